// The planner: every change is planned anew by the server; one question at a time, the newest state wins.
import { Advice } from "./advice.js";
import { get, post } from "./api.js";
import { Form } from "./form.js";
import { Picture, figures, freeGone, section } from "./pictures.js";
import { START, fromHash, toHash } from "./state.js";
import { announce, h, t, table } from "./ui.js";

let last = null;  // the state of the last visit, for the way back from the runs
const LOCAL = ["127.0.0.1", "localhost", "[::1]"].includes(location.hostname);
const ALL_CARDS_AT_FIRST = ["RTX 3060 12GB", "RTX 4070", "RTX 4090"];

export class Planner {
  constructor(start) {
    this.start = start;
    this.state = fromHash(location.hash) || last || structuredClone(START);
    this.asking = this.stale = false;
    this.job = null;
    this.command = "";
    this.form = new Form(start.fields, (name, value) => this.set(name, value));
    this.pictures = ["foretrain", "nanogpt"].map(() => new Picture());
    this.build();
  }

  get hash() { return toHash(this.state); }

  build() {
    const s = this.start;
    const devices = s.devices.map(device => h("option", { value: device.id }, device.text));
    this.preset = h("select", { id: "preset", onchange: () => this.begin({ preset: this.preset.value, values: this.prices() }) },
      h("option", { value: "" }, t("page.no_preset")), s.presets.map(name => h("option", { value: name }, name)));
    this.gpu = h("select", { id: "gpu", onchange: () => this.change({ gpu: this.gpu.value }) }, devices);
    this.others = h("input", { id: "others", type: "text", dir: "ltr", autocomplete: "off", spellcheck: "false", "aria-describedby": "others-help",
      oninput: () => this.change({ others: this.others.value }) });
    const row = (id, text, input, help) => h("div", { class: "field" }, h("div", { class: "line" }, h("label", { for: id }, text), input),
      help ? h("p", { class: "help", id: `${id}-help` }, help) : "");
    const form = h("section", { class: "form", "aria-label": t("page.form") },
      h("h2", {}, t("page.start_from")), row("preset", t("page.preset"), this.preset), this.paste(),
      h("h2", {}, t("page.device")), row("gpu", t("page.card"), this.gpu), row("others", t("page.others"), this.others, t("page.others_help")),
      h("h2", {}, t("page.knobs")), this.form.element,
      h("p", {}, h("button", { type: "button", onclick: () => this.begin({ values: {} }) }, t("page.reset"))));
    this.element = h("div", { class: "planner" }, form, this.results());
    this.element.addEventListener("dragover", event => event.preventDefault());
    this.element.addEventListener("drop", event => { event.preventDefault(); this.readFile(event.dataTransfer.files[0]); });
  }

  paste() {
    this.text = h("textarea", { id: "paste", dir: "ltr", rows: 6, spellcheck: "false", "aria-describedby": "paste-help paste-said" });
    this.said = h("div", { id: "paste-said", role: "status" });
    const file = h("input", { id: "file", type: "file", accept: ".py,.toml", onchange: () => { this.readFile(file.files[0]); file.value = ""; } });
    return h("details", { class: "group" }, h("summary", {}, t("page.paste")),
      h("p", { class: "help", id: "paste-help" }, t("page.paste_help")), h("label", { for: "paste" }, t("page.paste_label")), this.text,
      h("p", { class: "buttons" }, h("button", { type: "button", onclick: () => this.read("", this.text.value) }, t("page.read")),
        h("label", { for: "file" }, t("page.file")), file), this.said);
  }

  results() {
    this.strip = h("div", { class: "strip" });
    this.errors = h("div", { role: "alert", class: "errors" });
    this.verdict = h("div", { class: "verdict" });
    this.figures = h("dl", { class: "figures" });
    this.exactness = h("p", { class: "help", role: "status" });
    this.exactButton = h("button", { type: "button", disabled: Boolean(this.start.no_exact), onclick: () => this.job ? this.stopExact() : this.exact() }, t("page.exact"));
    this.copied = h("span", { role: "status", class: "help" });
    const buttons = h("p", { class: "buttons" },
      h("button", { type: "button", id: "share", title: LOCAL ? t("page.share_help") : null, onclick: () => this.share() }, t("page.share")),
      h("button", { type: "button", id: "share-command", title: t("page.share_command_help"), onclick: () => this.copy(this.command, "page.copied_command", h("code", {}, this.command)) },
        t("page.share_command")),
      h("button", { type: "button", id: "download", onclick: () => this.download() }, t("page.download")), this.exactButton, this.copied);
    this.more = h("div", {});
    this.cards = this.cardChooser();
    return h("section", { class: "results", "aria-label": t("page.answer"), "aria-busy": "true" }, this.strip, this.errors, this.verdict, this.figures,
      buttons, this.exactness, this.pictures.map(picture => picture.element), new Advice(this).element, this.cards, this.more);
  }

  enter() {
    history.replaceState(null, "", this.hash);
    this.show();
    this.exactness.textContent = this.start.no_exact;
    this.ask();
  }

