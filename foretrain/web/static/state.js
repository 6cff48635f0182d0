// What stands in a planner, as one value that fits behind # and so can be shared or kept as a bookmark. `config` is the
// text of a config.json in place of a model that is known; then `model` is a name for it.
const form = (kind, model, gpu, values = {}) => ({ kind, model, config: "", gpu, count: "1", others: "", cards: [], values });
export const STARTS = {
  plan: form("pretraining", "gpt2-124m", "RTX 4070"),
  finetune: form("fine-tuning", "qwen3-8b", "RTX 4090", { method: "qlora" }),
  generate: form("generation", "llama-3.1-8b", "RTX 4070", { weights: "q4_k_m" }),
};
const UNSAID = { config: "", count: "1" };  // what a link leaves out

// `part`: plan, finetune or generate.
export function toHash(part, state) {
  const said = ["model", "gpu", "count", "others", "config"].filter(name => state[name] !== UNSAID[name]);
  const query = new URLSearchParams(said.map(name => [name, state[name]]));
  for (const card of state.cards) query.append("card", card);
  for (const [name, value] of Object.entries(state.values)) query.append(`k.${name}`, value);
  return `#/${part}?${query}`;
}

export function fromHash(part, hash) {
  const query = new URLSearchParams(hash.split("?")[1] || "");
  if (![...query.keys()].length) return null;
  const values = {};
  for (const [key, value] of query) if (key.startsWith("k.")) values[key.slice(2)] = value;
  const missing = { ...STARTS[part], ...(part === "plan" ? { model: "" } : {}) };
  const texts = Object.fromEntries(["model", "gpu", "count", "others", "config"].map(name => [name, query.get(name) || missing[name]]));
  return { kind: missing.kind, ...texts, cards: query.getAll("card"), values };
}

// Runs to compare, the one that the others are held against first.
export const MOST = 4;
export const compareHash = ids => `#/compare?${new URLSearchParams(ids.map(id => ["run", id]))}`;
export const comparedIn = hash => new URLSearchParams(hash.split("?")[1] || "").getAll("run");
