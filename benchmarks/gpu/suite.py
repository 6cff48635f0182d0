"""The GPU suite: predicted against measured memory and time on a real CUDA card, in one call.

    python benchmarks/gpu/suite.py --out results.json              (about 8 minutes on a fast card)
    python benchmarks/gpu/suite.py --device cpu --small            (does the script itself work?)

For every config, eager and compiled, foretrain's own step and nanoGPT's way of writing it (logits returned and kept)
run for a few optimizer steps with an evaluation before and after. Allocated and reserved peaks of each phase come
from torch.cuda, the process's memory from NVML, seconds from steps between two synchronisations. The plan of the same
config on the same card stands beside each figure. What a case raises is written down, and the suite goes on.
"""

import argparse
import gc
import json
import platform
import sys
import time
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from foretrain.config import RunConfig
from foretrain.configfile import from_values
from foretrain.lm.model import GPT
from foretrain.lm.step import TrainState, build, evaluation_loss, train_step
from foretrain.predict.plan import plan
from foretrain.run.device import TORCH_DTYPES, place
from foretrain.run.meter import Meter

WARM_STEPS, TIMED_STEPS = 2, 4
CASES: dict[str, dict[str, Any]] = {
    "case A": {"n_layer": 6, "n_head": 6, "n_embd": 384, "block_size": 512, "batch_size": 16, "gradient_accumulation_steps": 4},
    "case B1": {"n_layer": 12, "n_head": 12, "n_embd": 384, "batch_size": 16, "gradient_accumulation_steps": 4},
    "case C": {"n_layer": 12, "n_head": 12, "n_embd": 576, "batch_size": 16, "gradient_accumulation_steps": 4},
    "124M B8": {"batch_size": 8, "gradient_accumulation_steps": 2},
    "124M B12": {"batch_size": 12, "gradient_accumulation_steps": 2},
    "124M B8 checkpointing": {"batch_size": 8, "gradient_accumulation_steps": 2, "activation_checkpointing": True},
    "124M B8 dropout": {"batch_size": 8, "gradient_accumulation_steps": 2, "dropout": 0.1},
    "characters": {"n_layer": 6, "n_head": 6, "n_embd": 384, "block_size": 256, "batch_size": 64, "vocab_size": 65,
                   "gradient_accumulation_steps": 1},
    "350M B4": {"n_layer": 24, "n_head": 16, "n_embd": 1024, "batch_size": 4, "gradient_accumulation_steps": 2},
}  # fmt: skip
SMALL = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 32, "vocab_size": 96, "batch_size": 4,
         "gradient_accumulation_steps": 2}  # fmt: skip


class NanoGpt(GPT):
    """nanoGPT's forward: logits and loss are returned, and its local names live until it returns."""

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        parts: Any = self.transformer
        tok_emb = parts["wte"](idx)
        pos_emb = parts["wpe"](torch.arange(idx.shape[1], device=idx.device))
        x = parts["drop"](tok_emb + pos_emb)
        for block in parts["h"]:
            x = block(x)
        x = parts["ln_f"](x)
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


