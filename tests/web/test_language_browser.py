"""The page in every language, in headless Chromium: the switch, the mirrored layout by geometry, keyboard, 320 pixels,
axe. Skipped where there is no browser."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("playwright")

from playwright.sync_api import Browser, Locator, Page, expect

from foretrain.base import messages
from tests.kit.browser import (
    SHOWN_DRAWING,
    answered,
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
from tests.kit.page import write_run

__all__ = ["browser", "pytestmark"]  # a fixture and marks that hold here, too

EVERY = [*messages.languages(), BRACKETS, ARABIC]
FROM_THE_RIGHT = [
    id for id in EVERY if messages.languages().get(id) is None or messages.languages()[id].direction == "rtl"
]
FROM_THE_RIGHT.remove(BRACKETS)


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    runs = tmp_path_factory.mktemp("languages") / "runs"
    write_run(runs / "baby")
    with serving_here(runs) as link:
        yield link


def choose(page: Page, id: str) -> None:
    """By the switch, as a user does it."""
    page.locator("#language").focus()
    page.locator("#language").select_option(id)
    expect(page.locator("html")).to_have_attribute("lang", id)
    answered(page)


def box(of: Locator) -> dict[str, float]:
    found = of.bounding_box()
    return {"left": found["x"], "right": found["x"] + found["width"], **found}


def test_language_switch_changes_all_and_is_remembered(browser: Browser, speaking: str) -> None:
    with opened(browser, speaking) as page:
        answered(page)
        assert page.locator("html").get_attribute("lang") == "en"
        page.get_by_label("batch_size sequences", exact=True).fill("16")
        answered(page)
        state = page.url
        page.evaluate(
            "window.told = []; new MutationObserver(() => told.push(document.getElementById('say').textContent))"
            ".observe(document.getElementById('say'), { childList: true })"
        )
        choose(page, BRACKETS)
        assert page.url == state  # what stood in the form still does, and the link says nothing of the language
        assert page.locator("#k-batch_size").input_value() == "16"
        expect(page.locator(".form h2").first).to_have_text("⟦Start from⟧")
        expect(page.locator(".verdict h2")).to_have_text("⟦Does it fit?⟧")
        expect(page.locator('label[for="language"]')).to_have_text("⟦Language⟧")
        assert page.evaluate("document.activeElement.id") == "language"  # the switch keeps the focus
        assert "⟦The page now speaks ⟧[English]⟦.⟧" in page.evaluate("told")
        again = page.context.new_page()
        again.goto(state)
        answered(again)
        assert again.locator("html").get_attribute("lang") == BRACKETS
        choose(again, "en")
        expect(again.locator(".form h2").first).to_have_text("Start from")


@pytest.mark.parametrize(
    ("locale", "id"), [("dv-MV", ARABIC), ("fr-FR", "en"), *((f"{id}-{id.upper()}", id) for id in messages.languages())]
)
def test_at_first_the_page_speaks_as_the_browser_does(browser: Browser, speaking: str, locale: str, id: str) -> None:
    with opened(browser, speaking, locale=locale) as page:
        answered(page)
        assert page.locator("html").get_attribute("lang") == id
        assert page.locator("#language").input_value() == id


@pytest.mark.parametrize("id", FROM_THE_RIGHT)
def test_from_the_right_everything_is_mirrored(browser: Browser, speaking: str, id: str) -> None:
    with opened(browser, speaking, locale=id) as page:
        answered(page)
        assert page.evaluate("getComputedStyle(document.body).direction") == "rtl"
        assert box(page.locator(".form"))["left"] > box(page.locator(".results"))["right"]
        assert box(page.locator("a.name"))["left"] > box(page.locator("#nav"))["left"]
        assert box(page.locator("#language"))["right"] < 200
        label, value = page.locator('label[for="others"]'), page.locator("#others")
        assert box(label)["right"] > box(value)["right"]
        slider, number = page.get_by_label(re.compile("n_layer")).first, page.locator("#k-n_layer")
        assert box(slider)["left"] > box(number)["left"]
        track, fill = page.locator(".track").first, page.locator(".fill").first
        assert abs(box(track)["right"] - box(fill)["right"]) < 1  # the bar grows from the right
        # A slider's low end is on its right.
        wide = box(page.locator(".of-int input[type=range]").first)
        page.mouse.click(wide["right"] - 3, wide["y"] + wide["height"] / 2)
        answered(page)
        assert page.locator("#k-n_layer").input_value() == "1"
        picture = page.evaluate(
            f"(() => {{ const [svg] = {SHOWN_DRAWING}[0], bar = svg.querySelector('rect[data-series]').getBoundingClientRect();"
            " const words = svg.querySelector('text:not(g > text)').getBoundingClientRect(); return [words.left > bar.right,"
            " ...['.legend', '.tip'].map(name => getComputedStyle(document.querySelector(name)).direction)]; })()"
        )
        assert picture == [True, "rtl", "rtl"]


@pytest.mark.parametrize("id", FROM_THE_RIGHT)
def test_numbers_stand_before_their_units_as_they_are_read(browser: Browser, speaking: str, id: str) -> None:
    """By geometry: in "6.63 GiB" the digits are left of the unit, in every text of the page."""
    look = """() => { const found = [], walker = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
      while (walker.nextNode()) { const node = walker.currentNode, range = document.createRange();
        if (!node.parentElement.offsetParent || node.parentElement.closest("select, option")) continue;
        for (const m of node.data.matchAll(/([0-9][0-9.,]*) (GiB|MiB|kWh|ms|EUR|tokens\\/s|TFLOP\\/s)/g)) {
          const place = (a, b) => { range.setStart(node, a); range.setEnd(node, b); return range.getBoundingClientRect(); };
          const number = place(m.index, m.index + m[1].length), unit = place(m.index + m[1].length + 1, m.index + m[0].length);
          if (Math.abs(number.top - unit.top) < 3) found.push([m[0], number.left < unit.left]); } }
      return found; }"""
    with opened(browser, speaking, locale=id) as page:
        answered(page)
        unfold(page)
        found = page.evaluate(look)
        assert len(found) > 60
        assert not [text for text, right in found if not right]


def test_nothing_on_the_page_is_said_but_by_id(browser: Browser, speaking: str) -> None:
    same = re.compile(
        r"^(GiB|MiB|KiB|TFLOP|kWh|EUR|RTX|GTX|SUPER|SXM|PCIe|Ada|foretrain|nanoGPT|gpt|baby|Apple|Tesla|cuBLAS|toml|tokens|Radeon"
        r"|Titan|TITAN|Laptop|CPU|AMD|EPYC|Intel|Xeon|cores|bfloat|float|English|dtype|compile|optimizer|currency|Max|Pro|Ultra)$"
    )
    with opened(browser, speaking, locale=BRACKETS) as page:
        answered(page)
        unfold(page)
        page.locator("#compare").click()
        expect(page.locator(".cards table").first).to_be_visible()
        page.locator("#advise").click()
        expect(page.locator(".advice table")).to_be_visible()
        page.evaluate("document.querySelectorAll('select, .fields bdi, .choices').forEach(e => e.remove())")
        words = {word for word in re.findall(r"[A-Za-z]{3,}", unsaid(said_in(page, "body"))) if not same.match(word)}
        assert not words - SAME, words - SAME


@pytest.mark.parametrize("id", EVERY)
@pytest.mark.parametrize("where", ["#/plan", "#/runs", "run"])
def test_accessible_and_nothing_sticks_out_in_any_language(
    browser: Browser, speaking: str, id: str, where: str
) -> None:
    scheme: Any = "dark" if id in ("en", ARABIC) else "light"
    with opened(browser, speaking, viewport={"width": 320, "height": 640}, locale=id, color_scheme=scheme) as page:
        answered(page)
        if where != "#/plan":
            page.locator("#nav a").last.click()
            page.wait_for_selector("tbody th a")
            expect(page.locator("#compare-runs")).to_be_hidden()  # one run is nothing to compare
        if where == "run":
            page.locator("tbody th a").first.click()
            page.wait_for_selector(".picture")
        usable(page, 320)
        clipped = page.evaluate(
            "[...document.querySelectorAll('button, select, input[type=text], summary, label, a')].filter(e => e.offsetParent "
            "&& e.scrollHeight > e.clientHeight + 2 && getComputedStyle(e).display !== 'inline').map(e => e.outerHTML.slice(0, 90))"
        )
        assert not clipped  # no glyph is cut off above or below


@pytest.mark.parametrize("id", FROM_THE_RIGHT)
def test_by_keyboard_in_a_language_from_the_right(browser: Browser, speaking: str, id: str) -> None:
    with opened(browser, speaking, locale=id) as page:
        answered(page)
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.id") == "skip"
        tab_to(page, "#language")
        page.keyboard.type("Eng")  # what a closed select understands
        page.keyboard.press("Enter")
        expect(page.locator("html")).to_have_attribute("lang", "en")
        assert page.evaluate("getComputedStyle(document.body).direction") == "ltr"
