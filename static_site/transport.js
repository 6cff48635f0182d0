// How questions travel where there is no server: to the ledger in a worker of this page. Nothing leaves the browser.
import { chosen } from "./language.js";
import { h, t } from "./ui.js";

const at = name => new URL(name, import.meta.url).href;
const read = async name => {
  try {
    const response = await fetch(at(name));
    if (response.ok) return await response.json();
    throw new Error(response.status);
  } catch (error) { throw new NoFile(`${name}: ${error.message}`); }
};
class NoFile extends Error {}
const waiting = new Map();  // question -> what to do with its answer
const begun = Promise.withResolvers();  // the worker
let worked = {}, language = "en", site = null, asked = 0, problem = "";
let state = null, loaded = 0, ready = false;  // the line that says how far the worker is

export function takeToken() {}

// [status, answer] to a question; the body is text, or undefined.
export async function send(method, path, body) {
  try { return await answerTo(path, body); } catch (error) {
    if (!(error instanceof NoFile)) throw error;
    // Every sentence of the page is in such a file, so this one is in English.
    return [500, { message: `This page could not read one of its files (${error.message}). Reload it to try again.` }];
  }
}

async function answerTo(path, body) {
  if (path === "/api/start") return start();
  const known = (await workedOut(JSON.parse(body).kind))[path];
  if (known && body === known.asked) return known.answer;
  const worker = await begun.promise;
  if (problem) return JSON.parse(refusal(problem));
  const answer = new Promise(resolve => waiting.set(++asked, resolve));
  worker.postMessage({ id: asked, path, body, language });
  return JSON.parse(await answer);
}

// The answers of a kind of run that were worked out when the site was built, with their questions.
async function workedOut(kind = "pretraining") { return worked[kind] ||= await read(`${kind}-${language}.json`); }

const refusal = reason => JSON.stringify([500, { message: t("page.site.failed", { reason }) }]);

// What the page needs once, in the language that was chosen, else in the one that the browser likes best.
async function start() {
  const known = site || await read("site.json");
  const wishes = [chosen(), ...navigator.languages].map(tag => tag.toLowerCase());
  const spoken = tag => known.languages.find(id => tag === id || tag.startsWith(`${id}-`));
  language = spoken(wishes.find(spoken) || "") || "en";
  const answer = await read(`start-${language}.json`);
  worked = {};  // those of another language
  setTimeout(site ? show : load, 0);  // the page is drawn first
  site = known;
  return [200, answer];
}

function show() {
  const total = site.loads, megabytes = size => (size / 1e6).toFixed(1);
  if (problem) state.replaceChildren(h("span", { class: "bad" }, t("page.site.failed", { reason: problem })));
  else if (ready) state.replaceChildren(t("page.site.ready"));
  else state.replaceChildren(
    loaded < total ? t("page.site.loading", { done: megabytes(loaded), of: megabytes(total) }) : t("page.site.starting"), " ",
    h("progress", { max: total, value: loaded, "aria-label": t("page.site.starting") }));
}

// The worker begins as a blob: so it has the content security policy of this page, whatever its host sends with files.
function load() {
  const link = URL.createObjectURL(new Blob([`import ${JSON.stringify(at("worker.js"))};`], { type: "text/javascript" }));
  const policy = self.trustedTypes?.createPolicy("foretrain-worker", { createScriptURL: () => link });
  state = h("p", { class: "help", id: "planner-state" });
  document.getElementById("main").before(state);
  show();
  const worker = new Worker(policy ? policy.createScriptURL("") : link, { type: "module" });
  worker.onerror = () => fail(t("page.site.not_started"));
  worker.onmessage = ({ data }) => {
    if (data.id !== undefined) answer(data.id, data.text ?? refusal(data.failed));
    else if (data.failed) fail(data.failed);
    else if (data.ready) {
      ready = true;
      state.dataset.ready = "true";
      URL.revokeObjectURL(link);
      show();
      if (!waiting.size) worker.postMessage({ id: 0, path: "/api/plan", body: worked.pretraining["/api/plan"].asked, language });  // the first is the slowest
    } else { loaded = data.loaded; show(); }
  };
  begun.resolve(worker);
}

function answer(id, text) {
  waiting.get(id)?.(text);
  waiting.delete(id);
}

// What cannot start answers every question with why.
function fail(reason) {
  problem = reason;
  show();
  for (const id of [...waiting.keys()]) answer(id, refusal(reason));
}
