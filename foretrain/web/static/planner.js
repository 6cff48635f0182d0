// The planner of each kind of run: a state that fits behind #, one question at a time, of which the newest wins, and what
// is drawn of every answer; exact answers, advice, cards beside each other, a download.
import { Advice } from "./advice.js";
import { get, post } from "./api.js";
import { Form } from "./form.js";
import { Picture, figures, section } from "./pictures.js";
import { STARTS, fromHash, toHash } from "./state.js";
import { announce, h, t, table } from "./ui.js";

const LOCAL = ["127.0.0.1", "localhost", "[::1]"].includes(location.hostname);
const ALL_CARDS_AT_FIRST = ["RTX 3060 12GB", "RTX 4070", "RTX 4090"];
const MOST_PASTED = 200_000;
const QUIET_MS = 400;  // without a change of the form, until changes are looked for
const OWN = "\u0000";  // of the chooser: the config.json that was pasted, whose name may be that of a model here
const PRICES = ["price_per_kwh", "price_per_hour", "currency", "co2_per_kwh"];  // have nothing to do with the model
const last = {};  // the state of each at the last visit, for the way back

export class Planner {
  // `part`: plan, finetune or generate.
  constructor(start, part) {
    this.start = start;
    this.part = part;
    this.state = fromHash(part, location.hash) || last[part] || structuredClone(STARTS[part]);
    this.asking = this.stale = false;
    this.job = null;
    this.command = "";
    this.element = h("div", { class: part });
  }

  get hash() { return toHash(this.part, this.state); }

  get pretrains() { return this.part === "plan"; }

  // The form comes when it is looked at, so that the page begins small.
  async enter() {
    try {
      const found = await post("/api/form", { kind: this.state.kind });
      if (this.gone) return;
      this.build(found);
      history.replaceState(null, "", this.hash);
      this.show();
      this.ask();
    } catch (error) {
      this.element.replaceChildren(h("p", { class: "bad box", role: "alert" }, error.problems ? error.message : t("page.no_server")));
    }
  }

  leave() {
    if (this.job) this.stopExact();
    clearTimeout(this.quiet);
    this.advice?.clear();
    last[this.part] = this.state;
    this.gone = true;
  }

  build({ fields, models, devices }) {
    this.models = models;
    this.form = new Form(fields, (name, value) => this.set(name, value));
    const texts = this.pretrains ? ["page.form", "page.preset", "page.paste", "page.paste_help"] : ["page.finetune.form", "page.finetune.model", "page.finetune.paste", "page.finetune.paste_help"];
    const [name, model, paste, pasteHelp] = texts.map(id => t(id));
    this.own = h("option", { value: OWN, hidden: true });
    this.model = h("select", { id: "model", "aria-describedby": "model-source", onchange: () => this.choose(this.model.value) }, models.map(one => h("option", { value: one.id }, one.text)), this.own);
    this.source = h("p", { class: "help", id: "model-source" });
    this.gpu = h("select", { id: "gpu", onchange: () => this.change({ gpu: this.gpu.value }) }, devices.map(device => h("option", { value: device.id }, device.text)));
    this.others = this.typed("others", "text", value => ({ others: value }));
    this.count = this.typed("count", "numeric", value => ({ count: value.trim() || "1" }));
    const form = h("section", { class: "form", "aria-label": name },
      h("h2", {}, t("page.start_from")), this.row("model", model, this.model), this.source, this.paste(paste, pasteHelp, this.pretrains ? ".py,.toml" : ".json,.yaml,.yml,.py"),
      h("h2", {}, t("page.device")), this.row("gpu", t("page.card"), this.gpu), this.row("others", t("page.others"), this.others, t("page.others_help")),
      this.row("count", t("page.count"), this.count, t("page.count_help")), h("h2", {}, t("page.knobs")), this.form.element,
      h("p", {}, h("button", { type: "button", onclick: () => this.begin({ values: {} }) }, t("page.reset"))));
    for (const [place, tag, options] of [["strip", "div", { class: "strip" }], ["errors", "div", { role: "alert", class: "errors" }], ["verdict", "div", { class: "verdict" }],
      ["figures", "dl", { class: "figures" }], ["table", "div", { class: "strategies" }], ["lines", "dl", { class: "lines" }], ["more", "div", {}]]) this[place] = h(tag, options);
    this.pictures = [new Picture(), new Picture()];
    this.advice = new Advice(this);
    this.results = h("section", { class: "results", "aria-label": t("page.answer"), "aria-busy": "true" }, this.strip, this.errors, this.verdict, this.figures, this.table, this.lines,
      this.sharing(), this.exactness, this.pictures.map(picture => picture.element), this.advice.element, this.cardChooser(devices), this.more);
    const planner = h("div", { class: "planner" }, form, this.results);  // files can be dropped onto both
    planner.addEventListener("dragover", event => event.preventDefault());
    planner.addEventListener("drop", event => { event.preventDefault(); this.readFile(event.dataTransfer.files[0]); });
    this.element.replaceChildren(planner);
  }

