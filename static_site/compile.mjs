// node compile.mjs PYODIDE SOURCES.zip OUT: the Python that the browser loads, compiled by the Python that will run it and
// pictured when all is imported (python.js), and what the page shows while that loads: everything that it needs once, and
// the answers to what stands in its planners at first.
import crypto from "node:crypto";
import fs from "node:fs";
import path from "node:path";
import { pathToFileURL } from "node:url";
import zlib from "node:zlib";
import { APP, CORE, difference, forPicture } from "./python.js";

const [runtime, sources, out] = process.argv.slice(2).map(name => path.resolve(name));
const load = name => import(pathToFileURL(name));
const { loadPyodide } = await load(path.join(runtime, "pyodide.mjs"));
const { default: create } = await load(path.join(runtime, "pyodide.asm.mjs"));
const { STARTS } = await import(`data:text/javascript,${encodeURIComponent(fs.readFileSync(path.join(out, "state.js"), "utf8"))}`);

// An archive of bytecode and data, and pydantic-core, whose name ends so that hosts compress it.
const archive = path.join(out, "python.zip"), core = path.join(out, "pyodide", "pydantic_core.wasm");
{
  const python = await loadPyodide({ indexURL: runtime });
  python.unpackArchive(new Uint8Array(fs.readFileSync(sources)), "zip", { extractDir: APP });
  python.runPython(`
import compileall, py_compile, zipfile
from pathlib import Path

app, unchecked = Path("${APP}"), py_compile.PycInvalidationMode.UNCHECKED_HASH
if not compileall.compile_dir(app, quiet=1, legacy=True, invalidation_mode=unchecked, stripdir="${APP}"):
    raise SystemExit("something does not compile")
with zipfile.ZipFile("/python.zip", "w", zipfile.ZIP_DEFLATED, compresslevel=9) as packed:
    for path in sorted(app.rglob("*")):
        if path.is_file() and path.suffix not in (".py", ".pyi", ".typed", ".so"):
            name = zipfile.ZipInfo(path.relative_to(app).as_posix(), (1980, 1, 1, 0, 0, 0))  # the same files, the same archive
            name.compress_type = zipfile.ZIP_DEFLATED
            packed.writestr(name, path.read_bytes(), compresslevel=9)
`);
  fs.writeFileSync(archive, python.FS.readFile("/python.zip"));
  fs.writeFileSync(core, python.FS.readFile(CORE));
}

let place, before;
// Nothing of the machine that builds is to be in the picture: its paths, its language (its time zone: build.py).
const env = { PYTHONHASHSEED: "0", LANG: "C.UTF-8" };
const python = await loadPyodide({
  indexURL: runtime, env, _sysExecutable: "./this.program", ...forPicture(create, core, (...told) => [place, before] = told),
});
python.unpackArchive(new Uint8Array(fs.readFileSync(archive)), "zip", { extractDir: APP });
python.FS.writeFile(CORE, "");  // for Python to find: it is linked
const [calls, languages] = python.runPython(`
import sys

sys.path.insert(0, "${APP}")
sys.dont_write_bytecode = True
from foretrain.base import messages
from foretrain.web import calls

calls, list(messages.languages())
`);
const ids = languages.toJs();
for (const id of ids) {
  fs.writeFileSync(path.join(out, `start-${id}.json`), calls.begin(id));
  for (const start of Object.values(STARTS)) {
    const questions = { "/api/form": { kind: start.kind }, "/api/plan": start };
    const answers = Object.entries(questions).map(([where, question]) => {
      const asked = JSON.stringify(question);
      return [where, { asked, answer: JSON.parse(calls.post(where, asked, id)) }];
    });
    fs.writeFileSync(path.join(out, `${start.kind}-${id}.json`), JSON.stringify(Object.fromEntries(answers)));
  }
}
fs.writeFileSync(path.join(out, "languages.json"), JSON.stringify(ids));
// What else visitors ask for, so that its modules are in the picture, too.
const text = "base_model: gpt2";
for (const [where, question] of [
  ["/api/plan", { ...STARTS.plan, model: "baby" }], ["/api/plan", { ...STARTS.plan, model: "llama-124m" }],
  ["/api/read", { kind: "fine-tuning", name: "run.yaml", text }], ["/api/read", { name: "run.py", text }],
]) calls.post(where, JSON.stringify(question), "en");

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

[calls, languages].forEach(each => each.destroy());
python.runPython("import gc; gc.collect()");
clear(python._module);
const picture = python.makeMemorySnapshot();
difference(picture, before);
const mark = crypto.createHash("sha256").update(picture).digest().subarray(0, 8);
fs.writeFileSync(path.join(out, "python.picture"), zlib.gzipSync(Buffer.concat([picture, mark]), { level: 9 }));
fs.writeFileSync(path.join(out, "python.json"), JSON.stringify({ bytes: picture.length, place, mark: [...mark] }));
process.exit(0);
