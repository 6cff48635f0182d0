"""How cost grows: seconds and bytes at five sizes of one thing, the slope in log-log, and the slope that theory gives.

    python benchmarks/growth.py                       all parts that are not whole yet, for three minutes; call it again
    python benchmarks/growth.py --only plan prepare   these parts
    python benchmarks/growth.py --again plan          measure a part anew

A part is measured in rounds, each of which goes through its five points in turn, so that a machine that drifts moves
all of them. A round in which other programs used a tenth of the cores is measured again, twice at most, and counted as
disturbed. What is done is kept in the result after each round.

- layers, width, context, batch, vocabulary: one training step on this CPU (float32, not compiled) and its peak memory,
  by PyTorch's CPU allocator as in ledger_against_allocator.py. Theory: the FLOPs of the plan, and its memory.
- plan: `foretrain plan` from its start to its end, over the sizes of GPT-2. Theory: the births and deaths of tensors in
  the step that it simulates.
- prepare: `foretrain prepare`, its processes together. Theory: tokens and memory as `prepare --plan` says of them.
- resume: `foretrain train --resume auto` from its start until the checkpoint is loaded, and the loading alone. Theory:
  the bytes, each of which is read, verified and copied once.
"""

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import prepare
from against_nanogpt import OUTSIDE, Load
from common import RESULTS, report

from foretrain.config.options import RunConfig
from foretrain.config.presets import PRESETS
from foretrain.config.resolve import from_values
from foretrain.hardware.catalogue import find
from foretrain.hardware.cpu import cpu_device
from foretrain.predict.memory import predict
from foretrain.predict.plan import plan
from foretrain.predict.spec import StepSpec
from foretrain.predict.step_moments import step_moments