  leave() {
    last = this.state;
    if (this.job) this.stopExact();
    this.gone = true;
  }

  show() {
    this.preset.value = this.state.preset;
    this.gpu.value = this.state.gpu;
    if (document.activeElement !== this.others) this.others.value = this.state.others;
  }

  prices() {  // what electricity costs has nothing to do with the model
    const kept = ["price_per_kwh", "price_per_hour", "currency", "co2_per_kwh"];
    return Object.fromEntries(Object.entries(this.state.values).filter(([name]) => kept.includes(name)));
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
    this.state = { ...this.state, ...parts };
    history.replaceState(null, "", this.hash);
    if (this.job) this.stopExact();
    this.ask();
  }

  async ask() {
    this.element.querySelector(".results").setAttribute("aria-busy", "true");
    if (this.asking) { this.stale = true; return; }
    this.asking = true;
    do {
      this.stale = false;
      try {
        const answer = await post("/api/plan", this.state);
        if (!this.stale && !this.gone) this.draw(answer);
      } catch (error) {
        if (!this.stale && !this.gone) this.fail(error);
      }
    } while (this.stale && !this.gone);
    this.asking = false;
    this.element.querySelector(".results").setAttribute("aria-busy", "false");
  }

  fail(error) {
    const messages = this.form.problems(error.problems || [{ message: t("page.no_server"), key: "" }]);
    this.errors.replaceChildren(...messages.map(message => h("p", { class: "bad" }, message)));
    this.element.querySelector(".results").classList.add("old");
    this.show();
  }

  draw(answer) {
    this.command = answer.command || this.command;  // a trace's answer is of the form as it was
    this.errors.replaceChildren();
    this.element.querySelector(".results").classList.remove("old");
    this.form.problems([]);
    this.form.show(answer.config);
    this.show();
    this.verdict.replaceChildren(h("h2", {}, t("page.verdict")), ...answer.verdict.map(part => h("p", { class: part.tone }, part.text)),
      h("p", { class: "help" }, answer.subtitle));
    this.figures.replaceChildren(...figures(answer.figures));
    answer.pictures.forEach((picture, i) => this.pictures[i].show(picture));
    this.drawStrip(answer.strip);
    const open = new Set([...this.more.querySelectorAll("details[open] > summary")].map(summary => summary.textContent));
    const notes = answer.notes.length ? [{ title: t("page.config_notes"), blocks: answer.notes.map(text => ({ kind: "paragraph", text, tone: "plain" })) }] : [];
    this.more.replaceChildren(...[...notes, ...answer.sections].map(found => section(found, open.has(found.title))));
    freeGone();
    clearTimeout(this.told);  // not at every step of a slider
    this.told = setTimeout(() => announce(answer.verdict.map(part => part.text).join(" ")), 700);
  }

  // The worst moment of both steps in lines that stay in sight.
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
    if (file) this.read(file.name, file.size > 200_000 ? "" : await file.text(), file.size > 200_000);
  }

  // A config that was pasted or dropped takes the place of all values; nothing in it is run.
  async read(name, text, tooLarge = false) {
    try {
      if (tooLarge) throw new Error(t("page.file_too_large"));
      const found = await post("/api/read", { name, text });
      const values = Object.fromEntries(Object.entries(found.values).map(([key, value]) => [key, String(value)]));
      this.said.replaceChildren(h("p", { class: "good" }, t("page.was_read", { count: Object.keys(values).length, name: found.name })),
        ...found.notes.map(note => h("p", { class: "help" }, note)));
      this.begin({ preset: "", values: { ...this.prices(), ...values } });
    } catch (error) {
      this.said.replaceChildren(...(error.problems || [error]).map(problem => h("p", { class: "bad" }, problem.message)));
    }
  }

  async exact() {
    try {
      const { job } = await post("/api/exact", this.state);
      this.job = job;
      this.exactButton.textContent = t("page.stop");
      while (this.job === job && !this.gone) {
        const found = await get(`/api/exact/${job}`);
        if (this.job !== job) return;
        if (found.state === "working") this.exactness.textContent = t("page.tracing", { state: found.progress });
        else { this.endExact(found.state === "failed" ? t("page.exact_failed", { reason: found.reason }) : found.plan ? t("page.exact_done") : ""); if (found.plan) this.draw(found.plan); return; }
        await new Promise(resolve => setTimeout(resolve, 400));
      }
    } catch (error) { this.endExact((error.problems || [{ message: t("page.no_server") }])[0].message); }
  }

  endExact(text) {
    this.job = null;
    this.exactButton.textContent = t("page.exact");
    this.exactness.textContent = text;
  }

  stopExact() {
    const job = this.job;
    this.endExact(t("page.exact_stopped"));
    post(`/api/exact/${job}/stop`).catch(() => {});
  }

  cardChooser() {
    const chosen = new Set(this.state.cards.length ? this.state.cards : ALL_CARDS_AT_FIRST);
    const answer = h("div", { role: "status" });
    const boxes = this.start.devices.map((device, i) => h("span", { class: "choice" },
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
}
