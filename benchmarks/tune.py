"""`foretrain tune` against an exhaustive search of the same settings, on this CPU.

    python benchmarks/tune.py            (about ten minutes; leave the machine idle. OMP_NUM_THREADS=1 counts CPU time)
    python benchmarks/tune.py --again    (measure what is in the results already, too)
    python benchmarks/tune.py --one      (one stage, of a minute or two, then stop; call it until nothing is left)

For each config: tune with a quarter of the settings as its limit, then every setting, all models in one process, timed
in turns for many rounds. tune's pick and the best of the exhaustive search then meet alone for as many rounds again,
as the best of many noisy figures looks better than it is. What is done is kept, so that a run that was stopped goes on
where it was.
"""

import io
import json
import math
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import arguments, report
from rich.console import Console

from foretrain.app.tuning_session import Job, prepare
from foretrain.config.resolve import from_values
from foretrain.hardware.cpu import cpu_device
from foretrain.measure.space import TUNABLE, Setting, levels_of
from foretrain.measure.timed_step import TimedStep
from foretrain.measure.tune_record import Tuning, estimate
from foretrain.reports import text
from foretrain.reports.views.tune import difference, document
from foretrain.training.device import keep_memory

# So few steps that `train` would not measure what the config leaves open: as given is float32 with PyTorch's attention.
USUAL = {"device": "cpu", "vocab_size": 256, "dropout": 0.0, "max_iters": 10, "lr_decay_iters": 10, "warmup_iters": 1,
         "compile": False, "memory_limit": "4GiB"}  # fmt: skip
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "4 x 128, T 64, 12 sequences": (
        {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 64, "batch_size": 12,
         "gradient_accumulation_steps": 1},
        "batch_size,attention,dtype,cpu_threads",
    ),
    "6 x 192, T 128, 16 sequences": (
        {"n_layer": 6, "n_head": 6, "n_embd": 192, "block_size": 128, "batch_size": 4,
         "gradient_accumulation_steps": 4},
        "batch_size,loss_chunk_size,attention,dtype",
    ),
    "4 x 256, T 256, 4 sequences, V 2048": (
        {"n_layer": 4, "n_head": 4, "n_embd": 256, "block_size": 256, "batch_size": 1,
         "gradient_accumulation_steps": 4, "vocab_size": 2048, "master_weights": False},
        "batch_size,compile,attention,dtype",
    ),
}  # fmt: skip
ROUNDS, BURST_S, BUDGET_S = 10, 0.12, 150.0


def log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def tuned(job: Job, trials: int) -> Tuning:
    def listen(id: str, values: dict[str, Any]) -> None:
        if id == "tried":
            log(f"  tune: {values['setting'].levels} {values['speed'] or values['death']}")

    return job.search(BUDGET_S, trials, listen)


def console(found: Tuning) -> str:
    screen = Console(file=io.StringIO(), width=100, highlight=False)
    text.render(document(found), screen)
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue()


