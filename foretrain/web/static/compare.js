// Two to four runs beside each other: what `foretrain report A B` shows, as far as each run goes.
import { post } from "./api.js";
import { apart } from "./language.js";
import { blocks } from "./pictures.js";
import { MOST, compareHash } from "./state.js";
import { announce, h, t } from "./ui.js";

export class ComparePage {
  constructor(ids) {
    this.ids = ids;
    this.said = h("span", { class: "help", role: "status" });
    this.again = h("button", { type: "button", id: "again", onclick: () => this.ask() }, t("page.beside.again"));
    this.answer = h("div", {});
    this.element = h("div", { class: "comparison" }, h("p", {}, h("a", { href: "#/runs" }, t("page.back"))), h("h1", {}, t("page.beside.title")), h("p", { class: "buttons" }, this.again,
      h("button", { type: "button", id: "share", onclick: () => this.share() }, t("page.share")), this.said), this.answer);
  }

  enter() { this.ask(); }

  leave() { this.gone = true; }

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
    this.answer.replaceChildren(h("p", { class: "bad box", role: "alert" }, error.problems ? error.message : t("page.no_server")));
  }

  show(found) {
    this.said.textContent = "";
    const title = found.document ? found.document.title : t("page.beside.title");
    this.element.querySelector("h1").textContent = title;
    const sections = found.document ? found.document.sections.map(part => h("section", {}, h("h2", {}, part.title), blocks(part))) : [];
    this.answer.replaceChildren(h("ul", { class: "compared" }, found.runs.map((run, i) => this.run(run, i))),
      found.problem ? h("p", { class: "bad box", role: "alert" }, found.problem) : "",
      found.document ? h("p", { class: "help" }, found.document.subtitle) : "", ...sections,
      found.command ? h("section", {}, h("h2", {}, t("page.beside.file")), h("pre", { tabindex: 0 }, found.command)) : "");
    announce(found.problem || title);
  }

  // One run: how far it is, what is to be said of it, and a link that puts it first.
  run(run, place) {
    const first = [run.id, ...this.ids.filter((_, i) => i !== place)];
    const state = run.status_text ? h("span", {}, " · ", h("span", { class: run.tone }, run.status_text),
      ` · ${run.progress}`) : "";
    return h("li", {}, run.name ? h("a", { href: `#/run/${run.id}` }, run.name) : apart(run.id), state,
      place && !run.problem ? h("span", {}, " · ", h("a", { href: compareHash(first), "aria-label": `${t("page.beside.first")}: ${run.name}` }, t("page.beside.first"))) : "",
      run.path ? h("div", { class: "help" }, apart(run.path)) : "",
      run.notes.map(text => h("p", { class: "warn" }, text)), run.problem ? h("p", { class: "bad" }, run.problem) : "");
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
