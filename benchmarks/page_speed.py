"""How quick the page answers: of `foretrain serve`, and as a static site in Chromium; how large it is, how much a visit loads.

    python benchmarks/page_speed.py              (over HTTP, from a change to the last byte of its answer)
    python benchmarks/page_speed.py --static     (needs Chromium and node: builds the site as `make site` does)

Moves every slider of the form over all its stops, one change after the other, as a hand that drags does, and times each
answer. The static site is opened from a host on this machine: until the first picture, until Python is there, until the
first answer that Python gives; then each change until its answer is drawn. Run it on a machine that does nothing else.
"""

import functools
import gzip
import http.client
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

from common import RESULTS, arguments, report

from foretrain.web.calls import fields
from foretrain.web.routes import files

PRESETS = ("gpt2-124m", "gpt2-774m")
STOPS = 12  # of each slider


def start(folder: str) -> tuple[subprocess.Popen[str], int, str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "foretrain", "serve", "--json"], stdout=subprocess.PIPE, text=True, cwd=folder
    )
    assert process.stdout is not None
    ready = json.loads(process.stdout.readline())
    return process, ready["port"], ready["url"].partition("token=")[2]


class Client:
    def __init__(self, port: int, token: str) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self.headers = {"X-Foretrain-Token": token, "Origin": f"http://127.0.0.1:{port}",
                        "Content-Type": "application/json", "Accept-Encoding": "gzip"}  # fmt: skip

    def ask(self, method: str, path: str, body: object = None) -> tuple[float, int, int]:
        began = time.perf_counter()
        self.connection.request(method, path, json.dumps(body) if body is not None else None, self.headers)
        answer = self.connection.getresponse()
        size = len(answer.read())
        return time.perf_counter() - began, answer.status, size


def drag(client: Client, preset: str) -> tuple[list[float], int]:
    """Return (seconds of each answer with a plan, how many values were answered with a sentence instead)."""
    times, refused = [], 0
    for field in fields():
        stops = field["stops"]
        for stop in stops[:: max(1, len(stops) // STOPS)]:
            seconds, status, _ = client.ask(
                "POST", "/api/plan", {"model": preset, "values": {field["name"]: str(stop)}}
            )
            if status == 200:
                times.append(seconds)
            else:
                refused += 1
    return times, refused


def resident_bytes(pid: int) -> int | None:
    try:
        return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) * 1024  # type: ignore[index]
    except OSError:
        return None


def processor_s(pid: int) -> float:
    """Return the server's processor time, which other work changes little. Linux."""
    ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


def figures(times: list[float], refused: int) -> dict[str, float]:
    def quantile(share: float) -> float:
        return round(sorted(times)[min(len(times) - 1, int(share * len(times)))], 4)

    shares = {"median_s": 0.5, "p95_s": 0.95, "highest_s": 1.0}
    return {"answers": len(times), "refused": refused, **{name: quantile(share) for name, share in shares.items()}}


def served() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        process, port, token = start(folder)
        try:
            client = Client(port, token)
            later = set(re.findall(r'import\("\.(/\w+\.js)"\)', files()["/main.js"][0].decode()))  # when looked at
            load = sum(client.ask("GET", path)[2] for path in files().keys() - later)
            load += client.ask("GET", "/api/start")[2]
            load += client.ask("POST", "/api/form", {})[2]
            load += client.ask("POST", "/api/plan", {"model": PRESETS[0]})[2]
            results = {}
            for preset in PRESETS:
                before = processor_s(process.pid)
                found = figures(*drag(client, preset))
                spent = processor_s(process.pid) - before
                results[preset] = {**found, "processor_s": round(spent / (found["answers"] + found["refused"]), 4)}
            resident = resident_bytes(process.pid)
        finally:
            process.terminate()
            process.wait()
    return {
        "first_load_bytes": load,
        "resident_bytes": resident,
        "load": round(os.getloadavg()[0], 1),
        "dragging": results,
    }


ROOT = Path(__file__).parent.parent
# Moves every slider to every n-th stop; timing ends when the answer is on the page.
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
    """Serves files as most hosts do. `sent`: which, so far."""

    sent: ClassVar[set[Path]] = set()

    def do_GET(self) -> None:
        self.sent.add(Path(self.translate_path(self.path)))
        super().do_GET()

    def log_message(self, format: str, *args: Any) -> None:
        pass


def first_visit(page: Any, link: str) -> dict[str, float]:
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
    """Return bytes of a first visit, uncompressed and compressed."""
    files = [path / "index.html" if path.is_dir() else path for path in sent if path.exists()]
    plain = [path for path in files if path.suffix in (".zip", ".picture")]
    packed = [path for path in files if path not in plain]
    return {
        "files": len(files),
        "load_bytes": sum(path.stat().st_size for path in files),
        "packed_bytes": sum(path.stat().st_size for path in plain)
        + sum(len(gzip.compress(path.read_bytes(), 6)) for path in packed),
    }


def static() -> dict[str, Any]:
    from playwright.sync_api import sync_playwright

    subprocess.run([sys.executable, str(ROOT / "static_site" / "build.py")], check=True)
    host = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Host, directory=str(ROOT / "build" / "planner")))
    threading.Thread(target=host.serve_forever, daemon=True).start()
    link, dragging = f"http://127.0.0.1:{host.server_port}/", {}
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        context = chromium.new_context()
        visits = [first_visit(context.new_page(), link)]
        loaded = sizes(Host.sent)
        visits.append(first_visit(context.new_page(), link))
        page = context.pages[-1]
        for preset in PRESETS:
            page.locator("#model").select_option(preset)
            page.wait_for_selector(".results[aria-busy=false]")
            dragging[preset] = figures(page.evaluate(DRAG, STOPS), 0)
        chromium.close()
    host.shutdown()
    return {**loaded, "load": round(os.getloadavg()[0], 1), "visits": visits, "dragging": dragging}


def main() -> None:
    options = arguments("page_speed", __doc__ or "", static="the static site instead")
    usual = options.out == RESULTS / "page_speed.json"
    report(
        RESULTS / "static_site.json" if options.static and usual else options.out,
        static() if options.static else served(),
    )


if __name__ == "__main__":
    main()
