"""The documentation of several versions side by side (docs/versions.py)."""

import json
import sys
from pathlib import Path

import pytest

from tests.kit.command import REPO

sys.path.insert(0, str(REPO / "docs"))
import versions


def site(folder: Path) -> Path:
    """A site as the theme builds one: its pages have their settings in them."""
    (folder / "guide").mkdir(parents=True)
    for page in (folder / "index.html", folder / "guide" / "index.html"):
        page.write_text('<script id="__config">{"base":".","version":null}</script>', "utf-8")
    return folder


def listed(home: Path) -> list[tuple[str, list[str]]]:
    return [(entry["version"], entry["aliases"]) for entry in json.loads((home / "versions.json").read_text("utf-8"))]


def test_versions_are_listed_newest_first_and_the_latest_opens(tmp_path: Path) -> None:
    built, home = site(tmp_path / "site"), tmp_path / "home"
    home.mkdir()
    for version in ("0.9.0", "0.10.0"):
        versions.add(built, home, version)
    assert listed(home) == [("0.10.0", ["latest"]), ("0.9.0", [])]
    assert 'url=0.10.0/"' in (home / "index.html").read_text("utf-8")
    versions.add(built, home, "0.9.1", latest=False)  # a fix of the old one
    assert listed(home) == [("0.10.0", ["latest"]), ("0.9.1", []), ("0.9.0", [])]
    assert 'url=0.10.0/"' in (home / "index.html").read_text("utf-8")


def test_pages_get_the_menu_and_the_built_site_stays_as_it_was(tmp_path: Path) -> None:
    built, home = site(tmp_path / "site"), tmp_path / "home"
    home.mkdir()
    versions.add(built, home, "1.0")
    pages = list((home / "1.0").rglob("*.html"))
    assert len(pages) == 2
    for page in pages:
        assert '"version":{"provider":"mike"}' in page.read_text("utf-8")
    assert '"version":null' in (built / "index.html").read_text("utf-8")


def test_a_version_is_replaced_whole(tmp_path: Path) -> None:
    built, home = site(tmp_path / "site"), tmp_path / "home"
    home.mkdir()
    versions.add(built, home, "1.0")
    (home / "1.0" / "gone.html").write_text("", "utf-8")
    versions.add(built, home, "1.0")
    assert not (home / "1.0" / "gone.html").exists()
    assert listed(home) == [("1.0", ["latest"])]


def test_without_a_site_it_says_how_to_build_one(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="make docs"):
        versions.add(tmp_path / "nothing", tmp_path, "1.0")
