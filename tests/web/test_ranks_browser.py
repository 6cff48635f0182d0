"""Several cards on the page, in Chromium: the number of cards is typed, kept in the link, and advice is applied."""

import re
from collections.abc import Iterator

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("playwright")

from playwright.sync_api import Browser, expect

from tests.kit.browser import answered, browser, opened, pytestmark, usable
from tests.kit.command import free_port
from tests.kit.page import serving

__all__ = ["browser", "pytestmark"]  # a fixture and marks that hold here, too


@pytest.fixture(scope="module")
def link(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("page"), "--port", str(free_port())) as (said, _):
        yield said["url"]


def test_two_cards_are_typed_shared_and_given_up_again(browser: Browser, link: str) -> None:
    with opened(browser, link) as page:
        answered(page)
        assert "count=" not in page.url
        strip = page.locator(".strip").inner_text()
        page.get_by_label("Number of cards").fill("2")
        expect(page.get_by_role("heading", name="Strategies side by side")).to_be_visible()
        answered(page)
        expect(page).to_have_url(re.compile("count=2"))
        expect(page.locator(".results table").first).to_contain_text("ZeRO-1")
        expect(page.locator(".lines")).to_contain_text("The second card pays")
        assert page.locator(".picture:visible").count() == 0
        again = page.context.new_page()  # the link alone says it all
        again.goto(page.url)
        expect(again.locator(".lines")).to_contain_text("The second card pays")
        assert again.get_by_label("Number of cards").input_value() == "2"
        again.close()
        page.get_by_label("Number of cards").fill("two")
        expect(page.locator(".errors")).to_contain_text("must be a count")
        page.get_by_label("Number of cards").fill("1")
        expect(page.locator(".picture:visible").first).to_be_visible()
        answered(page)
        assert page.locator(".strip").inner_text() == strip
        expect(page.get_by_role("heading", name="Strategies side by side")).to_have_count(0)


def test_advice_for_two_cards_fills_the_form(browser: Browser, link: str) -> None:
    with opened(browser, f"{link.partition('#')[0]}#token={link.partition('token=')[2]}") as page:
        answered(page)
        page.get_by_label("Number of cards").fill("2")
        expect(page.locator(".lines")).to_contain_text("pays")
        page.get_by_text("What to change").click()
        page.get_by_label("Goal").select_option("speed")
        page.get_by_role("button", name="Find changes").click()
        page.get_by_role("button", name=re.compile("^Apply: 8 x")).click()
        expect(page.get_by_label("Number of cards")).to_have_value("8")
        answered(page)
        usable(page, 1280)
