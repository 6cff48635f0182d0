"""How quick the tools answer: seconds asked for and measured, whole processes from start to end, in one table.

    python benchmarks/tool_speed.py                    what is not whole yet, for three minutes; call it again
    python benchmarks/tool_speed.py --only advise best
    python benchmarks/tool_speed.py --again advise     measure it again

Exact plans are cold with an empty cache, and cached right after. A slider is one answer of `foretrain serve` over HTTP,
from the change to the last byte, over all stops of all sliders. A run beside which other programs used a tenth of the
cores is repeated once. The least processor time of a run stands beside its wall time: other programs disturb it
less. Bytecode is there, as pip leaves it: without, each process would compile the package first, which takes longer
than most answers.
"""

import compileall
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from common import OUTSIDE, Load, parser_of, report
from page_speed import Client, drag, start

import foretrain

FORETRAIN = [sys.executable, "-c", "from foretrain.cli import main; main()"]
CARD = ["--gpu", "4070"]
EAGER = ["plan", "gpt2-124m", "--compile=false", *CARD, "--exact", "--json"]
COMPILED = ["plan", "gpt2-124m", *CARD, "--exact", "--json"]
LORA = ["plan", "qwen3-8b", "--method", "lora", "--seq-len", "1024", "--batch-size", "2", "--gradient-checkpointing",
        "--gpu", "4090", "--exact", "--json"]  # fmt: skip
DISTURBED = 1  # runs that are thrown away before one counts all the same


class Took(NamedTuple):
    wall_s: float
    processor_s: float | None = None  # of the process that was started


@dataclass
class Figure:
    """A line of the table. `seconds`: measures once, or several times, in a folder for the cache."""

    name: str
    asked_s: float
    seconds: Callable[[Path], list[Took]]
    runs: int = 5


def compile_package() -> None:
    """Compile bytecode of all modules."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    compileall.compile_dir(Path(foretrain.__file__).parent, quiet=1)


def timed(words: list[str], cache: Path) -> Took:
    began, before = time.perf_counter(), os.times()
    environment = {**os.environ, "FORETRAIN_CACHE": str(cache)}
    subprocess.run([*FORETRAIN, *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=True, env=environment)
    wall_s, after = time.perf_counter() - began, os.times()
    return Took(wall_s, sum(after[2:4]) - sum(before[2:4]))


def cold(words: list[str]) -> Callable[[Path], list[Took]]:
    """Time with an empty cache, which is filled then."""

    def once(cache: Path) -> list[Took]:
        with tempfile.TemporaryDirectory(dir=cache) as empty:
            return [timed(words, Path(empty))]

    return once


def cached(words: list[str]) -> Callable[[Path], list[Took]]:
    """Time three more calls in one cache."""

    def once(cache: Path) -> list[Took]:
        timed(words, cache)
        return [timed(words, cache) for _ in range(3)]

    return once


def slider(_: Path) -> list[Took]:
    with tempfile.TemporaryDirectory() as folder:
        process, port, token = start(folder)
        try:
            client = Client(port, token)
            client.ask("POST", "/api/plan", {"preset": "gpt2-124m"})
            return [Took(seconds) for seconds in drag(client, "gpt2-124m")[0]]
        finally:
            process.terminate()
            process.wait()


FIGURES = {
    "eager": Figure("exact plan, 124M, eager", 4.0, cold(EAGER), 3),
    "compiled": Figure("exact plan, 124M, compiled", 20.0, cold(COMPILED), 2),
    "eager_cached": Figure("the same again, eager", 0.3, cached(EAGER), 1),
    "compiled_cached": Figure("the same again, compiled", 0.3, cached(COMPILED), 1),
    "lora": Figure("exact plan, Qwen3 8B, LoRA", 20.0, cold(LORA), 2),
    "plan": Figure("plan, 124M", 0.3, cold(["plan", "gpt2-124m", *CARD])),
    "advise": Figure("advise, 124M", 1.0, cold(["advise", "gpt2-124m", *CARD])),
    "finetune": Figure(
        "plan, Qwen3 14B, LoRA, with changes", 4.0, cold(["plan", "qwen3-14b", "--method", "lora", *CARD])
    ),
    "best": Figure("plan --best --within 20h", 1.0, cold(["plan", "gpt2-124m", *CARD, "--best", "--within", "20h"])),
    "slider": Figure("a slider of the page, 124M", 0.016, slider, 1),
}


def measured(figure: Figure, until: float) -> dict[str, Any]:
    """Return as many runs as there is time for."""
    took: list[Took] = []
    done, disturbed, outside = 0, 0, 0.0
    with tempfile.TemporaryDirectory() as cache:
        while done < figure.runs and time.monotonic() < until:
            load = Load()
            found = figure.seconds(Path(cache))
            outside = load.outside()
            if outside > OUTSIDE and disturbed < DISTURBED:
                disturbed += 1
                continue
            took, done = took + found, done + 1
    if not took:
        return {}
    runs, processor_s = [each.wall_s for each in took], [each.processor_s for each in took if each.processor_s]
    return {
        "name": figure.name, "asked_s": figure.asked_s,
        "median_s": median(runs), "low_s": min(runs), "high_s": max(runs),
        "processor_s": min(processor_s, default=None),
        "p95_s": sorted(runs)[int(0.95 * (len(runs) - 1))], "runs": len(runs), "others_share": round(outside, 2),
        "date": date.today().isoformat(), "seconds": runs if len(runs) < 20 else None,
    }  # fmt: skip


def main() -> None:
    parser = parser_of(__doc__, "tool_speed")
    parser.add_argument("--only", nargs="+", choices=FIGURES, default=list(FIGURES))
    parser.add_argument("--again", nargs="+", choices=FIGURES, default=[], help="forget what is kept of these")
    parser.add_argument("--seconds", type=float, default=150, help="start no run after this long")
    options = parser.parse_args()
    compile_package()
    until = time.monotonic() + options.seconds
    before = json.loads(options.out.read_text("utf-8"))["figures"] if options.out.exists() else {}
    figures: dict[str, Any] = {key: row for key, row in before.items() if key not in options.again}
    for key in options.only:
        if key not in figures and (found := measured(FIGURES[key], until)):
            figures[key] = found
    figures = {key: figures[key] for key in FIGURES if key in figures}
    report(options.out, {"what": (__doc__ or "").splitlines()[0], "figures": figures})


if __name__ == "__main__":
    main()
