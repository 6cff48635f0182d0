"""foretrain's training step against nanoGPT's: same model, same initial weights, same batches, same machine.

    python benchmarks/against_nanogpt.py                       (all three models, half an hour on two cores)
    python benchmarks/against_nanogpt.py --only 4x128 --threads 1
    python benchmarks/against_nanogpt.py --device cuda --out gpu_against.json     (under 9 minutes on a card)

On a CPU all contestants stand in one process and train a block of steps in turn; a round's ratio is between blocks that
follow each other. Blocks during which other programs took more than OUTSIDE of the cores are not counted. With
--threads 1 a block is timed by the process's CPU time, which other programs hardly move. On a card each stands alone,
as a card may not hold two. The losses of all steps are compared with those of nanoGPT.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from common import RESULTS, show, versions
from nanogpt_step import Contestant, Foretrain, NanoGptTraining

from foretrain.config.options import RunConfig
from foretrain.config.shape import ModelShape
from foretrain.data.builtin import prepare_built_in
from foretrain.data.dataset import DatasetInfo
from foretrain.hardware.cpu import cpu_flags, usable_cores
from foretrain.training import starting
from foretrain.training.device import Placement, keep_memory, place

OUTSIDE = 0.10  # share of the cores that other programs may take
# Two curves are the same within the rounding of bfloat16 when no loss differs by more than a unit in its last place.
ROUNDING = 2**-8
RECIPE = {
    "gradient_accumulation_steps": 1, "dataset": "python-stdlib", "learning_rate": 1e-3, "min_lr": 1e-4,
    "warmup_iters": 100, "max_iters": 2000, "lr_decay_iters": 2000, "beta2": 0.99,
}  # fmt: skip


@dataclass(frozen=True)
class Model:
    """One model: knobs, steps in a block, rounds. `losses`: at so many steps the curves are compared."""

    name: str
    knobs: dict[str, Any]
    block: int
    rounds: int
    target: float


MODELS = [
    Model("4x128", {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 64, "batch_size": 12, "vocab_size": 256},
          20, 10, 2.0),
    Model("6x384", {"n_layer": 6, "n_head": 6, "n_embd": 384, "block_size": 256, "batch_size": 8, "vocab_size": 256},
          2, 11, 3.0),
    Model("124M", {"block_size": 512, "batch_size": 8, "vocab_size": 50304}, 1, 3, 4.2),
]  # fmt: skip
ON_CARD = [
    Model("124M, micro-batch 12", {"batch_size": 12}, 10, 1, 1.0),
    Model("40M, micro-batch 16", {"n_head": 12, "n_embd": 384, "batch_size": 16}, 10, 1, 1.0),
]
TINY = Model(
    "tiny", {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 32, "batch_size": 4, "vocab_size": 256}, 2, 2, 0
)


@dataclass
class Entry:
    """A contestant and what it did. `block_s`: seconds a step of each block, None where it was disturbed."""

    name: str
    compiled: bool
    dtype: str
    make: Callable[[], Contestant]
    chosen: dict[str, Any] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    block_s: list[float | None] = field(default_factory=list)
    first_s: float = 0.0
    peak_bytes: int | None = None
    error: str = ""
    own: Any = None

    @property
    def label(self) -> str:
        return f"{self.name} {'compiled' if self.compiled else 'eager'} {self.dtype}"

    def start(self, steps: int) -> None:
        """Build, and take the steps that compile and warm up."""
        began = time.perf_counter()
        self.own = self.make()
        self.train(steps)
        self.first_s = time.perf_counter() - began

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.losses.append(self.own.step(len(self.losses)))


class Load:
    """What other programs take of the cores between two looks; 0 where the system does not tell."""

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
        """Share of all cores since the look before."""
        wall = (time.perf_counter() - self.wall) * (os.cpu_count() or 1)
        return max(0.0, (self._busy_s() - self.busy) - (self._own_s() - self.own)) / wall


def time_block(entry: Entry, steps: int, threads: int) -> float | None:
    """Seconds a step; None where the machine was not ours."""
    load, cpu = Load(), threads == 1
    clock = time.process_time if cpu else time.perf_counter
    began = clock()
    entry.train(steps)
    took = (clock() - began) / steps
    return took if cpu or load.outside() <= OUTSIDE else None


def entries(
    config: RunConfig, placement: Placement, info: DatasetInfo, dtypes: list[str], *, patched: bool
) -> list[Entry]:
    """nanoGPT eager and compiled, and foretrain as it would train, compiled and not. `patched`: nanoGPT changed to
    autocast on a CPU, too, whose losses show what rounding to bfloat16 does to a curve."""
    device = placement.device
    modes = [False, True] if placement.compiled else [False]
    found = []
    for dtype in dtypes:
        for compiled in modes if device.type == "cpu" else modes[-1:]:
            make = lambda d=dtype, c=compiled: NanoGptTraining(config, device, d, info, compiled=c)  # noqa: E731
            found.append(Entry("nanoGPT", compiled, "float32" if device.type == "cpu" else dtype, make))
        if device.type == "cpu" and patched:
            make = lambda: NanoGptTraining(config, device, "bfloat16", info, compiled=False, autocast=True)  # noqa: E731
            found.append(Entry("nanoGPT with autocast", False, "bfloat16", make))
        chosen = starting.decide(config, placement, set()) if device.type == "cpu" else None
        ways = [chosen.config] if chosen else [
            config.model_copy(update={"dtype": dtype, "master_weights": masters}) for masters in (False, True)
        ]  # fmt: skip
        for own in ways:
            for compiled in modes if device.type == "cpu" else modes[-1:]:
                make = lambda c=own, m=compiled: Foretrain(c, device, c.dtype, info, compiled=m)  # noqa: E731
                picked = {key: getattr(own, key) for key in starting.CHOSEN}
                found.append(Entry("foretrain", compiled, own.dtype, make, picked))
    return found


def alternate(all: list[Entry], model: Model, threads: int, end: float) -> None:
    """Rounds of one block each, in turn. The order is turned around in every other round."""
    for entry in all:
        entry.start(min(2, model.block))  # a block of one is a large model, whose first step is as the others
    for round in range(model.rounds):
        if time.monotonic() > end and round >= 2:
            break
        for entry in all if round % 2 == 0 else reversed(all):
            entry.block_s.append(time_block(entry, model.block, threads))


def alone(all: list[Entry], model: Model, end: float) -> None:
    """One after the other, each with its own peak of memory."""
    for entry in all:
        if time.monotonic() > end:
            entry.error = "no time left"
            continue
        torch._dynamo.reset()
        on_card = torch.cuda.is_available()
        if on_card:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        try:
            entry.start(5)
            for _ in range(5):
                began = time.perf_counter()
                entry.train(model.block)
                entry.block_s.append((time.perf_counter() - began) / model.block)
            entry.peak_bytes = torch.cuda.max_memory_allocated() if on_card else None
        except Exception as error:  # one failing contestant must not cost the others their time on the card
            entry.error = f"{type(error).__name__}: {str(error)[:300]}"
        entry.own = None


def difference(losses: list[float], reference: list[float]) -> dict[str, float | int]:
    """Of two curves, relative to the reference, over the steps that both took."""
    each = [abs(a - b) / b for a, b in zip(losses, reference, strict=False)]
    return {"steps": len(each), "largest": max(each), "mean": sum(each) / len(each)}


def results(all: list[Entry], config: RunConfig, placement: Placement) -> list[dict[str, Any]]:
    """What each entry did, against the better of nanoGPT's."""
    timed = [e for e in all if any(e.block_s) and not e.error]
    rivals = [e for e in timed if e.name == "nanoGPT"]
    rows = []
    for entry in all:
        row: dict[str, Any] = {
            "name": entry.name, "label": entry.label, "compiled": entry.compiled, "dtype": entry.dtype, "chosen": entry.chosen,
            "first_steps_s": entry.first_s, "losses": entry.losses, "peak_bytes": entry.peak_bytes,
            "blocks_s": entry.block_s, "error": entry.error,
        }  # fmt: skip
        rows.append(row)
        same = [e for e in rivals if e.dtype == entry.dtype or placement.device.type == "cpu"]
        if entry not in timed or not same:
            continue
        clean = [s for s in entry.block_s if s is not None]
        base = min(same, key=lambda e: median(s for s in e.block_s if s is not None))
        row["step_s"], row["lowest_s"], row["highest_s"] = median(clean), min(clean), max(clean)
        row["tokens_per_s"] = config.tokens_per_step / row["step_s"]
        peak = placement.gpu.peak_flop_per_s(entry.dtype)  # type: ignore[arg-type]
        row["mfu"] = row["tokens_per_s"] * ModelShape.of(config).flops_per_token / peak if peak else None
        pairs = [(a, b) for a, b in zip(base.block_s, entry.block_s, strict=False) if a is not None and b is not None]
        ratios = [a / b for a, b in pairs]
        if ratios:
            row["ratio"], row["lowest_ratio"], row["highest_ratio"] = median(ratios), min(ratios), max(ratios)
        row["loss_difference"] = difference(entry.losses, same[0].losses)
    return rows


