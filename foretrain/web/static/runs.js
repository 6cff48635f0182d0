// The list of runs, and one run with its live progress. Both only ask; a run never notices.
import { get } from "./api.js";
import { apart } from "./language.js";
import { drawLines, Picture, section } from "./pictures.js";
import { MOST, compareHash } from "./state.js";
import { h, seconds, t } from "./ui.js";

const EVERY_MS = 2000, MOST_POINTS = 2400;
let picked = [];  // ids of those that are ticked, in the order of ticking, kept for the way back

// Ask again and again while somebody looks.
class Polled {
  constructor() { this.element = h("div", {}); }
  enter() { this.first(); this.timer = setInterval(() => document.hidden || this.again(), EVERY_MS); }
  leave() { clearInterval(this.timer); this.gone = true; }
  redraw() { this.draw?.(); }
  fail(error) { this.element.replaceChildren(h("p", { class: "bad box", role: "alert" }, error.problems ? error.message : t("page.no_server"))); }
}

const heading = id => h("th", { scope: "col" }, t(`page.column.${id}`));

export class RunsPage extends Polled {
  constructor() {
    super();
    this.list = h("div", {});
    this.against = h("div", {});
    this.said = h("span", { class: "help", role: "status" });
    const button = h("button", { type: "button", id: "compare-runs", onclick: () => this.beside() }, t("page.compare"));
    this.choice = h("p", { class: "buttons", hidden: true }, button, this.said);
    this.element.append(h("h1", {}, t("page.runs")), this.choice, this.list, this.against);
  }

  // A box that was ticked or not; more than can be compared are not taken.
  pick(run, box) {
    const full = box.checked && picked.length >= MOST;
    if (full) box.checked = false;
    else picked = box.checked ? [...picked, run.id] : picked.filter(id => id !== run.id);
    this.tell(full);
  }

  tell(full = false) {
    const first = this.names.get(picked[0]);
    const text = first ? t("page.beside.picked", { count: picked.length, most: MOST, name: first }) : t("page.beside.pick");
    this.said.textContent = full ? `${t("page.beside.full", { most: MOST })} ${text}` : text;
  }

  beside() {
    if (picked.length > 1) location.hash = compareHash(picked);
    else this.said.textContent = t("page.beside.more");
  }

  async first() { await this.again(); if (!this.gone) this.compare(); }

  async again() {
    try {
      const found = await get("/api/runs");
      const text = JSON.stringify(found);
      if (this.gone || text === this.before) return;
      this.before = text;
      this.show(found);
    } catch (error) { this.fail(error); }
  }

  // What changes is put into the rows that are there, so that a link keeps its focus.
  show(found) {
    const ids = found.runs.map(run => run.id).join();
    if (ids !== this.ids) {
      const focused = document.activeElement?.id;
      const alike = name => found.runs.filter(run => run.name === name).length > 1;
      this.names = new Map(found.runs.map(run => [run.id, alike(run.name) ? `${run.name} (${apart(run.path)})` : run.name]));
      picked = picked.filter(id => this.names.has(id));
      this.choice.hidden = found.runs.length < 2;
      this.rows = new Map(found.runs.map(run => [run.id, h("tr", {}, h("td", {}, this.box(run)),
        h("th", { scope: "row" }, h("a", { href: `#/run/${run.id}` }, run.name), h("div", { class: "help" }, run.path)),
        ["", "number", "number", "number", "number", ""].map(kind => h("td", { class: kind })))]));
      const head = h("tr", {}, ["pick", "run", "status", "steps", "val_loss", "speed", "mfu", "started"].map(heading));
      const table = h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": t("page.runs") },
        h("table", {}, h("thead", {}, head), h("tbody", {}, [...this.rows.values()])));
      this.list.replaceChildren(found.runs.length ? table : h("p", { class: "box" }, t("page.no_runs")), ...found.unreadable.map(text => h("p", { class: "warn" }, text)));
      this.ids = ids;
      this.tell();
      if (focused?.startsWith("pick-")) document.getElementById(focused)?.focus();
    }
    for (const run of found.runs) {
      const cells = [...this.rows.get(run.id).children].slice(2);
      const loss = run.val_loss === null ? "–" : run.val_loss.toFixed(4), steps = apart(`${run.steps.toLocaleString("en")} / ${run.of.toLocaleString("en")}`);
      cells[0].className = run.tone;
      [run.status_text, steps, loss, run.speed || "–", run.mfu || "–", apart(run.started.replace("T", " ").slice(0, 16))].forEach((text, i) => { cells[i].textContent = text; });
    }
  }

  box(run) {
    const box = h("input", { type: "checkbox", id: `pick-${run.id}`, checked: picked.includes(run.id), onchange: () => this.pick(run, box),
      "aria-label": t("page.beside.pick_this", { name: run.name, path: run.path }) });
    return h("label", { class: "pick" }, box);
  }

  async compare() {
    const found = await get("/api/comparisons").catch(() => null);
    if (!found || !found.runs.length || this.gone) return;
    const rows = found.runs.flatMap(run => run.rows.map((row, i) => h("tr", {},
      h("th", { scope: "row" }, ...(i ? [] : [h("a", { href: `#/run/${run.id}` }, run.name), h("div", { class: "help" }, run.path)])), h("td", {}, row.label), h("td", { class: "number" }, row.predicted_text),
      h("td", { class: "number" }, row.measured_text), h("td", { class: "number" }, row.error),
      h("td", {}, row.busy ? t("page.busy") : row.in_range === null ? "" : t(row.in_range ? "page.inside" : "page.outside")))));
    const head = h("tr", {}, ["run", "quantity", "predicted", "measured", "error", "range"].map(heading));
    this.against.replaceChildren(h("h2", {}, t("page.against")), h("p", { class: "help" }, t("page.against_help")),
      h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": t("page.against") }, h("table", {}, h("thead", {}, head), h("tbody", {}, rows))));
  }
}