  row(id, text, input, help) {
    return h("div", { class: "field" }, h("div", { class: "line" }, h("label", { for: id }, text), input), help ? h("p", { class: "help", id: `${id}-help` }, help) : "");
  }

  typed(id, inputmode, parts) {
    const input = h("input", { id, type: "text", dir: "ltr", inputmode, autocomplete: "off", spellcheck: "false", "aria-describedby": `${id}-help`, oninput: () => this.change(parts(input.value)) });
    return input;
  }

  // A text of one's own, typed, from a file or dropped onto the page.
  paste(title, help, accept) {
    this.text = h("textarea", { id: "paste", dir: "ltr", rows: 6, spellcheck: "false", "aria-describedby": "paste-help paste-said" });
    this.said = h("div", { id: "paste-said", role: "status" });
    const file = h("input", { id: "file", type: "file", accept, onchange: () => { this.readFile(file.files[0]); file.value = ""; } });
    return h("details", { class: "group" }, h("summary", {}, title),
      h("p", { class: "help", id: "paste-help" }, help), h("label", { for: "paste" }, t("page.paste_label")), this.text,
      h("p", { class: "buttons" }, h("button", { type: "button", onclick: () => this.read("", this.text.value) }, t("page.read")),
        h("label", { for: "file" }, t("page.file")), file), this.said);
  }

  // Ways to take the plan elsewhere, or deeper (`exactness`: how far that is).
  sharing() {
    const traced = this.part !== "generate", no = this.start.no_exact;
    this.copied = h("span", { role: "status", class: "help" });
    this.exactness = h("p", { class: "help", role: "status" }, traced ? no : "");
    this.exactButton = h("button", { type: "button", id: "exact", disabled: Boolean(no), onclick: () => this.job ? this.stopExact() : this.exact() }, t("page.exact"));
    return h("p", { class: "buttons" },
      h("button", { type: "button", id: "share", title: LOCAL ? t("page.share_help") : null, onclick: () => this.share() }, t("page.share")),
      h("button", { type: "button", id: "share-command", title: t("page.share_command_help"), onclick: () => this.copy(this.command, "page.copied_command", h("code", {}, this.command)) },
        t("page.share_command")), this.pretrains ? h("button", { type: "button", id: "download", onclick: () => this.download() }, t("page.download")) : "",
      traced ? this.exactButton : "", this.copied);
  }

  show() {
    const { model, config, gpu } = this.state, own = config !== "";
    this.own.hidden = !own;
    this.own.textContent = own ? t("page.finetune.own", { name: model }) : "";
    this.model.value = own ? OWN : model;
    this.source.textContent = own ? t("page.finetune.own_source") : this.models.find(one => one.id === model)?.source || "";
    this.gpu.value = gpu;
    for (const name of ["others", "count"]) if (document.activeElement !== this[name]) this[name].value = this.state[name];
  }

  choose(id) { if (id !== OWN) this.begin({ model: id, config: "", ...(this.pretrains ? { values: this.prices() } : {}) }); }

  prices() { return Object.fromEntries(Object.entries(this.state.values).filter(([name]) => PRICES.includes(name))); }

