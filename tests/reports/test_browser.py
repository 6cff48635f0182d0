"""Reports in headless Chromium, offline: pictures are drawn, keys and switches work, dark, print and 320 px hold, axe-core
finds nothing serious, and no request is made. Skipped where there is no browser."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright")

from playwright.sync_api import Browser, Page, expect

from tests.kit.browser import SHOWN_DRAWING, blank_pictures, browser, pytestmark, tab, violations
from tests.kit.command import REPO
from tests.kit.command import foretrain as run_foretrain
from tests.kit.reports import HOSTILE, write_long_run

__all__ = ["browser", "pytestmark"]  # a fixture and marks that hold here, too
KINDS = ("run", "plan", "log", "comparison")
CASES = REPO / "examples" / "real-cases"


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One report of each kind; the run has a hostile name, a card's figures and a stretch of heat."""
    folder = tmp_path_factory.mktemp("reports")
    run = write_long_run(folder / "run", 900, HOSTILE)
    b1 = f"{CASES}/b1.log+{CASES}/b1.py"
    words = {
        "run": [str(run)], "plan": [f"{CASES}/c.py", "--used-by-others", "1GB"], "log": [b1],
        "comparison": [f"b1={b1}", f"b2={CASES}/b2.csv+{CASES}/b2.py"],
    }  # fmt: skip
    for kind in KINDS:
        run_foretrain("report", *words[kind], "--gpu", "RTX 4070", "--out", str(folder / f"{kind}.html"), code=0)
    return {kind: folder / f"{kind}.html" for kind in KINDS}


@contextlib.contextmanager
def opened(browser: Browser, path: Path, **options: Any) -> Iterator[Page]:
    """The file in a fresh tab without a network; fails on a console message and on any request but for the file."""
    page, wrong = tab(browser, offline=True, **options), []
    page.on("console", lambda message: wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda request: wrong.append(request.url) if request.url != path.as_uri() else None)
    page.goto(path.as_uri())
    yield page
    page.context.close()
    assert not wrong


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_report_draws_and_axe_finds_nothing_serious(
    browser: Browser, reports: dict[str, Path], kind: str, scheme: Any
) -> None:
    with opened(browser, reports[kind], color_scheme=scheme) as page:
        assert page.locator(".drawing").count() >= 3
        assert blank_pictures(page) == []
        page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
        assert [(v["id"], v["nodes"][0]["html"][:90]) for v in violations(page)] == []


@pytest.mark.parametrize("kind", KINDS)
def test_at_320_px_nothing_is_wider_than_the_page(browser: Browser, reports: dict[str, Path], kind: str) -> None:
    with opened(browser, reports[kind], viewport={"width": 320, "height": 700}) as page:
        page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
        assert page.evaluate("document.documentElement.scrollWidth") == 320
        assert blank_pictures(page) == []
        assert min(page.evaluate("[...document.querySelectorAll('.drawing')].map(c => c.clientWidth)")) > 220


TOUCHING = f"""() => {SHOWN_DRAWING}.flatMap(([svg]) => {{
  const frame = svg.getBoundingClientRect(), found = [];
  const boxes = [...svg.querySelectorAll("g > text")].map(one => [one.textContent, one.getBoundingClientRect()]);
  boxes.forEach(([text, a], i) => {{
    if (a.left < frame.left - 1 || a.right > frame.right + 1) found.push(`${{svg.parentElement.parentElement.title}}: ${{text}}`);
    for (const [other, b] of boxes.slice(i + 1)) {{
      const apart = a.right <= b.left || b.right <= a.left || a.bottom <= b.top + 4 || b.bottom <= a.top + 4;
      if (!apart) found.push(`${{text}} on ${{other}}`);
    }}
  }});
  return found;
}})"""
OFF_AXIS = f"""() => {SHOWN_DRAWING}.flatMap(([svg]) => {{
  const [left, , width] = svg.dataset.plot.split(" ").map(Number);
  return [...svg.querySelectorAll("path[d*='m0-4v8']")].map(one => one.getBBox()).filter(box => box.x < left - 1 || box.x + box.width > left + width + 1).length;
}})"""


