// node compile.mjs PYODIDE SOURCES.zip OUT: the Python that the browser loads, compiled by the Python that will run it and
// pictured when all is imported (python.js), and what the page shows while that loads: everything that it needs once, and
// the answers to what stands in its planners at first.
import fs from "node:fs";
import path from "node:path";
import { pathToFileURL } from "node:url";
import zlib from "node:zlib";
import { APP, difference, forPicture } from "./python.js";

const [runtime, sources, out] = process.argv.slice(2).map(name => path.resolve(name));
const load = name => import(pathToFileURL(name));
const { loadPyodide } = await load(path.join(runtime, "pyodide.mjs"));
const { default: create } = await load(path.join(runtime, "pyodide.asm.mjs"));
const { START, TUNE_START } = await import(`data:text/javascript,${encodeURIComponent(fs.readFileSync(path.join(out, "state.js"), "utf8"))}`);

// All files of the archive, as bytecode where they are Python: {path: bytes}.
async function compiled() {
  const python = await loadPyodide({ indexURL: runtime });
  python.unpackArchive(new Uint8Array(fs.readFileSync(sources)), "zip", { extractDir: APP });
  const paths = python.runPython(`
import compileall, py_compile
from pathlib import Path

app, unchecked = Path("${APP}"), py_compile.PycInvalidationMode.UNCHECKED_HASH
if not compileall.compile_dir(app, quiet=1, legacy=True, invalidation_mode=unchecked, stripdir="${APP}"):
    raise SystemExit("something does not compile")
sorted(str(path) for path in app.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyi", ".typed"))
`).toJs();
  return Object.fromEntries(paths.map(name => [name.slice(APP.length + 1), python.FS.readFile(name)]));
}

const files = await compiled();
const [core] = Object.keys(files).filter(name => name.endsWith(".so"));
const coreFile = path.join(out, "pyodide", "pydantic_core.wasm");  // hosts compress files of this name
fs.writeFileSync(coreFile, files[core]);

let place, before;
const python = await loadPyodide({
  indexURL: runtime, env: { PYTHONHASHSEED: "0" }, ...forPicture(create, coreFile, (...told) => [place, before] = told),
});
for (const [name, bytes] of Object.entries(files)) {
  python.FS.mkdirTree(path.dirname(`${APP}/${name}`));
  python.FS.writeFile(`${APP}/${name}`, bytes);
}
const [browser, languages] = python.runPython(`
import sys

sys.path.insert(0, "${APP}")
sys.dont_write_bytecode = True
from foretrain.base import languages
from foretrain.web import browser

browser, list(languages.known())
`);
const ids = languages.toJs();
const first = { "/api/plan": START }, finetune = { "/api/finetune/form": {}, "/api/finetune": TUNE_START };
for (const id of ids) {
  const answered = questions => JSON.stringify(Object.fromEntries(Object.entries(questions).map(([where, question]) => {
    const asked = JSON.stringify(question);
    return [where, { asked, answer: JSON.parse(browser.post(where, asked, id)) }];
  })));
  fs.writeFileSync(path.join(out, `start-${id}.json`), browser.start(id));
  fs.writeFileSync(path.join(out, `first-${id}.json`), answered(first));
  fs.writeFileSync(path.join(out, `finetune-${id}.json`), answered(finetune));
}
fs.writeFileSync(path.join(out, "languages.json"), JSON.stringify(ids));

// What of memory is free goes as zeros: else it would be loaded, too.
function clear(module) {
  const held = [];
  for (let size = 1 << 22; size >= 8; size >>= 1) {
    for (const top = module._sbrk(0);;) {
      const found = module._malloc(size);
      held.push(found);
      if (module._sbrk(0) > top) break;
      module.HEAPU8.fill(0, found, found + size);
    }
  }
  held.forEach(found => module._free(found));
}

[browser, languages].forEach(each => each.destroy());
python.runPython("import gc; gc.collect()");
clear(python._module);
const picture = python.makeMemorySnapshot();
difference(picture, before);
fs.writeFileSync(path.join(out, "python.picture"), zlib.gzipSync(picture, { level: 9 }));
delete files[core];
for (const [name, bytes] of Object.entries(files)) {  // what is asked for after all is read from the host
  fs.mkdirSync(path.dirname(path.join(out, "python", name)), { recursive: true });
  fs.writeFileSync(path.join(out, "python", name), bytes);
}
fs.writeFileSync(path.join(out, "python.json"), JSON.stringify({ bytes: picture.length, place, files: Object.keys(files) }));
process.exit(0);
