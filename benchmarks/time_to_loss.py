"""Steps and time to a loss on a CPU: nanoGPT's recipe, the same with a tuned learning rate, and `recipe = modern`.

    python benchmarks/time_to_loss.py            (three seeds; about half an hour of one core)
    python benchmarks/time_to_loss.py --sweep    (the learning rates of the tuned baseline, one seed; ten minutes)
    python benchmarks/time_to_loss.py --parts    (the modern recipe without one part at a time; ten minutes)

The config is that of nanoGPT's README for a CPU (4 layers, 4 heads, 128 wide, context 64, batch 12, 2000 steps) on the
built-in corpus in bytes. The modern recipe runs a quarter and a third of the steps, each a whole schedule of its own.
One thread; the runs of a seed take turns in one process, 25 steps each, so that what disturbs one disturbs all. Seconds
are those of training steps alone, on the clock and of the processor. Each loss is over the same 800 rows of the
validation split.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
from common import RESULTS, arguments, report, show

from foretrain.config.options import RunConfig
from foretrain.config.resolve import from_values
from foretrain.data.batches import TokenFile, evaluation_batches, train_batches
from foretrain.data.builtin import prepare_built_in
from foretrain.model import modern
from foretrain.model.optimizer import learning_rate
from foretrain.model.step import build, evaluation_loss, train_step
from foretrain.training.host_memory import keep_memory

STEPS, SEEDS, TURN = 2000, (1, 2, 3), 25
README: dict[str, Any] = {
    "n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 64, "batch_size": 12, "gradient_accumulation_steps": 1,
    "vocab_size": 256, "dropout": 0.0, "dataset": "python-stdlib", "tokenizer": "byte", "device": "cpu",
    "compile": False,
}  # fmt: skip
NANOGPT = {"learning_rate": 1e-3, "min_lr": 1e-4, "beta2": 0.99, "warmup_iters": 100}
TUNED_RATE = 4e-3  # the best of SWEEP
SWEEP = (2e-3, 4e-3, 8e-3)
SWEEP_STEPS, PART_STEPS = 600, 300
CPU = torch.device("cpu")


def config_of(recipe: str, steps: int, seed: int, **changes: Any) -> RunConfig:
    """nanoGPT's README config under a recipe, with a schedule over `steps`."""
    knobs = {**README, "seed": seed, "max_iters": steps, "lr_decay_iters": steps, **changes}
    return from_values(knobs | ({"recipe": "modern"} if recipe == "modern" else {**NANOGPT, **changes})).config


class Run:
    """One training run that goes on turn by turn."""

    def __init__(self, name: str, config: RunConfig, every: int) -> None:
        self.name, self.config, self.every = name, config, every
        info = prepare_built_in(config)
        self.tokens = TokenFile(info, "train", config.vocab_size)
        val = TokenFile(info, "val", config.vocab_size)
        options: dict[str, Any] = {"rows": 800, "batch_size": 40, "block": config.block_size, "device": CPU}
        self.validation = list(evaluation_batches(val, 0, "val", **options))
        self.state = build(config, CPU, torch.float32, compile=False)
        self.step, self.wall_s, self.cpu_s = 0, 0.0, 0.0
        self.curve: list[dict[str, float]] = []

    @property
    def finished(self) -> bool:
        return self.step == self.config.max_iters

    def turn(self, count: int = TURN) -> None:
        """`count` steps, and an evaluation where one is due."""
        c = self.config
        for _ in range(min(count, c.max_iters - self.step)):
            batches = list(
                train_batches(
                    self.tokens, c.seed, self.step, batch_size=c.batch_size, accumulation=1, block=c.block_size,
                    device=CPU,
                )
            )  # fmt: skip
            wall, cpu = time.perf_counter(), time.process_time()
            train_step(self.state, batches, learning_rate(c, self.step))
            self.wall_s += time.perf_counter() - wall
            self.cpu_s += time.process_time() - cpu
            self.step += 1
            if self.step % self.every == 0 or self.finished:
                loss = mean(float(evaluation_loss(self.state, batch)) for batch in self.validation)
                self.curve.append({"step": self.step, "val_loss": loss, "wall_s": self.wall_s, "cpu_s": self.cpu_s})

    @property
    def record(self) -> dict[str, Any]:
        last = self.curve[-1]
        return {"run": self.name, "seed": self.config.seed, **last, "curve": self.curve}