def lines(rows: list[dict[str, Any]]) -> list[list[str]]:
    """The table's rows."""
    found = []
    for row in rows:
        masters = ", master weights" if row["chosen"].get("master_weights") else ""
        kernels = f", {row['chosen']['attention']}" if row["chosen"].get("attention", "auto") != "auto" else ""
        name = f"{row['label']}{kernels}{masters}"
        if "step_s" not in row:
            found.append([name, row["error"][:40] or "disturbed throughout", *[""] * 6])
            continue
        loss, memory = row["loss_difference"], row["peak_bytes"]
        ratio = (
            f"{row['ratio']:.2f} ({row['lowest_ratio']:.2f} to {row['highest_ratio']:.2f})" if "ratio" in row else "-"
        )
        found.append([
            name, f"{row['step_s'] * 1e3:,.1f} ({row['lowest_s'] * 1e3:,.1f} to {row['highest_s'] * 1e3:,.1f})",
            f"{row['tokens_per_s']:,.0f}", ratio, f"{row['mfu']:.0%}" if row["mfu"] else "-",
            f"{loss['largest']:.2%} in {loss['steps']}", f"{row['first_steps_s']:.0f}",
            f"{memory / 2**30:.2f}" if memory else "-",
        ])  # fmt: skip
    return found


