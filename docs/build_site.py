"""Builds the documentation site: gathers the pages, puts them in order, and hands them to zensical.

    make docs         build/docs/site, without a warning; it opens from the folder as well as from any address
    make docs-serve   the same on 127.0.0.1, rebuilt at each change

The pages are docs/*.md, README.md as the first, CONTRIBUTING.md and CHANGELOG.md. A file of the repository that a page links to (an example, a
module) gets a page of its own with its text, so that no link of the site leads outside.
"""

import json
import posixpath
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
STAGE = ROOT / "build" / "docs"

# The groups of the navigation, in order, and in each the pages that come first. Every page names its group in its first
# line, `<!-- section: Train -->`.
SECTIONS: dict[str, tuple[str, ...]] = {
    "Get started": ("index", "get-started", "install", "gallery"),
    "Plan": ("advice", "budget", "several-cards", "inference", "memory", "time", "page"),
    "Fine-tune": ("fine-tuning", "fine-tuning-estimates"),
    "Train": ("data", "runs", "training-on-several-cards", "techniques", "speed", "recipes", "export", "reliability"),
    "Look back": ("explain", "compare"),
    "Trust": ("trust", "threat-model"),
    "Reference": ("commands", "options", "python", "schemas", "languages", "ar", "hi"),
    "Take part": ("extend", "contributing", "changelog"),
}
ROOT_PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
OWN = ("foretrain.css", "foretrain.js")
SHIM = "https://unpkg.com/iframe-worker/shim"
# Resources that a browser loads by itself; clickable links do not count.
_FETCHED = re.compile(
    r"""(?:<(?:script|img|iframe|source)[^>]*\ssrc=|<link[^>]*\shref=)["']?((?:https?:)?//[^"' >]+)"""
)
_SECTION = re.compile(r"\A<!-- section: (.+?) -->\n")
_LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
_CODE = re.compile(r"^(`{3,}).*?^\1 *$|`[^`\n]+`", re.DOTALL | re.MULTILINE)


def sources() -> dict[str, Path]:
    pages = {page.name: page for page in sorted(DOCS.glob("*.md"))}
    return pages | {name: ROOT / file for file, name in ROOT_PAGES.items()}


def sections(pages: dict[str, Path]) -> dict[str, list[str]]:
    """Return every page under its group. Raises SystemExit for a page that names none."""
    found: dict[str, list[str]] = {heading: [] for heading in SECTIONS}
    of_root = {f"{name}.md": heading for heading, names in SECTIONS.items() for name in names}
    for name, path in pages.items():
        named = _SECTION.match(path.read_text("utf-8"))
        heading = named[1] if named else of_root[name] if name in ROOT_PAGES.values() else ""
        if heading not in found:
            raise SystemExit(
                f"{path.name}: its first line must be <!-- section: X -->, with one of {', '.join(SECTIONS)}"
            )
        found[heading].append(name)
    for heading, first in SECTIONS.items():
        place = {f"{name}.md": i for i, name in enumerate(first)}
        found[heading].sort(key=lambda name: (place.get(name, len(place)), name))
    return found


class Gatherer:
    """Copies pages into the stage; what they link to follows."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names = {path: name for name, path in sources().items()}
        self.listings: dict[Path, str] = {}

    def gather(self) -> None:
        for name, path in sources().items():
            self._write(name, _SECTION.sub("", self._relinked(path)))
        commands = (self.folder / "commands.md").read_text("utf-8")
        for name, text in command_pages(commands).items():
            self._write(name, text)
        shutil.copytree(DOCS / "pictures", self.folder / "pictures", dirs_exist_ok=True)
        shutil.copytree(DOCS / "schemas", self.folder / "schemas", dirs_exist_ok=True)
        for name in OWN:
            shutil.copy(DOCS / name, self.folder)
        for path, name in self.listings.items():
            self._write(name, _listing(path))

    def _write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_file() or path.read_text("utf-8") != text:
            path.write_text(text, "utf-8")

    def _relinked(self, page: Path) -> str:
        """Adapt the page's links to the site. Code is left alone."""
        text, parts, start = page.read_text("utf-8"), [], 0
        for code in _CODE.finditer(text):
            parts += [self._links(text[start : code.start()], page), code[0]]
            start = code.end()
        return "".join([*parts, self._links(text[start:], page)])

    def _links(self, text: str, page: Path) -> str:
        return _LINK.sub(lambda found: self._target(page, found[1]) + (found[2] or ""), text)

    def _target(self, page: Path, link: str) -> str:
        target = (page.parent / link).resolve()
        if target in self.names:
            return self.names[target]
        if not target.exists():
            raise SystemExit(f"{page.relative_to(ROOT)} links to {link}, which does not exist")
        if target.is_relative_to(DOCS) and target.suffix in (".png", ".svg", ".webp", ".json"):
            return target.relative_to(DOCS).as_posix()
        name = posixpath.join("source", f"{target.relative_to(ROOT).as_posix()}.md")
        self.listings[target] = name
        return name


