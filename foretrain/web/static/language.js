// The language of the page. What was chosen here is kept for this browser, and is no part of a link: who opens that has
// a language of his own. Where nothing was chosen, the server decides by what the browser asks for.
const KEPT = "foretrain-language";

export const chosen = () => localStorage.getItem(KEPT) || "";

export function choose(id) { localStorage.setItem(KEPT, id); }

export function speak(start) {
  document.documentElement.lang = start.language;
  document.documentElement.dir = start.direction;
}

export const rightToLeft = () => document.documentElement.dir === "rtl";

// Numbers with their units, names and code keep their order within a line that runs from right to left.
export const apart = text => rightToLeft() ? `\u2066${text}\u2069` : text;
