// What to change: a table of changes, each with a button that puts it into the form.
import { get, post } from "./api.js";
import { section } from "./pictures.js";
import { announce, h, t, table } from "./ui.js";

const GOALS = ["any", "fit", "speed", "cost", "quality"], STEPS = ["foretrain", "nanogpt"];

export class Advice {
  constructor(planner) {
    this.planner = planner;
    this.goal = h("select", { id: "goal" }, GOALS.map(goal => h("option", { value: goal }, t(`page.goal.${goal}`))));
    this.step = h("select", { id: "whose" }, STEPS.map(step => h("option", { value: step }, step === "nanogpt" ? "nanoGPT" : step)));
    this.said = h("p", { class: "help", role: "status" });
    this.answer = h("div", {});
    const button = h("button", { type: "button", id: "advise", onclick: () => this.find() }, t("page.find"));
    this.element = h("details", { class: "section advice" }, h("summary", {}, h("h2", {}, t("page.advice"))),
      h("p", { class: "buttons" }, h("label", { for: "goal" }, t("page.goal_label")), this.goal, h("label", { for: "whose" }, t("page.whose")), this.step, button),
      this.said, this.answer);
  }

  async find() {
    const goal = this.goal.value === "any" ? null : this.goal.value;
    this.said.textContent = t("page.finding");
    try {
      let found = await post("/api/advice", { ...this.planner.state, goal, step: this.step.value });
      while (found.job) {  // it takes long; the rest of the page answers meanwhile
        this.said.textContent = t("page.finding_still", { seconds: found.seconds });
        found = await get(`/api/advice/${found.job}`);
      }
      this.said.textContent = "";
      this.show(found);
    } catch (error) {
      this.said.textContent = "";
      this.answer.replaceChildren(...(error.problems || [error]).map(problem => h("p", { class: "bad" }, problem.message)));
    }
  }

  show(found) {
    const text = part => part.kind === "table" ? table(part) : h("p", { class: part.tone }, part.text);
    const parts = found.list.blocks.map(text);
    if (found.changes.length) {
      const element = parts[0];
      element.querySelector("thead tr").append(h("th", { scope: "col" }, t("page.apply")));
      [...element.querySelectorAll("tbody tr")].forEach((row, i) => row.append(h("td", {}, found.changes[i].able ? h("button", { type: "button",
        "aria-label": t("page.apply_this", { text: found.changes[i].text }), onclick: () => this.apply(found.changes[i]) }, t("page.apply")) : "")));
    }
    this.answer.replaceChildren(...found.now.blocks.map(text), h("h3", {}, found.list.title), ...parts, ...found.rest.map(part => section(part, false)));
  }

  apply(change) {
    const values = { ...this.planner.state.values };
    for (const [name, value] of Object.entries(change.values)) values[name] = String(value);
    const parts = { values };
    if (change.count !== null) parts.count = change.count;
    if (change.gpu !== null) parts.gpu = change.gpu;
    if (change.used_by_others_bytes !== null) parts.others = `${change.used_by_others_bytes}B`;
    this.planner.begin(parts);
    this.answer.replaceChildren();
    this.said.textContent = t("page.applied", { text: change.text });
    announce(this.said.textContent);
  }
}
