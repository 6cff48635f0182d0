"""Headless Chromium, for the tests that look at pages as people do. Skipped where there is none.

A test file imports what it needs by name, so that the fixture and the marks hold in it, too.
"""

import shutil
import sys
from collections.abc import Iterator
from importlib import resources
from typing import Any

import pytest

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
in_chromium = pytest.mark.skipif(CHROMIUM is None or not sys.platform.startswith("linux"), reason="no Chromium here")
pytestmark = [pytest.mark.slow, in_chromium]
PATIENCE_MS = 600_000  # what a test waits for comes sooner or later; how soon is no test's business
SETTLED = """() => new Promise(done => {
  const root = document.documentElement;
  let before = "", same = 0;
  const look = () => {
    const now = [root.scrollWidth, root.scrollHeight, document.querySelectorAll("*").length,
      ...[...document.querySelectorAll("canvas")].map(canvas => canvas.clientHeight)].join();
    same = now === before ? same + 1 : 0;
    before = now;
    if (same >= 5) done(); else requestAnimationFrame(look);
  };
  look();
})"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A playwright Browser."""
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as started:
        playwright.expect.set_options(timeout=PATIENCE_MS)
        made = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=PATIENCE_MS)
        yield made
        made.close()


def tab(browser: Any, **options: Any) -> Any:
    """A page in a context of its own, with patience; close `page.context`."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
    context.set_default_timeout(PATIENCE_MS)
    return context.new_page()


def settled(page: Any) -> None:
    """Wait until the layout has stayed as it is for some frames."""
    page.evaluate(SETTLED)


def violations(page: Any) -> list[dict[str, Any]]:
    """All that axe-core finds on a page."""
    axe = pytest.importorskip("axe_playwright_python")
    page.evaluate((resources.files(axe) / "axe.min.js").read_text("utf-8"))
    return page.evaluate("axe.run()")["violations"]


def serious(page: Any) -> list[tuple[str, list[Any]]]:
    """Of it what is serious or critical: the rule and the first places."""
    return [
        (v["id"], [n["target"] for n in v["nodes"]][:4])
        for v in violations(page)
        if v["impact"] in ("serious", "critical")
    ]
