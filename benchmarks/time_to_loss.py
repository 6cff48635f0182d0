"""Steps and time to a loss on a CPU: nanoGPT's recipe, the same with a tuned learning rate, and `recipe = modern`.

    python benchmarks/time_to_loss.py                  (4 x 128: the runs that are missing; about ten minutes of one core)
    python benchmarks/time_to_loss.py --model 6x384    (two hours of one core)
    python benchmarks/time_to_loss.py --sweep          (the learning rates of the tuned baseline, one seed; three minutes)
    python benchmarks/time_to_loss.py --times          (seconds a step at 4 x 128; two minutes, leave the machine idle)

4 x 128 is the config of nanoGPT's README for a CPU (context 64, batch 12, 2000 steps), 6 x 384 that of its baby GPT
(context 256, batch 8). Both train on the built-in corpus in bytes; each loss is over the same 51,200 bytes of the
validation split. The modern recipe runs a share of the steps, with as many tokens a step and a schedule of its own
length; once also with a tokenizer of this corpus, whose loss is that of the whole split in nats a byte.

Losses and seconds are measured apart, since a loss does not depend on what else the machine does. A run's time is its
steps times the seconds of one, without evaluations. Seconds are those of nanoGPT's own step (nanogpt_step.py: eager,
float32) and of foretrain's step of the modern recipe in the dtype that `train` takes, in turns in one process, with as
many threads as PyTorch uses by itself. At 6 x 384 the losses of both are those of bfloat16 matmuls, so that a run
takes half as long; nanoGPT's seconds stay those of float32.

Each run is kept in the JSON when it is done, and not repeated as long as its config is the same. `--minutes 5` stops
after so many; the run that is not done then goes on where it was at the next call.
"""

import fcntl
import hashlib
import json
import math
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import numpy as np
import torch
from common import RESULTS, parser_of, report
from nanogpt_step import Contestant, Foretrain, NanoGptTraining

from foretrain.config.options import RunConfig
from foretrain.config.resolve import from_values
from foretrain.data.batches import TokenFile, evaluation_batches
from foretrain.data.builtin import prepare_built_in
from foretrain.data.dataset import DatasetInfo
from foretrain.model.step import build, evaluation_loss, learning_rate, train_step
from foretrain.training.device import TORCH_DTYPES, keep_memory
from tests.kit.batches import train_batches

STEPS, SEEDS = 2000, (1, 2, 3)
SHARED: dict[str, Any] = {
    "gradient_accumulation_steps": 1, "vocab_size": 256, "dropout": 0.0, "dataset": "python-stdlib",
    "tokenizer": "byte", "device": "cpu", "compile": False,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "4x128": {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 64, "batch_size": 12},
    "6x384": {"n_layer": 6, "n_head": 6, "n_embd": 384, "block_size": 256, "batch_size": 8},
}
NANOGPT = {"learning_rate": 1e-3, "min_lr": 1e-4, "beta2": 0.99, "warmup_iters": 100}
TUNED_RATE = 4e-3  # the best of SWEEP at 4 x 128 (--sweep)
SWEEP, SWEEP_STEPS = (2e-3, 4e-3, 8e-3), 600
TUNED = {"learning_rate": TUNED_RATE, "min_lr": TUNED_RATE / 10}
PARTS = {"4x128": (4, 6, 8, 10), "6x384": (6, 8, 10)}  # the modern recipe runs one of so many parts of the steps
BPE = {"tokenizer": "bpe", "vocab_size": 1024}  # trained on the training split; the runs are named after it
DTYPE = {"4x128": "float32", "6x384": "bfloat16"}  # that of `train` for the modern recipe; losses of both are of it
TURNS = {"4x128": (7, 10), "6x384": (4, 2)}  # of the measurement of seconds: how many, and steps in each
VALIDATION_BYTES = 51_200
CPU = torch.device("cpu")


def config_of(model: str, recipe: str, steps: int, seed: int, **changes: Any) -> RunConfig:
    settings = {**SHARED, **MODELS[model], "seed": seed, "max_iters": steps, "lr_decay_iters": steps}
    own = {"recipe": "modern"} if recipe == "modern" else NANOGPT
    return from_values({**settings, **own, **changes}).config


