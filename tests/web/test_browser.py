"""The page in headless Chromium: what people do with it, by mouse and by keyboard, wide and narrow, without an error
on the console. Skipped where there is no browser."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("playwright")

from playwright.sync_api import Browser, expect

from foretrain.config.resolve import resolve
from foretrain.runs.folder import RunDirectory
from tests.kit.browser import answered, browser, needs, opened, pytestmark, tab, tab_to
from tests.kit.command import free_port
from tests.kit.page import EVIL_NAME, NANOGPT, serving, write_run

__all__ = ["browser", "pytestmark"]  # a fixture and marks that hold here, too


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    folder = tmp_path_factory.mktemp("page")
    write_run(folder / "runs" / "evil", EVIL_NAME)
    live = write_run(folder / "runs" / "live", "live", status="running")
    live.acquire()
    try:
        with serving(folder, "--port", str(free_port())) as (said, _):
            yield said["url"], folder / "runs"
    finally:
        live.release()


def test_opens_with_an_answer_and_hides_the_token(browser: Browser, served: tuple[str, Path]) -> None:
    with opened(browser, served[0]) as page:
        answered(page)
        assert "token" not in page.url
        assert "Fits." in page.locator(".verdict").inner_text()
        assert page.locator(".figures > div").count() >= 7
        assert page.evaluate("document.cookie") == ""
        assert page.locator(".drawing").first.bounding_box()["width"] > 300  # type: ignore[index]


def test_without_the_token_there_is_a_sentence(browser: Browser, served: tuple[str, Path]) -> None:
    page = tab(browser)
    page.goto(served[0].partition("#")[0])
    expect(page.get_by_role("alert")).to_contain_text("foretrain serve")
    page.context.close()


def test_type_and_drag(browser: Browser, served: tuple[str, Path]) -> None:
    with opened(browser, served[0]) as page:
        answered(page)
        before = needs(page)
        page.get_by_label("batch_size sequences", exact=True).fill("16")
        expect(page).to_have_url(re.compile("k.batch_size=16"))
        answered(page)
        assert needs(page) > 1.3 * before
        slider = page.get_by_label("n_layer, slider")
        box = slider.bounding_box()
        page.mouse.move(box["x"] + box["width"] * 0.19, box["y"] + box["height"] / 2)
        page.mouse.down()
        for share in range(20, 90, 5):
            page.mouse.move(box["x"] + box["width"] * share / 100, box["y"] + box["height"] / 2)
        page.mouse.up()
        answered(page)
        layers = int(page.get_by_label("n_layer blocks", exact=True).input_value())
        assert layers > 48
        expect(page.locator(".strip")).to_contain_text("does not fit")
        page.get_by_label("n_head", exact=True).fill("7")
        page.wait_for_selector(".errors .bad")
        assert "n_embd = 768" in page.locator(".errors").inner_text()
        page.get_by_role("button", name="Undo all changes").click()
        answered(page)
        assert needs(page) == before


def test_paste_share_and_download(browser: Browser, served: tuple[str, Path], tmp_path: Path) -> None:
    with opened(browser, served[0]) as page:
        answered(page)
        page.get_by_text("Your own config").click()
        page.get_by_label("Text of the config").fill(NANOGPT)
        page.get_by_role("button", name="Use it").click()
        expect(page.locator("#paste-said")).to_contain_text("8 settings")
        answered(page)
        assert page.get_by_label("n_embd", exact=True).input_value() == "384"
        page.get_by_label("Used by other programs").fill("2.1GB")
        page.get_by_label("GPU or CPU").select_option("RTX 3090")
        answered(page)
        link, strip = page.url, page.locator(".strip").inner_text()
        with page.expect_download() as waiting:
            page.get_by_role("button", name="Download as TOML").click()
        waiting.value.save_as(tmp_path / "downloaded.toml")
        config = resolve([str(tmp_path / "downloaded.toml")]).config
        assert (config.n_embd, config.dropout, config.out_dir) == (384, 0.2, "out-mine")
        assert tomllib.loads((tmp_path / "downloaded.toml").read_text())["model"]["n_layer"] == 6
        again = page.context.new_page()  # the link alone says it all
        again.goto(link)
        again.wait_for_selector(".results[aria-busy=false]")
        assert again.locator(".strip").inner_text() == strip
        assert again.get_by_label("Used by other programs").input_value() == "2.1GB"
        page.get_by_label("Text of the config").fill("import os\nn_layer = os.getpid()")
        page.get_by_role("button", name="Use it").click()
        expect(page.locator("#paste-said .bad")).to_contain_text(":2")


def test_a_config_can_be_dropped(browser: Browser, served: tuple[str, Path]) -> None:
    with opened(browser, served[0]) as page:
        answered(page)
        data = page.evaluate_handle(
            "text => { const d = new DataTransfer(); d.items.add(new File([text], 'mine.py')); return d; }", NANOGPT
        )
        page.dispatch_event(".planner", "drop", {"dataTransfer": data})
        expect(page.locator("#paste-said")).to_contain_text("mine")
        answered(page)
        assert page.get_by_label("block_size tokens", exact=True).input_value() == "256"


def test_on_a_phone_the_answer_comes_before_the_form(browser: Browser, served: tuple[str, Path]) -> None:
    link, _ = served
    rights = ["clipboard-read", "clipboard-write"]
    with opened(browser, link, viewport={"width": 390, "height": 800}, permissions=rights) as page:
        answered(page)
        top = {name: page.locator(name).first.bounding_box() for name in (".strip", ".verdict", ".figures", ".form")}
        tops = [box["y"] for box in top.values() if box]
        assert len(tops) == 4
        assert tops == sorted(tops)
        page.get_by_role("button", name="Copy command line").click()
        expect(page.locator(".results .buttons").first).to_contain_text("Command line copied")
        assert page.evaluate("navigator.clipboard.readText()") == "foretrain plan gpt2-124m --gpu 'RTX 4070'"


def test_a_running_run_is_followed(browser: Browser, served: tuple[str, Path]) -> None:
    link, folder = served
    with opened(browser, link) as page:
        answered(page)
        page.get_by_role("link", name="Runs").click()
        expect(page.locator("tbody").first).to_contain_text("running")
        assert page.locator("img").count() == 0  # the evil name is text
        expect(page.locator("tbody").first).to_contain_text("<img src=x onerror=alert(1)>")
        page.get_by_role("link", name="live", exact=True).first.click()
        expect(page.get_by_role("heading", name="live")).to_be_visible()
        RunDirectory(folder / "live").append(
            "metrics", {"kind": "step", "step": 11, "loss": 1.2345, "step_s": 0.25, "tokens_per_s": 8.0}
        )
        expect(page.locator(".figures").first).to_contain_text("1.2345")
        RunDirectory(folder / "live").event("saved", name="step-11")
        expect(page.locator(".events")).to_contain_text("saved step-11")
        page.get_by_role("link", name="Runs", exact=True).click()
        page.get_by_role("link", name="<img src=x onerror=alert(1)>").first.click()
        expect(page.locator(".figures").first).to_contain_text("100 tokens/s")  # its record's; its last line says 9


def test_by_keyboard_alone(browser: Browser, served: tuple[str, Path]) -> None:
    with opened(browser, served[0]) as page:
        answered(page)
        before = needs(page)

        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.id") == "skip"
        tab_to(page, "[aria-label='n_layer, slider']")
        for _ in range(6):
            page.keyboard.press("ArrowRight")
        answered(page)
        assert page.evaluate("document.activeElement.getAttribute('aria-valuetext')") == "18 blocks"
        assert needs(page) > before
        tab_to(page, "#download")
        with page.expect_download():
            page.keyboard.press("Enter")
