"""The pictures of the page and of the report in docs/pictures/.

    python docs/pictures.py               all of them; needs a Chromium, playwright and Pillow
    python docs/pictures.py page-planner  those whose name begins so
    python docs/pictures.py --in work  with the runs that are in this folder, or made there

What is shown is real: two runs are trained on this CPU first, in a temporary folder, and `foretrain serve` is started on them.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

ROOT = Path(__file__).parent.parent
TO = ROOT / "docs" / "pictures"
RUN = (
    "train", "baby", "--n_layer=2", "--n_embd=64", "--n_head=2", "--block_size=64", "--batch_size=8",
    "--gradient_accumulation_steps=1", "--max_iters=300", "--lr_decay_iters=300", "--warmup_iters=20", "--eval_interval=50",
    "--eval_iters=5", "--quiet",
)  # fmt: skip
RUNS = {
    "out-baby": ("--name=narrow baby", "--tag=width", "--note=Does a wider model learn more in the same steps?"),
    "out-wide": ("--n_embd=96", "--n_head=3", "--learning_rate=3e-3", "--tag=width"),
}
MOST_BYTES = 150_000
COLOURS = 256
PATIENCE_MS = 600_000  # on a busy machine
CASES = ROOT / "examples" / "real-cases"
# Reports of this repository's own cases: name -> (words of the report, dark, width, heading at the top, height)
SHOTS = {
    "report-plan": ((str(CASES / "c.py"),), False, 1000, "", 1080),
    "report-plan-dark": ((str(CASES / "c.py"),), True, 1000, "One step", 1100),
}


def foretrain(folder: Path, *words: str) -> subprocess.Popen[str]:
    code = "from foretrain.cli import main; main()"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", code, *words], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
    )


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve the runs of a folder; yield the link."""
    process = foretrain(folder, "serve", "--json")
    assert process.stdout is not None
    try:
        yield json.loads(process.stdout.readline())["url"]
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def opened(browser: Browser, link: str, language: str, dark: bool, width: int, height: int) -> Iterator[Page]:
    """Open a tab at the link, in a language, and wait for the answer."""
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light", locale=language
    )
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    page.goto(link)
    yield page
    context.close()


def keep(page: Page, name: str, *, full: bool = False) -> None:
    """Store a picture of the tab with few colours."""
    page.wait_for_timeout(400)
    path = TO / f"{name}.png"
    page.screenshot(path=path, full_page=full)
    lighten(path)


def lighten(path: Path) -> None:
    """Use a palette close to every colour: the usual one turns pink to grey."""
    with Image.open(path) as picture:
        few = picture.convert("RGB").quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(path, optimize=True)
    size = path.stat().st_size
    print(f"{path.name}: {size:,} bytes")
    assert size < MOST_BYTES, path


def planner(page: Page) -> None:
    page.wait_for_selector(".results[aria-busy=false]")
    page.locator("#others").fill("2.1GB")
    page.wait_for_timeout(300)
    page.wait_for_selector(".results[aria-busy=false]")
    page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")  # from the top, on a telephone, too


def runs(page: Page) -> None:
    page.wait_for_selector("#nav a")
    page.locator("#nav a").last.click()
    page.wait_for_selector("tbody th a")


def run(page: Page) -> None:
    """Show a run, its label, and its curves, the loss smoothed."""
    runs(page)
    page.locator("th", has_text="out-baby").locator("a").first.click()
    page.wait_for_selector(".picture .drawing")
    page.locator(".smooth input").first.evaluate("one => { one.value = 0.6; one.dispatchEvent(new Event('input')); }")


def compare(page: Page) -> None:
    runs(page)
    for name in RUNS:
        page.locator(f'.pick input[aria-label*="{name}"]').check()
    page.locator("#compare-runs").click()
    page.wait_for_selector(".comparison[aria-busy=false] .drawing")


# Pictures of the page: name -> (what it shows, language, width, height)
VIEWS: dict[str, tuple[Callable[[Page], None], str, int, int]] = {
    "page-planner": (planner, "en", 1280, 1000), "page-planner-ar": (planner, "ar", 1280, 1000),
    "page-run": (run, "en", 1280, 1000), "page-compare": (compare, "en", 1280, 1300),
}  # fmt: skip


def reports_of_cases(browser: Browser, work: Path, wanted: list[str]) -> None:
    for name, (words, dark, width, heading, height) in SHOTS.items():
        if wanted and not any(name.startswith(word) for word in wanted):
            continue
        out, path = work / f"{name}.html", TO / f"{name}.png"
        assert foretrain(work, "report", *words, "--gpu", "RTX 4070", "--out", str(out), "--quiet").wait() == 0
        with opened(browser, out.as_uri(), "en", dark, width, 900) as page:
            box = page.locator("h2", has_text=heading).bounding_box() if heading else None
            clip = {"x": 0, "y": box["y"] - 8 if box else 0, "width": width, "height": height}
            page.screenshot(path=path, full_page=True, clip=clip)  # type: ignore[arg-type]
            lighten(path)


def main() -> None:
    wanted, kept = sys.argv[1:], None
    if wanted[:1] == ["--in"]:
        kept, wanted = Path(wanted[1]), wanted[2:]
        kept.mkdir(exist_ok=True)
    chromium = next(
        found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))
    )
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        work = kept or Path(folder)
        for name, options in RUNS.items():
            made = (work / name / "run.json").exists()
            assert made or foretrain(work, *RUN, f"--out_dir={name}", *options).wait() == 0
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        with served(work) as link:
            for name, (show, language, width, height) in VIEWS.items():
                if not wanted or any(name.startswith(word) for word in wanted):
                    with opened(browser, link, language, False, width, height) as page:
                        show(page)
                        keep(page, name)
        reports_of_cases(browser, work, wanted)
        browser.close()


if __name__ == "__main__":
    main()
