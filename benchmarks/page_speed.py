"""How quick the page of `foretrain serve` answers, how large its server is, how much a first visit loads.

Moves every slider of the form over all its stops, one change after the other, as a hand that drags does, and times each
answer over HTTP from the change to the last byte. Run it on a machine that does nothing else:

    python benchmarks/page_speed.py
"""

import http.client
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import arguments, report

from foretrain.web.planner import fields
from foretrain.web.routes import files

PRESETS = ("gpt2-124m", "gpt2-774m")
STOPS = 12  # of each slider


def start(folder: str) -> tuple[subprocess.Popen[str], int, str]:
    """(server, port, token)."""
    process = subprocess.Popen(
        [sys.executable, "-m", "foretrain", "serve", "--json"], stdout=subprocess.PIPE, text=True, cwd=folder
    )
    assert process.stdout is not None
    said = json.loads(process.stdout.readline())
    return process, said["port"], said["url"].partition("token=")[2]


class Client:
    """One kept connection, as a browser has."""

    def __init__(self, port: int, token: str) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self.headers = {"X-Foretrain-Token": token, "Origin": f"http://127.0.0.1:{port}",
                        "Content-Type": "application/json", "Accept-Encoding": "gzip"}  # fmt: skip

    def ask(self, method: str, path: str, body: object = None) -> tuple[float, int, int]:
        """(seconds, status, bytes)."""
        began = time.perf_counter()
        self.connection.request(method, path, json.dumps(body) if body is not None else None, self.headers)
        answer = self.connection.getresponse()
        size = len(answer.read())
        return time.perf_counter() - began, answer.status, size


def drag(client: Client, preset: str) -> tuple[list[float], int]:
    """(seconds of each answer with a plan, how many values were answered with a sentence instead)."""
    times, refused = [], 0
    for field in fields():
        stops = field["stops"]
        for stop in stops[:: max(1, len(stops) // STOPS)]:
            seconds, status, _ = client.ask(
                "POST", "/api/plan", {"preset": preset, "values": {field["name"]: str(stop)}}
            )
            if status == 200:
                times.append(seconds)
            else:
                refused += 1
    return times, refused


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def resident_bytes(pid: int) -> int | None:
    try:
        return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) * 1024  # type: ignore[index]
    except OSError:
        return None


def processor_s(pid: int) -> float:
    """Processor time that the server has taken, which other work on the machine changes little. Linux."""
    ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    out = arguments("page_speed", __doc__ or "").out
    with tempfile.TemporaryDirectory() as folder:
        process, port, token = start(folder)
        try:
            client = Client(port, token)
            later = set(re.findall(r'import\("\.(/\w+\.js)"\)', files()["/main.js"][0].decode()))  # when looked at
            load = sum(client.ask("GET", path)[2] for path in files().keys() - later)
            load += client.ask("GET", "/api/start")[2]
            load += client.ask("POST", "/api/plan", {"preset": PRESETS[0]})[2]
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
    rows = [[preset, *(str(value) for value in found.values())] for preset, found in results.items()]
    columns = ["preset", "answers", "refused", "median s", "95 % s", "highest s", "processor s"]
    report(
        out,
        "The page",
        columns,
        rows,
        {
            "first_load_bytes": load,
            "resident_bytes": resident,
            "load": round(os.getloadavg()[0], 1),
            "dragging": results,
        },
    )


def figures(times: list[float], refused: int) -> dict[str, float]:
    shares = {"median_s": 0.5, "p95_s": 0.95, "highest_s": 1.0}
    return {
        "answers": len(times),
        "refused": refused,
        **{name: round(quantile(times, share), 4) for name, share in shares.items()},
    }


if __name__ == "__main__":
    main()
