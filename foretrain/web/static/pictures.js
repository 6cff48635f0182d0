// The blocks of a document as elements. Pictures come as elements, too, and live as in a report (chart.js), each with its
// numbers behind it.
import { Chart } from "./chart.js";
import { h, t, table } from "./ui.js";

const SVG = "http://www.w3.org/2000/svg";
let made = 0;  // of which each group of radio buttons has a name of its own
let weight = 0;  // of smoothing, as it was chosen last

// An element as charts.py makes it: [tag, attributes, children …]. Every text becomes a text node, never markup.
function build([tag, attributes, ...children], inside = false) {
  const drawn = inside || tag === "svg", element = drawn ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children.map(child => typeof child === "string" ? child : build(child, drawn)));
  return element;
}

export class Picture {
  // `found`: a block of the kind "chart"; null: it comes later, by `show`.
  constructor(found = null) {
    this.element = h("figure", { class: "picture" });
    this.group = `axis-${made += 1}`;
    if (found) this.show(found);
  }

  show(found) {
    const fresh = build(found.figure), numbers = table({ ...found.numbers, label: `${found.title} · ${t("page.numbers")}` });
    if (this.chart && this.title === found.title) {   // what the reader holds stays where it is
      this.behind.lastChild.replaceWith(numbers);
      for (const part of [".drawing", ".legend"]) this.element.querySelector(part)?.replaceChildren(...fresh.querySelector(part)?.childNodes || []);
      this.chart.show(found.picture);
      return;
    }
    this.title = found.title;
    this.behind = h("details", { class: "behind", open: this.behind?.open }, h("summary", {}, t("page.numbers")), numbers);
    fresh.querySelectorAll(".switch input").forEach(input => { input.name = this.group; });
    this.element.replaceChildren(...fresh.childNodes, this.behind);
    this.chart = new Chart(this.element, found.picture, { view: this.chart?.chosen, weight });
    this.element.querySelector(".smooth input")?.addEventListener("input", event => { weight = +event.target.value; });
  }
}

// Numbers that people look at first: [{label, value, range, source}].
export function figures(items) {
  return items.map(one => h("div", {}, h("dt", {}, one.label), h("dd", {}, one.value), one.range ? h("dd", { class: "range" }, one.range) : "",
    h("dd", { class: "source" }, one.source)));
}

// One block of a document as an element. `name`: of the region, where it is a table that scrolls.
export function block(found, name) {
  if (found.kind === "paragraph") return h("p", { class: found.tone }, found.text);
  if (found.kind === "verbatim") return h("pre", { tabindex: 0 }, found.text);
  if (found.kind === "figures") return h("dl", { class: "figures" }, figures(found.items));
  return found.kind === "table" ? table({ ...found, label: name }) : new Picture(found).element;
}

// The blocks of a section; small pictures stand side by side.
export function blocks(section) {
  const elements = [];
  for (const [i, found] of section.blocks.entries()) {
    const element = block(found, `${section.title} (${i + 1})`), last = elements.at(-1);
    if (!found.small) elements.push(element);
    else if (last?.className === "grid") last.append(element);
    else elements.push(h("div", { class: "grid" }, element));
  }
  return elements;
}

// A part of a document that is opened and closed.
export function section(found, open) {
  return h("details", { class: "section", open }, h("summary", {}, h("h2", {}, found.title)), blocks(found));
}
