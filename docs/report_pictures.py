"""The pictures of docs/report.md: reports of this repository's own cases, photographed by headless Chromium.

    python docs/report_pictures.py [RUN]      (RUN: a run directory, for the picture of a run)

Needs Chromium, playwright and Pillow. Colours are reduced to a palette, so that each picture stays below 150 KB.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from pictures import PATIENCE_MS, lighten
from playwright.sync_api import sync_playwright

REPO = Path(__file__).resolve().parent.parent
CASES, PICTURES = REPO / "examples" / "real-cases", REPO / "docs" / "pictures"
B1, B2 = f"{CASES}/b1.log+{CASES}/b1.py", f"{CASES}/b2.csv+{CASES}/b2.py"
# name -> (words of the report, colour scheme, width, first pixel, height)
SHOTS = {
    "report-plan": ([str(CASES / "c.py"), "--gpu", "RTX 4070"], "light", 1000, 0, 1080),
    "report-plan-dark": ([str(CASES / "c.py"), "--gpu", "RTX 4070"], "dark", 1000, "One step", 1100),
    "report-compare": ([f"b1={B1}", f"b2={B2}", "--gpu", "RTX 4070"], "light", 1000, "Learning", 1000),
    "report-narrow": ([B1, "--gpu", "RTX 4070"], "dark", 320, 0, 1100),
}


def main(runs: list[str]) -> None:
    """Make every picture."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    shots = dict(SHOTS)
    if runs:
        shots["report"] = ([runs[0]], "light", 1000, 0, 1080)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name, (words, scheme, width, start, height) in shots.items():
            page_file, shot = Path(folder) / f"{name}.html", Path(folder) / f"{name}.png"
            command = [sys.executable, "-m", "foretrain", "report", *words, "--out", str(page_file), "--quiet"]
            subprocess.run(command, check=True)
            page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
            page.set_default_timeout(PATIENCE_MS)
            page.goto(page_file.as_uri())
            box = None if isinstance(start, int) else page.locator("h2", has_text=start).bounding_box()
            top = box["y"] - 8 if box else start
            page.screenshot(path=shot, full_page=True, clip={"x": 0, "y": top, "width": width, "height": height})
            page.close()
            shutil.copyfile(shot, PICTURES / f"{name}.png")
            lighten(PICTURES / f"{name}.png")
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1:])
