"""How quick the static site of the planner is, and how much it loads: in Chromium, from a host on this machine.

Builds the site as `make site` does, opens it, waits for the first picture, for Python, and for the first answer that
Python gives; then moves every slider of the form over its stops and times each change until its answer is drawn. Run it
on a machine that does nothing else (Chromium and node are needed):

    python benchmarks/static_site.py
"""

import functools
import gzip
import os
import shutil
import subprocess
import sys
import threading
import time
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

from common import arguments, report
from page_speed import PRESETS, STOPS, figures
from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).parent.parent
SITE = ROOT / "build" / "planner"
# Every slider to every n-th stop; what is timed ends when the answer to the change is on the page.
DRAG = """async stops => {
  const results = document.querySelector(".results"), times = [];
  const drawn = () => new Promise(resolve => {
    const check = () => results.getAttribute("aria-busy") === "false" && (watch.disconnect(), resolve());
    const watch = new MutationObserver(check);
    watch.observe(results, { attributes: true });
  });
  for (const slider of document.querySelectorAll("input[type=range]")) {
    const before = slider.value, every = Math.max(1, Math.floor((Number(slider.max) + 1) / stops));
    const move = async to => {
      slider.value = to;
      const began = performance.now(), done = drawn();
      slider.dispatchEvent(new Event("input"));
      await done;
      return performance.now() - began;
    };
    for (let stop = 0; stop <= Number(slider.max); stop += every) {
      const taken = await move(stop);
      if (!document.querySelector(".errors .bad")) times.push(taken / 1e3);
    }
    await move(before);
  }
  return times;
}"""


class Host(SimpleHTTPRequestHandler):
    """Files as most hosts send them. `sent`: which, so far."""

    sent: ClassVar[set[Path]] = set()

    def do_GET(self) -> None:
        self.sent.add(Path(self.translate_path(self.path)))
        super().do_GET()

    def log_message(self, format: str, *args: Any) -> None:
        pass


def first_visit(page: Page, link: str) -> dict[str, float]:
    """Seconds from opening the site to each of its moments."""
    began = time.perf_counter()
    found = {}
    page.goto(link)
    page.wait_for_selector(".results[aria-busy=false]")
    found["first_picture_s"] = time.perf_counter() - began
    page.wait_for_selector("#planner-state[data-ready]", timeout=180_000)
    found["python_ready_s"] = time.perf_counter() - began
    page.locator("#k-batch_size").fill("9")
    page.wait_for_selector(".results[aria-busy=false]")
    found["first_answer_s"] = time.perf_counter() - began
    assert not page.locator(".errors .bad").count(), "that was no answer"
    return {name: round(seconds, 2) for name, seconds in found.items()}


def sizes(sent: set[Path]) -> dict[str, int]:
    """Bytes of a first visit, as they are and as a host sends them that packs what can be packed."""
    files = [path / "index.html" if path.is_dir() else path for path in sent if path.exists()]
    plain = [path for path in files if path.suffix in (".zip", ".picture")]
    packed = [path for path in files if path not in plain]
    return {
        "files": len(files),
        "load_bytes": sum(path.stat().st_size for path in files),
        "packed_bytes": sum(path.stat().st_size for path in plain)
        + sum(len(gzip.compress(path.read_bytes(), 6)) for path in packed),
    }


def main() -> None:
    out = arguments("static_site", __doc__ or "").out
    subprocess.run([sys.executable, str(ROOT / "static_site" / "build.py")], check=True)
    host = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Host, directory=str(SITE)))
    threading.Thread(target=host.serve_forever, daemon=True).start()
    link = f"http://127.0.0.1:{host.server_port}/"
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        context = chromium.new_context()
        visits = [first_visit(context.new_page(), link)]
        loaded = sizes(Host.sent)
        visits.append(first_visit(context.new_page(), link))
        dragging = {}
        page = context.pages[-1]
        for preset in PRESETS:
            page.locator("#preset").select_option(preset)
            page.wait_for_selector(".results[aria-busy=false]")
            dragging[preset] = figures(page.evaluate(DRAG, STOPS), 0)
        chromium.close()
    host.shutdown()
    rows = [[preset, *(str(value) for value in found.values())] for preset, found in dragging.items()]
    rows += [
        [f"visit {i + 1}", "", "", *(f"{seconds}" for seconds in visit.values())] for i, visit in enumerate(visits)
    ]
    columns = ["sliders of", "answers", "refused", "median s", "95 % s", "highest s"]
    report(
        out,
        "The static site",
        columns,
        rows,
        {**loaded, "load": round(os.getloadavg()[0], 1), "visits": visits, "dragging": dragging},
    )


if __name__ == "__main__":
    main()
