"""What each part of `recipe = modern` gains at 4 x 128.

    python benchmarks/recipe_parts.py                 (the runs that are missing; half an hour of one core)

Each run is a process of its own with one thread, a sixth of nanoGPT's 2000 steps and a schedule of that length. A part
is left out (or another one put in its place) with everything else unchanged; what it gains is the difference to the
recipe with the same seed, so the spread of these differences over the seeds is the noise of that gain.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from statistics import mean, stdev
from typing import Any

import torch
import torch.nn.functional as F
from common import parser_of, report
from time_to_loss import SEEDS, STEPS, Run, config_of, fingerprint

from foretrain.config.options import RunConfig
from foretrain.data.builtin import prepare_built_in
from foretrain.model import modern, muon
from foretrain.training.device import keep_memory

PART_STEPS = STEPS // 6
Patch = Callable[[], None]
_plain_norm = modern.norm


def _set(module: Any, name: str, value: Any) -> Patch:
    return lambda: setattr(module, name, value)


def _initialised(change: Callable[[Any, RunConfig], None]) -> Patch:
    """Change a model after it is made."""

    def patch() -> None:
        made = modern.ModernGPT.__init__

        def init(self: Any, config: RunConfig) -> None:
            made(self, config)
            change(self, config)

        modern.ModernGPT.__init__ = init

    return patch


def _learned_positions() -> None:
    """Add nanoGPT's table of positions to the embedding."""

    def add(self: Any, config: RunConfig) -> None:
        self.position = torch.nn.Parameter(torch.randn(config.block_size, config.n_embd) * 0.02)

    def embed(self: Any, idx: torch.Tensor) -> torch.Tensor:
        return plain(self, idx) + self.position[: idx.shape[1]]

    plain = modern.ModernGPT.embed
    _initialised(add)()
    modern.ModernGPT.embed = embed
    modern.rotate = lambda x, cos, sin: x


def _tie(self: Any, config: RunConfig) -> None:
    self.lm_head.weight = self.embedding.weight


def _draw_projections(self: Any, config: RunConfig) -> None:
    """Draw residual projections as GPT-2 does."""
    for name, weight in self.named_parameters():
        if name.endswith(("out.weight", "down.weight")):
            torch.nn.init.normal_(weight, std=0.02 / (2 * config.n_layer) ** 0.5)


def _freeze(ending: str) -> Callable[[Any, RunConfig], None]:
    """Freeze parameters of this name."""

    def freeze(self: Any, config: RunConfig) -> None:
        for name, weight in self.named_parameters():
            if name.endswith(ending):
                weight.register_hook(torch.zeros_like)

    return freeze


def _five_iterations() -> None:
    """Iterate Newton-Schulz as Keller Jordan's Muon does: five times one polynomial, from the Frobenius norm on."""
    a, b, c = 3.4445, -4.7750, 2.0315

    def iterate(x: torch.Tensor) -> torch.Tensor:
        tall = x.shape[-2] > x.shape[-1]
        x = x.mT if tall else x
        x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_(min=muon.EPS)
        for _ in range(5):
            square = torch.bmm(x, x.mT)
            x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
        return x.mT if tall else x

    muon.newton_schulz = iterate


NOTHING: Patch = lambda: None  # noqa: E731
CASES: dict[str, tuple[Patch, dict[str, Any]]] = {
    "all parts": (NOTHING, {}),
    "learned positions for RoPE": (_learned_positions, {}),
    "no QK-norm": (_set(modern, "norm", lambda x, dtype: x if x.dim() == 4 else _plain_norm(x, dtype)), {}),
    "attention scale of 1": (_set(modern, "QK_SCALE", 1.0), {}),
    "GELU for ReLU²": (_set(modern, "squared_relu", F.gelu), {}),
    "LayerNorm for RMSNorm": (
        _set(modern, "norm", lambda x, dtype: F.layer_norm(x, x.shape[-1:]) if x.dim() == 3 else _plain_norm(x, dtype)),
        {},
    ),
    "drawn projections for zeros": (_initialised(_draw_projections), {}),
    "tied head": (_initialised(_tie), {}),
    "no skip from the embedding": (_initialised(_freeze("skip")), {}),
    "no share of the token before": (_initialised(_freeze("smear")), {}),
    "AdamW 1e-3 for Muon": (NOTHING, {"optimizer": "adamw", "learning_rate": 1e-3, "min_lr": 0.0}),
    "AdamW 3e-3 for Muon": (NOTHING, {"optimizer": "adamw", "learning_rate": 3e-3, "min_lr": 0.0}),
    "five Newton-Schulz iterations": (_five_iterations, {}),
    "Muon's momentum 0.95 for 0.85": (NOTHING, {"muon_momentum": 0.95}),
    "cosine for linear": (NOTHING, {"lr_schedule": "cosine"}),
}  # fmt: skip


def one(name: str, seed: int) -> None:
    patch, settings = CASES[name]
    patch()
    config = config_of("4x128", "modern", PART_STEPS, seed, **settings)
    loss = Run(config, "float32", prepare_built_in(config)).finish(every=PART_STEPS)
    print(json.dumps({"run": name, "seed": seed, "val_loss": loss, "config": fingerprint(config)}))


def gains(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return for each part the mean loss, and the difference to all parts with its standard deviation over the seeds."""
    by_name: dict[str, dict[int, float]] = {}
    for run in runs:
        by_name.setdefault(run["run"], {})[run["seed"]] = run["val_loss"]
    base, rows = by_name["all parts"], []
    for name in [name for name in CASES if name in by_name]:
        own = {seed: loss for seed, loss in by_name[name].items() if seed in base}
        off = [loss - base[seed] for seed, loss in own.items()]
        row: dict[str, Any] = {"part": name, "seeds": list(own), "loss": mean(own.values()), "more": mean(off)}
        rows.append({**row, "more_sd": stdev(off) if len(off) > 1 else None})
    return rows


def main() -> None:
    parser = parser_of(__doc__, "time_to_loss_parts")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--only", nargs="*", choices=CASES, default=list(CASES), help="these parts")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_memory()  # as the trainer does
    if options.one:
        one(options.one[0], int(options.one[1]))
        return
    runs: list[dict[str, Any]] = json.loads(options.out.read_text("utf-8"))["runs"] if options.out.exists() else []
    for name in options.only:
        for seed in SEEDS:
            own = fingerprint(config_of("4x128", "modern", PART_STEPS, seed, **CASES[name][1]))
            if (name, seed, own) in {(r["run"], r["seed"], r.get("config")) for r in runs}:
                continue
            words = [sys.executable, __file__, "--one", name, str(seed)]
            record = json.loads(subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout)
            print(name, seed, f"{record['val_loss']:.4f}", flush=True)
            runs = [*(r for r in runs if (r["run"], r["seed"]) != (name, seed)), record]
            data = {"what": (__doc__ or "").splitlines()[0], "steps": PART_STEPS}
            report(options.out, {**data, "table": gains(runs), "runs": runs})


if __name__ == "__main__":
    main()
