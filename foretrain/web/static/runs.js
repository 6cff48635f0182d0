// The list of runs, and one run with its live progress. Both only ask; a run never notices.
import { get } from "./api.js";
import { apart } from "./language.js";
import { Picture, figures, section } from "./pictures.js";
import { MOST, compareHash } from "./state.js";
import { h, t } from "./ui.js";

const EVERY_MS = 2000;
let picked = [];  // ids of those that are ticked, in the order of ticking, kept for the way back

// Ask again and again while somebody looks.
class Polled {
  constructor() { this.element = h("div", {}); }
  enter() { this.first(); this.timer = setInterval(() => document.hidden || this.again(), EVERY_MS); }
  leave() { clearInterval(this.timer); this.gone = true; }
  fail(error) { this.element.replaceChildren(h("p", { class: "bad box", role: "alert" }, error.problems ? error.message : t("page.no_server"))); }
}

// What the user calls a run besides its name.
const tags = run => run.tags.length ? h("div", { class: "tags" }, run.tags.map(tag => h("bdi", {}, tag))) : "";

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
    const ids = JSON.stringify(found.runs.map(run => [run.id, run.name, run.tags]));
    if (ids !== this.ids) {
      const focused = document.activeElement?.id;
      const alike = name => found.runs.filter(run => run.name === name).length > 1;
      this.names = new Map(found.runs.map(run => [run.id, alike(run.name) ? `${run.name} (${apart(run.path)})` : run.name]));
      picked = picked.filter(id => this.names.has(id));
      this.choice.hidden = found.runs.length < 2;
      this.rows = new Map(found.runs.map(run => [run.id, h("tr", {}, h("td", {}, this.box(run)),
        h("th", { scope: "row" }, h("a", { href: `#/run/${run.id}` }, run.name), h("div", { class: "help" }, run.path), tags(run)),
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
      cells[0].className = run.tone;
      [run.status_text, run.steps_text, run.val_loss, run.speed || "–", run.mfu || "–", run.started].forEach((text, i) => { cells[i].textContent = text; });
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
      h("th", { scope: "row" }, ...(i ? [] : [h("a", { href: `#/run/${run.id}` }, run.name), h("div", { class: "help" }, run.path)])), h("td", {}, row.label), h("td", { class: "number" }, row.predicted),
      h("td", { class: "number" }, row.measured), h("td", { class: "number" }, row.error),
      h("td", {}, row.range))));
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
    this.status = h("p", { role: "status" });
    this.progress = h("progress", { max: this.run.of, "aria-label": t("page.progress") });
    this.now = h("dl", { class: "figures" });
    this.pictures = [];
    this.shown = h("div", {});
    this.events = h("ul", { class: "events" });
    this.report = h("div", { role: "status" }, t("page.making_report"));
    this.element.replaceChildren(h("p", {}, h("a", { href: "#/runs" }, t("page.back"))), h("h1", {}, this.run.name), h("p", { class: "help" }, `${apart(this.run.gpu)} · ${apart(this.run.path)}`),
      this.run.note ? h("p", { class: "note" }, h("bdi", {}, this.run.note)) : "", tags(this.run),
      this.status, this.progress, this.now, this.shown,
      h("details", { class: "section", open: true }, h("summary", {}, h("h2", {}, t("page.events"))), this.events),
      this.report);
    this.draw(this.run);
    this.tell();
  }

  // What `foretrain report` makes of the run, which takes a while of a long one.
  async tell() {
    const found = await get(`/api/runs/${this.id}/report`).catch(error => ({ document: null, problem: error.problems ? error.message : t("page.no_server") }));
    if (this.gone) return;
    this.report.removeAttribute("role");
    this.report.replaceChildren(...(found.document ? found.document.sections.map(one => section(one, false)) : [h("p", { class: "warn" }, found.problem)]));
  }

  async again() {
    if (!this.run || this.asking || (this.run.status !== "running" && this.idle > 2)) return;
    this.asking = true;
    try {
      const found = await get(`/api/runs/${this.id}/live?after=${this.run.next}`);
      if (this.gone) return;
      this.idle = found.status === "running" ? 0 : (this.idle || 0) + 1;
      this.run = { ...this.run, status: found.status, next: found.next };
      this.draw(found);
    } catch (error) {
      this.status.replaceChildren(h("span", { class: "bad" }, error.problems ? error.message : t("page.no_server")));
    } finally { this.asking = false; }
  }

  // What an answer says; its pictures are null where nothing is new in them.
  draw(found) {
    this.status.replaceChildren(h("span", { class: found.tone }, found.status_text), ` · ${found.progress}`);
    this.progress.value = Math.min(found.steps, found.of);
    this.now.replaceChildren(...figures(found.now));
    const events = found.events.map(event => h("li", {}, h("span", { class: "help" }, `${event.at} `), event.text));
    this.events.replaceChildren(...(events.length ? events : [h("li", {}, t("page.no_events"))]));
    if (!found.pictures) return;
    if (found.pictures.length !== this.pictures.length) {
      this.pictures = found.pictures.map(one => new Picture(one));
      const [first, ...rest] = this.pictures.map(picture => picture.element);
      this.shown.replaceChildren(first, h("div", { class: "grid" }, rest));
    } else found.pictures.forEach((one, i) => this.pictures[i].show(one));
  }
}