Point = dict[str, Any]  # x, what it is, what theory says, and lists of what was measured
Round = Callable[[], Iterator[dict[str, float]]]  # one measurement of each point, in order
FORETRAIN = [sys.executable, "-c", "from foretrain.cli import main; main()"]
BASE: dict[str, Any] = {
    "n_layer": 4, "n_head": 4, "n_embd": 256, "block_size": 256, "batch_size": 4, "vocab_size": 1024,
    "gradient_accumulation_steps": 1, "device": "cpu", "dtype": "float32", "attention": "sdpa", "compile": False,
}  # fmt: skip
AXES: dict[str, list[dict[str, int]]] = {
    "layers": [{"n_layer": n} for n in (1, 2, 4, 8, 16)],
    "width": [{"n_embd": n, "n_head": n // 64} for n in (64, 128, 256, 512, 1024)],
    "context": [{"block_size": n} for n in (128, 256, 512, 1024, 2048)],
    "batch": [{"batch_size": n} for n in (1, 2, 4, 8, 16)],
    "vocabulary": [{"vocab_size": n} for n in (256, 1024, 4096, 16384, 65536)],
}
PLANNED = ("gpt2-30m", "gpt2-124m", "gpt2-350m", "gpt2-774m", "gpt2-1558m")
PREPARED_MB = (10, 20, 40, 80, 160)
RESUMED_WIDTHS = (64, 128, 256, 512, 1024)
ROUNDS = {"prepare": 3, "plan": 7, "resume": 7}
STEP_ROUNDS = 9
MOST_TRIES = 2  # to find a quiet moment for a round; then it counts, with what others used


@dataclass
class Part:
    """What is measured, and how. `measured`: names of the lists, `theory`: the figure that each is held against."""

    points: list[Point]
    start: Callable[[Path], Round]
    theory: dict[str, str]
    rounds: int = STEP_ROUNDS


# -- a training step ---------------------------------------------------------------------------------------


def config_of(values: dict[str, int]) -> RunConfig:
    return from_values({**BASE, **values}).config


def step_part(axis: str) -> Part:
    """Points with FLOPs and the estimate's memory, which know only the config."""
    points = []
    for values in AXES[axis]:
        config, cpu = config_of(values), cpu_device()
        memory = predict(StepSpec.of(config, cpu, dtype="float32", compiled=False))
        points.append({
            "x": next(iter(values.values())), "config": {**BASE, **values},
            "flops": plan(config, cpu).work.flops_per_token * config.tokens_per_step,
            "estimated_bytes": memory.worst.allocated_bytes,
        })  # fmt: skip
    return Part(points, lambda work: steps(points), {"seconds": "flops", "peak_bytes": "estimated_bytes"})


def steps(points: list[Point]) -> Round:
    """States of all points in this process; a round is a step of each, on random tokens."""
    import torch
    from ledger_against_allocator import measure

    from foretrain.model.step import build, train_step
    from foretrain.training.device import keep_memory

    configs = [config_of({k: v for k, v in point["config"].items() if BASE.get(k) != v}) for point in points]
    for point, config in zip(points, configs, strict=True):
        if "peak_bytes" not in point:
            point["peak_bytes"] = [max(measure(config, torch.float32).values())]
    keep_memory()  # as the trainer does
    states = [build(config, torch.device("cpu"), torch.float32, compile=False) for config in configs]

    def once() -> Iterator[dict[str, float]]:
        for config, state in zip(configs, states, strict=True):
            ids = torch.randint(0, config.vocab_size, (config.batch_size, config.block_size + 1))
            batch = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
            began = time.perf_counter()
            train_step(state, [batch], 1e-5)
            yield {"seconds": time.perf_counter() - began}

    return once


# -- the tools ---------------------------------------------------------------------------------------------


def plan_part() -> Part:
    points: list[Point] = []
    for name in PLANNED:
        config, card = from_values(dict(PRESETS[name])).config, find("RTX 4070")
        spec = StepSpec.of(config, card, compiled=config.compile)
        parameters = plan(config, card).counts.n_params
        points.append({"x": parameters, "name": name, "events": step_moments(spec).events})

    def once() -> Iterator[dict[str, float]]:
        for name in PLANNED:
            with tempfile.TemporaryDirectory() as empty:  # an answer that is kept would be given at once
                environment = {**os.environ, "FORETRAIN_CACHE": empty}
                began = time.perf_counter()
                words = [*FORETRAIN, "plan", name, "--gpu", "4070", "--json"]
                subprocess.run(words, stdout=subprocess.DEVNULL, check=True, env=environment)
                yield {"seconds": time.perf_counter() - began}

    return Part(points, lambda work: once, {"seconds": "events"}, ROUNDS["plan"])


# What `prepare --plan` says, with the tokenizer that benchmarks/prepare.py trains.
PLAN_OF_PREPARE = """
import sys, json, tiktoken.registry
from pathlib import Path
from foretrain.data.tokenizer import TiktokenTokenizer
from foretrain.data.prepare.engine import plan
from foretrain.data.prepare.sources import PrepareOptions
source, out, folder, cores = sys.argv[1:]
tiktoken.registry.ENCODINGS["bench"] = TiktokenTokenizer.load(Path(folder), "bench")._encoding
found = plan(PrepareOptions(sources=(source,), out=out, tokenizer="bench", workers=int(cores)))
print(json.dumps({"planned_tokens": found.tokens, "planned_bytes": found.memory_bytes}))
"""


def prepare_part() -> Part:
    """The points' theory is filled in once there are sources."""
    points: list[Point] = [{"x": size * 1_000_000, "name": f"{size} MB"} for size in PREPARED_MB]
    cores = len(os.sched_getaffinity(0))

    def start(work: Path) -> Round:
        sources = [work / f"{size}MB.jsonl" for size in PREPARED_MB]
        for source, point in zip(sources, points, strict=True):
            if not source.exists():
                prepare.make_source(source, point["x"])
        if not (work / "tokenizer").exists():
            prepare.make_tokenizer(work, sources[-1])
        for source, point in zip(sources, points, strict=True):
            if "planned_tokens" not in point:
                words = [PLAN_OF_PREPARE, str(source), str(work / "out"), str(work / "tokenizer"), str(cores)]
                said = subprocess.run([sys.executable, "-c", *words], check=True, capture_output=True, text=True)
                point.update(json.loads(said.stdout))

        def once() -> Iterator[dict[str, float]]:
            for source in sources:
                found = prepare.foretrain_run(str(source), work, cores)
                yield {"seconds": found["wall_s"], "peak_bytes": found["peak_bytes"]}

        return once

    return Part(points, start, {"seconds": "planned_tokens", "peak_bytes": "planned_bytes"}, ROUNDS["prepare"])


LOAD = """
import sys, json, time, torch
from pathlib import Path
from foretrain.config.options import RunConfig
from foretrain.model.step import build
from foretrain.training.checkpoint import load
state = build(RunConfig(**json.loads(sys.argv[2])), torch.device("cpu"), torch.float32, compile=False)
began = time.perf_counter()
assert load(Path(sys.argv[1]), state)
print(time.perf_counter() - began)
"""


def resume_part() -> Part:
    """One step of a small context is trained and saved for each width; then it is resumed, and killed when loaded."""
    small = {**BASE, "block_size": 32, "batch_size": 1, "vocab_size": 256, "eval_iters": 1}
    points: list[Point] = [{"width": n, "config": {**small, "n_embd": n, "n_head": n // 64}} for n in RESUMED_WIDTHS]

    def start(work: Path) -> Round:
        for point in points:
            folder = work / f"resumed-{point['width']}"
            if not (folder / "checkpoints").exists():
                subprocess.run([*train(point, folder), "--max_iters=1"], check=True, capture_output=True)
            saved = next((folder / "checkpoints").glob("step-*"))
            point["x"] = sum(path.stat().st_size for path in saved.iterdir())

        def once() -> Iterator[dict[str, float]]:
            for point in points:
                folder = work / f"resumed-{point['width']}"
                words = [sys.executable, "-c", LOAD, str(folder / "checkpoints"), json.dumps(point["config"])]
                loaded = subprocess.run(words, check=True, capture_output=True, text=True)
                yield {"seconds": until_resumed(point, folder), "load_s": float(loaded.stdout)}

        return once

    return Part(points, start, {"seconds": "x", "load_s": "x"}, ROUNDS["resume"])


def train(point: Point, folder: Path) -> list[str]:
    options = [f"--{key}={value}" for key, value in point["config"].items()]
    return [*FORETRAIN, "train", "baby", *options, f"--out_dir={folder}", "--lang=en"]


def until_resumed(point: Point, folder: Path) -> float:
    """Seconds from the start of the command to its line that says so."""
    began = time.perf_counter()
    words = [*train(point, folder), "--max_iters=1000", "--resume=auto"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout
        try:
            for line in process.stdout:
                if line.startswith("resumed at step"):
                    return time.perf_counter() - began
        finally:
            process.kill()
    raise SystemExit(f"{' '.join(words)} did not resume")


# -- slopes ------------------------------------------------------------------------------------------------


def slope(xs: list[float], ys: list[float]) -> float:
    """Of the line through the logarithms, by least squares."""
    u, v = [math.log(x) for x in xs], [math.log(y) for y in ys]
    mean_u, mean_v = sum(u) / len(u), sum(v) / len(v)
    return sum((a - mean_u) * (b - mean_v) for a, b in zip(u, v, strict=True)) / sum((a - mean_u) ** 2 for a in u)


def slopes(part: Part) -> dict[str, dict[str, float]]:
    """Of each quantity: measured (of the medians), the range over the rounds, theory's, and both between the two
    largest points."""
    xs = [point["x"] for point in part.points]
    found = {}
    for name, theory in part.theory.items():
        middle = [median(point[name]) for point in part.points]
        expected = [point[theory] for point in part.points]
        rounds = [slope(xs, list(ys)) for ys in zip(*(point[name] for point in part.points), strict=True)]
        found[name] = {
            "measured": slope(xs, middle), "low": min(rounds), "high": max(rounds), "theory": slope(xs, expected),
            "measured_at_end": slope(xs[-2:], middle[-2:]), "theory_at_end": slope(xs[-2:], expected[-2:]),
        }  # fmt: skip
    return found


# -- all of it ---------------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[], Part]] = {
    **{axis: lambda axis=axis: step_part(axis) for axis in AXES},
    "plan": plan_part, "prepare": prepare_part, "resume": resume_part,
}  # fmt: skip


def asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--again", nargs="+", choices=PARTS, default=[], help="forget what is kept of these")
    parser.add_argument("--seconds", type=float, default=180, help="start no round after this long")
    parser.add_argument("--busy", action="store_true", help="count rounds whatever other programs use, and say so")
    parser.add_argument("--work", type=Path, help="sources and runs; kept for the next call")
    parser.add_argument("--out", type=Path, default=RESULTS / "growth.json")
    return parser.parse_args()


def measured(name: str, kept: dict[str, Any], until: float, work: Path, most_tries: int) -> Iterator[dict[str, Any]]:
    """What is to be kept of a part after each round."""
    part, tries = PARTS[name](), 0
    disturbed, others = kept.get("disturbed", 0), kept.get("others_share", 0.0)
    names = list(part.theory)
    for point, old in zip(part.points, kept.get("points", []), strict=False):
        point.update({key: value for key, value in old.items() if key not in point})
    done = len(part.points[0].get(names[0], []))
    if done >= part.rounds or time.monotonic() > until:
        return
    once = part.start(work)
    for _ in once():  # warms up
        pass
    while done < part.rounds and time.monotonic() < until:
        load = Load()
        found = list(once())
        share = load.outside()
        if share > OUTSIDE:
            disturbed, tries = disturbed + 1, tries + 1
            print(f"{name}: others used {share:.0%}", file=sys.stderr, flush=True)
            if tries <= most_tries:
                continue
        done, tries, others = done + 1, 0, max(others, share)
        for point, values in zip(part.points, found, strict=True):
            for key, value in values.items():
                point.setdefault(key, []).append(value)
        yield {
            "date": date.today().isoformat(), "theory": part.theory, "rounds": done, "whole": done >= part.rounds,
            "disturbed": disturbed, "others_share": round(others, 2), "slopes": slopes(part), "points": part.points,
        }  # fmt: skip


def main() -> None:
    options = asked()
    until = time.monotonic() + options.seconds
    before = json.loads(options.out.read_text("utf-8")) if options.out.exists() else {}
    parts: dict[str, Any] = {k: v for k, v in before.get("parts", {}).items() if k not in options.again}
    data = {"what": (__doc__ or "").splitlines()[0], "parts": parts}
    with contextlib.ExitStack() as stack:
        work = options.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        work.mkdir(parents=True, exist_ok=True)
        for name in options.only:
            for found in measured(name, parts.get(name, {}), until, work, 0 if options.busy else MOST_TRIES):
                parts[name] = found
                options.out.write_text(json.dumps(data) + "\n", "utf-8")
    rows = [
        [f"{name}: {what}", str(part["rounds"]), f"{s['measured']:.2f} ({s['low']:.2f} to {s['high']:.2f})",
         f"{s['theory']:.2f}", f"{s['measured_at_end']:.2f}", f"{s['theory_at_end']:.2f}"]
        for name, part in parts.items() for what, s in part["slopes"].items()
    ]  # fmt: skip
    columns = ["slope of", "rounds", "measured (rounds)", "theory", "largest two", "theory there"]
    report(options.out, "How cost grows", columns, rows, data)
    missing = [name for name in options.only if not parts.get(name, {}).get("whole")]
    print(f"not whole yet: {', '.join(missing) or 'none'}")


if __name__ == "__main__":
    main()
