// What stands in the planner, as one value that fits behind # and so can be shared or kept as a bookmark.
export const START = { preset: "gpt2-124m", gpu: "RTX 4070", others: "", cards: [], values: {} };

export function toHash(state) {
  const query = new URLSearchParams({ preset: state.preset, gpu: state.gpu, others: state.others });
  for (const card of state.cards) query.append("card", card);
  for (const [name, value] of Object.entries(state.values)) query.append(`k.${name}`, value);
  return `#/plan?${query}`;
}

export function fromHash(hash) {
  const query = new URLSearchParams(hash.split("?")[1] || "");
  if (![...query.keys()].length) return null;
  const values = {};
  for (const [key, value] of query) if (key.startsWith("k.")) values[key.slice(2)] = value;
  return { preset: query.get("preset") ?? "", gpu: query.get("gpu") || START.gpu, others: query.get("others") || "",
    cards: query.getAll("card"), values };
}

// Runs to compare, the one that the others are held against first.
export const MOST = 4;
export const compareHash = ids => `#/compare?${new URLSearchParams(ids.map(id => ["run", id]))}`;
export const comparedIn = hash => new URLSearchParams(hash.split("?")[1] || "").getAll("run");
