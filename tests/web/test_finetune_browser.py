"""The fine-tuning part of the page in headless Chromium: typing, pasting, applying a change, by keyboard, on a phone, in
every language. Skipped where there is no browser."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("playwright")

from playwright.sync_api import Browser, Page, expect

from foretrain.base import messages
from foretrain.base.messages import say
from foretrain.config.finetune.options import FINETUNE_OPTIONS
from foretrain.config.presets import models
from tests.kit.browser import answered, browser, needs, opened, pytestmark, said_in, serving_here, unfold, usable
from tests.kit.finetune_files import AXOLOTL
from tests.kit.language import ARABIC, BRACKETS, SAME, unsaid
from tests.kit.page import write_run

__all__ = ["browser", "pytestmark"]  # a fixture and marks that hold here, too

LORA = "#/finetune?model=smollm2-135m&gpu=RTX+4090&k.method=lora&k.seq_len=512&k.batch_size=2"
ADVISED = ".advice tbody button"
OVER = "#/finetune?model=gpt2&gpu=RTX+3060+12GB&k.batch_size=64"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    runs = tmp_path_factory.mktemp("finetune") / "runs"
    write_run(runs / "baby")
    with serving_here(runs) as link:
        yield link


def at(page: Page, where: str) -> None:
    """Go to a part of the page, and wait for its answer."""
    answered(page)
    page.evaluate("where => { location.hash = where; }", where)
    page.wait_for_selector(".finetune .results[aria-busy=false] .lines dt")


def test_the_part_is_loaded_when_it_is_looked_at(browser: Browser, served: str) -> None:
    fetched: list[str] = []
    with opened(browser, "about:blank") as page:
        page.on("request", lambda request: fetched.append(request.url.rpartition("/")[2]))
        page.goto(served)
        answered(page)
        assert not {"runs.js", "compare.js"} & {*fetched}
        assert fetched.count("form") == 1
        page.get_by_role("link", name="Fine-tuning").click()
        page.wait_for_selector(".finetune .results[aria-busy=false] .lines dt")
        assert fetched.count("form") == 2
        assert page.get_by_role("link", name="Fine-tuning").get_attribute("aria-current") == "page"
        assert "Fits." in page.locator(".verdict").inner_text()
        assert page.locator(".drawing").count() == 1


def test_type_and_choose(browser: Browser, served: str) -> None:
    with opened(browser, served) as page:
        at(page, LORA)
        before = needs(page)
        page.get_by_label("batch_size sequences", exact=True).fill("16")
        expect(page).to_have_url(re.compile("k.batch_size=16"))
        answered(page)
        assert needs(page) > 1.3 * before
        page.get_by_label("batch_size, slider", exact=True).focus()
        page.keyboard.press("Home")
        answered(page)
        assert page.get_by_label("batch_size sequences", exact=True).input_value() == "1"
        assert needs(page) < before
        lora = needs(page)
        page.get_by_label("method", exact=True).select_option("full")
        answered(page)
        assert needs(page) > lora
        page.get_by_label("Model", exact=True).select_option("qwen3-0.6b")
        answered(page)
        expect(page.locator("#model-source")).to_contain_text("Qwen/Qwen3-0.6B")
        expect(page.locator(".verdict")).to_contain_text("qwen3: 28 layers")
        page.get_by_label("seq_len tokens", exact=True).fill("many")
        expect(page.locator("#k-seq_len-problem")).to_contain_text("whole number")
        page.get_by_role("button", name="Undo all changes").click()
        answered(page)
        assert page.get_by_label("seq_len tokens", exact=True).input_value() == "2048"


def test_a_link_opens_the_same_plan(browser: Browser, served: str) -> None:
    with opened(browser, served) as page:
        at(page, LORA)
        page.get_by_label("Used by other programs").fill("2.1GB")
        answered(page)
        link, strip = page.url, page.locator(".strip").inner_text()
        again = page.context.new_page()
        again.goto(link)
        again.wait_for_selector(".finetune .results[aria-busy=false] .lines dt")
        assert again.locator(".strip").inner_text() == strip
        assert again.get_by_label("Used by other programs").input_value() == "2.1GB"
        again.get_by_role("link", name="Planner").click()  # and back again, the form is as it was
        again.wait_for_selector("#download")
        again.get_by_role("link", name="Fine-tuning").click()
        again.wait_for_selector(".finetune .results[aria-busy=false] .lines dt")
        assert again.locator(".strip").inner_text() == strip


def test_a_config_json_is_pasted_and_a_trainers_file_is_dropped(browser: Browser, served: str) -> None:
    config = json.dumps({**models()["smollm2-135m"].config, "_name_or_path": "me/<img src=x onerror=alert(1)>"})
    with opened(browser, served) as page:
        at(page, LORA)
        strip = page.locator(".strip").inner_text()
        page.get_by_text("Your own model or config").click()
        page.get_by_label("Text of the config").fill(config)
        page.get_by_role("button", name="Use it").click()
        expect(page.locator("#paste-said .good")).to_contain_text("<img src=x onerror=alert(1)>")
        answered(page)
        assert page.locator("img").count() == 0
        assert page.locator(".strip").inner_text() == strip  # the same sizes, the options as they were
        expect(page.locator("#model-source")).to_have_text(say("page.finetune.own_source"))
        again = page.context.new_page()  # the link holds the sizes, too
        again.goto(page.url)
        again.wait_for_selector(".finetune .results[aria-busy=false] .lines dt")
        assert again.locator(".strip").inner_text() == strip
        data = page.evaluate_handle(
            "text => { const d = new DataTransfer(); d.items.add(new File([text], 'mine.yaml')); return d; }", AXOLOTL
        )
        page.dispatch_event(".planner", "drop", {"dataTransfer": data})
        expect(page.locator("#paste-said")).to_contain_text("mine.yaml")
        expect(page.locator("#paste-said")).to_contain_text("context_paralel_size")
        answered(page)
        assert page.get_by_label("Model", exact=True).input_value() == "llama-3.2-1b"
        assert page.get_by_label("lora_r", exact=True).input_value() == "32"
        page.get_by_label("Text of the config").fill("adapter: !!python/object/apply:os.getpid []")
        page.get_by_role("button", name="Use it").click()
        expect(page.locator("#paste-said .bad")).to_contain_text("!!python")


def test_a_click_applies_a_change(browser: Browser, served: str) -> None:
    with opened(browser, served) as page:
        at(page, OVER)
        expect(page.locator(".strip")).to_contain_text("does not fit")
        best = page.locator(".advice tbody tr").first
        expect(best).to_contain_text("fits")
        best.get_by_role("button").click()
        answered(page)
        expect(page.locator(".strip")).to_contain_text("fits")
        expect(page.locator(".advice [role=status]")).to_contain_text("Applied")
        assert page.locator(".advice table").count() == 0
        assert "k.batch_size=64" not in page.url or "k.grad" in page.url


def test_the_trainers_loop_is_traced_on_a_click(browser: Browser, served: str) -> None:
    with opened(browser, served) as page:
        at(page, LORA)
        assert "estimated" in page.locator(".figures").inner_text()
        page.get_by_role("button", name="Trace").click()
        expect(page.get_by_text("These figures are traced.")).to_be_visible(timeout=100_000)
        assert "traced" in page.locator(".figures").inner_text()
        page.get_by_label("batch_size sequences", exact=True).fill("4")
        expect(page).to_have_url(re.compile("k.batch_size=4"))
        answered(page)
        assert "traced" not in page.locator(".figures").inner_text()


def test_by_keyboard_alone(browser: Browser, served: str) -> None:
    with opened(browser, served) as page:
        at(page, OVER)
        page.wait_for_selector(ADVISED)
        seen = []
        for _ in range(400):
            page.keyboard.press("Tab")
            found, ring = page.evaluate(
                "(() => { const e = document.activeElement; return [e.getAttribute('aria-label') || e.id || e.textContent, getComputedStyle(e).outlineStyle]; })()"
            )
            assert ring != "none", found
            seen.append(found)
            if found.startswith("Apply: "):
                break
        assert {"model", "gpu", "k-method", "seq_len, slider", "share-command"} <= {*seen}
        page.keyboard.press("Enter")
        answered(page)
        expect(page.locator(".strip")).to_contain_text("fits")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_accessible_and_nothing_sticks_out_at_320_pixels(browser: Browser, served: str, scheme: Any) -> None:
    with opened(browser, served, viewport={"width": 320, "height": 640}, color_scheme=scheme) as page:
        at(page, OVER)
        page.wait_for_selector(ADVISED)
        usable(page, 320)


def test_nothing_is_said_but_by_id(browser: Browser, served: str) -> None:
    sources = [model.repository for model in models().values()]
    options = [f"{o.name} {o.default} {o.choices}" for o in FINETUNE_OPTIONS.values()]
    same = {
        word
        for text in [*options, *models(), *sources, "GPT qlora foretrain dtype"]
        for word in re.findall(r"[A-Za-z]+", text)
    }
    with opened(browser, served, locale=BRACKETS) as page:
        at(page, OVER)
        page.wait_for_selector(ADVISED)
        unfold(page)
        page.locator("#compare").click()
        expect(page.locator(".cards table").first).to_be_visible()
        page.evaluate("document.querySelectorAll('select, .fields bdi, .choices').forEach(e => e.remove())")
        words = {*re.findall(r"[A-Za-z]{3,}", unsaid(said_in(page, "main")))} - SAME - same
        assert not words, words


@pytest.mark.parametrize("id", [*messages.languages(), BRACKETS, ARABIC])
def test_every_language(browser: Browser, served: str, id: str) -> None:
    with opened(browser, served, locale=id, viewport={"width": 390, "height": 800}) as page:
        at(page, OVER)
        assert page.locator("html").get_attribute("lang") == id
        page.wait_for_selector(ADVISED)
        strip, form = page.locator(".strip").bounding_box(), page.locator(".form").bounding_box()
        assert strip["y"] < form["y"], "on a phone the answer comes before the form"
        usable(page, 390)