  // What was read: a model, options, or both. A model keeps the options of the form; options keep its model.
  put(found, values) {
    const parts = found.model === undefined ? {} : { model: found.model, config: found.config || "" };
    if (this.pretrains) parts.values = { ...this.prices(), ...values };
    else if (Object.keys(values).length) parts.values = values;
    this.begin(parts);
  }

  begin(parts) {
    document.activeElement?.blur?.();
    this.change(parts);
  }

  set(name, value) {
    const values = { ...this.state.values };
    if (value === null) delete values[name]; else values[name] = value;
    this.change({ values });
  }

  change(parts) {
    if (this.job) this.stopExact();
    clearTimeout(this.quiet);
    this.advice.clear();
    this.state = { ...this.state, ...parts };
    history.replaceState(null, "", this.hash);
    this.ask();
  }

  async ask() {
    this.results.setAttribute("aria-busy", "true");
    if (this.asking) { this.stale = true; return; }
    this.asking = true;
    do {
      this.stale = false;
      try {
        const answer = await post("/api/plan", this.state);
        if (!this.stale && !this.gone) this.answered(answer);
      } catch (error) {
        if (!this.stale && !this.gone) this.fail(error);
      }
    } while (this.stale && !this.gone);
    this.asking = false;
    this.results.setAttribute("aria-busy", "false");
  }

  fail(error) {
    const messages = this.form.problems(error.problems || [{ message: t("page.no_server"), key: "" }]);
    this.errors.replaceChildren(...messages.map(message => h("p", { class: "bad" }, message)));
    this.results.classList.add("old");
    this.show();
  }

  answered(answer) {
    this.command = answer.command || this.command;  // a trace's answer is of the form as it was
    this.errors.replaceChildren();
    this.results.classList.remove("old");
    this.form.problems([]);
    this.form.show(this.pretrains ? answer.config : { ...answer.config, ...this.state.values });  // also what does nothing
    this.show();
    this.draw(answer);
    clearTimeout(this.told);  // not at every step of a slider
    this.told = setTimeout(() => announce(answer.verdict.map(part => part.text).join(" ")), 700);
    if (!answer.fits && !this.pretrains && !this.start.no_runs) this.quiet = setTimeout(() => this.advice.find(true), QUIET_MS);
  }

  draw(answer) {
    this.drawStrip(answer.strip);
    this.verdict.replaceChildren(h("h2", {}, t("page.verdict")), ...answer.verdict.map(part => h("p", { class: part.tone }, part.text)), ...answer.sentences.map(text => h("p", { class: "help" }, text)));
    this.figures.replaceChildren(...figures(answer.figures));
    this.table.replaceChildren(...(answer.table ? [h("h2", {}, answer.heading), table(answer.table)] : []));
    this.lines.replaceChildren(...answer.rows.map(([label, text]) => h("div", {}, h("dt", {}, label), h("dd", {}, text))));
    this.pictures.forEach((picture, i) => {
      picture.element.hidden = !answer.pictures[i];
      if (answer.pictures[i]) picture.show(answer.pictures[i]);
    });
    const open = new Set([...this.more.querySelectorAll("details[open] > summary")].map(summary => summary.textContent));
    const notes = answer.notes.length ? [{ title: t("page.config_notes"), blocks: answer.notes.map(text => ({ kind: "paragraph", text, tone: "plain" })) }] : [];
    this.more.replaceChildren(...[...notes, ...answer.sections].map(found => section(found, open.has(found.title))));
  }

  // The worst moment in lines that stay in sight.
  drawStrip(steps) {
    const share = value => `${Math.min(100, 100 * value)}%`;
    this.strip.replaceChildren(...steps.map(step => {
      const bar = h("div", { class: `fill ${step.tone}` }), limit = h("div", { class: "limit" });
      bar.style.inlineSize = share(step.share);
      if (step.limit !== null) limit.style.insetInlineStart = share(step.limit);
      return h("div", { class: "strip-row" }, h("span", { class: step.tone }, step.text),
        h("div", { class: "track", "aria-hidden": "true" }, bar, step.limit === null ? "" : limit));
    }));
  }