def one_model(model: Model, args: argparse.Namespace, end: float) -> dict[str, Any]:
    """Everything about one model."""
    config = RunConfig.model_validate({**RECIPE, **model.knobs, "device": args.device, "compile": not args.eager})
    placement = place(config)
    info = prepare_built_in(config)
    on_card = placement.device.type == "cuda"
    dtypes = ["bfloat16", "float16"] if on_card else ["float32"]
    long = config.model_copy(update={"max_iters": 10**7})  # so that foretrain measures what to choose
    all = entries(long, placement, info, dtypes, patched=model.name != "124M")
    all = [entry for entry in all if not any(words in entry.label for words in args.skip)]
    if on_card or args.alone:
        alone(all, model, end)
    else:
        torch.set_num_threads(args.threads)
        alternate(all, model, args.threads, end)
    rows = results(all, config, placement)
    columns = ["contestant", "ms a step (range)", "tokens/s", "times nanoGPT (range)", "MFU", "loss differs", "first s",
               "GiB"]  # fmt: skip
    clock = "CPU time of one thread" if not on_card and args.threads == 1 else "wall time"
    show(f"{model.name}: {clock}", columns, lines(rows))
    return {"model": model.name, "knobs": model.knobs, "target": model.target, "threads": args.threads, "clock": clock,
            "rounding": ROUNDING, "contestants": rows}  # fmt: skip


def machine(device: str) -> dict[str, Any]:
    """What the figures hold for."""
    flags = sorted(cpu_flags() & {"avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile"})
    gpu = place(RunConfig(device=device, compile=False)).gpu
    return {"device": gpu.name, "flags": flags, "cores": usable_cores(), "system": f"{platform.system()} {platform.machine()}",
            "capability": torch.backends.cpu.get_cpu_capability()}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "against_nanogpt.json")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--only", help="one model: " + ", ".join(m.name for m in [*MODELS, TINY]))
    parser.add_argument(
        "--skip", action="append", default=[], help='contestants to leave out, such as "nanoGPT compiled"'
    )
    parser.add_argument("--alone", action="store_true", help="one contestant after the other, as on a card")
    parser.add_argument("--eager", action="store_true", help="nothing compiled")
    parser.add_argument(
        "--minutes", type=float, default=30.0, help="start no further round or contestant after this long"
    )
    args = parser.parse_args()
    os.environ["FORETRAIN_CACHE"] = tempfile.mkdtemp()  # what foretrain chooses is measured here and now
    keep_memory()  # as `foretrain train` does; it serves both sides
    end = time.monotonic() + (args.minutes if args.device == "cpu" else min(args.minutes, 8.0)) * 60
    models = [
        m
        for m in [*(MODELS if args.device == "cpu" else ON_CARD), TINY]
        if m.name == args.only or (not args.only and m is not TINY)
    ]
    known = json.loads(args.out.read_text("utf-8")) if args.out.exists() else {"models": []}
    for model in models:
        found = one_model(model, args, end)
        found |= {"date": date.today().isoformat(), "machine": machine(args.device), "versions": versions()}
        same = [(m["model"], m["threads"]) != (found["model"], found["threads"]) for m in known["models"]]
        known["models"] = [m for m, keep in zip(known["models"], same, strict=True) if keep] + [found]
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({"what": (__doc__ or "").splitlines()[0], **known}, indent=1) + "\n", "utf-8")
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
