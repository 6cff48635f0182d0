"""What each part of `recipe = modern` gains at 4 x 128, and what was tried and left out.

    python benchmarks/recipe_parts.py                 (the runs that are missing; half an hour of one core)
    python benchmarks/recipe_parts.py --tuning        (the choices, on another corpus with other seeds; half an hour)

Each run is a process of its own with one thread, a sixth of nanoGPT's 2000 steps and a schedule of that length. A part
is left out (or another one tried) with everything else unchanged; what it gains is the difference to the recipe with
the same seed, so the spread of these differences over the seeds is the noise of that gain.

`--tuning` does it where the recipe's rates and parts were chosen (time_to_loss_choices.json is the record of those
choices, with 333 steps each): the C++ headers that come with PyTorch (without those that a program wrote, below ops/),
one file in twenty held out, seeds 11 and 12. The table of the parts is of the built-in corpus and seeds 1 to 3, which
chose nothing.
"""

import argparse
import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from common import RESULTS, report
from time_to_loss import SEEDS, STEPS, Run, config_of, fingerprint

from foretrain.config.options import RunConfig
from foretrain.data.builtin import prepare_built_in
from foretrain.data.dataset import DATA_DIR, DatasetInfo, read_info
from foretrain.model import modern, muon
from foretrain.training.device import keep_memory

PART_STEPS, TUNING_SEEDS = STEPS // 6, (11, 12)
OUT = {False: RESULTS / "time_to_loss_parts.json", True: RESULTS / "time_to_loss_tuning.json"}


def tuning_corpus() -> DatasetInfo:
    """The headers of PyTorch as token files in bytes, byte 0 after each; made once."""
    root = Path(torch.__file__).parent / "include"
    folder = DATA_DIR / f"headers-{torch.__version__.partition('+')[0]}"
    if not (folder / "val.bin").exists():
        folder.mkdir(parents=True, exist_ok=True)
        splits: dict[str, list[bytes]] = {"train": [], "val": []}
        for path in sorted(root.rglob("*.h")):
            name = path.relative_to(root).as_posix()
            if "/ops/" not in name:
                digest = hashlib.sha256(name.encode()).digest()
                held_out = int.from_bytes(digest[:4], "big") % 20 == 0
                splits["val" if held_out else "train"] += [path.read_bytes(), b"\0"]
        for split, parts in splits.items():
            np.frombuffer(b"".join(parts), dtype=np.uint8).astype(np.uint16).tofile(folder / f"{split}.bin")
    return read_info(folder)


# -- the recipe without a part, and with others -------------------------------------------------------------

Patch = Callable[[], None]
_plain_norm = modern.norm


def _set(module: Any, name: str, value: Any) -> Patch:
    return lambda: setattr(module, name, value)


def _initialised(change: Callable[[Any, RunConfig], None]) -> Patch:
    """The model with something changed after it is made."""

    def patch() -> None:
        made = modern.ModernGPT.__init__

        def init(self: Any, config: RunConfig) -> None:
            made(self, config)
            change(self, config)

        modern.ModernGPT.__init__ = init

    return patch


def _learned_positions() -> None:
    """nanoGPT's: a table added to the embedding."""

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
    """GPT-2's initialisation of what adds to the residual stream."""
    for name, weight in self.named_parameters():
        if name.endswith(("out.weight", "down.weight")):
            torch.nn.init.normal_(weight, std=0.02 / (2 * config.n_layer) ** 0.5)


def _freeze(ending: str) -> Callable[[Any, RunConfig], None]:
    """Parameters of this name stay what they are at the start."""

    def freeze(self: Any, config: RunConfig) -> None:
        for name, weight in self.named_parameters():
            if name.endswith(ending):
                weight.register_hook(torch.zeros_like)

    return freeze


def _five_iterations() -> None:
    """Newton-Schulz as Keller Jordan's Muon does it: five times one polynomial, from the Frobenius norm on."""
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


def _before(x: torch.Tensor) -> torch.Tensor:
    """Of each token what the one before it has (dimension 1 is the context's), of the first zeros."""
    return torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1]), 1)


def _shift_in_blocks() -> None:
    """A share of the token before in what attention reads, in every block."""
    made = modern.Block.__init__

    def init(self: Any, n_embd: int, n_head: int) -> None:
        made(self, n_embd, n_head)
        self.mix = torch.nn.Parameter(torch.zeros(n_embd))

    def forward(self: Any, x: Any, x0: Any, cos: Any, sin: Any) -> Any:
        x = torch.addcmul(x, x0, self.skip)
        h = modern.norm(x, cos.dtype)
        x = x + self.attention(torch.addcmul(h, _before(h), self.mix), cos, sin)
        return x + self.mlp(modern.norm(x, cos.dtype))

    modern.Block.__init__, modern.Block.forward = init, forward


def _shift_keys() -> None:
    """Half of each key is that of the token before."""

    def forward(self: Any, x: Any, cos: Any, sin: Any) -> Any:
        B, T, C = x.shape
        qk = modern.rotate(self.qk(x).view(B, T, 2 * self.n_head, -1), cos, sin)
        q, k = modern.norm(qk, qk.dtype).split(self.n_head, dim=2)
        same, shifted = k.chunk(2, -1)
        k = torch.cat((same, _before(shifted)), -1)
        v = self.v(x).view(B, T, self.n_head, -1)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return self.out(y.transpose(1, 2).reshape(B, T, C))

    modern.Attention.forward = forward


def _cap_logits() -> None:
    """15·tanh(x / 15), as nanochat does."""

    def whole_loss(self: Any, hidden: Any, targets: Any) -> Any:
        logits = 15 * torch.tanh(self.lm_head(hidden).float() / 15)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))

    modern.ModernGPT.whole_loss = whole_loss