@pytest.mark.parametrize("width", [320, 1280])
@pytest.mark.parametrize("language", ["en", "ar", "hi"])
def test_words_of_axes_stand_apart_and_ranges_on_their_axis(
    browser: Browser, tmp_path: Path, language: str, width: int
) -> None:
    """Of a plan for a processor, next to which cards are hundreds of times as fast, and of a short run's times."""
    run = write_long_run(tmp_path / "run", 900, "short")
    for words in ([f"{CASES}/c.py", "--gpu", "cpu"], [str(run)]):
        out = tmp_path / "report.html"
        run_foretrain("report", *words, "--lang", language, "--out", str(out), code=0)
        with opened(browser, out, viewport={"width": width, "height": 900}) as page:
            assert page.evaluate(TOUCHING) == []
            assert set(page.evaluate(OFF_AXIS)) == {0}


def test_keys_alone(browser: Browser, reports: dict[str, Path]) -> None:
    with opened(browser, reports["run"]) as page:
        loss = page.locator(".drawing").first
        loss.focus()
        for key in ("ArrowRight", "ArrowRight", "End"):
            page.keyboard.press(key)
        said = loss.locator("xpath=..").locator(".readout")
        expect(said).to_contain_text("training loss")
        page.keyboard.press("Escape")
        expect(said).to_be_empty()
        page.keyboard.press("Shift+Tab")
        page.keyboard.press("End")
        expect(page.locator(".smooth output").first).to_have_text("0.99")
        assert page.locator("figure").first.locator(".wide .faint").count() == 5  # over each axis
        page.keyboard.press("Shift+Tab")
        page.keyboard.press("ArrowRight")
        assert page.locator(".switch input").nth(1).is_checked()
        moments = page.locator(".drawing[aria-label='One step: what is alive']")
        moments.focus()
        page.keyboard.press("PageDown")
        said = moments.locator("xpath=..").locator(".readout")
        expect(said).to_contain_text("weights")
        expect(said).to_contain_text("forward")


def test_the_axis_of_the_losses_is_switched(browser: Browser, reports: dict[str, Path]) -> None:
    with opened(browser, reports["run"]) as page:
        shown = []
        for name in ("tokens", "hours", "energy", "money", "step"):
            page.locator(".switch label", has_text=name).click()
            view = page.locator(".view:visible").first
            shown.append(view.locator("svg:visible > text").first.text_content())
            assert view.locator("svg:visible path[data-series]").first.bounding_box()["width"] > 300  # type: ignore[index]
        assert shown == ["tokens", "hours", "energy", "money (EUR)", "step"]


def test_hover_says_what_is_alive(browser: Browser, reports: dict[str, Path]) -> None:
    with opened(browser, reports["plan"]) as page:
        drawing = page.locator(".drawing[aria-label='One step: what is alive']")
        drawing.scroll_into_view_if_needed()
        box = drawing.bounding_box()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 120)
        expect(drawing.locator(".tip")).to_be_visible()
        expect(drawing.locator(".tip")).to_contain_text("weights")
        expect(drawing.locator(".tip")).to_contain_text("activations")


def test_a_series_is_left_out_by_its_name(browser: Browser, reports: dict[str, Path]) -> None:
    with opened(browser, reports["plan"]) as page:
        figure = page.locator("figure").first
        bars, key = figure.locator("rect[data-series='0']:visible"), figure.locator(".legend button").first
        assert bars.count() > 2
        key.click()
        assert key.get_attribute("aria-pressed") == "false"
        assert bars.count() == 0
        drawing = figure.locator(".drawing")
        drawing.focus()
        page.keyboard.press("Home")
        assert key.inner_text() not in drawing.locator(".tip").inner_text()
        key.click()
        assert bars.count() > 2


def test_dark_is_chosen_by_hand_and_printing_is_light(browser: Browser, reports: dict[str, Path]) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    with opened(browser, reports["run"], color_scheme="light") as page:
        light = page.evaluate(paper)
        page.locator("#theme").click()
        dark = page.evaluate(paper)
        assert dark != light
        assert page.locator("#theme").inner_text() == "Light"
        page.emulate_media(media="print")
        assert page.evaluate(paper) == "rgb(255, 255, 255)"
        assert not page.locator("nav").is_visible()
        assert blank_pictures(page) == []
        assert len(page.pdf()) > 50_000


def test_without_javascript_the_numbers_are_there(browser: Browser, reports: dict[str, Path]) -> None:
    with opened(browser, reports["plan"], java_script_enabled=False) as page:
        assert blank_pictures(page) == []
        page.locator("summary").first.click()
        assert "GiB" in page.locator("details table").first.inner_text()


def test_hostile_names_do_nothing(browser: Browser, reports: dict[str, Path]) -> None:
    with opened(browser, reports["run"]) as page:
        assert page.locator("img").count() == 0
        assert "onerror=alert(1)" in page.title()
