// What stands in a planner, as one value that fits behind # and so can be shared or kept as a bookmark. Of a fine-tuning
// run `config` is the text of a config.json in place of a preset; then `model` is a name for it.
export const START = { preset: "gpt2-124m", gpu: "RTX 4070", count: "1", others: "", cards: [], values: {} };
export const TUNE_START = { model: "qwen3-8b", gpu: "RTX 4090", others: "", config: "", cards: [],
  values: { method: "qlora" } };
export const STARTS = { plan: START, finetune: TUNE_START };
const TEXTS = { plan: { preset: "", gpu: START.gpu, count: START.count, others: "" }, finetune: { model: TUNE_START.model, gpu: TUNE_START.gpu, others: "", config: "" } };

const UNSAID = { config: "", count: START.count };  // what a link leaves out

// `part`: plan or finetune.
export function toHash(part, state) {
  const query = new URLSearchParams(Object.keys(TEXTS[part]).filter(name => state[name] !== UNSAID[name]).map(name => [name, state[name]]));
  for (const card of state.cards) query.append("card", card);
  for (const [name, value] of Object.entries(state.values)) query.append(`k.${name}`, value);
  return `#/${part}?${query}`;
}

export function fromHash(part, hash) {
  const query = new URLSearchParams(hash.split("?")[1] || "");
  if (![...query.keys()].length) return null;
  const values = {};
  for (const [key, value] of query) if (key.startsWith("k.")) values[key.slice(2)] = value;
  const texts = Object.fromEntries(Object.entries(TEXTS[part]).map(([name, missing]) => [name, query.get(name) || missing]));
  return { ...texts, cards: query.getAll("card"), values };
}

// Runs to compare, the one that the others are held against first.
export const MOST = 4;
export const compareHash = ids => `#/compare?${new URLSearchParams(ids.map(id => ["run", id]))}`;
export const comparedIn = hash => new URLSearchParams(hash.split("?")[1] || "").getAll("run");
