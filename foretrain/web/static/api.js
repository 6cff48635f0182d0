// The answers to what the page asks, wherever they are made.
import { send } from "./transport.js";

export { takeToken } from "./transport.js";

export class Failed extends Error {
  constructor(status, answer) {
    super(answer.message);
    this.status = status;
    this.problems = answer.problems || [{ message: answer.message, key: "" }];
  }
}

async function ask(method, path, body) {
  const [status, answer] = await send(method, path, body === undefined ? undefined : JSON.stringify(body));
  if (status >= 300) throw new Failed(status, answer);
  return answer;
}

export const get = path => ask("GET", path);
export const post = (path, body = {}) => ask("POST", path, body);
