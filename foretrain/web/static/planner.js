// The planner of GPTs: every change is planned anew by the server; exact answers, advice, a download.
import { Advice } from "./advice.js";
import { post } from "./api.js";
import { Form } from "./form.js";
import { Picture, figures, section } from "./pictures.js";
import { Plans } from "./plans.js";
import { h, t, table } from "./ui.js";

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
      this.device(t("page.card")), this.row("count", t("page.count"), this.counted(), t("page.count_help")), h("h2", {}, t("page.knobs")), this.form.element,
      h("p", {}, h("button", { type: "button", onclick: () => this.begin({ values: {} }) }, t("page.reset"))));
    const download = h("button", { type: "button", id: "download", onclick: () => this.download() }, t("page.download"));
    this.more = h("div", {});
    this.strategies = h("div", { class: "strategies" });
    this.lines = h("dl", { class: "lines" });
    this.element = this.place(form, this.strategies, this.lines, this.sharing(download), this.exactness, this.pictures.map(picture => picture.element), new Advice(this).element, this.cardChooser(), this.more);
  }

  show() {
    super.show();
    this.preset.value = this.state.preset;
    if (document.activeElement !== this.count) this.count.value = this.state.count;
  }

  // How many cards train together.
  counted() {
    this.count = h("input", { id: "count", type: "text", dir: "ltr", inputmode: "numeric", autocomplete: "off", spellcheck: "false", "aria-describedby": "count-help",
      oninput: () => this.change({ count: this.count.value.trim() || "1" }) });
    return this.count;
  }

  prices() {  // what electricity costs has nothing to do with the model
    const kept = ["price_per_kwh", "price_per_hour", "currency", "co2_per_kwh"];
    return Object.fromEntries(Object.entries(this.state.values).filter(([name]) => kept.includes(name)));
  }

  put(found, values) { this.begin({ preset: "", values: { ...this.prices(), ...values } }); }

  draw(answer) {
    this.verdict.replaceChildren(h("h2", {}, t("page.verdict")), ...answer.verdict.map(part => h("p", { class: part.tone }, part.text)),
      h("p", { class: "help" }, answer.subtitle));
    this.figures.replaceChildren(...figures(answer.figures));
    this.strategies.replaceChildren(...(answer.table ? [h("h2", {}, t("page.strategies")), table(answer.table)] : []));
    this.lines.replaceChildren(...(answer.rows || []).map(([label, text]) => h("div", {}, h("dt", {}, label), h("dd", {}, text))));
    this.pictures.forEach((picture, i) => {  // those of one card
      picture.element.hidden = !answer.pictures[i];
      if (answer.pictures[i]) picture.show(answer.pictures[i]);
    });
    const open = new Set([...this.more.querySelectorAll("details[open] > summary")].map(summary => summary.textContent));
    const notes = answer.notes.length ? [{ title: t("page.config_notes"), blocks: answer.notes.map(text => ({ kind: "paragraph", text, tone: "plain" })) }] : [];
    this.more.replaceChildren(...[...notes, ...answer.sections].map(found => section(found, open.has(found.title))));
  }

  async download() {
    try {
      const found = await post("/api/toml", this.state);
      const link = h("a", { href: URL.createObjectURL(new Blob([found.text], { type: "application/toml" })), download: found.name });
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 1000);
    } catch (error) { this.fail(error); }
  }
}
