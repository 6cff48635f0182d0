// How questions travel where there is no server: to the ledger in a worker of this page. Nothing leaves the browser.
import { h, t } from "./ui.js";

const at = name => new URL(name, import.meta.url).href;
const waiting = new Map();  // question -> what to do with its answer
const begun = Promise.withResolvers();  // the worker
let first = null, state = null, asked = 0, problem = "";

export function takeToken() {}

// [status, answer] to a question; the body is text, or undefined.
export async function send(method, path, body) {
  if (path === "/api/start") return begin();
  if (first && path === "/api/plan" && body === first.asked) return first.answer;  // it was worked out when the site was built
  const worker = await begun.promise;
  if (problem) return JSON.parse(refusal(problem));
  const answer = new Promise(resolve => waiting.set(++asked, resolve));
  worker.postMessage({ id: asked, path, body });
  return JSON.parse(await answer);
}

const refusal = reason => JSON.stringify([500, { message: t("page.site.failed", { reason }) }]);
const read = async name => (await fetch(at(name))).json();

async function begin() {
  const [start, sizes, known] = await Promise.all([read("start.json"), read("loads.json"), read("first.json")]);
  first = known;
  setTimeout(() => load(Object.values(sizes).reduce((a, b) => a + b)), 0);  // the page is drawn first
  return [200, start];
}

// The worker begins as a blob: so it has the content security policy of this page, whatever its host sends with files.
function load(total) {
  const link = URL.createObjectURL(new Blob([`import ${JSON.stringify(at("worker.js"))};`], { type: "text/javascript" }));
  const policy = self.trustedTypes?.createPolicy("foretrain-worker", { createScriptURL: () => link });
  const bar = h("progress", { max: total, value: 0, "aria-label": t("page.site.starting") }), said = h("span", {});
  state = h("p", { class: "help", id: "planner-state" }, said, " ", bar);
  document.getElementById("main").before(state);
  const megabytes = size => (size / 1e6).toFixed(1);
  const show = loaded => {
    bar.value = loaded;
    said.textContent = loaded < total ? t("page.site.loading", { done: megabytes(loaded), of: megabytes(total) }) : t("page.site.starting");
  };
  show(0);
  const worker = new Worker(policy ? policy.createScriptURL("") : link, { type: "module" });
  worker.onerror = () => fail(t("page.site.not_started"));
  worker.onmessage = ({ data }) => {
    if (data.loaded) show(data.loaded);
    else if (data.ready) { state.replaceChildren(t("page.site.ready")); state.dataset.ready = "true"; URL.revokeObjectURL(link); }
    else if (data.id) answer(data.id, data.text ?? refusal(data.failed));
    else fail(data.failed);
  };
  begun.resolve(worker);
}

function answer(id, text) {
  waiting.get(id)(text);
  waiting.delete(id);
}

// What cannot start answers every question with why.
function fail(reason) {
  problem = reason;
  state.replaceChildren(h("span", { class: "bad" }, t("page.site.failed", { reason })));
  for (const id of [...waiting.keys()]) answer(id, refusal(reason));
}
