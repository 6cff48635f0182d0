import { chosen } from "./language.js";

// The server's answers. The token came behind # in the link; it is kept for this address and sent in a header,
// which no other site can do.
const KEPT = "foretrain-token";

export function takeToken() {
  const found = /^#token=([\w-]+)$/.exec(location.hash);
  if (!found) return;
  localStorage.setItem(KEPT, found[1]);
  history.replaceState(null, "", "/#/plan");
}

export class Failed extends Error {
  constructor(status, answer) {
    super(answer.message);
    this.status = status;
    this.problems = answer.problems || [{ message: answer.message, key: "" }];
  }
}

async function ask(method, path, body) {
  const headers = { "X-Foretrain-Token": localStorage.getItem(KEPT) || "" };
  if (chosen()) headers["X-Foretrain-Language"] = chosen();
  if (method === "POST") headers["Content-Type"] = "application/json";
  const response = await fetch(path, { method, headers, body: body === undefined ? undefined : JSON.stringify(body) });
  const answer = await response.json();
  if (!response.ok) throw new Failed(response.status, answer);
  return answer;
}

export const get = path => ask("GET", path);
export const post = (path, body = {}) => ask("POST", path, body);
