// The blocks of a document as elements. Pictures are drawn by draw.js, as in a report, each with its numbers behind it.
import { Drawing } from "./draw.js";
import { h, t, table } from "./ui.js";

const all = new Set();
let made = 0;  // of which each group of radio buttons has a name of its own
let weight = 0;  // of smoothing, as it was chosen last

export class Picture {
  // `found`: a block of the kind "chart"; null: it comes later, by `show`.
  constructor(found = null) {
    this.canvas = h("canvas", { role: "img", tabindex: 0 });
    this.frame = h("div", { class: "canvas" }, this.canvas);
    this.said = h("p", { class: "help", role: "status" });
    this.element = h("figure", { class: "picture" });
    this.group = `axis-${made += 1}`;
    this.seen = new ResizeObserver(() => this.drawing?.fit());
    this.seen.observe(this.frame);
    all.add(this);
    if (found) this.show(found);
  }

  show(found) {
    if (this.drawing && this.title === found.title) {   // what the reader holds stays where it is
      this.behind.lastChild.replaceWith(this.numbers(found));
      this.drawing.show(found.picture);
      return;
    }
    this.title = found.title;
    this.canvas.setAttribute("aria-label", found.title);
    const open = this.behind?.open, chosen = this.drawing?.picture.chosen || 0;
    this.drawing ||= new Drawing({ ...found.picture, weight }, this.canvas, this.said);
    this.behind = h("details", { class: "behind", open }, h("summary", {}, t("page.numbers")), this.numbers(found));
    const axes = found.picture.axes || [];
    const choice = (axis, i) => h("label", {}, h("input", { type: "radio", name: this.group, value: String(i), checked: i === chosen, onchange: () => this.drawing.choose(i) }), h("span", {}, axis.label));
    const parts = [h("h3", {}, found.title), found.source ? h("p", { class: "source" }, found.source) : "",
      axes.length > 1 ? h("fieldset", { class: "switch" }, h("legend", {}, this.drawing.words.over), axes.map(choice)) : "", found.picture.smooth ? this.slider() : "",
      this.frame, this.said, this.behind];
    this.element.replaceChildren(...parts.filter(part => part !== ""));
    this.drawing.show(found.picture);
  }

  numbers(found) { return table({ ...found.numbers, label: `${found.title} · ${t("page.numbers")}` }); }

  slider() {
    const said = h("output", {}, String(weight));
    const turned = event => { weight = +event.target.value; said.textContent = event.target.value; this.drawing.smooth(weight); };
    return h("label", { class: "smooth" }, this.drawing.words.smoothing, " ", h("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: String(weight), oninput: turned }), said);
  }

  free() { this.seen.disconnect(); this.drawing?.free(); all.delete(this); }
}

// After others took their place in the page.
export function freeGone() { for (const picture of [...all]) if (!picture.element.isConnected) picture.free(); }

function drawAll() { for (const picture of all) picture.drawing?.draw(); }

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
    if (!found.picture?.small) elements.push(element);
    else if (last?.className === "grid") last.append(element);
    else elements.push(h("div", { class: "grid" }, element));
  }
  return elements;
}

// A part of a document that is opened and closed.
export function section(found, open) {
  return h("details", { class: "section", open }, h("summary", {}, h("h2", {}, found.title)), blocks(found));
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