def command_pages(text: str) -> dict[str, str]:
    """Return the text of commands.md as an overview, and a page per command."""
    intro, *parts = re.split(r"^## (?=\S)", text, flags=re.MULTILINE)
    found = {"commands.md": re.sub(r"\(#([a-z-]+)\)", r"(commands/\1.md)", intro)}
    for part in parts:
        name, _, rest = part.partition("\n")
        own = _LINK.sub(lambda link: f"../{link[1]}{link[2] or ''}", rest)
        found[f"commands/{name.replace(' ', '-')}.md"] = f"# {name}\n{own}"
    return found


def _listing(path: Path) -> str:
    """Return a page with a file's text, or with a folder's file names."""
    name = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        shown = "\n".join(sorted(f"{entry.name}{'/' if entry.is_dir() else ''}" for entry in path.iterdir()))
        return f"# {name}\n\nThe files of this folder:\n\n```text\n{shown}\n```\n"
    if path.suffix == ".md":
        return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", path.read_text("utf-8"))
    kind = {".py": "python", ".toml": "toml", ".json": "json", ".log": "text"}.get(path.suffix, "text")
    return f"# {name}\n\n````{kind}\n{path.read_text('utf-8', 'replace').rstrip()}\n````\n"


def stage(folder: Path = STAGE) -> Path:
    """Write the gathered pages and zensical.toml into `folder`; returns the path of the latter."""
    pages = folder / "pages"
    shutil.rmtree(pages, ignore_errors=True)
    pages.mkdir(parents=True)
    Gatherer(pages).gather()
    each = json.dumps(sorted(f"commands/{path.name}" for path in (pages / "commands").iterdir()))
    entries = ", ".join(f"{{{json.dumps(heading)} = {json.dumps(names)}}}" for heading, names in navigation().items())
    entries = entries.replace('"commands.md"', f'"commands.md", {{"Each command" = {each}}}')
    config = (DOCS / "zensical.toml").read_text("utf-8").replace("[project]\n", f"[project]\nnav = [{entries}]\n", 1)
    (folder / "zensical.toml").write_text(config, "utf-8")
    return folder / "zensical.toml"


def navigation() -> dict[str, list[str]]:
    return sections(sources())


def build(folder: Path = STAGE) -> int:
    """Build `folder`/site again and strictly; return zensical's exit code."""
    config = stage(folder)
    shutil.rmtree(folder / "site", ignore_errors=True)
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict", "--config-file", str(config)]
    code = subprocess.run(command, check=False).returncode
    if code == 0:
        keep_inside(folder / "site")
        print(f"open {folder / 'site' / 'index.html'}")
    return code


def keep_inside(site: Path) -> None:
    """Serve the theme's external files from the site itself. Raises SystemExit where others are left.

    It is one script: search in pages that are opened from a folder (MIT, docs/vendor).
    """
    shutil.copy(DOCS / "vendor" / "iframe-worker" / "index.js", site / "assets" / "iframe-worker.js")
    for page in site.rglob("*.html"):
        up = "../" * (len(page.relative_to(site).parts) - 1)
        text = page.read_text("utf-8").replace(SHIM, f"{up}assets/iframe-worker.js")
        page.write_text(text, "utf-8")
        if fetched := _FETCHED.search(text):
            raise SystemExit(f"{page.relative_to(site)} would fetch {fetched[1]}")


def serve(folder: Path = STAGE) -> int:
    """Serve the site, gathering again what changes."""
    command = [sys.executable, "-m", "zensical", "serve", "--config-file", str(stage(folder))]
    seen = _stamps()
    with subprocess.Popen(command) as server:
        try:
            while server.poll() is None:
                time.sleep(0.5)
                if (now := _stamps()) != seen:
                    seen = now
                    Gatherer(folder / "pages").gather()
        except KeyboardInterrupt:
            server.terminate()
    return 0


def _stamps() -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in [*sources().values(), *(DOCS / name for name in OWN)]}


if __name__ == "__main__":
    sys.exit(serve() if "--serve" in sys.argv else build())
