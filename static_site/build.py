"""Builds the planner as a static site: the page of `foretrain serve`, with the ledger running in the browser.

    make site                                   build/planner
    python static_site/build.py --out FOLDER    the same elsewhere

Needs node and npm to build (Pyodide comes from npm, and node lets it compile what the browser will load); what is
built needs only a host for files. Everything that is fetched is pinned by digest and kept in build/downloads.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from fetch import PYODIDE, PYODIDE_FILES, CannotFetch, licences, pyodide, wheels

HERE = Path(__file__).parent
ROOT = HERE.parent
PACKAGE = ROOT / "foretrain"
# What no answer of the page needs: commands, training, runs, other people's files, and the page's own files.
ROOMS_LEFT_OUT = {"cli", "training", "comparison", "prepare"}
LEFT_OUT = {*ROOMS_LEFT_OUT, "static", "__pycache__"}
# Scripts, data and workers from the site's own host only, WebAssembly allowed, no text can become markup. The worker
# begins as a blob, so that this policy holds for it too: a worker loaded by its address has its host's, or none.
POLICY = (
    "default-src 'self'; script-src 'self' 'wasm-unsafe-eval'; worker-src 'self' blob:; object-src 'none'; "
    "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; trusted-types foretrain-worker"
)
MARK = "site.json"  # what a built site consists of; a folder without it is never emptied
NOTICE = """The planner of foretrain as a static site. Apache-2.0, the text below. It carries the work of others:

Pyodide {pyodide}, MPL-2.0: CPython 3.14 (PSF licence) and its libraries as WebAssembly.
  Sources, unchanged here, and texts of the licences: https://github.com/pyodide/pyodide/tree/{pyodide}
  https://github.com/python/cpython/blob/3.14/LICENSE
pydantic, pydantic-core, annotated-types, typing-inspection, PyYAML, MIT; typing-extensions, PSF: texts below.
"""


def build(out: Path, cache: Path) -> dict[str, int]:
    """Build the site beside a folder, then put it into its place: {file: bytes}. Raises CannotFetch."""
    cache.mkdir(parents=True, exist_ok=True)
    runtime, packages = pyodide(cache), wheels(cache)
    begun = out.with_name(f".{out.name}.new")
    shutil.rmtree(begun, ignore_errors=True)
    sizes = _build(begun, cache, runtime, packages)
    shutil.rmtree(out, ignore_errors=True)
    begun.rename(out)
    return sizes


def _build(out: Path, cache: Path, runtime: Path, packages: list[Path]) -> dict[str, int]:
    (out / "pyodide").mkdir(parents=True)
    _page(out)
    for name in PYODIDE_FILES:
        shutil.copyfile(runtime / name, out / "pyodide" / name)
    _empty_lock(out / "pyodide" / "pyodide-lock.json")
    _sources(cache / "sources.zip", packages)
    _compile(runtime, cache / "sources.zip", out)
    (out / "LICENSES.txt").write_text(_notice(packages), "utf-8")
    sizes = {path.relative_to(out).as_posix(): path.stat().st_size for path in sorted(out.rglob("*")) if path.is_file()}
    languages = json.loads((out / "languages.json").read_text("utf-8"))
    (out / "languages.json").unlink()
    (out / MARK).write_text(json.dumps({"loads": sizes["python.picture"], "languages": languages}), "utf-8")
    return sizes


def _page(out: Path) -> None:
    """The page's own files, with the transport that needs no server."""
    for path in sorted((PACKAGE / "web" / "static").iterdir()):
        shutil.copyfile(path, out / path.name)
    for name in ("chart.js", "chart.css"):
        shutil.copyfile(PACKAGE / "reports" / name, out / name)
    for name in ("transport.js", "worker.js", "python.js"):
        shutil.copyfile(HERE / name, out / name)
    page = (out / "index.html").read_text("utf-8")
    head = f'<head>\n<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
    head += '\n<meta name="referrer" content="no-referrer">'
    (out / "index.html").write_text(page.replace("<head>", head, 1), "utf-8")
    (out / ".nojekyll").touch()  # some hosts else leave files out


def _empty_lock(path: Path) -> None:
    """Pyodide's list of packages, without the packages: nothing is ever fetched from elsewhere."""
    lock = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps({"info": lock["info"], "packages": {}}), "utf-8")


def _sources(path: Path, packages: list[Path]) -> None:
    """One archive of foretrain and of the wheels that it needs, as they come."""
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(PACKAGE.rglob("*")):
            inside = file.relative_to(ROOT)
            if file.is_file() and not LEFT_OUT & set(inside.parts):
                archive.writestr(inside.as_posix(), file.read_bytes())
        archive.writestr("foretrain/web/corpus.json", json.dumps({"train_bytes": _corpus_bytes()}))
        for wheel in packages:
            with zipfile.ZipFile(wheel) as packed:
                for name in packed.namelist():
                    if not (".dist-info/" in name or name.startswith("pydantic/v1/") or name.endswith(("/", ".pyd"))):
                        archive.writestr(name, packed.read(name))


def _corpus_bytes() -> int:
    """The size of the built-in corpus: the library of the Python that builds the site, which the browser's lacks."""
    sys.path.insert(0, str(ROOT))
    from foretrain.data import corpus

    return corpus.size_bytes("train")


def _compile(runtime: Path, sources: Path, out: Path) -> None:
    """In Pyodide itself: bytecode of its own Python, and what the page shows before Pyodide is there."""
    command = ["node", str(HERE / "compile.mjs"), str(runtime), str(sources), str(out)]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=600, env={**os.environ, "TZ": "UTC"}
        )
    except OSError as error:
        raise CannotFetch(f"node is needed to build the site: {error}") from None
    if result.returncode:
        raise RuntimeError(f"compile.mjs failed: {result.stderr[-2000:]}")


def _notice(packages: list[Path]) -> str:
    parts = [NOTICE.format(pyodide=PYODIDE), "== foretrain\n\n" + (ROOT / "LICENSE").read_text("utf-8")]
    parts += [f"== {wheel.name}\n\n{licences(wheel)}" for wheel in packages]
    return "\n\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--out", type=Path, default=ROOT / "build" / "planner", help="where the site goes; emptied first"
    )
    parser.add_argument("--cache", type=Path, default=ROOT / "build" / "downloads", help="where downloads are kept")
    given = parser.parse_args()
    if given.out.exists() and any(given.out.iterdir()) and not (given.out / MARK).is_file():
        print(f"{given.out} holds something that is no built site; choose an empty folder", file=sys.stderr)
        return 2
    try:
        sizes = build(given.out.resolve(), given.cache.resolve())
    except CannotFetch as problem:
        print(problem, file=sys.stderr)
        return 4
    print(f"{given.out}: {len(sizes)} files, {sum(sizes.values()) / 1e6:.1f} MB; any host for files will do, such as")
    print(f"  python -m http.server --bind 127.0.0.1 --directory {given.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
