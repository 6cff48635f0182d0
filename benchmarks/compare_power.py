"""False and missed differences of `foretrain compare`, by synthetic pairs of nanoGPT logs, and by the real logs and
runs behind its floors.

python benchmarks/compare_power.py             the synthetic pairs, and the noise of case B1's published log
python benchmarks/compare_power.py --unlike    of the pairs only those of unlike lengths, beside existing results
python benchmarks/compare_power.py --train     six seeds of a tiny model trained on this CPU, beside existing results

A synthetic log has: a power-law loss with the noise of batches, correlated from step to step; an offset by its seed;
step times with AR(1) noise, slow drift, outliers, compilation, evaluations, and an offset by its start. `card` is a
quiet GPU, `desktop` one that draws a screen as well, `busy` one that others use. Runs of unlike lengths come from a
second generator, of other noise, whose card slows as it warms up.
"""

import json
import math
import random
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from common import arguments, report

from foretrain.comparison.compare import compare
from foretrain.comparison.sources import load
from foretrain.comparison.sources.request import SourceRequest, take_apart
from foretrain.comparison.subject import Subject
from foretrain.runs.training_log import read_log

ROOT = Path(__file__).parent.parent
PAIRS = 100
TRAIN = {
    "dataset": "python-stdlib", "n_layer": 3, "n_head": 4, "n_embd": 96, "block_size": 64, "vocab_size": 256, "batch_size": 16,
    "gradient_accumulation_steps": 1, "max_iters": 400, "lr_decay_iters": 400, "warmup_iters": 20, "eval_interval": 100,
    "eval_iters": 50, "learning_rate": "2e-3", "min_lr": "2e-4", "device": "cpu", "compile": "false", "dtype": "float32",
    "attention": "sdpa", "cpu_threads": 1, "log_interval": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Noise:
    """Deviations as shares: of a step from the one before, of its slow drift, of starts, of seeds, of a batch's loss."""

    step: float
    memory: float
    drift: float
    outliers: float
    start: float
    seed: float
    batch: float


NOISES = {
    "card": Noise(step=0.003, memory=0.5, drift=0.002, outliers=0.01, start=0.003, seed=0.002, batch=0.02),
    "desktop": Noise(step=0.01, memory=0.6, drift=0.004, outliers=0.03, start=0.003, seed=0.003, batch=0.03),
    "busy": Noise(step=0.02, memory=0.6, drift=0.005, outliers=0.06, start=0.003, seed=0.003, batch=0.04),
}


def synthetic(seed: int, noise: Noise, *, steps: int, step_s: float = 0.5, learns: float = 1.0) -> str:
    """Return a log of nanoGPT's shape. `learns`: factor on the loss above its floor."""
    rng = random.Random(seed)
    start, offset = rng.gauss(0, noise.start), rng.gauss(0, noise.seed)
    phase, period = rng.uniform(0, 2 * math.pi), rng.uniform(0.5, 2) * steps
    slow = wander = 0.0
    lines = ["tokens per iteration will be: 32,768", "number of parameters: 10.65M"]
    for i in range(steps):
        clean = 2.0 + learns * 8.0 * (i + 10) ** -0.35
        wander = 0.3 * wander + rng.gauss(0, noise.batch)
        if i % 100 == 0:
            measured = clean * (1 + offset) * (1 + rng.gauss(0, 0.001))
            lines.append(f"step {i}: train loss {measured:.4f}, val loss {measured * 1.01:.4f}")
        slow = noise.memory * slow + rng.gauss(0, noise.step * math.sqrt(1 - noise.memory**2))
        drift = noise.drift * math.sin(phase + 2 * math.pi * i / period)
        time_s = step_s * (1 + start) * (1 + drift) * math.exp(slow)
        if rng.random() < noise.outliers:
            time_s *= rng.uniform(1.05, 2.5)
        time_s += 30 if i == 0 else 4 * step_s if i % 100 == 0 else 0
        lines.append(f"iter {i}: loss {clean * (1 + offset) * (1 + wander):.4f}, time {time_s * 1e3:.2f}ms, mfu 30.00%")
    return "\n".join(lines) + "\n"


def unlike(seed: int, noise: Noise, *, steps: int, slows: float, step_s: float = 0.5) -> str:
    """Return a log from another generator: the card slows by a share `slows` of a step as it warms up, give or take a
    sixth, from a random temperature; on top a mean-reverting random walk, Gamma tails, stalls, lost lines.
    """
    rng = random.Random(seed)
    start, offset, wander = 1 + rng.gauss(0, noise.start), rng.gauss(0, noise.seed), 0.0
    slows, tau_s, warm = slows * rng.gauss(1, 1 / 6), rng.uniform(40, 200), rng.uniform(0, 0.3)
    lines = ["tokens per iteration will be: 32,768", "number of parameters: 10.65M"]
    elapsed_s = 0.0
    for i in range(steps):
        wander = 0.98 * wander + rng.gauss(0, 0.2 * noise.drift)
        heat = 1 - (1 - warm) * math.exp(-elapsed_s / tau_s)
        tail = rng.gammavariate(2.0, noise.step / math.sqrt(2)) - noise.step * math.sqrt(2)
        time_s = step_s * start * (1 + slows * heat) * math.exp(wander + tail)
        time_s += rng.expovariate(1 / (0.3 * step_s)) if rng.random() < noise.outliers else 0.0
        elapsed_s += time_s
        clean = (2.0 + 8.0 * (i + 10) ** -0.35) * (1 + offset)
        loss = clean * (1 + rng.gauss(0, noise.batch))
        if i % 250 == 0:
            evaluated = clean * (1 + rng.gauss(0, 0.001))
            lines.append(f"step {i}: train loss {evaluated:.4f}, val loss {evaluated * 1.01:.4f}")
            time_s += 3 * step_s + (20 if i == 0 else 0)
        if rng.random() > 0.01 or i == 0:
            lines.append(f"iter {i}: loss {loss:.4f}, time {time_s * 1e3:.2f}ms, mfu 30.00%")
    return "\n".join(lines) + "\n"


def unlike_pairs(folder: Path, noise: Noise, steps: int, share: float = 0.0, pairs: int = PAIRS) -> int:
    """Count right answers on speed for a run and one 2 to 12 times as long, in any order.

    `share`: by how much the second of them is faster; without it "no difference" is right, in every question.
    """
    right = 0
    for pair in range(pairs):
        rng = random.Random(5000 + pair)
        lengths = [steps, round(steps * math.exp(rng.uniform(math.log(2), math.log(12))))]
        rng.shuffle(lengths)
        slows = rng.uniform(0.005, 0.03)
        first = unlike(2 * pair + 5000, noise, steps=lengths[0], slows=slows)
        second = unlike(2 * pair + 5001, noise, steps=lengths[1], slows=slows, step_s=0.5 / (1 + share))
        found = outcomes(folder, first, second)
        if share:
            right += found["speed"] == ("difference", "other")
        else:
            right += all(outcome != "difference" for outcome, _ in found.values())
    return right


def outcomes(folder: Path, first: str, second: str) -> dict[str, tuple[str, str]]:
    """Return {question: (outcome, winner)} of two logs."""
    subjects: list[Subject] = []
    for name, text in (("one", first), ("other", second)):
        path = folder / f"{name}.log"
        path.write_text(text, "utf-8")
        subjects.append(load(SourceRequest(path=str(path))))
    found = compare(subjects)
    return {v.question: (v.outcome, v.pair.one if v.pair else "") for v in found.verdicts}


def same_pairs(folder: Path, noise: Noise, steps: int, pairs: int = PAIRS) -> dict[str, int]:
    """Count false differences among pairs that differ only in seed and start, by question and at all."""
    counts = {"speed": 0, "tokens": 0, "hours": 0, "any": 0}
    for pair in range(pairs):
        logs = (synthetic(2 * pair + k, noise, steps=steps) for k in (0, 1))
        found = outcomes(folder, *logs)
        wrong = {question for question, (outcome, _) in found.items() if outcome == "difference"}
        for question in wrong & set(counts):
            counts[question] += 1
        counts["any"] += bool(wrong)
    return counts


def planted(folder: Path, noise: Noise, share: float, steps: int, pairs: int = PAIRS, question: str = "speed") -> int:
    """Count pairs in which a step shorter by `share`, or ("tokens") a loss above its floor less by it, is found, with
    the right winner.
    """
    found, speed = 0, question == "speed"
    changed = {"step_s": 0.5 / (1 + share)} if speed else {"learns": 1 - share}
    for seed in range(1000 if speed else 3000, (1000 if speed else 3000) + 2 * pairs, 2):
        first, second = synthetic(seed, noise, steps=steps), synthetic(seed + 1, noise, steps=steps, **changed)
        found += outcomes(folder, first, second)[question] == ("difference", "other")
    return found


def of_b1() -> dict[str, float]:
    """Return of case B1's published log the deviation of validation from its neighbours, and of steps from their
    median.
    """
    log = read_log(ROOT / "examples" / "real-cases" / "b1.log")
    times = [t for t in log.steps.time_s if 3 < t < 5]
    losses = [e.val_loss for e in log.evaluations if e.val_loss and e.step >= 4000]
    bends = [a - 2 * b + c for a, b, c in zip(losses, losses[1:], losses[2:], strict=False)]
    stray = math.sqrt(fmean(bend**2 for bend in bends) / 6) / fmean(losses)  # 1 + 4 + 1 variances in each bend
    tokens = 200 * 16 * 1024
    return {
        "step_deviation": stdev(times) / median(times), "steps": len(times), "evaluations": len(losses),
        "evaluation_deviation": stray, "times_root_of_tokens": stray * math.sqrt(tokens),
    }  # fmt: skip


def train(folder: Path, seeds: int = 6) -> list[Path]:
    paths = []
    for seed in range(1, seeds + 1):
        out = folder / f"s{seed}"
        options = [f"--{key}={value}" for key, value in {**TRAIN, "seed": seed, "out_dir": out}.items()]
        words = [sys.executable, "-m", "foretrain", "train", *options, "--quiet"]
        subprocess.run(words, check=True, cwd=folder, stdout=subprocess.DEVNULL)
        paths.append(out)
    return paths


def of_runs(paths: list[Path]) -> dict[str, Any]:
    """Compare every pair of the runs; return their distances."""
    subjects = [load(take_apart(str(path))) for path in paths]
    wrong = {"speed": 0, "tokens": 0, "any": 0}
    count = 0
    for one, other in combinations(subjects, 2):
        found = {v.question for v in compare([one, other]).verdicts if v.outcome == "difference"}
        count += 1
        wrong["any"] += bool(found)
        for question in ("speed", "tokens"):
            wrong[question] += question in found
    finals = [s.val.losses[-1] for s in subjects]
    tails = [fmean(s.train.losses[-80:]) for s in subjects]
    steps = [s.step_s.expected_s for s in subjects if s.step_s]
    return {
        "runs": len(subjects), "pairs": count, "called_different": wrong,
        "val_loss_deviation": stdev(finals) / fmean(finals), "train_loss_deviation": stdev(tails) / fmean(tails),
        "step_deviation": stdev(steps) / fmean(steps),
    }  # fmt: skip


def unlike_of(name: str, steps: int) -> dict[str, int]:
    """Return right answers about runs of unlike lengths: of one speed, and 3% apart."""
    with tempfile.TemporaryDirectory() as there:
        return {f"{share:.0%}": unlike_pairs(Path(there), NOISES[name], steps, share) for share in (0.0, 0.03)}


def row_of(name: str, steps: int) -> dict[str, Any]:
    noise = NOISES[name]
    with tempfile.TemporaryDirectory() as there:
        folder = Path(there)
        return {
            "unlike_lengths": unlike_of(name, steps), "noise": name, "steps": steps, "same": same_pairs(folder, noise, steps),
            "speed_found": {f"{share:.0%}": planted(folder, noise, share, steps) for share in (0.02, 0.03)},
            "loss_found": {f"{share:.0%}": planted(folder, noise, share, steps, question="tokens") for share in (0.05, 0.1)},
        }  # fmt: skip


def main() -> None:
    args = arguments(
        "compare_power", __doc__ or "", train="train six seeds on this CPU instead of the synthetic pairs",
        unlike="the pairs of unlike lengths alone",
    )  # fmt: skip
    data: dict[str, Any] = {"pairs": PAIRS, "b1": of_b1(), "synthetic": [], "trained": None}
    if args.out.is_file():
        data |= {key: value for key, value in json.loads(args.out.read_text("utf-8")).items() if key in data}
    data["b1"] = of_b1()
    if args.train:
        with tempfile.TemporaryDirectory() as name:
            data["trained"] = of_runs(train(Path(name)))
        print(json.dumps(data["trained"], indent=1))
    elif args.unlike:
        with ProcessPoolExecutor(2) as pool:
            wanted = [(row["noise"], row["steps"]) for row in data["synthetic"]]
            found = pool.map(unlike_of, *zip(*wanted, strict=True))
            data["synthetic"] = [row | {"unlike_lengths": u} for row, u in zip(data["synthetic"], found, strict=True)]
    else:
        with ProcessPoolExecutor(2) as pool:
            wanted = [(name, steps) for name in NOISES for steps in (200, 1000)]
            data["synthetic"] = list(pool.map(row_of, *zip(*wanted, strict=True)))
    report(args.out, data)


if __name__ == "__main__":
    main()