  share() {
    const link = new URL(this.hash, location.href).href;
    this.copy(link, "page.copied", h("a", { href: link }, link));
  }

  // Into the clipboard, or, where that is not allowed, to where it can be copied by hand.
  async copy(text, said, shown) {
    try {
      await navigator.clipboard.writeText(text);
      this.copied.textContent = t(said);
    } catch {
      this.copied.replaceChildren(t("page.copy_this"), " ", shown);
    }
  }

  async download() {
    try {
      const found = await post("/api/toml", this.state);
      const link = h("a", { href: URL.createObjectURL(new Blob([found.text], { type: "application/toml" })), download: found.name });
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 1000);
    } catch (error) { this.fail(error); }
  }

  async readFile(file) {
    if (file) this.read(file.name, file.size > MOST_PASTED ? "" : await file.text(), file.size > MOST_PASTED);
  }

  // A text that was pasted or dropped takes the place of all values; nothing in it is run.
  async read(name, text, tooLarge = text.length > MOST_PASTED) {
    try {
      if (tooLarge) throw new Error(t("page.file_too_large"));
      const found = await post("/api/read", { kind: this.state.kind, name, text });
      const values = Object.fromEntries(Object.entries(found.values).map(([key, value]) => [key, String(value)]));
      this.said.replaceChildren(h("p", { class: "good" }, found.summary), ...found.notes.map(note => h("p", { class: "help" }, note)));
      this.put(found, values);
    } catch (error) {
      this.said.replaceChildren(...(error.problems || [error]).map(problem => h("p", { class: "bad" }, problem.message)));
    }
  }

  cardChooser(devices) {
    const chosen = new Set(this.state.cards.length ? this.state.cards : ALL_CARDS_AT_FIRST);
    const answer = h("div", { role: "status" });
    const boxes = devices.map((device, i) => h("span", { class: "choice" },
      h("input", { type: "checkbox", id: `card-${i}`, value: device.id, checked: chosen.has(device.id) }), h("label", { for: `card-${i}` }, device.text)));
    const compare = async () => {
      const cards = boxes.map(box => box.firstChild).filter(box => box.checked).map(box => box.value);
      this.state = { ...this.state, cards };
      history.replaceState(null, "", this.hash);
      try {
        const found = await post("/api/cards", this.state);
        answer.replaceChildren(...found.sections.flatMap(part => [h("h3", {}, part.title), ...part.blocks.map(one => one.kind === "table" ? table(one) : h("p", { class: one.tone }, one.text))]));
      } catch (error) { answer.replaceChildren(...(error.problems || [error]).map(problem => h("p", { class: "bad" }, problem.message))); }
    };
    return h("details", { class: "section cards" }, h("summary", {}, h("h2", {}, t("page.compare_cards"))),
      h("fieldset", {}, h("legend", {}, t("page.cards")), h("div", { class: "choices" }, boxes)),
      h("p", {}, h("button", { type: "button", id: "compare", onclick: compare }, t("page.compare"))), answer);
  }

  // The real step, or the Trainer's loop, traced by the server; a change of the form stops it.
  async exact() {
    let job = null;
    try {
      let found = await post("/api/exact", this.state);
      this.job = job = found.job;
      this.exactButton.textContent = t("page.stop");
      while (found.job && this.job === job) {
        this.exactness.textContent = t("page.tracing", { state: found.progress });
        found = await get(`/api/jobs/${job}`);
      }
      if (this.job !== job) return;
      this.endExact(t("page.exact_done"));
      this.answered(found);
    } catch (error) {
      if (this.job === job) this.endExact((error.problems || [{ message: t("page.no_server") }])[0].message);
    }
  }

  endExact(text) {
    this.job = null;
    this.exactButton.textContent = t("page.exact");
    this.exactness.textContent = text;
  }

  stopExact() {
    const job = this.job;
    this.endExact(t("page.exact_stopped"));
    post(`/api/jobs/${job}/stop`).catch(() => {});
  }
}
