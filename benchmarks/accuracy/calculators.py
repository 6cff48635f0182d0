"""Published formulas beside measured runs of docs/trust.md.

python -m benchmarks.accuracy.calculators

Each is written down from its own source, with the options that fit the run best, for whole training steps of uncompiled
models with AdamW on one GPU: their highest measured peak (allocated or requested; where only that was published,
reserved). None of the formulas claims to be that peak: CALCULATORS has what each one counts.
"""

import json
import sys
from collections.abc import Callable
from datetime import date
from statistics import median
from typing import Any, NamedTuple

from benchmarks.accuracy import results
from benchmarks.common import RESULTS

OUT = RESULTS / "accuracy_calculators.json"


class Shape(NamedTuple):
    """A run for a calculator. `linears`: of each MLP, 3 where it is gated."""

    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    context: int
    batch: int
    linears: int = 3
    mixed: bool = False
    recomputes: bool = False

    @property
    def parameters(self) -> int:
        """Count as the programs do: embedding and head apart, norms, learned positions where the MLP is not gated."""
        block = 4 * self.hidden**2 + self.linears * self.hidden * self.ffn + 2 * self.hidden
        positions = 0 if self.linears == 3 else self.context * self.hidden
        return self.layers * block + 2 * self.vocab * self.hidden + self.hidden + positions


def accelerate(run: Shape) -> float:
    """huggingface/accelerate, commands/estimate.py: four times the weights in fp32, or twice in mixed precision."""
    return run.parameters * 4 * (2 if run.mixed else 4)


def deepspeed(run: Shape) -> float:
    """deepspeed/runtime/zero/stage_1_and_2.py, estimate_zero2_model_states_mem_needs, one GPU, nothing offloaded."""
    return run.parameters * (4 + 16)


def cookbook(run: Shape) -> float:
    """EleutherAI/cookbook, calc/calc_transformer_mem.py at 069ae2e, without its optional misc-mem-gib."""
    s, b, h, layers, low = run.context, run.batch, run.hidden, run.layers, 2 if run.mixed else 4
    weights = (
        2 * run.vocab * h + h * s + 8 * h * layers + 2 * h + 4 * layers * h * h + run.linears * layers * h * run.ffn
    )
    each = 16 * low + 2 + (0 if run.recomputes else (2 * low + 1) * run.heads * s / h)
    return weights * (low + 4 + 12) + s * b * h * layers * each


def megatron(run: Shape) -> float:
    """NVIDIA/Megatron-LM, training/theoretical_memory_usage.py at 00caa53, without sequence parallelism."""
    s, b, h = run.context, run.batch, run.hidden
    gated = 1.5 if run.linears == 3 else 1
    layer = 2 * h * (run.ffn * gated + 1) + 4 * h * h
    weights = layer * run.layers + h + 2 * run.vocab * h
    activations = s * b * h * 34 * run.layers + 8 * s * b + s * b * h + 2 * (s * b * run.vocab + s * b * h)
    return weights * 18 + 1.05 * activations


class Calculator(NamedTuple):
    name: str
    says: Callable[[Shape], float]
    counts: str


CALCULATORS = (
    Calculator("accelerate estimate-memory", accelerate, "weights, gradients or Adam's states, the largest; no batch"),
    Calculator("DeepSpeed, ZeRO-2 estimate", deepspeed, "weights, gradients and Adam's states; activations are left out"),
    Calculator(
        "EleutherAI cookbook", cookbook,
        "18 or 20 bytes a weight and activations, with attention written out; no logits; says to add some GiB",
    ),
    Calculator(
        "Megatron-LM's report", megatron, "18 bytes a weight and 16-bit activations, one copy of the logits, 5% on top"
    ),
)  # fmt: skip

NIU = Shape(4, 512, 16, 1344, 10_000, 100, 10)
MEDIUM = Shape(24, 1024, 16, 4096, 10_000, 128, 4)
LARGE = Shape(32, 2560, 32, 10_240, 10_000, 128, 4)
GPT2 = Shape(12, 768, 12, 3072, 50_257, 1024, 8, linears=2)
SHAPES = {
    "cs-n-100": NIU,
    "cs-n-150": NIU._replace(context=150),
    "cs-w-128": MEDIUM,
    "cs-w-512": MEDIUM._replace(context=512, mixed=True),
    "cs-k-128": LARGE,
    "cs-k-256": LARGE._replace(context=256),
    "cs-e-128-fp32": LARGE,
    "cs-e-128-bf16": LARGE._replace(mixed=True),
    "cs-e-512-fp32": LARGE._replace(context=512),
    "cs-e-512-bf16": LARGE._replace(context=512, mixed=True),
    "cs-ec-512-1": LARGE._replace(context=512, recomputes=True),
    "cs-ec-2048-1": LARGE._replace(context=2048, recomputes=True),
    "rb-orig": GPT2,
    "rb-mask": GPT2,
    "rb-tf32": GPT2,
    "rb-fused": GPT2,
}


def peak_of(case: dict[str, Any]) -> dict[str, Any]:
    """Return the figure that stands for a case: its highest peak, reserved only where nothing else was published."""
    figures = [f for f in case["figures"] if f["kind"] in ("allocated", "requested") and "predicted" in f]
    return max(figures or [f for f in case["figures"] if f["kind"] == "reserved"], key=lambda f: f["measured"])


def rows(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return measured, predicted and calculated figures of each case that the formulas can answer."""
    found = []
    for case in cases:
        if (shape := SHAPES.get(case["id"])) is None:
            continue
        figure = peak_of(case)
        found.append(
            {
                "case": case["id"], "what": case["what"], "kind": figure["kind"], "measured": figure["measured"],
                "foretrain": figure["predicted"], "says": {one.name: one.says(shape) for one in CALCULATORS},
            }
        )  # fmt: skip
    return found


def summary(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    groups = {"foretrain": ([row["foretrain"] / row["measured"] - 1 for row in found], "every tensor of the program")}
    for one in CALCULATORS:
        groups[one.name] = ([row["says"][one.name] / row["measured"] - 1 for row in found], one.counts)
    return [
        {
            "calculator": name, "counts": counts, "figures": len(errors), "median_abs_error": median(map(abs, errors)),
            "lowest_error": min(errors), "highest_error": max(errors),
        }
        for name, (errors, counts) in groups.items()
    ]  # fmt: skip


def main() -> int:
    accuracy = json.loads((RESULTS / "accuracy.json").read_text("utf-8"))
    found = rows(accuracy["cases"])
    record = {
        "what": "published formulas beside measured peaks", "date": date.today().isoformat(),
        "summary": summary(found), "rows": found,
    }  # fmt: skip
    results.write(OUT, record)
    print(json.dumps(record["summary"], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
