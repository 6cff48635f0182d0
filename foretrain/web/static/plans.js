// What the planners share: a state that fits behind #, one question at a time, of which the newest wins, and what is
// drawn of every answer. A planner has a `form`, `draw(answer)` and `put(found, values)`.
import { get, post } from "./api.js";
import { STARTS, fromHash, toHash } from "./state.js";
import { announce, h, t, table } from "./ui.js";

const LOCAL = ["127.0.0.1", "localhost", "[::1]"].includes(location.hostname);
const ALL_CARDS_AT_FIRST = ["RTX 3060 12GB", "RTX 4070", "RTX 4090"];
const MOST_PASTED = 200_000;
const PATHS = { plan: { plan: "/api/plan", cards: "/api/cards", read: "/api/read", exact: "/api/exact" },
  finetune: { plan: "/api/finetune", cards: "/api/finetune/cards", read: "/api/finetune/read", exact: "/api/finetune/exact" } };
const last = {};  // the state of each at the last visit, for the way back

export class Plans {
  // `part`: plan or finetune.
  constructor(start, part) {
    this.start = start;
    this.part = part;
    this.paths = PATHS[part];
    this.state = fromHash(part, location.hash) || last[part] || structuredClone(STARTS[part]);
    this.devices = start.devices;
    this.asking = this.stale = false;
    this.command = "";
  }

  get hash() { return toHash(this.part, this.state); }

  row(id, text, input, help) {
    return h("div", { class: "field" }, h("div", { class: "line" }, h("label", { for: id }, text), input), help ? h("p", { class: "help", id: `${id}-help` }, help) : "");
  }

  // The card, and what others use of it.
  device(label) {
    this.gpu = h("select", { id: "gpu", onchange: () => this.change({ gpu: this.gpu.value }) }, this.devices.map(device => h("option", { value: device.id }, device.text)));
    this.others = h("input", { id: "others", type: "text", dir: "ltr", autocomplete: "off", spellcheck: "false", "aria-describedby": "others-help",
      oninput: () => this.change({ others: this.others.value }) });
    return [h("h2", {}, t("page.device")), this.row("gpu", label, this.gpu), this.row("others", t("page.others"), this.others, t("page.others_help"))];
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

  // The form beside the results; files can be dropped onto both.
  place(form, ...results) {
    this.strip = h("div", { class: "strip" });
    this.errors = h("div", { role: "alert", class: "errors" });
    this.verdict = h("div", { class: "verdict" });
    this.figures = h("dl", { class: "figures" });
    this.results = h("section", { class: "results", "aria-label": t("page.answer"), "aria-busy": "true" }, this.strip, this.errors, this.verdict, this.figures, results.flat());
    const planner = h("div", { class: "planner" }, form, this.results);
    planner.addEventListener("dragover", event => event.preventDefault());
    planner.addEventListener("drop", event => { event.preventDefault(); this.readFile(event.dataTransfer.files[0]); });
    return planner;
  }

  // Ways to take the plan elsewhere, or deeper (`exactness`: how far that is); `more`: a planner's own.
  sharing(...more) {
    this.copied = h("span", { role: "status", class: "help" });
    this.exactness = h("p", { class: "help", role: "status" }, this.start.no_exact);
    this.exactButton = h("button", { type: "button", id: "exact", disabled: Boolean(this.start.no_exact), onclick: () => this.job ? this.stopExact() : this.exact() }, t("page.exact"));
    return h("p", { class: "buttons" },
      h("button", { type: "button", id: "share", title: LOCAL ? t("page.share_help") : null, onclick: () => this.share() }, t("page.share")),
      h("button", { type: "button", id: "share-command", title: t("page.share_command_help"), onclick: () => this.copy(this.command, "page.copied_command", h("code", {}, this.command)) },
        t("page.share_command")), more, this.exactButton, this.copied);
  }

  enter() {
    history.replaceState(null, "", this.hash);
    this.show();
    this.ask();
  }

  leave() {
    if (this.job) this.stopExact();
    last[this.part] = this.state;
    this.gone = true;
  }

  show() {
    this.gpu.value = this.state.gpu;
    if (document.activeElement !== this.others) this.others.value = this.state.others;
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
        const answer = await post(this.paths.plan, this.state);
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
    this.form.show(answer.config);
    this.show();
    this.drawStrip(answer.strip);
    this.draw(answer);
    clearTimeout(this.told);  // not at every step of a slider
    this.told = setTimeout(() => announce(answer.verdict.map(part => part.text).join(" ")), 700);
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

  async readFile(file) {
    if (file) this.read(file.name, file.size > MOST_PASTED ? "" : await file.text(), file.size > MOST_PASTED);
  }

  // A text that was pasted or dropped takes the place of all values; nothing in it is run.
  async read(name, text, tooLarge = text.length > MOST_PASTED) {
    try {
      if (tooLarge) throw new Error(t("page.file_too_large"));
      const found = await post(this.paths.read, { name, text });
      const values = Object.fromEntries(Object.entries(found.values).map(([key, value]) => [key, String(value)]));
      this.said.replaceChildren(h("p", { class: "good" }, found.said), ...found.notes.map(note => h("p", { class: "help" }, note)));
      this.put(found, values);
    } catch (error) {
      this.said.replaceChildren(...(error.problems || [error]).map(problem => h("p", { class: "bad" }, problem.message)));
    }
  }

  cardChooser() {
    const chosen = new Set(this.state.cards.length ? this.state.cards : ALL_CARDS_AT_FIRST);
    const answer = h("div", { role: "status" });
    const boxes = this.devices.map((device, i) => h("span", { class: "choice" },
      h("input", { type: "checkbox", id: `card-${i}`, value: device.id, checked: chosen.has(device.id) }), h("label", { for: `card-${i}` }, device.text)));
    const compare = async () => {
      const cards = boxes.map(box => box.firstChild).filter(box => box.checked).map(box => box.value);
      this.state = { ...this.state, cards };
      history.replaceState(null, "", this.hash);
      try {
        const found = await post(this.paths.cards, this.state);
        answer.replaceChildren(...found.sections.flatMap(part => [h("h3", {}, part.title), ...part.blocks.map(one => one.kind === "table" ? table(one) : h("p", { class: one.tone }, one.text))]));
      } catch (error) { answer.replaceChildren(...(error.problems || [error]).map(problem => h("p", { class: "bad" }, problem.message))); }
    };
    return h("details", { class: "section cards" }, h("summary", {}, h("h2", {}, t("page.compare_cards"))),
      h("fieldset", {}, h("legend", {}, t("page.cards")), h("div", { class: "choices" }, boxes)),
      h("p", {}, h("button", { type: "button", id: "compare", onclick: compare }, t("page.compare"))), answer);
  }

  // The real step, or the Trainer's loop, traced by the server; a change of the form stops it.
  async exact() {
    try {
      const { job } = await post(this.paths.exact, this.state);
      this.job = job;
      this.exactButton.textContent = t("page.stop");
      while (this.job === job && !this.gone) {
        const found = await get(`/api/exact/${job}`);
        if (this.job !== job) return;
        if (found.state === "working") this.exactness.textContent = t("page.tracing", { state: found.progress });
        else { this.endExact(found.state === "failed" ? t("page.exact_failed", { reason: found.reason }) : found.plan ? t("page.exact_done") : ""); if (found.plan) this.answered(found.plan); return; }
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
}
