// Elements from data. Every text becomes a text node, never markup.
let texts = {};

export function setTexts(found) { texts = found; }

// The text of an id; {name} in it is a value.
export function t(id, values = {}) {
  const template = texts[id];
  if (template === undefined) throw new Error(`no text ${id}`);
  return template.replace(/\{(\w+)\}/g, (_, name) => String(values[name]));
}

// h("p", {class: "good", onclick: f}, "text", child): an element with attributes, listeners and children.
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked" || name === "disabled") element[name] = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter(child => child !== null && child !== undefined && child !== ""));
  return element;
}

// Tell it to those who do not see the page.
export function announce(text) {
  const place = document.getElementById("say");
  if (place.textContent !== text) place.textContent = text;
}

export function table(block) {
  const row = (cells, tag, tone) => h("tr", { class: tone },
    cells.map((cell, i) => h(tag, { class: block.numeric.includes(i) ? "number" : null, scope: tag === "th" ? "col" : null }, cell)));
  const head = block.columns.length ? h("thead", {}, row(block.columns, "th")) : null;
  const body = h("tbody", {}, block.rows.map((cells, i) => row(cells, "td", (block.tones || [])[i])));
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": block.label || block.columns.filter(Boolean).join(", ") || t("page.table") },
    h("table", {}, head, body));
}
