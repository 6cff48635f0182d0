// The ledger in a thread of its own: Python in WebAssembly, so that the page stays smooth while it works.
import { loadPyodide } from "./pyodide/pyodide.mjs";

const at = name => new URL(name, import.meta.url).href;
let loaded = 0;

// Count what arrives, for the progress bar.
const plain = self.fetch.bind(self);
self.fetch = async (...asked) => {
  const response = await plain(...asked);
  if (!response.ok) throw new Error(`${response.url}: ${response.status}`);
  const count = new TransformStream({ transform(chunk, onwards) {
    loaded += chunk.byteLength;
    self.postMessage({ loaded });
    onwards.enqueue(chunk);
  } });
  return new Response(response.body.pipeThrough(count), { headers: response.headers });
};

async function begin() {
  const archive = self.fetch(at("python.zip")).then(response => response.arrayBuffer());
  const python = await loadPyodide({ indexURL: at("pyodide/"), packageBaseUrl: at("pyodide/"), stdout: () => {}, stderr: () => {} });
  python.unpackArchive(await archive, "zip", { extractDir: "/app" });
  return python.runPython("import sys; sys.path.insert(0, '/app'); sys.dont_write_bytecode = True\nfrom foretrain.web import browser\nbrowser");
}

const begun = begin();
begun.then(() => self.postMessage({ ready: true }), error => self.postMessage({ failed: String(error.message || error).slice(0, 300) }));

self.onmessage = async ({ data: { id, path, body, language } }) => {
  try {
    const browser = await begun;
    self.postMessage({ id, text: browser.post(path, body, language) });
  } catch (error) {
    self.postMessage({ id, failed: String(error.message || error).trim().slice(-300) });
  }
};
