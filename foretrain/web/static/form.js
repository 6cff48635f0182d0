// The planner's form, made from the description of the knobs that the server sends.
import { apart } from "./language.js";
import { h, t } from "./ui.js";

export class Form {
  // `changed(name, value)`: value is text, or null to go back to the default.
  constructor(fields, changed) {
    this.changed = changed;
    this.parts = new Map();
    const basic = fields.filter(field => field.basic).map(field => this.field(field));
    const groups = Map.groupBy(fields.filter(field => !field.basic), field => field.group);
    const rest = [...groups].map(([group, members]) => h("details", { class: "group" },
      h("summary", {}, t(`page.group.${group}`)), members.map(field => this.field(field))));
    this.element = h("div", { class: "fields" }, basic, h("h2", { class: "minor" }, t("page.more")), rest);
  }

  field(field) {
    const id = `k-${field.name}`;
    const problem = h("p", { class: "bad problem", id: `${id}-problem`, hidden: true });
    const help = h("p", { class: "help", id: `${id}-help` }, [field.help, field.limits && field.type !== "choice" && field.type !== "bool" ? ` (${apart(field.limits)})` : ""].join(""));
    const part = { field, problem, slider: null };
    const describe = { id, "aria-describedby": `${id}-help ${id}-problem` };
    if (field.type === "bool") {
      part.input = h("input", { ...describe, type: "checkbox", onchange: () => this.changed(field.name, String(part.input.checked)) });
    } else if (field.type === "choice") {
      part.input = h("select", { ...describe, onchange: () => this.changed(field.name, part.input.value) },
        field.choices.map(choice => h("option", { value: choice }, choice)));
    } else {
      const typed = () => this.changed(field.name, part.input.value.trim() === "" ? null : part.input.value.trim());
      part.input = h("input", { ...describe, type: "text", dir: "ltr", inputmode: field.type === "str" ? "text" : "decimal",
        autocomplete: "off", spellcheck: "false", oninput: typed });
    }
    if (field.stops.length) part.slider = this.slider(field, part);
    const label = h("label", { for: id }, h("bdi", {}, field.name), field.unit ? h("span", { class: "unit" }, ` ${field.unit}`) : "");
    part.row = h("div", { class: `field of-${field.type}` }, h("div", { class: "line" }, label, part.slider, part.input), help, problem);
    this.parts.set(field.name, part);
    return part.row;
  }

  slider(field, part) {
    const slider = h("input", { type: "range", min: 0, max: field.stops.length - 1, step: 1, "aria-label": t("page.slider", { name: field.name }) });
    slider.addEventListener("input", () => {
      const value = String(field.stops[slider.value]);
      part.input.value = value;
      slider.setAttribute("aria-valuetext", `${value} ${field.unit}`);
      this.changed(field.name, value);
    });
    return slider;
  }

  // Show the values that are in force; what somebody is typing in stays as it is.
  show(config) {
    for (const [name, part] of this.parts) this.put(part, config[name]);
  }

  put(part, value) {
    if (part.field.type === "bool") part.input.checked = value === true || value === "true";
    else if (document.activeElement !== part.input || part.field.type === "choice") part.input.value = value;
    if (!part.slider || document.activeElement === part.slider) return;
    const stops = part.field.stops, number = Number(value);
    const nearest = stops.reduce((best, stop, i) => Math.abs(stop - number) < Math.abs(stops[best] - number) ? i : best, 0);
    part.slider.value = nearest;
    part.slider.setAttribute("aria-valuetext", `${value} ${part.field.unit}`);
  }

  // Say what is wrong beside the field that it is about; returns what belongs to none.
  problems(found) {
    for (const part of this.parts.values()) {
      part.problem.hidden = true;
      part.input.removeAttribute("aria-invalid");
    }
    const left = [];
    for (const problem of found) {
      const part = this.parts.get(problem.key);
      if (!part) { left.push(problem.message); continue; }
      part.problem.textContent = problem.message;
      part.problem.hidden = false;
      part.input.setAttribute("aria-invalid", "true");
      left.push(problem.message);
    }
    return left;
  }
}
