// The planner of fine-tuning: a model by name or by its config.json, how it is trained, a card; what to change comes by itself.
import { post } from "./api.js";
import { Form } from "./form.js";
import { Picture, figures, section } from "./pictures.js";
import { Plans } from "./plans.js";
import { announce, h, t } from "./ui.js";

const OWN = "\u0000";  // of the chooser: the config.json that was pasted, whose name may be that of a preset
const QUIET_MS = 400;  // without a change of the form, until changes are looked for

export class FineTune extends Plans {
  constructor(start) {
    super(start, "finetune");
    this.element = h("div", { class: "finetune" });
  }

  // The form comes when it is looked at, so that the page begins small.
  async enter() {
    try {
      const found = await post("/api/finetune/form");
      if (this.gone) return;
      this.build(found);
      super.enter();
    } catch (error) {
      this.element.replaceChildren(h("p", { class: "bad box", role: "alert" }, error.problems ? error.message : t("page.no_server")));
    }
  }

  build({ models, fields, without }) {
    this.models = models;
    this.devices = this.start.devices.filter(device => !without.includes(device.id));
    this.form = new Form(fields, (name, value) => this.set(name, value));
    this.picture = new Picture();
    this.model = h("select", { id: "model", "aria-describedby": "model-source", onchange: () => this.choose(this.model.value) }, models.map(one => h("option", { value: one.id }, one.text)));
    this.own = h("option", { value: OWN, hidden: true });
    this.model.append(this.own);
    this.source = h("p", { class: "help", id: "model-source" });
    const form = h("section", { class: "form", "aria-label": t("page.finetune.form") },
      h("h2", {}, t("page.start_from")), this.row("model", t("page.finetune.model"), this.model), this.source,
      this.paste(t("page.finetune.paste"), t("page.finetune.paste_help"), ".json,.yaml,.yml,.py"),
      this.device(t("page.finetune.card")), h("h2", {}, t("page.knobs")), this.form.element,
      h("p", {}, h("button", { type: "button", onclick: () => this.begin({ values: {} }) }, t("page.reset"))));
    this.lines = h("dl", { class: "lines" });
    this.looked = h("p", { class: "help", role: "status" });
    this.changes = h("ul", { class: "changes" });
    this.advice = h("section", { class: "section advice" }, h("h2", {}, t("page.advice")), h("p", { class: "help" }, t("page.finetune.changes_help")), this.looked, this.changes);
    this.more = h("div", {});
    this.element.replaceChildren(this.place(form, this.lines, this.sharing(), this.exactness, this.picture.element, this.advice, this.cardChooser(), this.more));
  }

  leave() {
    clearTimeout(this.quiet);
    super.leave();
  }

  show() {
    super.show();
    const own = this.state.config !== "";
    this.own.hidden = !own;
    this.own.textContent = own ? t("page.finetune.own", { name: this.state.model }) : "";
    this.model.value = own ? OWN : this.state.model;
    const known = this.models.find(one => one.id === this.state.model);
    this.source.textContent = own ? t("page.finetune.own_source") : known ? known.source : "";
  }

  choose(id) { if (id !== OWN) this.begin({ model: id, config: "" }); }

  // What was read: a model, options, or both. A model keeps the options of the form; options keep its model.
  put(found, values) {
    const parts = found.model === undefined ? {} : { model: found.model, config: found.config };
    this.begin(Object.keys(values).length ? { ...parts, values } : parts);
  }

  change(parts) {
    clearTimeout(this.quiet);
    this.looking = null;
    super.change(parts);
  }

  draw(answer) {
    this.verdict.replaceChildren(h("h2", {}, t("page.verdict")), ...answer.verdict.map(part => h("p", { class: part.tone }, part.text)),
      h("p", { class: "help" }, answer.title), h("p", { class: "help" }, answer.model));
    this.figures.replaceChildren(...figures(answer.figures));
    this.lines.replaceChildren(...answer.rows.map(([label, text]) => h("div", {}, h("dt", {}, label), h("dd", {}, text))));
    answer.pictures.forEach(picture => this.picture.show(picture));
    const open = new Set([...this.more.querySelectorAll("details[open] > summary")].map(summary => summary.textContent));
    this.more.replaceChildren(...answer.sections.map(found => section(found, open.has(found.title))));
    this.changes.replaceChildren();
    this.looked.textContent = answer.changes ? t("page.finetune.looking") : t("page.finetune.fits");
    if (answer.changes) this.quiet = setTimeout(() => this.look(), QUIET_MS);
  }

  // One change after the other is planned, until all are or the form is another.
  async look() {
    const state = this.looking = this.state;
    const current = () => this.looking === state && !this.gone;
    try {
      for (let done = false; !done && current();) {
        const found = await post("/api/finetune/changes", state);
        if (!current()) return;
        done = found.done;
        this.looked.textContent = found.said;
        this.list(found.changes);
      }
    } catch (error) {
      if (current()) this.looked.textContent = (error.problems || [{ message: t("page.no_server") }])[0].message;
    }
  }

  // The buttons of changes that stay keep the focus.
  list(changes) {
    const there = new Map([...this.changes.children].map(item => [item.dataset.text, item]));
    const items = changes.map(change => there.get(change.text) || h("li", { "data-text": change.text }, h("span", { class: change.tone }, change.text), " ",
      h("button", { type: "button", "aria-label": t("page.apply_this", { text: change.text }), onclick: () => this.apply(change) }, t("page.apply"))));
    const focus = document.activeElement;
    this.changes.replaceChildren(...items);
    if (focus !== document.activeElement && this.changes.contains(focus)) focus.focus({ preventScroll: true });
  }

  apply(change) {
    const values = { ...this.state.values };
    for (const [name, value] of Object.entries(change.values)) values[name] = String(value);
    this.begin({ values });
    announce(t("page.applied", { text: change.text }));
  }
}