class Everything:
    """All settings of a job as models in this process, timed in turns."""

    def __init__(self, settings: list[Setting], *, cpu_clock: bool) -> None:
        self.threads = torch.get_num_threads()
        self.settings, self.steps = settings, list[TimedStep]()
        for number, setting in enumerate(settings, 1):
            self._use(setting)
            step = TimedStep(setting.config, cpu_clock=cpu_clock)
            step.warm_up()
            self.steps.append(step)
            log(f"  exhaustive: {number}/{len(settings)} ready")
        self.random = random.Random(0)

    def _use(self, setting: Setting) -> None:
        torch.set_num_threads(setting.config.cpu_threads or self.threads)

    def rounds(self, numbers: list[int], count: int, seconds: float) -> list[list[float]]:
        """Return for each of these settings the logarithm of its fast steps in each round, less the round's mean."""
        logs: list[list[float]] = [[] for _ in numbers]
        for _ in range(count):
            found = {}
            for at in self.random.sample(range(len(numbers)), len(numbers)):
                self._use(self.settings[numbers[at]])
                times = sorted(self.steps[numbers[at]].burst(seconds))
                found[at] = math.log(times[len(times) // 4])
            middle = sum(found.values()) / len(found)
            for at, value in found.items():
                logs[at].append(value - middle)
        torch.set_num_threads(self.threads)
        return logs


def tune_stage(job: Job, settings: list[Setting], shown: list[str]) -> dict[str, Any]:
    """Tune with a quarter of the settings as its limit."""
    found = tuned(job, len(settings) // 4)
    pick = next(n for n, s in enumerate(settings) if s.config == found.config)
    return {
        "settings": len(settings), "trials": len(found.trials), "pick_number": pick, "pick": shown[pick],
        "given": shown[0], "gain": found.gain, "tune_s": found.took_s, "stop": found.stop, "rounds": found.rounds,
        "clock": found.clock, "elsewhere": found.elsewhere, "calibrated": found.calibrated,
        "time_error": found.time_error.to_json() if found.time_error else None,
        "memory_error": found.memory_error.to_json() if found.memory_error else None,
        "first_choice": found.first_choice, "console": console(found),
    }  # fmt: skip


def all_stage(job: Job, settings: list[Setting], shown: list[str], pick: int) -> dict[str, Any]:
    """Time every setting, then tune's pick against the best of them alone."""
    started = time.monotonic()
    everything = Everything(settings, cpu_clock=job.cpu_clock)
    table = [estimate(row) for row in everything.rounds(list(range(len(settings))), ROUNDS, BURST_S)]
    best = min(range(len(settings)), key=lambda n: table[n].mean)
    gap, half = 0.0, 0.0
    if best != pick:
        mine, its = everything.rounds([pick, best], 2 * ROUNDS, 2 * BURST_S)
        duel = estimate([a - b for a, b in zip(mine, its, strict=True)])
        gap, half = math.expm1(duel.mean), duel.half
    over = [math.expm1(row.mean - table[best].mean) for row in table]
    return {
        "best": shown[best], "gap": gap, "gap_half": half, "gap_in_table": over[pick], "given_in_table": over[0],
        "worst_in_table": max(over), "exhaustive_s": time.monotonic() - started,
        "within_3_percent": sum(x <= 0.03 for x in over), "table": dict(zip(shown, over, strict=True)),
    }  # fmt: skip


def measure(name: str, case: dict[str, Any]) -> dict[str, Any]:
    """Run the next stage of one config: tune, or all settings."""
    overrides, wanted = CASES[name]
    job = prepare(from_values({**USUAL, **overrides}), tuple(wanted.split(",")))
    settings = job.settings()
    base: dict[str, object] = dict(zip(TUNABLE, levels_of(job.base), strict=True))
    shown = [difference(s.named, s.config.gradient_accumulation_steps, base) for s in settings]
    log(f"{name}: {len(settings)} settings")
    if "pick" not in case or case["given"] != shown[0] or case["settings"] != len(settings):
        return {"name": name, "knobs": wanted, "threads": torch.get_num_threads(), **tune_stage(job, settings, shown)}
    return {**case, **all_stage(job, settings, shown, case["pick_number"])}


def done_before(path: Path, again: bool) -> list[dict[str, Any]]:
    """Return results of this machine that are still valid."""
    if again or not path.exists():
        return []
    data = json.loads(path.read_text("utf-8"))
    threads = torch.get_num_threads()
    same = data["machine"]["cpu"] == cpu_device().name
    return [case for case in data["cases"] if same and case["name"] in CASES and case["threads"] == threads]


def keep(out: Path, cases: list[dict[str, Any]]) -> None:
    done = [case for case in cases if "best" in case]
    held = len(done) == len(CASES) and all(c["gap"] <= 0.03 and 4 * c["trials"] <= c["settings"] for c in done)
    report(out, {"cases": cases, "within_3_percent_in_a_quarter_of_the_trials": held})


def main() -> None:
    flags = {"again": "measure what is in the results already, too", "one": "one stage, then stop"}
    args = arguments("tune", __doc__ or "", **flags)
    torch._dynamo.config.recompile_limit = 10_000  # every setting is a compilation of the same code
    torch._dynamo.config.accumulated_recompile_limit = 100_000
    keep_memory()
    cases = {case["name"]: case for case in done_before(args.out, args.again)}
    for name in CASES:
        while "best" not in cases.get(name, {}):
            with tempfile.TemporaryDirectory() as cache:  # tune starts without knowledge of this machine
                os.environ["FORETRAIN_CACHE"] = cache
                cases[name] = measure(name, cases.get(name, {}))
            keep(args.out, list(cases.values()))
            if args.one:
                return


if __name__ == "__main__":
    main()
