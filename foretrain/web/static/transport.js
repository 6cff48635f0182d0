// How questions travel: over HTTP to the server on this machine. The token came behind # in the link; it is kept for
// this address and sent in a header, which no other site can do. (static_site/transport.js is the way without a server.)
import { chosen } from "./language.js";

const KEPT = "foretrain-token";

export function takeToken() {
  const found = /^#token=([\w-]+)$/.exec(location.hash);
  if (!found) return;
  localStorage.setItem(KEPT, found[1]);
  history.replaceState(null, "", "/#/plan");
}

// [status, answer] to a question; the body is text, or undefined.
export async function send(method, path, body) {
  const headers = { "X-Foretrain-Token": localStorage.getItem(KEPT) || "" };
  if (chosen()) headers["X-Foretrain-Language"] = chosen();
  if (method === "POST") headers["Content-Type"] = "application/json";
  const response = await fetch(path, { method, headers, body });
  return [response.status, await response.json()];
}
