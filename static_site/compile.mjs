// node compile.mjs PYODIDE SOURCES.zip OUT: the Python that the browser loads, compiled by the Python that will run it,
// and what the page shows while that loads: everything that it needs once, and the answers to what stands in its planners
// at first.
import fs from "node:fs";
import path from "node:path";
import { pathToFileURL } from "node:url";

const [runtime, sources, out] = process.argv.slice(2).map(name => path.resolve(name));
const { loadPyodide } = await import(pathToFileURL(path.join(runtime, "pyodide.mjs")));
const { START, TUNE_START } = await import(`data:text/javascript,${encodeURIComponent(fs.readFileSync(path.join(out, "state.js"), "utf8"))}`);

const python = await loadPyodide({ indexURL: runtime });
python.unpackArchive(new Uint8Array(fs.readFileSync(sources)), "zip", { extractDir: "/app" });
python.runPython(`
import compileall, py_compile, sys, zipfile
from pathlib import Path

app, unchecked = Path("/app"), py_compile.PycInvalidationMode.UNCHECKED_HASH
if not compileall.compile_dir(app, quiet=1, legacy=True, invalidation_mode=unchecked, stripdir="/app"):
    raise SystemExit("something does not compile")
with zipfile.ZipFile("/python.zip", "w", zipfile.ZIP_DEFLATED, compresslevel=9) as packed:
    for path in sorted(app.rglob("*")):
        if path.is_file() and path.suffix not in (".py", ".pyi", ".typed"):
            name = zipfile.ZipInfo(path.relative_to(app).as_posix(), (1980, 1, 1, 0, 0, 0))  # the same files, the same archive
            name.compress_type = zipfile.ZIP_DEFLATED
            packed.writestr(name, path.read_bytes(), compresslevel=9)
sys.path.insert(0, "/app")
`);
fs.writeFileSync(path.join(out, "python.zip"), python.FS.readFile("/python.zip"));
const browser = python.runPython("from foretrain.web import browser; browser");
const languages = python.runPython("from foretrain.base import languages; list(languages.known())").toJs();
const first = { "/api/plan": START }, finetune = { "/api/finetune/form": {}, "/api/finetune": TUNE_START };
for (const id of languages) {
  const answered = questions => JSON.stringify(Object.fromEntries(Object.entries(questions).map(([where, question]) => {
    const asked = JSON.stringify(question);
    return [where, { asked, answer: JSON.parse(browser.post(where, asked, id)) }];
  })));
  fs.writeFileSync(path.join(out, `start-${id}.json`), browser.start(id));
  fs.writeFileSync(path.join(out, `first-${id}.json`), answered(first));
  fs.writeFileSync(path.join(out, `finetune-${id}.json`), answered(finetune));
}
fs.writeFileSync(path.join(out, "languages.json"), JSON.stringify(languages));
