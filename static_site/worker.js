// The ledger in a thread of its own: Python in WebAssembly, so that the page stays smooth while it works.
import { loadPyodide } from "./pyodide/pyodide.mjs";
import create from "./pyodide/pyodide.asm.mjs";
import { APP, withPicture } from "./python.js";

const at = name => new URL(name, import.meta.url).href;

// Some hosts do not know what WebAssembly is, and browsers compile nothing else while it comes.
const WASM = "application/wasm";
const plain = self.fetch.bind(self);
self.fetch = async (...asked) => {
  const response = await plain(...asked);
  if (!response.ok) throw new Error(`${response.url}: ${response.status}`);
  const unknown = response.url.endsWith(".wasm") && response.headers.get("Content-Type") !== WASM;
  return unknown ? new Response(response.body, { headers: { "Content-Type": WASM } }) : response;
};

// Pyodide waits for ever where its own WebAssembly does not come.
const lost = Promise.withResolvers();
const streaming = WebAssembly.instantiateStreaming.bind(WebAssembly);
WebAssembly.instantiateStreaming = (...asked) => {
  const made = streaming(...asked);
  made.catch(lost.reject);
  return made;
};

// The picture is packed, unless its host called it "Content-Encoding: gzip": then the browser has unpacked it.
async function unpacked(stream) {
  const [whole, copy] = stream.tee(), head = copy.getReader();
  const { value } = await head.read();
  head.cancel();
  return value?.[0] === 0x1f ? whole.pipeThrough(new DecompressionStream("gzip")) : whole;
}

// Fill memory with the picture, and count what arrives of it for the progress bar. The bytes behind it tell builds apart.
async function unpack(packed, picture, mark) {
  const behind = [];
  let loaded = 0, filled = 0;
  const count = new TransformStream({ transform(chunk, onwards) {
    self.postMessage({ loaded: loaded += chunk.byteLength });
    onwards.enqueue(chunk);
  } });
  const reader = (await unpacked((await packed).body.pipeThrough(count))).getReader();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) break;
    const inside = value.subarray(0, picture.length - filled);
    picture.set(inside, filled);
    filled += inside.length;
    behind.push(...value.subarray(inside.length, inside.length + mark.length));
  }
  if (String(behind) !== String(mark)) throw new Error("python.picture and python.json are of two builds");
}

// What no question needed when the picture was taken, of Python's library and of ours. It comes when all else is there.
async function rest(python) {
  await new Promise(resolve => setTimeout(resolve, 2000));  // first questions first
  const [library] = python.FS.readdir("/lib").filter(name => name.endsWith(".zip"));
  const bytes = async name => new Uint8Array(await (await self.fetch(at(name))).arrayBuffer());
  python.FS.writeFile(`/lib/${library}`, await bytes("pyodide/python_stdlib.zip"));
  python.unpackArchive(await bytes("python.zip"), "zip", { extractDir: APP });
}

async function begin() {
  const packed = self.fetch(at("python.picture"));
  packed.catch(() => {});  // it is awaited later
  const { bytes, place, mark } = await (await self.fetch(at("python.json"))).json();
  const picture = new Uint8Array(bytes), arrived = unpack(packed, picture, mark);
  arrived.catch(lost.reject);
  const python = await loadPyodide({
    indexURL: at("pyodide/"), packageBaseUrl: at("pyodide/"), stdout: () => {}, stderr: () => {},
    stdLibURL: at("python.json"),  // Pyodide insists on a file; `rest` puts the library into its place
    ...withPicture(create, at("pyodide/pydantic_core.wasm"), place, picture, arrived),
  });
  delete python._api.config._loadSnapshot;  // as large as memory itself, and held by the other, too
  delete python._api.config.createPyodideModule;
  return [python.runPython("from foretrain.web import calls\ncalls"), python];
}

const begun = Promise.race([begin(), lost.promise]);
const complete = begun.then(([, python]) => rest(python)).catch(() => {});  // nearly all questions do without
begun.then(() => self.postMessage({ ready: true }), error => self.postMessage({ failed: String(error.message || error).slice(0, 300) }));

self.onmessage = async ({ data: { id, path, body, language } }) => {
  try {
    const [calls] = await begun;
    const answer = () => self.postMessage({ id, text: calls.post(path, body, language) });
    try { answer(); } catch {  // perhaps for want of the rest
      await complete;
      answer();
    }
  } catch (error) {
    self.postMessage({ id, failed: String(error.message || error).trim().slice(-300) });
  }
};
