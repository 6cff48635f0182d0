"""Shared parts of the benchmarks: JSON with machine, versions, date and commit, and a table on the screen."""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from foretrain.hardware.cpu import cpu_device

RESULTS = Path(__file__).parent / "results"
OUTSIDE = 0.10  # share of the cores that other programs may take


class Load:
    """Measure other programs' use of the cores between two looks; 0 where the system does not tell."""

    def __init__(self) -> None:
        self.wall, self.busy, self.own = time.perf_counter(), self._busy_s(), self._own_s()

    @staticmethod
    def _busy_s() -> float:
        try:
            fields = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
        except OSError:
            return 0.0
        return (sum(fields[:8]) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")  # less idle and iowait

    @staticmethod
    def _own_s() -> float:
        return sum(os.times()[:4])

    def outside(self) -> float:
        """Return the share of all cores since the last call."""
        wall = (time.perf_counter() - self.wall) * (os.cpu_count() or 1)
        return max(0.0, (self._busy_s() - self.busy) - (self._own_s() - self.own)) / wall


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("foretrain", "torch", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            pass
    return found


def parser_of(description: str | None, name: str) -> argparse.ArgumentParser:
    """Return a parser of --out FILE, which is benchmarks/results/NAME.json without it."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / f"{name}.json", help="where to write the JSON")
    return parser


def arguments(name: str, description: str | None, **flags: str) -> argparse.Namespace:
    """Parse --out FILE. `flags`: --name switches with their help."""
    parser = parser_of(description, name)
    for flag, help in flags.items():
        parser.add_argument(f"--{flag}", action="store_true", help=help)
    return parser.parse_args()


def commit() -> str:
    """Return the figures' commit, with + where files of the package or of a benchmark differ from it."""
    git = ["git", "-C", str(RESULTS.parent.parent)]
    name = subprocess.run([*git, "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True, check=False)
    there = ["foretrain", "benchmarks/*.py"]
    differs = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", *there], capture_output=True, check=False)
    return name.stdout.strip() + ("+" if differs.returncode == 1 else "")


def console(
    words: Iterable[str], folder: str | Path = ".", columns: int = 100, *, both: bool = False, **more: str
) -> str:
    """Return what a terminal shows of `foretrain WORDS`, run in a folder. `both`: stderr too; `more`: its environment."""
    environment = {**os.environ, "COLUMNS": str(columns), "NO_COLOR": "1", **more}
    command, stderr = [sys.executable, "-m", "foretrain", *words], subprocess.STDOUT if both else subprocess.PIPE
    done = subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True, check=True
    )
    return "\n".join(line.rstrip() for line in done.stdout.rstrip().splitlines())


def show(title: str, columns: list[str], rows: list[list[str]]) -> None:
    table = Table(title=title, box=None, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*row)
    Console(width=130).print(table)


def report(out: Path, data: dict[str, Any]) -> None:
    """Write the data with machine, versions, date and commit, and print what is short of it; docs/ makes the tables."""
    machine = {"cpu": cpu_device().name, "system": f"{platform.system()} {platform.machine()}"}
    document = {"date": date.today().isoformat(), "commit": commit(), "machine": machine}
    document |= {"versions": versions(), **data}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    for key, value in data.items():
        if key != "what" and len(shown := json.dumps(value, indent=1)) < 4000:
            print(f"{key}: {shown}")
    print(f"wrote {out}")
