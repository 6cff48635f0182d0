// What to change: a table of changes, each with a button that puts it into the form.
import { get, post } from "./api.js";
import { blocks, section } from "./pictures.js";
import { announce, h, t } from "./ui.js";

const GOALS = ["any", "fit", "speed", "cost", "quality"], STEPS = ["foretrain", "nanogpt"];

export class Advice {
  constructor(planner) {
    this.planner = planner;
    this.turn = 0;
    const pretrains = planner.pretrains;
    this.goal = h("select", { id: "goal" }, GOALS.slice(0, pretrains ? 5 : 4).map(goal => h("option", { value: goal }, t(`page.goal.${goal}`))));
    this.step = h("select", { id: "whose" }, STEPS.map(step => h("option", { value: step }, step === "nanogpt" ? "nanoGPT" : step)));
    this.said = h("p", { class: "help", role: "status" });
    this.answer = h("div", {});
    const button = h("button", { type: "button", id: "advise", onclick: () => this.find() }, t("page.find"));
    this.element = h("details", { class: "section advice" }, h("summary", {}, h("h2", {}, t("page.advice"))),
      h("p", { class: "buttons" }, h("label", { for: "goal" }, t("page.goal_label")), this.goal,
        pretrains ? [h("label", { for: "whose" }, t("page.whose")), this.step] : [], button), this.said, this.answer);
  }

  clear(text = "") {
    this.turn += 1;  // what is still looked for is of another form
    this.said.textContent = text;
    this.answer.replaceChildren();
  }

  // `unasked`: the run does not fit, so nobody has to press the button.
  async find(unasked = false) {
    this.clear(t("page.finding"));
    if (unasked) this.element.open = true;
    const turn = this.turn, goal = this.goal.value === "any" ? null : this.goal.value;
    try {
      let found = await post("/api/advice", { ...this.planner.state, goal, ...(this.planner.pretrains ? { trainer: this.step.value } : {}) });
      while (found.job && turn === this.turn) {  // it takes long; the rest of the page answers meanwhile
        this.said.textContent = t("page.finding_still", { seconds: found.seconds });
        found = await get(`/api/jobs/${found.job}`);
      }
      if (turn === this.turn) this.show(found);
    } catch (error) {
      if (turn !== this.turn) return;
      this.said.textContent = "";
      this.answer.replaceChildren(...(error.problems || [error]).map(problem => h("p", { class: "bad" }, problem.message)));
    }
  }

  show(found) {
    this.said.textContent = "";
    const parts = found.sections.slice(0, found.list + 1).map(part => h("div", {}, h("h3", {}, part.title), blocks(part)));
    const list = parts[found.list].querySelector("table");
    if (found.changes.length) {
      list.querySelector("thead tr").append(h("th", { scope: "col" }, t("page.apply")));
      [...list.querySelectorAll("tbody tr")].forEach((row, i) => row.append(h("td", {}, this.button(found.changes[i]))));
    }
    this.answer.replaceChildren(...parts, ...found.sections.slice(found.list + 1).map(part => section(part, false)));
  }

  button(change) {
    return Object.keys(change.set).length ? h("button", { type: "button", "aria-label": t("page.apply_this", { text: change.text }), onclick: () => this.apply(change) }, t("page.apply")) : "";
  }

  apply(change) {
    const changed = Object.entries(change.set.values).map(([name, value]) => [name, String(value)]);
    this.planner.begin({ ...change.set, values: { ...this.planner.state.values, ...Object.fromEntries(changed) } });
    this.said.textContent = t("page.applied", { text: change.text });
    announce(this.said.textContent);
  }
}
