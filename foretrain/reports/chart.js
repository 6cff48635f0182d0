// What a reader does with a picture, which is an SVG already: points to it, walks through it by arrow keys, leaves series
// out, chooses its axis, smooths its curves. A module of its own on the page; html.py puts it into reports.
"use strict";
const SVG = "http://www.w3.org/2000/svg", FAR = 16;  // pixels from a point that still mean it

// TensorBoard's smoothing: an exponential mean whose weights are made up to one while few values have come.
function smoothed(values, weight) {
  let mean = 0;
  return values.map((value, i) => { mean = weight * mean + (1 - weight) * value; return mean / (1 - weight ** (i + 1)); });
}

// The places of a path as plots.py writes it: the first, then how far each is from the one before.
function placesOf(path) {
  let x = 0, y = 0;
  return [...path.matchAll(/([Mlhv])(-?[\d.]+)(?: ?(-?[\d.]+))?/g)].map(([, kind, one, other]) => {
    if (kind === "v") y += +one; else x += +one;
    y += +(other || 0);
    return [x, y];
  });
}

function element(tag, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

class Chart {
  // `found`: {mode, stops, words} as charts.py makes them.
  constructor(figure, found, { view = 0, weight = 0 } = {}) {
    Object.assign(this, { figure, chosen: view, weight, at: -1, left: new Set() });
    this.drawing = figure.querySelector(".drawing");
    this.readout = figure.querySelector(".readout");
    this.tip = document.createElement("div");
    this.tip.className = "tip";
    this.drawing.addEventListener("pointermove", event => this.point(event));
    this.drawing.addEventListener("pointerdown", event => this.point(event));
    this.drawing.addEventListener("pointerleave", () => this.leave());
    this.drawing.addEventListener("keydown", event => this.walk(event));
    this.drawing.addEventListener("blur", () => { this.leave(); this.readout.textContent = ""; });
    figure.querySelectorAll(".switch input").forEach((input, i) => input.addEventListener("change", () => this.choose(i)));
    const slider = figure.querySelector(".smooth input");
    slider?.addEventListener("input", () => this.smooth(+slider.value));
    this.show(found);
  }

  // After what is drawn was put into its place.
  show(found) {
    const isShown = this.tip.classList.contains("shown");
    this.found = found;
    this.keys = [...this.figure.querySelectorAll(".legend button")];
    this.keys.forEach((key, i) => key.addEventListener("click", () => this.toggle(i)));
    this.drawing.append(this.tip);
    this.choose(Math.min(this.chosen, found.stops.length - 1));
    this.smooth(this.weight);
    this.hide();
    if (isShown && this.at >= 0) this.tell(this.at);
  }

  get stops() { return this.found.stops[this.chosen]; }

  // The drawing that the style sheet shows, and where in it a place is, in pixels of the window.
  get svg() { return [...this.drawing.querySelectorAll(".view:not([hidden]) > svg")].find(one => one.getBoundingClientRect().width); }

  place(svg) {
    const box = svg.getBoundingClientRect(), scale = box.width / svg.viewBox.baseVal.width;
    const [left, top, width, height] = svg.dataset.plot.split(" ").map(Number);
    return { scale, left, top, width, height, at: (u, v) => [box.left + (left + u * width / 1000) * scale, box.top + (top + v * height / 1000) * scale] };
  }

  point(event) {
    const svg = this.svg;
    if (!svg || !this.stops.length) return;
    const place = this.place(svg), away = ([u, v]) => {
      const [x, y] = place.at(u, v), along = Math.abs(x - event.clientX), across = Math.abs(y - event.clientY);
      return { along, rows: across, near: Math.hypot(along, across) }[this.found.mode];
    };
    const far = this.stops.map(away), best = far.indexOf(Math.min(...far));
    if (this.found.mode === "near" && far[best] > FAR) this.leave();
    else this.tell(best, event.clientX);
  }

  // What is at a stop, in a box beside it and marked in the picture.
  tell(at, x) {
    this.at = at;
    const [u, v, title, end, lines] = this.stops[at], { words, mode } = this.found;
    const shown = lines.filter(([series]) => !this.left.has(series));
    const texts = [words[title], ...shown.map(([, word]) => words[word]), words[end]].filter(Boolean);
    this.tip.replaceChildren(...texts.map((text, i) => {
      const row = document.createElement("div"), key = text === words[title] || text === words[end] ? null : this.keys[shown[i - (words[title] ? 1 : 0)]?.[0]];
      row.append(...(key ? [key.querySelector("svg").cloneNode(true), " "] : []), text);
      return row;
    }));
    const svg = this.svg, place = this.place(svg), frame = this.drawing.getBoundingClientRect(), [px, py] = place.at(u, v);
    const from = mode === "rows" && x !== undefined ? x : px, wide = this.tip.offsetWidth, gap = 14;
    const right = from - frame.left + gap, fits = right + wide <= frame.width;
    this.tip.style.left = `${Math.max(0, fits ? right : Math.max(0, from - frame.left - gap - wide))}px`;
    this.tip.style.top = `${Math.max(0, Math.min(py - frame.top - 12, frame.height - this.tip.offsetHeight))}px`;
    this.tip.classList.add("shown");
    const inside = (a, b) => [place.left + a * place.width / 1000, place.top + b * place.height / 1000];
    const [gx] = inside(u, v), marks = mode === "along" ? [element("path", { d: `M${gx} ${place.top}v${place.height}`, class: "guide" })] : [];
    for (const [, , a, b] of mode === "near" ? [[0, 0, u, v]] : shown) if (a !== undefined) { const [cx, cy] = inside(a, b); marks.push(element("circle", { cx, cy, r: mode === "near" ? 8 : 4 })); }
    this.drawing.querySelectorAll(".marks").forEach(one => one.remove());
    svg.append(element("g", { class: "marks" }, ...marks));
    return texts;
  }

  leave() {
    this.tip.classList.remove("shown");
    this.drawing.querySelectorAll(".marks").forEach(one => one.remove());
  }

  walk(event) {
    const count = this.stops.length, far = Math.max(1, Math.round(count / 12)), rtl = document.documentElement.dir === "rtl";
    const by = { ArrowRight: rtl ? -1 : 1, ArrowLeft: rtl ? 1 : -1, ArrowDown: 1, ArrowUp: -1, PageDown: far, PageUp: -far, Home: -Infinity, End: Infinity }[event.key];
    if (event.key === "Escape") { this.leave(); this.readout.textContent = ""; return; }
    if (by === undefined || !count) return;
    event.preventDefault();
    const next = by === -Infinity ? 0 : by === Infinity ? count - 1 : this.at < 0 ? 0 : this.at + by;
    this.readout.textContent = this.tell(Math.min(count - 1, Math.max(0, next))).join(" · ");
  }

  toggle(series) {
    if (!this.left.delete(series)) this.left.add(series);
    this.leave();
    this.hide();
  }

  hide() {
    for (const part of this.drawing.querySelectorAll("[data-series]")) part.toggleAttribute("hidden", this.left.has(+part.dataset.series));
    this.keys.forEach((key, i) => key.setAttribute("aria-pressed", String(!this.left.has(i))));
  }

  choose(view) {
    this.chosen = view;
    this.at = Math.min(this.at, this.stops.length - 1);
    this.leave();
    this.drawing.querySelectorAll(".view").forEach((one, i) => one.toggleAttribute("hidden", i !== view));
    this.figure.querySelectorAll(".switch input").forEach((input, i) => { input.checked = i === view; });
  }

  // From 0, as it was measured, to 1. What was measured stays, faint, behind.
  smooth(weight) {
    this.weight = weight;
    const slider = this.figure.querySelector(".smooth input");
    if (slider) slider.value = slider.nextElementSibling.value = weight;
    this.drawing.querySelectorAll(".faint").forEach(one => one.remove());
    this.drawing.querySelectorAll("[data-marks]").forEach(one => one.classList.toggle("unseen", weight > 0));
    for (const line of this.drawing.querySelectorAll("[data-smooth]")) {
      line.dataset.measured ??= line.getAttribute("d");
      line.setAttribute("d", line.dataset.measured);
      const points = placesOf(line.dataset.measured);
      if (!weight || !points.length) continue;
      const faint = line.cloneNode();
      faint.removeAttribute("data-smooth");
      faint.classList.add("faint");
      line.before(faint);
      const mean = smoothed(points.map(at => at[1]), weight);
      line.setAttribute("d", `M${points.map(([x], i) => `${x.toFixed(1)} ${mean[i].toFixed(1)}`).join("L")}`);
    }
  }
}

export { Chart, placesOf, smoothed };