class KeepsLogits:
    """Calls the model as nanoGPT's loop does: the last logits stay alive under a name."""

    def __init__(self, model: Any) -> None:
        self.model, self.logits = model, None

    def __call__(self, idx: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.logits, loss = self.model(idx, targets)
        return loss


def batch(config: RunConfig, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (config.batch_size, config.block_size)
    return tuple(torch.randint(0, config.vocab_size, shape, device=device) for _ in range(2))  # type: ignore[return-value]


def make(config: RunConfig, device: torch.device, dtype: torch.dtype, step: str, compiled: bool) -> TrainState:
    state = build(config, device, dtype, compile=compiled and step == "foretrain")
    if step == "nanogpt":
        state.model.__class__ = NanoGpt
        state.call = KeepsLogits(torch.compile(state.model) if compiled else state.model)
    return state


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(config: RunConfig, device: torch.device, dtype: torch.dtype, step: str, compiled: bool) -> dict[str, Any]:
    """Peaks by phase and seconds by step of one case."""
    state, meter = make(config, device, dtype, step, compiled), Meter(device)

    def train() -> None:
        train_step(state, (batch(config, device) for _ in range(config.gradient_accumulation_steps)), 1e-4)

    def evaluate() -> None:
        for _ in range(3):
            evaluation_loss(state, batch(config, device))

    times = []
    with meter.phase("evaluate_first", state):
        evaluate()
    with meter.phase("first_step", state):
        train()
    for number in range(WARM_STEPS + TIMED_STEPS):
        with meter.phase("steady_step", state):
            synchronize(device)
            before = time.perf_counter()
            train()
            synchronize(device)
        if number >= WARM_STEPS:
            times.append(time.perf_counter() - before)
    with meter.phase("evaluate_later", state):
        evaluate()
    return {
        "phases": {name: phase.model_dump(exclude={"phase"}) for name, phase in meter.phases.items()},
        "step_s": median(times), "process_bytes": process_bytes(device),
    }  # fmt: skip


def process_bytes(device: torch.device) -> int | None:
    """What the driver counts on the card; the context is this less what torch has reserved, on an idle card."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def one(name: str, values: dict[str, Any], args: argparse.Namespace, step: str, compiled: bool) -> dict[str, Any]:
    config = from_values({**values, "device": args.device, "dtype": args.dtype, "compile": compiled}).config
    placement = place(config)
    row: dict[str, Any] = {"case": name, "step": step, "compiled": compiled, "config": values, "dtype": placement.dtype}
    forecast = plan(config.model_copy(update={"dtype": placement.dtype}), placement.gpu)
    memory, timing = forecast.memory_of(step), forecast.timing if step == "foretrain" else forecast.nanogpt_timing  # type: ignore[arg-type]
    row["predicted"] = {
        "allocated_bytes": {p.phase: p.allocated_bytes for p in memory.phases},
        "step_s": timing.step_s.model_dump() if timing else None,
    }
    try:
        row["measured"] = measure(config, placement.device, TORCH_DTYPES[placement.dtype], step, compiled)
    except Exception as error:  # one failing case must not cost the others their lease of the card
        row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
        return row
    peaks = row["measured"]["phases"]
    row["errors"] = {
        phase: row["predicted"]["allocated_bytes"][phase] / found["allocated_bytes"] - 1
        for phase, found in peaks.items()
    }
    if timing:
        row["errors"]["step_s"] = timing.step_s.expected_s / row["measured"]["step_s"] - 1
    return row


def release() -> None:
    gc.collect()
    torch._dynamo.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu_suite.json"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--small", action="store_true", help="one tiny case, to try the script")
    parser.add_argument("--minutes", type=float, default=9.0, help="start no further case after this long")
    args = parser.parse_args()
    started, rows = time.monotonic(), []
    cases = {"small": SMALL} if args.small else CASES
    for compiled in (False, True):
        for name, values in cases.items():
            for step in ("foretrain", "nanogpt"):
                if time.monotonic() - started > args.minutes * 60:
                    rows.append(
                        {"case": name, "step": step, "compiled": compiled, "error": "not measured: no time left"}
                    )
                    continue
                row = one(name, values, args, step, compiled)
                rows.append(row)
                shown = " ".join(f"{k} {v:+.1%}" for k, v in row.get("errors", {}).items()) or row.get("error", "")
                print(f"{name:24} {step:10} {'compiled' if compiled else 'eager':9} {shown}", flush=True)
                release()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    document = {
        "what": (__doc__ or "").splitlines()[0], "date": date.today().isoformat(),
        "machine": {"gpu": gpu, "system": f"{platform.system()} {platform.machine()}"},
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda},
        "command": " ".join(sys.argv), "rows": rows,
    }  # fmt: skip
    args.out.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
