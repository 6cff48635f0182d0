"""Adds the built site to those of other versions, in the layout of the documentation's host.

make docs && python docs/versions.py --home PATH       adds this version, and makes it the one that PATH/ opens
python docs/versions.py --home PATH --keep-latest      adds it and leaves the latest as it is (a fix of an old one)

PATH/VERSION/ holds each site, PATH/versions.json their list, newest first, in the form of mike
(https://github.com/jimporter/mike), which the theme's version menu reads. An existing version is replaced.
"""

import argparse
import json
import shutil
import sys
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any

from packaging.version import Version

BUILT = Path(__file__).parent.parent / "build" / "docs" / "site"
LIST = "versions.json"
# The theme's text in each page, and the one that turns its menu on.
OFF, ON = '"version":null', '"version":{"provider":"mike"}'
OPENS = """<!doctype html>
<meta charset="utf-8">
<title>foretrain</title>
<meta http-equiv="refresh" content="0; url={version}/">
<a href="{version}/">foretrain {version}</a>
"""


def add(site: Path, home: Path, version: str, *, latest: bool = True) -> None:
    """Copy `site` to `home`/`version` and name it in the list. Raises SystemExit where the site is not built."""
    if not (site / "index.html").is_file():
        raise SystemExit(f"{site} has no index.html; build the site with `make docs` first")
    place = home / version
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(site, place)
    for page in place.rglob("*.html"):
        page.write_text(page.read_text("utf-8").replace(OFF, ON), "utf-8")
    known = [entry for entry in _listed(home) if entry["version"] != version]
    latest = latest or not known
    if latest:
        known = [{**entry, "aliases": []} for entry in known]
    known.append({"version": version, "title": version, "aliases": ["latest"] if latest else []})
    known.sort(key=lambda entry: Version(entry["version"]), reverse=True)
    (home / LIST).write_text(json.dumps(known, indent=1) + "\n", "utf-8")
    if latest:
        (home / "index.html").write_text(OPENS.format(version=version), "utf-8")


def _listed(home: Path) -> list[dict[str, Any]]:
    path = home / LIST
    return json.loads(path.read_text("utf-8")) if path.is_file() else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--home", type=Path, required=True, help="the folder that is served")
    parser.add_argument("--version", default=installed("foretrain"))
    parser.add_argument("--keep-latest", action="store_true", help="do not make it the one that opens")
    options = parser.parse_args()
    options.home.mkdir(parents=True, exist_ok=True)
    add(BUILT, options.home, options.version, latest=not options.keep_latest)
    print(f"open {options.home / 'index.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
