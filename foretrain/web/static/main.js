// Where the page begins: the token, the texts, and which part is shown.
import { Failed, get, takeToken } from "./api.js";
import { choose, speak } from "./language.js";
import { Planner } from "./planner.js";
import { comparedIn } from "./state.js";
import { announce, h, setTexts, t } from "./ui.js";

const main = document.getElementById("main");
let shown = null, start = null, turn = 0;

// What stands in the place of a part that cannot be had here: why.
class Missing {
  constructor(reason) { this.element = h("p", { class: "box" }, reason); }
  enter() {}
  leave() {}
}

// The part that an address means, and how it is made; all but the first are loaded when they are looked at.
function pageOf(hash) {
  const path = hash.replace(/^#/, "").split("?")[0];
  const run = /^\/run\/([\w-]+)$/.exec(path);
  const elsewhere = run || path === "/runs" || path === "/compare";
  if (elsewhere && start.no_runs) return ["runs", async () => new Missing(start.no_runs)];
  if (run) return ["runs", async () => new (await import("./runs.js")).RunPage(run[1])];
  if (path === "/compare") return ["runs", async () => new (await import("./compare.js")).ComparePage(comparedIn(hash))];
  if (path === "/runs") return ["runs", async () => new (await import("./runs.js")).RunsPage()];
  const part = path === "/finetune" ? "finetune" : path === "/generate" ? "generate" : "plan";
  return [part, async () => new Planner(start, part)];
}

async function route(focus) {
  if (location.hash === "#main") return;
  const [name, make] = pageOf(location.hash);
  if (shown?.hash === location.hash) return;
  shown?.leave();
  for (const link of document.querySelectorAll("#nav a")) {
    if (link.dataset.page === name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  shown = null;
  const mine = turn += 1;
  const made = await make().catch(() => new Missing(t("page.no_server")));
  if (mine !== turn) return;  // somebody went on meanwhile
  shown = made;
  main.replaceChildren(shown.element);
  shown.enter();
  if (focus) main.focus({ preventScroll: true });
}

// What the page says itself, in the language that is chosen; false where it cannot be had.
async function learn() {
  try {
    start = await get("/api/start");
  } catch (error) {
    if (!(error instanceof Failed)) throw error;
    main.replaceChildren(h("p", { class: "bad box", role: "alert" }, error.message));
    return false;
  }
  speak(start);
  setTexts(start.texts);
  document.getElementById("skip").textContent = t("page.skip");
  const links = [["plan", t("page.planner")], ["finetune", t("page.finetune.title")], ["generate", t("page.generate")]];
  document.getElementById("elsewhere")?.remove();
  if (start.no_runs) main.after(h("footer", { class: "help", id: "elsewhere" }, start.no_runs));
  else links.push(["runs", t("page.runs")]);
  document.getElementById("nav").setAttribute("aria-label", t("page.parts"));
  document.getElementById("nav").replaceChildren(...links.map(([name, text]) => h("a", { href: `#/${name}`, "data-page": name }, text)));
  return true;
}

// Each language by its own name. The switch itself stays as it is, and so keeps the focus.
function languageSwitch() {
  const label = h("label", { for: "language" }, t("page.language"));
  const options = start.languages.map(one => h("option", { value: one.id, lang: one.id }, one.name));
  const select = h("select", { id: "language", onchange: async () => {
    choose(select.value);
    if (!await learn()) return;
    label.textContent = t("page.language");
    shown?.leave();
    shown = null;
    route(false);
    announce(t("page.language_chosen", { name: select.selectedOptions[0].text }));
  } }, options);
  select.value = start.language;
  return h("div", { class: "language" }, label, select);
}

async function begin() {
  takeToken();
  if (!await learn()) return;
  document.querySelector(".top").append(languageSwitch());
  document.getElementById("skip").addEventListener("click", event => { event.preventDefault(); main.focus(); });
  window.addEventListener("hashchange", () => { takeToken(); route(true); });
  route(false);
}

begin();
