"""The documentation site in headless Chromium: from its folder and under a sub-path, light and dark, wide and narrow."""

import shutil
import sys
from pathlib import Path

import pytest

pytest.importorskip("zensical")
pytest.importorskip("playwright")

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from tests.kit.browser import browser, files_served, pytestmark, settled, tab
from tests.kit.command import REPO

sys.path.insert(0, str(REPO / "docs"))
import build_site

PAGES = ("index", "start-no-gpu", "commands", "advice", "schemas", "source/examples/real-cases/b1.log")
__all__ = ["browser", "pytestmark"]  # a fixture and marks that hold here, too


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs")
    assert build_site.build(folder) == 0
    return folder / "site"


def opened(browser: Browser, url: str, width: int = 1300, scheme: str = "light") -> tuple[Page, list[str]]:
    """(the page, what went wrong on it: requests to elsewhere and complaints on the console)."""
    page = tab(browser, viewport={"width": width, "height": 900}, color_scheme=scheme)
    wrong: list[str] = []
    home = ("file:", "data:", "about:", "blob:", "http://127.0.0.1")
    page.on("request", lambda sent: None if sent.url.startswith(home) else wrong.append(sent.url))
    page.on("requestfailed", lambda sent: wrong.append(sent.url))
    page.on("console", lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None)
    page.goto(url, wait_until="load")
    settled(page)
    return page, wrong


def find(page: Page) -> None:
    page.keyboard.press("Control+k")
    expect(page.locator("input:focus")).to_be_visible()
    page.keyboard.type("expandable segments", delay=20)
    expect(page.locator("a[href*='techniques'], a[href*='advice']").last).to_be_visible()
    expect(page.locator("body")).to_contain_text("results")


@pytest.mark.parametrize(("scheme", "width"), [("light", 1300), ("dark", 320)])
@pytest.mark.parametrize("name", PAGES)
def test_no_serious_violation(site: Path, browser: Browser, name: str, scheme: str, width: int) -> None:
    page, wrong = opened(browser, (site / f"{name}.html").as_uri(), width, scheme)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert not wrong  # before axe-core, which reads style sheets itself
    found = [v for v in Axe().run(page).response["violations"] if v["impact"] in ("serious", "critical")]
    assert not found, [(v["id"], v["nodes"][0]["html"]) for v in found]
    page.context.close()


def test_search_in_the_folder(site: Path, browser: Browser) -> None:
    page, wrong = opened(browser, (site / "index.html").as_uri())
    find(page)
    assert not wrong


def test_under_a_sub_path(site: Path, browser: Browser) -> None:
    """Served at /some/where/, with every link of the home page and the search."""
    root = site.parent / "web"
    shutil.copytree(site, root / "some" / "where")

    with files_served(root) as link:
        home = f"{link}/some/where/"
        page, wrong = opened(browser, home + "index.html")
        links = set(page.eval_on_selector_all("a[href]", "found => found.map(a => a.href.split('#')[0])"))
        inside = {found for found in links if found.startswith("http://127.0.0.1")}
        assert len(inside) > len(build_site.sources()) - 2
        for found in inside:
            assert found.startswith(home), found
            assert page.request.get(found).ok, found
        find(page)
        assert not wrong