def _value_embeddings() -> None:
    """A table for each block, added to its values (Zhou et al. 2024, arXiv:2410.17897; modded-nanogpt)."""

    def add(self: Any, config: RunConfig) -> None:
        for block in self.blocks:
            block.attention.table = torch.nn.Embedding(config.vocab_size, config.n_embd)
            torch.nn.init.normal_(block.attention.table.weight, std=modern.EMBEDDING_STD)
            layer = block.attention.v
            layer.register_forward_hook(lambda _, x, y, own=block.attention: y + own.table(own.ids))

    def embed(self: Any, idx: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            block.attention.ids = idx
        return plain(self, idx)

    plain = modern.ModernGPT.embed
    _initialised(add)()
    modern.ModernGPT.embed = embed


def _normuon() -> None:
    """Updates of each neuron brought to one size by their running mean square (Li et al. 2025, arXiv:2510.05491)."""
    plain, kept = muon.newton_schulz, {}

    def iterate(x: torch.Tensor) -> torch.Tensor:
        y = plain(x).float()
        dim = -1 if y.shape[-2] >= y.shape[-1] else -2
        size = y.square().mean(dim, keepdim=True)
        count, squares = kept.get(y.shape, (0, torch.zeros_like(size)))
        kept[y.shape] = (count + 1, squares.lerp_(size, 0.05))
        even = y * (squares / (1 - 0.95 ** (count + 1)) + 1e-10).rsqrt()
        lengths = [z.norm(dim=(-2, -1), keepdim=True).clamp_min(muon.EPS) for z in (y, even)]
        return even * (lengths[0] / lengths[1])

    muon.newton_schulz = iterate


NOTHING: Patch = lambda: None  # noqa: E731
WITHOUT: dict[str, tuple[Patch, dict[str, Any]]] = {
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
TRIED: dict[str, tuple[Patch, dict[str, Any]]] = {
    "share of the token before in every block": (_shift_in_blocks, {}),
    "half of each key from the token before": (_shift_keys, {}),
    "value embeddings": (_value_embeddings, {}),
    "logits capped at 15": (_cap_logits, {}),
    "NorMuon": (_normuon, {}),
    "a warm-up of 20 steps": (NOTHING, {"warmup_iters": 20}),
    "each window once": (NOTHING, {"data_order": "epochs"}),
    "half of the tokens a step": (NOTHING, {"batch_size": 6}),
}
RATES: dict[str, dict[str, Any]] = {
    **{f"muon_learning_rate {rate:g}": {"muon_learning_rate": rate} for rate in (0.01, 0.03, 0.04)},
    **{f"learning_rate {rate:g}": {"learning_rate": rate} for rate in (0.003, 0.01)},
    **{f"cooldown {share:g}": {"cooldown": share} for share in (0.75, 1.0)},
    **{f"muon_momentum {momentum:g}": {"muon_momentum": momentum} for momentum in (0.8, 0.9)},
    "beta2 0.99": {"beta2": 0.99},
}
CASES = {**WITHOUT, **TRIED, **{name: (NOTHING, knobs) for name, knobs in RATES.items()}}


def one(name: str, seed: int, tuning: bool) -> None:
    """One run in this process, which it changes; its record goes to stdout."""
    patch, knobs = CASES[name]
    patch()
    config = config_of("4x128", "modern", PART_STEPS, seed, **knobs)
    run = Run(config, "float32", tuning_corpus() if tuning else prepare_built_in(config))
    loss = run.finish(every=PART_STEPS)
    print(json.dumps({"run": name, "seed": seed, "val_loss": loss, "config": fingerprint(config)}))


def missing(out: Path, seeds: tuple[int, ...], names: list[str], tuning: bool) -> None:
    """Every run that the file does not have, each kept when it is done."""
    for name in names:
        for seed in seeds:
            own = fingerprint(config_of("4x128", "modern", PART_STEPS, seed, **CASES[name][1]))
            if (name, seed, own) in {(r["run"], r["seed"], r.get("config")) for r in _read(out)}:
                continue
            words = [sys.executable, __file__, "--one", name, str(seed), *(["--tuning"] if tuning else [])]
            record = json.loads(subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout)
            print(name, seed, f"{record['val_loss']:.4f}", flush=True)
            _write(out, [*(r for r in _read(out) if (r["run"], r["seed"]) != (name, seed)), record])


def _read(out: Path) -> list[dict[str, Any]]:
    return json.loads(out.read_text("utf-8"))["runs"] if out.exists() else []


def gains(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each part the mean loss, and the difference to all parts with its standard deviation over the seeds."""
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


def _write(out: Path, runs: list[dict[str, Any]]) -> None:
    table = gains(runs)
    rows = [
        [row["part"], f"{row['loss']:.4f}", f"{row['more']:+.4f}",
         "" if row["more_sd"] is None else f"± {row['more_sd']:.4f}"] for row in table
    ]  # fmt: skip
    data = {
        "what": "The modern recipe without one part, and with others",
        "steps": PART_STEPS,
        "tried": [*TRIED, *RATES],
    }
    title = f"Validation loss after {PART_STEPS} steps"
    report(out, title, ["recipe", "loss", "against all parts", "noise"], rows, {**data, "table": table, "runs": runs})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tuning", action="store_true", help="on the tuning corpus and seeds")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--only", nargs="*", help="these parts")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_memory()  # as the trainer does
    if options.one:
        one(options.one[0], int(options.one[1]), options.tuning)
        return
    seeds, default = (TUNING_SEEDS, [*CASES]) if options.tuning else (SEEDS, [*WITHOUT, *TRIED])
    missing(OUT[options.tuning], seeds, options.only or default, options.tuning)


if __name__ == "__main__":
    main()
