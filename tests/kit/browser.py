"""Headless Chromium, for the tests that look at pages as people do. Skipped where there is none.

A test file imports what it needs by name, so that the fixture and the marks hold in it, too.
"""

import contextlib
import functools
import json
import re
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from playwright.sync_api import Browser, Page

from foretrain.web import child as web_child
from foretrain.web import server
from tests.kit.language import child, pretending

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
      ...[...document.querySelectorAll(".drawing")].map(one => one.clientHeight)].join();
    same = now === before ? same + 1 : 0;
    before = now;
    if (same >= 5) done(); else requestAnimationFrame(look);
  };
  look();
})"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
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


def unfold(page: Any) -> None:
    for details in page.locator("details").all():
        details.evaluate("e => { e.open = true; }")


def said_in(page: Any, selector: str) -> str:
    """Return the text of a part of the page, and all labels of the page."""
    labels = "[...document.querySelectorAll('[aria-label]')].map(e => e.getAttribute('aria-label')).join('\\n')"
    return page.locator(selector).inner_text() + "\n" + page.evaluate(labels)


def tab_to(page: Any, selector: str) -> None:
    """Press Tab until this has the focus, which shows wherever it is."""
    for _ in range(80):
        page.keyboard.press("Tab")
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
        if page.evaluate("s => document.activeElement.matches(s)", selector):
            return
    raise AssertionError(f"{selector} is not reached")


def usable(page: Any, width: int) -> None:
    """With everything unfolded nothing sticks out at this width, and axe finds nothing serious."""
    unfold(page)
    settled(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    wrong = serious(page)
    assert not wrong, json.dumps(wrong)


@contextlib.contextmanager
def opened(browser: Browser, link: str, **options: Any) -> Iterator[Page]:
    page, wrong = tab(browser, **options), []
    page.on("console", lambda message: wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on(
        "request",
        lambda request: None if request.url.startswith(("http://127.0.0.1:", "blob:")) else wrong.append(request.url),
    )
    page.goto(link)
    yield page
    page.context.close()
    # A wrong value is answered with 422, which Chromium tells on its console.
    assert not [text for text in wrong if "status of 422" not in text]


def answered(page: Page) -> None:
    page.wait_for_selector(".results[aria-busy=false]")


def needs(page: Page) -> float:
    """What the first line says that foretrain's step needs, in GiB."""
    text = page.locator(".strip-row").first.inner_text()
    number, unit = re.search(r"([\d.]+) ([GM])iB of", text).groups()  # type: ignore[union-attr]
    return float(number) / (1 if unit == "G" else 1024)


@contextlib.contextmanager
def files_served(folder: Path, packed: str = "") -> Iterator[str]:
    """The address of a host for the files of a folder. It says "gzip" of files whose names end with `packed`."""

    class Host(SimpleHTTPRequestHandler):
        def end_headers(self) -> None:
            if packed and self.path.endswith(packed):
                self.send_header("Content-Encoding", "gzip")
            super().end_headers()

        def log_message(self, *_: Any) -> None: ...

    host = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Host, directory=str(folder)))
    threading.Thread(target=host.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{host.server_port}"
    finally:
        host.shutdown()
        host.server_close()


@contextlib.contextmanager
def serving_here(runs: Path) -> Iterator[str]:
    """The link of a server in this process, which knows the languages of the tests, too, as the processes that it starts."""
    with pretending(), mock.patch.object(web_child, "start", child):
        made = server.prepare(0, [runs])
        thread = threading.Thread(target=lambda: made.server.run(sockets=[made.listening]), daemon=True)
        thread.start()
        while not made.server.started:
            assert thread.is_alive()
            time.sleep(0.02)
        yield made.link
        made.server.should_exit = True
        thread.join()


SHOWN_DRAWING = "[...document.querySelectorAll('.drawing')].map(one => [...one.querySelectorAll('.view:not([hidden]) > svg')].filter(svg => svg.getBoundingClientRect().width))"


def blank_pictures(page: Page) -> list[str]:
    """Names of pictures of which not just one drawing is shown, or one in which hardly anything is drawn."""
    return page.evaluate(
        f"""() => {SHOWN_DRAWING}.map((shown, i) => [shown, document.querySelectorAll('.drawing')[i]])
            .filter(([, one]) => one.clientWidth).filter(([shown]) => shown.length !== 1 ||
              shown[0].querySelectorAll("text").length < 3 || !shown[0].querySelector("[data-series]"))
            .map(([, one]) => one.getAttribute("aria-label"))"""
    )