def together(runs: list[Run]) -> list[dict[str, Any]]:
    """All runs to their ends, in turns."""
    while waiting := [run for run in runs if not run.finished]:
        for run in waiting:
            run.turn()
    for run in runs:
        last = run.curve[-1]
        print(f"{run.name}, seed {run.config.seed}: {last['val_loss']:.4f} in {run.cpu_s:.0f} s", file=sys.stderr)
    return [run.record for run in runs]


def race(out: Path) -> None:
    """The claim: nanoGPT's loss in a quarter of the steps, the tuned one's in a third, and the time that they take."""
    records = []
    for seed in SEEDS:
        quarter, third = (config_of("modern", -(-STEPS // part), seed) for part in (4, 3))
        records += together(
            [
                Run("nanogpt", config_of("nanogpt", STEPS, seed), 100),
                Run("nanogpt tuned", config_of("nanogpt", STEPS, seed, learning_rate=TUNED_RATE, min_lr=TUNED_RATE / 10), 100),
                Run("modern, 1/4 of the steps", quarter, 50),
                Run("modern, 1/3 of the steps", third, 50),
            ]
        )  # fmt: skip
        _report(out, records)  # what is done stays, should the machine be needed


def _report(out: Path, records: list[dict[str, Any]]) -> None:
    rows = [
        [r["run"], str(r["seed"]), f"{r['step']:,}", f"{r['val_loss']:.4f}", f"{r['cpu_s']:.1f}", f"{r['wall_s']:.1f}"]
        for r in records
    ]
    margins = [
        _margins([r for r in records if r["seed"] == seed]) for seed in dict.fromkeys(r["seed"] for r in records)
    ]
    data = {"what": (__doc__ or "").splitlines()[0], "tuned_learning_rate": TUNED_RATE, "margins": margins}
    title = "Validation loss in nats a byte, and seconds of training"
    report(out, title, ["run", "seed", "steps", "val loss", "CPU s", "wall s"], rows, {**data, "runs": records})
    columns = ["seed", *(f"{part} {what}" for part in ("1/4", "1/3") for what in ("nanoGPT", "tuned", "CPU", "wall"))]
    show(
        "Modern: how much lower its loss is than each, and its share of their time",
        columns,
        [_shares(m) for m in margins],
    )


def _margins(runs: list[dict[str, Any]]) -> dict[str, float]:
    """How much lower the modern recipe's losses are, and its time as a share of the mean of both baselines'; one seed."""
    base, tuned, quarter, third = runs
    found = {"seed": base["seed"]}
    for part, short in (("quarter", quarter), ("third", third)):
        for name, long in (("nanogpt", base), ("tuned", tuned)):
            found[f"{part}_below_{name}"] = long["val_loss"] - short["val_loss"]
        found[f"{part}_cpu_share"] = short["cpu_s"] / (base["cpu_s"] / 2 + tuned["cpu_s"] / 2)
        found[f"{part}_wall_share"] = short["wall_s"] / (base["wall_s"] / 2 + tuned["wall_s"] / 2)
    return found


def _shares(margins: dict[str, float]) -> list[str]:
    seed, *rest = margins.values()
    return [f"{seed:.0f}", *(f"{value:.3f}" for value in rest)]


# -- the recipe without one part ---------------------------------------------------------------------------


def _learned_positions() -> None:
    """nanoGPT's: a table added to the embedding."""
    made = modern.ModernGPT.__init__

    def init(self: Any, config: RunConfig) -> None:
        made(self, config)
        self.position = torch.nn.Parameter(torch.randn(config.block_size, config.n_embd) * 0.02)

    def hidden(self: Any, idx: torch.Tensor) -> torch.Tensor:
        x = x0 = modern.norm(self.embedding(idx) + self.position[: idx.shape[1]], torch.float32)
        for block in self.blocks:
            x = block(x, x0, self.cos, self.sin)
        return modern.norm(x, torch.float32)

    modern.ModernGPT.__init__, modern.ModernGPT.hidden = init, hidden
    modern.rotate = lambda x, cos, sin: x


def _tied() -> None:
    made = modern.ModernGPT.__init__

    def init(self: Any, config: RunConfig) -> None:
        made(self, config)
        self.lm_head.weight = self.embedding.weight

    modern.ModernGPT.__init__ = init


def _drawn_projections(run: Run) -> None:
    """GPT-2's initialisation of what adds to the residual stream."""
    for name, weight in run.state.model.named_parameters():
        if name.endswith(("out.weight", "down.weight")):
            torch.nn.init.normal_(weight, std=0.02 / (2 * run.config.n_layer) ** 0.5)


def _no_skip(run: Run) -> None:
    for name, weight in run.state.model.named_parameters():
        if name.endswith("skip"):
            weight.register_hook(torch.zeros_like)


def _patch(module: Any, name: str, value: Any) -> Callable[[], None]:
    return lambda: setattr(module, name, value)


_plain_norm = modern.norm
PARTS: dict[str, tuple[Callable[[], None], Callable[[Run], None], dict[str, Any]]] = {
    "all parts": (lambda: None, lambda run: None, {}),
    "learned positions for RoPE": (_learned_positions, lambda run: None, {}),
    "no QK-norm": (
        _patch(modern, "norm", lambda x, dtype: x if x.dim() == 4 else _plain_norm(x, dtype)), lambda run: None, {},
    ),
    "attention scale of 1": (_patch(modern, "QK_SCALE", 1.0), lambda run: None, {}),
    "GELU for ReLU²": (_patch(modern, "squared_relu", F.gelu), lambda run: None, {}),
    "LayerNorm for RMSNorm": (
        _patch(
            modern, "norm", lambda x, dtype: F.layer_norm(x, x.shape[-1:]) if x.dim() == 3 else _plain_norm(x, dtype)
        ),
        lambda run: None, {},
    ),
    "drawn projections for zeros": (lambda: None, _drawn_projections, {}),
    "tied head": (_tied, lambda run: None, {}),
    "no skip from the embedding": (lambda: None, _no_skip, {}),
    "AdamW 1e-3 for Muon": (lambda: None, lambda run: None, {"optimizer": "adamw", "learning_rate": 1e-3, "min_lr": 0.0}),
    "AdamW 3e-3 for Muon": (lambda: None, lambda run: None, {"optimizer": "adamw", "learning_rate": 3e-3, "min_lr": 0.0}),
    "cosine for linear": (lambda: None, lambda run: None, {"lr_schedule": "cosine"}),
}  # fmt: skip


def parts(out: Path) -> None:
    """Each part of the recipe left out, one at a time, in a process of its own."""
    import subprocess

    rows, records = [], []
    for seed in SEEDS[:2]:
        for name in PARTS:
            words = [sys.executable, __file__, "--one", name, str(seed)]
            done = subprocess.run(words, capture_output=True, text=True, check=True)
            records.append(json.loads(done.stdout.splitlines()[-1]))
            print(name, seed, records[-1]["val_loss"], file=sys.stderr, flush=True)
    for name in PARTS:
        losses = [record["val_loss"] for record in records if record["run"] == name]
        rows.append([name, *(f"{loss:.4f}" for loss in losses)])
    data = {"what": "The modern recipe without one part", "steps": PART_STEPS, "runs": records}
    report(out, f"Validation loss after {PART_STEPS} steps", ["recipe", "seed 1", "seed 2"], rows, data)


def one(name: str, seed: int) -> None:
    """One run of `parts`; its record goes to stdout."""
    before, after, knobs = PARTS[name]
    before()
    run = Run(name, config_of("modern", PART_STEPS, seed, **knobs), 100)
    after(run)
    run.turn(PART_STEPS)
    print(json.dumps(run.record))


def sweep(out: Path) -> None:
    """The baseline at other learning rates, one seed."""
    records = together(
        [
            Run(f"{rate:g}", config_of("nanogpt", SWEEP_STEPS, 1, learning_rate=rate, min_lr=rate / 10), 200)
            for rate in SWEEP
        ]
    )
    rows = [[r["run"], f"{r['val_loss']:.4f}"] for r in records]
    data = {"what": "nanoGPT's recipe at other learning rates", "steps": SWEEP_STEPS, "runs": records}
    report(out, f"nanoGPT's recipe, {SWEEP_STEPS} steps, seed 1", ["learning rate", "val loss"], rows, data)


def main() -> None:
    torch.set_num_threads(1)
    keep_memory()  # as the trainer does
    if sys.argv[1:2] == ["--one"]:
        one(sys.argv[2], int(sys.argv[3]))
        return
    options = arguments(
        "time_to_loss", __doc__ or "", sweep="the baseline's learning rates", parts="the recipe without a part"
    )
    if options.sweep:
        sweep(RESULTS / "time_to_loss_sweep.json")
    elif options.parts:
        parts(RESULTS / "time_to_loss_parts.json")
    else:
        race(options.out)


if __name__ == "__main__":
    main()
