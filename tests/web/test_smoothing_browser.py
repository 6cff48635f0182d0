"""Smoothing, names, notes and tags on the page in headless Chromium: by keys, while new steps come, in comparisons."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("playwright")

from playwright.sync_api import Browser, Page, expect

from foretrain.runs import state
from foretrain.runs.state import Label
from tests.kit.browser import browser, opened, pytestmark, serious, serving_here
from tests.kit.page import EVIL_NAME, write_curve

__all__ = ["browser", "pytestmark"]  # a fixture and marks that hold here, too
# Of each curve that is shown: whether it is faint, and how high its points are.
CURVES = """(() => {
  const svg = [...document.querySelectorAll('.view:not([hidden]) > svg')].find(one => one.getBoundingClientRect().width);
  const heights = path => {
    let y = 0;
    return [...path.matchAll(/([MLlhv])(-?[\\d.]+)(?: ?(-?[\\d.]+))?/g)].map(([, kind, one, other]) =>
      y = "ML".includes(kind) ? +other : y + (kind === "v" ? +one : +(other || 0)));
  };
  return [...svg.querySelectorAll('path[data-series]:not([fill])')].map(one => [one.classList.contains('faint'), heights(one.getAttribute('d'))]);
})()"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    folder = tmp_path_factory.mktemp("smoothing") / "runs"
    write_curve(folder / "slow")
    quick = write_curve(folder / "quick", seed=2, rate=2e-3)
    state.write(quick.path, Label(name=EVIL_NAME, note=f"{EVIL_NAME}\nsecond line", tags=("sweep", EVIL_NAME)))
    live = write_curve(folder / "live", seed=6, steps=120, status="running", knobs={"max_iters": 900})
    live.acquire()
    with serving_here(folder) as link:
        yield link, folder
    live.release()


def to_run(page: Page, path: str) -> None:
    page.wait_for_selector("#nav a")
    page.locator("#nav a").last.click()
    page.locator("tbody tr", has_text=path).locator("th a").first.click()
    page.wait_for_selector(".smooth input")


def turn(page: Page, key: str) -> None:
    page.locator(".smooth input").first.focus()
    page.keyboard.press(key)


def mean_of(values: list[float], weight: float) -> float:
    """The last of the smoothed values, as a weighted mean of all."""
    weights = [weight ** (len(values) - 1 - i) for i in range(len(values))]
    return sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)


def test_curve_is_smoothed_by_keys_and_stays_so_with_new_steps(browser: Browser, served: tuple[str, Path]) -> None:
    link, folder = served
    with opened(browser, link) as page:
        to_run(page, "runs/live")
        expect(page.get_by_label("smoothing").first).to_be_visible()
        before = page.evaluate(CURVES)
        assert len(before) == 2
        turn(page, "End")
        expect(page.locator(".smooth output").first).to_have_text("0.99")
        measured, smooth, evaluations = page.evaluate(CURVES)  # what comes first is behind
        assert measured == [True, before[0][1]]
        assert evaluations == before[1]
        assert smooth[1][-1] == pytest.approx(mean_of(before[0][1], 0.99), abs=0.06)
        assert serious(page) == []
        line = {"kind": "step", "step": 120, "loss": 1.5, "grad_norm": 1.0, "learning_rate": 1e-3, "step_s": 0.1,
                "tokens_per_s": 9000.0, "mfu": 0.3, "memory_bytes": 2**30, "elapsed_s": 99.0, "eta_s": 1.0}  # fmt: skip
        with (folder / "live" / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        page.wait_for_function(f"n => {CURVES}[0][1].length > n", arg=len(measured[1]))
        assert page.evaluate("document.activeElement.matches('.smooth input')")  # who turns it goes on
        turn(page, "Home")
        assert len(page.evaluate(CURVES)) == 2


def test_what_is_said_is_what_was_measured(browser: Browser, served: tuple[str, Path]) -> None:
    with opened(browser, served[0]) as page:
        to_run(page, "runs/slow")

        def said() -> str:
            page.locator(".drawing").first.focus()
            page.keyboard.press("End")
            return page.locator(".readout").first.inner_text()

        before = said()
        turn(page, "End")
        assert said() == before
        assert "training" in before


def test_a_comparison_keeps_the_smoothing_over_every_axis(browser: Browser, served: tuple[str, Path]) -> None:
    with opened(browser, served[0]) as page:
        to_run(page, "runs/slow")
        turn(page, "End")
        page.locator("#nav a").last.click()
        for name in ("slow", "live"):
            page.locator(f'.pick input[aria-label*="runs/{name}"]').check()
        page.locator("#compare-runs").click()
        page.wait_for_selector(".comparison[aria-busy=false] .smooth")
        counts: set[int] = set()
        axes = page.locator(".comparison .switch").first.locator("label")
        names = axes.all_inner_texts()
        assert {"tokens", "hours", "step"} <= {name.split(" (")[0] for name in names}
        assert any("kWh" in name or "energy" in name for name in names)
        for axis in axes.all():
            axis.click()
            counts.add(len(page.evaluate(CURVES)))
        assert counts == {6}  # two runs: training, validation, and what was measured behind the smoothed
        assert serious(page) == []


def test_what_a_user_says_of_a_run_is_text(browser: Browser, served: tuple[str, Path]) -> None:
    with opened(browser, served[0]) as page:
        to_run(page, "runs/quick")
        shown: Any = page.locator("#main")
        expect(shown.locator("h1")).to_contain_text("<img src=x")
        expect(shown.locator(".note")).to_contain_text("second line")
        expect(shown.locator(".tags bdi")).to_have_count(2)
        assert page.locator("#main img").count() == 0
        assert serious(page) == []
