// The ledger in a thread of its own: Python in WebAssembly, so that the page stays smooth while it works.
import { loadPyodide } from "./pyodide/pyodide.mjs";
import create from "./pyodide/pyodide.asm.mjs";
import { APP, withPicture } from "./python.js";

const at = name => new URL(name, import.meta.url).href;

const plain = self.fetch.bind(self);
self.fetch = async (...asked) => {
  const response = await plain(...asked);
  if (!response.ok) throw new Error(`${response.url}: ${response.status}`);
  return response;
};

// Fill memory with the picture, and count what arrives of it for the progress bar.
async function unpack(packed, memory) {
  let loaded = 0, filled = 0;
  const count = new TransformStream({ transform(chunk, onwards) {
    self.postMessage({ loaded: loaded += chunk.byteLength });
    onwards.enqueue(chunk);
  } });
  const reader = (await packed).body.pipeThrough(count).pipeThrough(new DecompressionStream("gzip")).getReader();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    memory.set(value, filled);
    filled += value.length;
  }
}

// Python's library and our files: nearly all is in the picture, what else is asked for is read from the host then.
function link(files, fs) {
  const library = fs.readdir("/lib").find(name => name.endsWith(".zip"));
  fs.unlink(`/lib/${library}`);
  fs.createLazyFile("/lib", library, at("pyodide/python_stdlib.zip"), true, false);
  for (const name of files) {
    const [folder, file] = [`${APP}/${name}`.replace(/\/[^/]*$/, ""), name.replace(/.*\//, "")];
    fs.mkdirTree(folder);
    fs.createLazyFile(folder, file, at(`python/${name}`), true, false);
  }
}

async function begin() {
  const packed = self.fetch(at("python.picture")), list = at("python.json");
  const { bytes, place, files } = await (await self.fetch(list)).json();
  const python = await loadPyodide({
    indexURL: at("pyodide/"), packageBaseUrl: at("pyodide/"), stdout: () => {}, stderr: () => {},
    stdLibURL: list,  // some file in the place of the library
    ...withPicture(create, at("pyodide/pydantic_core.wasm"), bytes, place, memory => unpack(packed, memory)),
  });
  delete python._api.config._loadSnapshot;  // as large as memory itself
  link(files, python.FS);
  return python.runPython("from foretrain.web import browser\nbrowser");
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
