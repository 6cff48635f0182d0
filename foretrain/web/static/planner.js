// The planner of GPTs: every change is planned anew by the server; exact answers, advice, a download.
import { Advice } from "./advice.js";
import { get, post } from "./api.js";
import { Form } from "./form.js";
import { Picture, figures, freeGone, section } from "./pictures.js";
import { Plans } from "./plans.js";
import { h, t } from "./ui.js";

export class Planner extends Plans {
  constructor(start) {
    super(start, "plan");
    this.job = null;
    this.form = new Form(start.fields, (name, value) => this.set(name, value));
    this.pictures = ["foretrain", "nanogpt"].map(() => new Picture());
    this.build();
  }

  build() {
    const s = this.start;
    this.preset = h("select", { id: "preset", onchange: () => this.begin({ preset: this.preset.value, values: this.prices() }) },
      h("option", { value: "" }, t("page.no_preset")), s.presets.map(name => h("option", { value: name }, name)));
    const form = h("section", { class: "form", "aria-label": t("page.form") },
      h("h2", {}, t("page.start_from")), this.row("preset", t("page.preset"), this.preset), this.paste(t("page.paste"), t("page.paste_help"), ".py,.toml"),
      this.device(t("page.card")), h("h2", {}, t("page.knobs")), this.form.element,
      h("p", {}, h("button", { type: "button", onclick: () => this.begin({ values: {} }) }, t("page.reset"))));
    this.exactness = h("p", { class: "help", role: "status" });
    this.exactButton = h("button", { type: "button", disabled: Boolean(s.no_exact), onclick: () => this.job ? this.stopExact() : this.exact() }, t("page.exact"));
    const buttons = this.sharing(h("button", { type: "button", id: "download", onclick: () => this.download() }, t("page.download")), this.exactButton);
    this.more = h("div", {});
    this.element = this.place(form, buttons, this.exactness, this.pictures.map(picture => picture.element), new Advice(this).element, this.cardChooser(), this.more);
  }

  enter() {
    super.enter();
    this.exactness.textContent = this.start.no_exact;
  }

  leave() {
    if (this.job) this.stopExact();
    super.leave();
  }

  show() {
    super.show();
    this.preset.value = this.state.preset;
  }

  prices() {  // what electricity costs has nothing to do with the model
    const kept = ["price_per_kwh", "price_per_hour", "currency", "co2_per_kwh"];
    return Object.fromEntries(Object.entries(this.state.values).filter(([name]) => kept.includes(name)));
  }

  put(found, values) { this.begin({ preset: "", values: { ...this.prices(), ...values } }); }

  change(parts) {
    if (this.job) this.stopExact();
    super.change(parts);
  }

  draw(answer) {
    this.verdict.replaceChildren(h("h2", {}, t("page.verdict")), ...answer.verdict.map(part => h("p", { class: part.tone }, part.text)),
      h("p", { class: "help" }, answer.subtitle));
    this.figures.replaceChildren(...figures(answer.figures));
    answer.pictures.forEach((picture, i) => this.pictures[i].show(picture));
    const open = new Set([...this.more.querySelectorAll("details[open] > summary")].map(summary => summary.textContent));
    const notes = answer.notes.length ? [{ title: t("page.config_notes"), blocks: answer.notes.map(text => ({ kind: "paragraph", text, tone: "plain" })) }] : [];
    this.more.replaceChildren(...[...notes, ...answer.sections].map(found => section(found, open.has(found.title))));
    freeGone();
  }

  async download() {
    try {
      const found = await post("/api/toml", this.state);
      const link = h("a", { href: URL.createObjectURL(new Blob([found.text], { type: "application/toml" })), download: found.name });
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 1000);
    } catch (error) { this.fail(error); }
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