export class RunPage extends Polled {
  constructor(id) { super(); this.id = id; }

  async first() {
    try { this.run = await get(`/api/runs/${this.id}`); } catch (error) { this.fail(error); return; }
    if (this.gone) return;
    this.metrics = this.run.metrics;
    this.status = h("p", { role: "status" });
    this.progress = h("progress", { max: this.run.of, "aria-label": t("page.progress") });
    this.now = h("dl", { class: "figures" });
    this.pictures = ["loss", "step_time", "memory"].map(name => new Picture(t(`page.picture.${name}`)));
    this.events = h("ul", { class: "events" });
    const report = this.run.document ? this.run.document.sections.map(found => section(this.notLoss(found), false)) : [];
    this.element.replaceChildren(h("p", {}, h("a", { href: "#/runs" }, t("page.back"))), h("h1", {}, this.run.name), h("p", { class: "help" }, `${apart(this.run.gpu)} · ${apart(this.run.path)}`),
      this.status, this.progress, this.now, ...this.pictures.map(picture => picture.element),
      h("details", { class: "section", open: true }, h("summary", {}, h("h2", {}, t("page.events"))), this.events),
      this.run.problem ? h("p", { class: "warn" }, this.run.problem) : "", ...report);
    this.draw();
  }

  // The loss stands above already, live.
  notLoss(found) { return { ...found, blocks: found.blocks.filter(one => one.kind !== "lines") }; }

  async again() {
    if (!this.run || this.asking || (this.run.status !== "running" && this.run.idle > 2)) return;
    this.asking = true;
    try {
      const found = await get(`/api/runs/${this.id}/live?after=${this.run.next}`);
      if (this.gone) return;
      this.run.idle = found.status === "running" ? 0 : (this.run.idle || 0) + 1;
      this.metrics = found.anew ? found.metrics : this.metrics.concat(found.metrics);
      if (this.metrics.length > MOST_POINTS) this.metrics = this.metrics.filter((line, i) => line.kind === "evaluation" || i % 2 === 0);
      const changed = found.metrics.length || found.anew || found.status !== this.run.status || found.events.length !== this.run.events.length;
      Object.assign(this.run, { ...found, metrics: undefined });
      if (changed) this.draw();
    } catch (error) {
      this.status.replaceChildren(h("span", { class: "bad" }, error.problems ? error.message : t("page.no_server")));
    } finally { this.asking = false; }
  }

  draw() {
    if (!this.metrics) return;
    const steps = this.metrics.filter(line => line.kind === "step"), evaluations = this.metrics.filter(line => line.kind === "evaluation");
    const newest = steps[steps.length - 1], done = Math.max(this.run.steps, newest ? newest.step + 1 : 0);
    this.status.replaceChildren(h("span", { class: this.run.tone }, this.run.status_text), ` · ${t("page.steps_of", { done: done.toLocaleString("en"), of: this.run.of.toLocaleString("en") })}`);
    this.progress.value = Math.min(done, this.run.of);
    this.figures(newest, evaluations[evaluations.length - 1]);
    const of = (lines, key, shift = 0) => { const found = lines.filter(line => typeof line[key] === "number"); return { x: found.map(line => line.step + shift), y: found.map(line => line[key]) }; };
    const step = t("axis.step");
    drawLines(this.pictures[0], [{ label: t("axis.train"), ...of(steps, "loss", 1) }, { label: t("axis.val"), ...of(evaluations, "val_loss") }], step, "number");
    drawLines(this.pictures[1], [{ label: t("page.picture.step_time"), ...of(steps, "step_s", 1) }], step, "duration", true);
    const memory = of(steps, "memory_bytes", 1);
    this.pictures[2].element.hidden = !memory.x.length;
    if (memory.x.length) drawLines(this.pictures[2], [{ label: t("page.picture.memory"), ...memory }], step, "bytes", true);
    const events = this.run.events.map(event => h("li", {}, h("span", { class: "help" }, `${apart(event.at.replace("T", " ").slice(0, 19))} `), event.text));
    this.events.replaceChildren(...(events.length ? events : [h("li", {}, t("page.no_events"))]));
  }

  figures(newest, evaluation) {
    const rows = [];
    const add = (id, value) => rows.push(h("div", {}, h("dt", {}, t(`page.now.${id}`)), h("dd", {}, value), h("dd", { class: "source" }, t("page.measured"))));
    if (newest?.loss !== undefined) add("loss", newest.loss.toFixed(4));
    if (evaluation?.val_loss !== undefined) add("val_loss", evaluation.val_loss.toFixed(4));
    // Of a run that goes, the newest step; of one that is over, the medians that the list and the report have.
    if (this.run.status !== "running" && this.run.step) {
      for (const id of ["step", "speed", "mfu"]) if (this.run[id]) add(id, this.run[id]);
    } else {
      if (newest?.step_s !== undefined) add("step", seconds(newest.step_s));
      if (newest?.tokens_per_s !== undefined) add("speed", apart(`${Math.round(newest.tokens_per_s).toLocaleString("en")} tokens/s`));
      if (newest?.mfu) add("mfu", apart(`${(100 * newest.mfu).toFixed(1)} %`));
    }
    if (this.run.status === "running" && newest?.eta_s !== undefined) add("left", seconds(newest.eta_s));
    this.now.replaceChildren(...rows);
  }
}
