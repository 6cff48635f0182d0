// Two to four runs beside each other: what `foretrain report A B` shows, as far as each run goes. Loaded when it is asked for.
import { post } from "./api.js";
import { Drawing, prepare } from "./draw.js";
import { apart } from "./language.js";
import { block } from "./pictures.js";
import { MOST, compareHash } from "./state.js";
import { announce, h, t, table } from "./ui.js";

export class ComparePage {
  constructor(ids) {
    this.ids = ids;
    this.drawings = [];
    this.fit = () => this.drawings.forEach(drawing => drawing.fit());
    this.said = h("span", { class: "help", role: "status" });
    this.again = h("button", { type: "button", id: "again", onclick: () => this.ask() }, t("page.beside.again"));
    this.answer = h("div", {});
    this.element = h("div", { class: "comparison" }, h("p", {}, h("a", { href: "#/runs" }, t("page.back"))), h("h1", {}, t("page.beside.title")), h("p", { class: "buttons" }, this.again,
      h("button", { type: "button", id: "share", onclick: () => this.share() }, t("page.share")), this.said), this.answer);
  }

  enter() {
    window.addEventListener("resize", this.fit);
    this.ask();
  }

  leave() {
    window.removeEventListener("resize", this.fit);
    this.free();
    this.gone = true;
  }

  redraw() { this.drawings.forEach(drawing => drawing.draw()); }

  free() { this.drawings.splice(0).forEach(drawing => drawing.free()); }

  async ask() {
    if (this.again.disabled) return;
    if (this.ids.length < 2 || this.ids.length > MOST) { this.fail({ problems: [], message: t("page.beside.more") }); return; }
    this.again.disabled = true;
    this.said.textContent = t("page.beside.reading");
    this.element.setAttribute("aria-busy", "true");
    try {
      const found = await post("/api/compare", { runs: this.ids });
      if (!this.gone) this.show(found);
    } catch (error) {
      if (!this.gone) this.fail(error);
    }
    this.element.setAttribute("aria-busy", "false");
    this.again.disabled = false;
  }

  fail(error) {
    this.said.textContent = "";
    this.free();
    this.answer.replaceChildren(h("p", { class: "bad box", role: "alert" }, error.problems ? error.message : t("page.no_server")));
  }

  show(found) {
    this.free();
    prepare(found.drawing);
    this.said.textContent = "";
    const title = found.document ? found.document.title : t("page.beside.title");
    this.element.querySelector("h1").textContent = title;
    const sections = found.document ? found.document.sections.map(part => h("section", {}, h("h2", {}, part.title), part.blocks.map(one => this.block(one, part.title)))) : [];
    this.answer.replaceChildren(h("ul", { class: "compared" }, found.runs.map((run, i) => this.run(run, i))),
      found.problem ? h("p", { class: "bad box", role: "alert" }, found.problem) : "",
      found.document ? h("p", { class: "help" }, found.document.subtitle) : "", ...sections,
      found.command ? h("section", {}, h("h2", {}, t("page.beside.file")), h("pre", { tabindex: 0 }, found.command)) : "");
    this.redraw();  // a canvas must stand in the page to have a width
    announce(found.problem || title);
  }

  // One run: how far it is, what is to be said of it, and a link that puts it first.
  run(run, place) {
    const first = [run.id, ...this.ids.filter((_, i) => i !== place)];
    const state = run.status_text ? h("span", {}, " · ", h("span", { class: run.tone }, run.status_text),
      ` · ${t("page.steps_of", { done: apart(run.steps.toLocaleString("en")), of: apart(run.of.toLocaleString("en")) })}`) : "";
    return h("li", {}, run.name ? h("a", { href: `#/run/${run.id}` }, run.name) : apart(run.id), state,
      place && !run.problem ? h("span", {}, " · ", h("a", { href: compareHash(first), "aria-label": `${t("page.beside.first")}: ${run.name}` }, t("page.beside.first"))) : "",
      run.path ? h("div", { class: "help" }, apart(run.path)) : "",
      run.notes.map(text => h("p", { class: "warn" }, text)), run.problem ? h("p", { class: "bad" }, run.problem) : "");
  }

  block(found, title) {
    if (found.kind === "table") return table({ ...found, label: this.named(title) });
    return found.kind === "chart" ? this.picture(found) : block(found);
  }

  // Regions that scroll are told apart by their names.
  named(title) {
    this.regions = (this.regions || 0) + 1;
    return `${title} (${this.regions})`;
  }

  picture(found) {
    const canvas = h("canvas", { role: "img", tabindex: 0, "aria-label": found.title }), said = h("p", { class: "help", role: "status" });
    const drawing = new Drawing(found.picture, canvas, said), axes = found.picture.axes || [];
    const group = `axis-${this.drawings.push(drawing)}`;
    const choice = (axis, i) => h("label", {}, h("input", { type: "radio", name: group, value: String(i), checked: i === 0, onchange: () => drawing.choose(i) }), h("span", {}, axis.label));
    return h("figure", { class: "picture" }, h("h3", {}, found.title), found.source ? h("p", { class: "source" }, found.source) : "",
      axes.length > 1 ? h("fieldset", { class: "switch" }, h("legend", {}, drawing.words.over), axes.map(choice)) : "",
      h("div", { class: "canvas" }, canvas), said,
      h("details", { class: "behind" }, h("summary", {}, t("page.numbers")), table({ ...found.numbers, label: this.named(found.title) })));
  }

  async share() {
    try {
      await navigator.clipboard.writeText(location.href);
      this.said.textContent = t("page.beside.copied");
    } catch {
      this.said.replaceChildren(t("page.copy_this"), " ", h("a", { href: location.href }, location.href));
    }
  }
}
