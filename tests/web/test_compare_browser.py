"""Comparisons on the page in headless Chromium: by mouse, by keys alone, by link, in every language, dark and narrow."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("playwright")

from playwright.sync_api import Browser, Locator, Page, expect

from foretrain.base import messages
from tests.kit.browser import (
    SHOWN_DRAWING,
    blank_pictures,
    browser,
    opened,
    pytestmark,
    said_in,
    serving_here,
    tab_to,
    unfold,
    usable,
)
from tests.kit.language import ARABIC, BRACKETS, SAME, unsaid
from tests.kit.page import EVIL_NAME, write_curve

__all__ = ["browser", "pytestmark"]  # a fixture and marks that hold here, too
EVERY = [*messages.languages(), BRACKETS, ARABIC]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """(link, folder of the runs): a server in this process, which knows the languages of the tests, too."""
    folder = tmp_path_factory.mktemp("compare") / "runs"
    write_curve(folder / "slow")
    write_curve(folder / "quick", seed=2, rate=2e-3, knobs={"weight_decay": 0.3})
    write_curve(folder / "third", seed=3, rate=3e-3)
    write_curve(folder / "fourth", seed=4, rate=4e-3)
    write_curve(folder / "evil", seed=5, rate=4e-3, name=EVIL_NAME)
    live = write_curve(folder / "live", seed=6, steps=120, status="running", knobs={"max_iters": 900})
    live.acquire()
    with serving_here(folder) as link:
        yield link, folder
    live.release()


def to_runs(page: Page) -> None:
    page.wait_for_selector("#nav a")
    page.locator("#nav a").last.click()
    page.wait_for_selector("tbody th a")


def box(page: Page, name: str) -> Locator:
    return page.locator(f'.pick input[aria-label*="runs/{name}"]')


def tick(page: Page, *names: str) -> None:
    for name in names:
        box(page, name).check()


def compared(page: Page) -> None:
    page.wait_for_selector(".comparison[aria-busy=false]")


def beside(page: Page, *names: str) -> None:
    to_runs(page)
    tick(page, *names)
    page.locator("#compare-runs").click()
    compared(page)


def test_runs_are_ticked_and_compared(browser: Browser, served: tuple[str, Path]) -> None:
    with opened(browser, served[0]) as page:
        to_runs(page)
        said = page.get_by_role("status").filter(has_text="Tick two")
        expect(said).to_be_visible()
        page.locator("#compare-runs").click()
        expect(page.get_by_text("A comparison needs two to four runs")).to_be_visible()
        tick(page, "quick", "slow", "third", "fourth")
        expect(page.get_by_text("Ticked: 4, at most 4. The baseline is quick.")).to_be_visible()
        fifth = box(page, "live")
        fifth.click()
        assert not fifth.is_checked()
        expect(page.get_by_text("A comparison takes at most 4 runs.")).to_be_visible()
        for name in ("third", "fourth"):
            box(page, name).uncheck()
        page.locator("#compare-runs").click()
        compared(page)
        expect(page.get_by_role("heading", level=1)).to_have_text("Comparison: quick, slow")
        for title in ("Conclusions", "Settings that differ", "Learning", "Experiments that would tell"):
            expect(page.get_by_role("heading", name=title, exact=True)).to_be_visible()
        expect(page.locator(".comparison")).to_contain_text("weight_decay")
        assert blank_pictures(page) == []
        assert page.locator(".drawing").count() == page.locator(".behind table").count() >= 3
        page.get_by_role("link", name="Make baseline: slow").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("Comparison: slow, quick")
        page.go_back()
        expect(page.get_by_role("heading", level=1)).to_have_text("Comparison: quick, slow")
        page.get_by_role("link", name="All runs").click()  # what was ticked still is
        expect(box(page, "quick")).to_be_checked()


def test_the_link_holds_the_comparison(browser: Browser, served: tuple[str, Path]) -> None:
    with opened(browser, served[0]) as page:
        beside(page, "slow", "evil", "quick")
        link, shown = page.url, page.locator("#main").inner_text()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/#/compare\?run=[0-9a-f]{16}(&run=[0-9a-f]{16}){2}", link)
        assert page.locator("img").count() == 0
        again = page.context.new_page()
        again.goto(link)
        compared(again)
        assert again.locator("#main").inner_text() == shown
        page.evaluate("navigator.clipboard.writeText = async text => { window.kept = text; }")
        page.get_by_role("button", name="Copy link").click()
        expect(page.get_by_text("Link copied; it includes the runs")).to_be_visible()
        assert page.evaluate("kept") == link
        for wrong in (link.partition("&")[0], f"{link}{'&run=0' * 4}"):
            again.goto(wrong)
            expect(again.get_by_role("alert")).to_contain_text("two to four runs")
        again.goto(re.sub(r"run=\w+&", "run=gone&", link, count=1))
        expect(again.locator(".compared .bad")).to_have_text(re.compile("no longer in the folders"))
        expect(again.get_by_role("heading", level=1)).to_have_text("Comparison: evil, quick")


def test_a_run_that_goes_on_is_compared_again(browser: Browser, served: tuple[str, Path]) -> None:
    link, folder = served
    with opened(browser, link) as page:
        beside(page, "slow", "live")
        expect(page.locator(".compared")).to_contain_text("running")
        expect(page.locator(".compared .warn")).to_have_text(
            "This run has not ended; the comparison uses what it has so far."
        )
        row = page.locator("tr", has=page.get_by_role("cell", name="last step", exact=True)).last
        expect(row).to_contain_text("119")
        line = (folder / "live" / "metrics.jsonl").read_text().splitlines()[-1]
        with (folder / "live" / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({**json.loads(line), "step": 130}) + "\n")
        page.get_by_role("button", name="Compare again").click()
        expect(row).to_contain_text("130")


def test_by_keys_alone(browser: Browser, served: tuple[str, Path]) -> None:
    with opened(browser, served[0]) as page:
        to_runs(page)
        page.locator("#main").focus()

        for name in ("quick", "slow"):
            page.locator("#main").focus()
            tab_to(page, f"input[aria-label*='runs/{name}']")
            page.keyboard.press("Space")
        page.locator("#main").focus()
        tab_to(page, "#compare-runs")
        page.keyboard.press("Enter")
        compared(page)
        assert page.evaluate("document.activeElement.id") == "main"  # where the new part begins
        tab_to(page, ".switch input")
        page.keyboard.press("ArrowRight")
        expect(page.locator(".comparison .view:visible").first).to_contain_text("hours")
        tab_to(page, ".drawing")
        page.keyboard.press("End")
        expect(page.locator(".readout").first).to_contain_text(re.compile("(quick|slow), (training|validation)"))
        page.keyboard.press("Escape")
        expect(page.locator(".readout").first).to_be_empty()
        tab_to(page, ".behind summary")
        page.keyboard.press("Enter")
        expect(page.locator(".behind table").first).to_contain_text("validation")


def test_colours_and_width_are_followed(browser: Browser, served: tuple[str, Path]) -> None:
    ink = "getComputedStyle(document.querySelector('.comparison path[data-series]')).stroke"
    with opened(browser, served[0], color_scheme="light") as page:
        beside(page, "slow", "quick")
        light = page.evaluate(ink)
        page.emulate_media(color_scheme="dark")
        page.wait_for_function(f"before => {ink} !== before", arg=light)
        assert blank_pictures(page) == []
        page.set_viewport_size({"width": 400, "height": 800})
        page.wait_for_function("[...document.querySelectorAll('.comparison .drawing')].every(c => c.clientWidth < 400)")
        assert page.evaluate("document.documentElement.scrollWidth") <= 400


def test_from_the_right_the_comparison_is_mirrored(browser: Browser, served: tuple[str, Path]) -> None:
    with opened(browser, served[0], locale="ar") as page:
        beside(page, "slow", "quick")
        title, back = page.locator("h1").bounding_box(), page.locator("#again").bounding_box()
        assert title is not None
        assert back["x"] > 640  # buttons begin on the right
        left = f"{SHOWN_DRAWING}.map(([svg]) => [!!svg.querySelector('rect[data-series]'), svg.dataset.plot.split(' ')[0] < 30])"
        assert {tuple(one) for one in page.evaluate(left)} == {(True, True), (False, False)}  # bars from the right
        assert page.locator(".legend").first.evaluate("one => getComputedStyle(one).direction") == "rtl"
        page.locator("#language").select_option("en")  # and back, where it stands
        compared(page)
        expect(page.get_by_role("heading", level=1)).to_have_text("Comparison: slow, quick")
        assert page.locator(".comparison svg[direction=ltr]").count() >= 3


def test_nothing_is_said_but_by_id(browser: Browser, served: tuple[str, Path]) -> None:
    names = r"foretrain|nanoGPT|slow|quick|third|fourth|live|evil|img|src|onerror|alert|runs|report|compare|English|token|tokens|RTX"
    same = re.compile(rf"^({names}|FLOP|TFLOP|kWh|EUR|MiB|GiB|learning_rate|weight_decay|max_iters|optimizer)$")
    with opened(browser, served[0], locale=BRACKETS) as page:
        to_runs(page)
        listed = page.locator("#main").inner_text()
        beside(page, "slow", "quick")
        unfold(page)
        shown = [text.replace(str(served[1].parent), "") for text in (listed, said_in(page, "#main"))]
        left = "\n".join(unsaid(text) for text in shown)
        words = {word for word in re.findall(r"[A-Za-z_]{3,}", left) if not same.match(word)}
        assert not words - SAME, " ".join(sorted(words - SAME))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("id", EVERY)
def test_accessible_and_nothing_sticks_out_at_320_pixels(
    browser: Browser, served: tuple[str, Path], id: str, scheme: Any
) -> None:
    with opened(browser, served[0], viewport={"width": 320, "height": 640}, locale=id, color_scheme=scheme) as page:
        for where in ("list", "comparison"):
            if where == "list":
                to_runs(page)
                tick(page, "slow", "quick", "live")
            else:
                page.locator("#compare-runs").click()
                compared(page)
            usable(page, 320)