def validation_batches(info: DatasetInfo, config: RunConfig) -> list[Any]:
    rows = VALIDATION_BYTES // config.block_size
    options: dict[str, Any] = {"rows": rows, "batch_size": rows // 20, "block": config.block_size, "device": CPU}
    return list(evaluation_batches(TokenFile(info, "val", config.vocab_size), 0, "val", **options))


class Run:
    def __init__(self, config: RunConfig, dtype: str, info: DatasetInfo) -> None:
        self.config, self.step = config, 0
        self.tokens = TokenFile(info, "train", config.vocab_size)
        self.validation = validation_batches(info, config)
        self.state = build(config, CPU, TORCH_DTYPES[dtype], compile=False)
        self.curve: list[dict[str, float]] = []

    def loss(self) -> float:
        return mean(float(evaluation_loss(self.state, batch)) for batch in self.validation)

    def finish(self, every: int, until: float = float("inf")) -> float | None:
        """Take all steps, with an evaluation after every so many; return the last loss. None where the clock reaches
        `until` before.
        """
        c = self.config
        while self.step < c.max_iters:
            if time.monotonic() > until:
                return None
            batches = train_batches(
                self.tokens, c.seed, self.step, batch_size=c.batch_size, accumulation=1, block=c.block_size,
                device=CPU, order=c.data_order,
            )  # fmt: skip
            train_step(self.state, batches, learning_rate(c, self.step))
            self.step += 1
            if self.step % every == 0 or self.step == c.max_iters:
                self.curve.append({"step": self.step, "val_loss": self.loss()})
        return self.curve[-1]["val_loss"]

    @torch.no_grad()
    def nats_per_byte(self, info: DatasetInfo) -> float:
        """Evaluate the whole validation split, window after window, in any tokens."""
        split = json.loads((Path(info.path) / "meta.json").read_text("utf-8"))["splits"]["val"]
        tokens, block = TokenFile(info, "val", self.config.vocab_size), self.config.block_size
        starts, total = np.arange(0, tokens.tokens - block, block), 0.0
        for rows in np.array_split(starts, len(starts) // 40):
            total += float(evaluation_loss(self.state, tokens.batch(rows, block, CPU))) * len(rows) * block
        return total / (len(starts) * block) * split["tokens"] / split["source_bytes"]

    def save(self, path: Path) -> None:
        state = {"model": self.state.model.state_dict(), "optimizer": self.state.optimizer.state_dict()}
        torch.save({**state, "step": self.step, "curve": self.curve}, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)

    def load(self, path: Path) -> None:
        found = torch.load(path, weights_only=True)
        self.state.model.load_state_dict(found["model"])
        self.state.optimizer.load_state_dict(found["optimizer"])
        self.step, self.curve = found["step"], found["curve"]


def contestants(model: str) -> Iterator[tuple[str, str, int, dict[str, Any]]]:
    yield "nanogpt", "nanogpt", STEPS, {}
    for part in PARTS[model]:
        yield f"modern, 1/{part} of the steps", "modern", STEPS // part, {}
    yield "modern, 1/6 of the steps, BPE of 1,024", "modern", STEPS // 6, BPE
    if model == "4x128":
        yield "nanogpt tuned", "nanogpt", STEPS, TUNED


def losses(out: Path, model: str, seeds: tuple[int, ...], until: float, only: str) -> None:
    """Train every run that the file lacks, as far as the clock allows."""
    for seed in seeds:
        for name, recipe, steps, changes in contestants(model):
            config = config_of(model, recipe, steps, seed, **changes)
            if only not in name or _known(out, model, name, seed, config):
                continue
            info, kept = prepare_built_in(config), _kept(config)
            run = Run(config, DTYPE[model], info)
            if kept.exists():
                run.load(kept)
            loss = run.finish(every=250 if steps == STEPS else 50, until=until)
            if loss is None:
                run.save(kept)
                print(f"{model} {name}, seed {seed}: step {run.step}", flush=True)
                return
            kept.unlink(missing_ok=True)
            whole = run.nats_per_byte(info) if recipe == "modern" else None
            loss = loss if config.tokenizer == "byte" or whole is None else whole
            record = {
                "model": model, "run": name, "seed": seed, "step": steps, "val_loss": loss, "dtype": DTYPE[model],
                "bits_per_byte": whole / math.log(2) if whole else None,
                "date": date.today().isoformat(), "config": fingerprint(config), "curve": run.curve,
            }  # fmt: skip
            print(f"{model} {name}, seed {seed}: {loss:.4f}", flush=True)
            with changed_file(out) as data:
                others = [r for r in data["runs"] if (r["model"], r["run"], r["seed"]) != (model, name, seed)]
                data["runs"] = [*others, record]


def sweep(out: Path) -> None:
    """Train nanoGPT's recipe at other learning rates, one seed."""
    records = []
    for rate in SWEEP:
        config = config_of("4x128", "nanogpt", SWEEP_STEPS, 1, learning_rate=rate, min_lr=rate / 10)
        run = Run(config, "float32", prepare_built_in(config))
        loss = run.finish(every=200)
        records.append({"run": f"{rate:g}", "seed": 1, "step": run.step, "val_loss": loss, "curve": run.curve})
    report(out, {"what": "nanoGPT's recipe at other learning rates", "steps": SWEEP_STEPS, "runs": records})


def fingerprint(config: RunConfig) -> str:
    return hashlib.sha256(config.model_dump_json().encode()).hexdigest()[:12]


def _kept(config: RunConfig) -> Path:
    """Return the path of an unfinished run's state."""
    return Path(tempfile.gettempdir()) / f"time-to-loss-{fingerprint(config)}.pt"


def _known(out: Path, model: str, name: str, seed: int, config: RunConfig) -> bool:
    wanted = (model, name, seed, fingerprint(config))
    return any((r["model"], r["run"], r["seed"], r["config"]) == wanted for r in read(out)["runs"])


def read(out: Path) -> dict[str, Any]:
    empty: dict[str, Any] = {"runs": [], "steps_s": {}}
    return {**empty, **json.loads(out.read_text("utf-8"))} if out.exists() else empty


@contextmanager
def changed_file(out: Path) -> Iterator[dict[str, Any]]:
    """Yield the file's contents to change, and write them back with the table; one process at a time."""
    with (out.parent / f".{out.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        data = read(out)
        yield data
        order = {(m, name): i for i, (m, name) in enumerate((m, c[0]) for m in MODELS for c in contestants(m))}
        data["runs"].sort(key=lambda r: (order.get((r["model"], r["run"]), 99), r["seed"]))
        _report(out, data)
    Path(lock.name).unlink(missing_ok=True)


def seconds(model: str, *, rounds: int, steps: int) -> dict[str, Any]:
    """Time nanoGPT's own step and the modern recipe's, `rounds` turns of `steps` steps each."""
    plain, ours = config_of(model, "nanogpt", STEPS, 1), config_of(model, "modern", STEPS, 1)
    bpe = config_of(model, "modern", STEPS, 1, **BPE)
    all_three: tuple[Contestant, ...] = (
        NanoGptTraining(plain, CPU, "float32", prepare_built_in(plain), compiled=False),
        *(Foretrain(c, CPU, DTYPE[model], prepare_built_in(c), compiled=False) for c in (ours, bpe)),
    )
    number = 0
    found: tuple[list[float], ...] = ([], [], [])
    for _ in range(rounds + 1):
        for contestant, times in zip(all_three, found, strict=True):
            started = time.perf_counter()
            for step in range(number, number + steps):
                contestant.step(step)
            times.append((time.perf_counter() - started) / steps)
        number += steps
    nanogpt, modern, of_bpe = (times[1:] for times in found)  # the first turn warms up
    ratios = [b / a for a, b in zip(nanogpt, modern, strict=True)]
    return {
        "threads": torch.get_num_threads(), "steps_a_turn": steps, "modern_dtype": DTYPE[model],
        "nanogpt_step_s": median(nanogpt), "modern_step_s": median(modern), "bpe_step_s": median(of_bpe),
        "nanogpt_turns_s": nanogpt, "modern_turns_s": modern, "bpe_turns_s": of_bpe,
        "ratio": median(ratios), "lowest_ratio": min(ratios), "highest_ratio": max(ratios),
        "bpe_ratio": median(b / a for a, b in zip(nanogpt, of_bpe, strict=True)),
    }  # fmt: skip


def _report(out: Path, data: dict[str, Any]) -> None:
    kept = {"tuned_learning_rate": TUNED_RATE, "table": table(data), "steps_s": data["steps_s"], "runs": data["runs"]}
    report(out, {"what": (__doc__ or "").splitlines()[0], **kept})


def table(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each recipe at each size: losses by seed, mean and standard deviation, shares of steps and of
    time.
    """
    rows: list[dict[str, Any]] = []
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run in data["runs"]:
        groups.setdefault((run["model"], run["run"]), []).append(run)
    for (model, name), own in groups.items():
        found, steps = [run["val_loss"] for run in own], own[0]["step"]
        row = {
            "model": model, "run": name, "steps": steps, "seeds": [run["seed"] for run in own], "losses": found,
            "mean": mean(found), "steps_share": steps / STEPS,
        }  # fmt: skip
        if len(found) > 1:
            row["sd"] = stdev(found)
        if model in data["steps_s"]:
            kind = "bpe_ratio" if "BPE" in name else "ratio"
            ratio = data["steps_s"][model][kind] if name.startswith("modern") else 1.0
            row["wall_share"] = steps / STEPS * ratio
        rows.append(row)
    return rows


def main() -> None:
    parser = parser_of(__doc__, "time_to_loss")
    parser.add_argument("--model", choices=MODELS, default="4x128")
    parser.add_argument("--seeds", type=int, nargs="*", default=SEEDS)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after so many")
    parser.add_argument("--only", default="", help="runs whose names have this in them")
    parser.add_argument("--sweep", action="store_true", help="the baseline's learning rates")
    parser.add_argument("--times", action="store_true", help="seconds a step")
    options = parser.parse_args()
    keep_memory()  # as the trainer does
    if options.times:
        rounds, steps = TURNS[options.model]
        found = seconds(options.model, rounds=rounds, steps=steps)
        with changed_file(options.out) as data:
            data["steps_s"][options.model] = found
        return
    torch.set_num_threads(1)
    if options.sweep:
        sweep(RESULTS / "time_to_loss_sweep.json")
    else:
        until = time.monotonic() + 60 * options.minutes
        losses(options.out, options.model, tuple(options.seeds), until, options.only)


if __name__ == "__main__":
    main()
