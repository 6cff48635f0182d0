"""The estimate of reserved memory, against traces of the same runs.

python benchmarks/reserved.py               (60 random configs; about twenty minutes of one core)
python benchmarks/reserved.py --pairs 200

The estimate replays its own list of tensors through the simulator of PyTorch's caching allocator; the trace replays
those of the real step on fake CUDA tensors. "needed" is the least memory under which the trace's replay does not run
out. Finished rows are reused for the same code, so that a stopped run resumes.
"""

import json
import random
from collections.abc import Iterator
from statistics import median
from typing import Any

from common import parser_of, report

from foretrain.base.errors import UserError
from foretrain.config.resolve import from_values
from foretrain.hardware.catalogue import find
from foretrain.predict.allocator.replay import replay, smallest_limit_bytes
from foretrain.predict.plan import plan
from foretrain.predict.spec import StepSpec
from foretrain.predict.trace import service
from foretrain.predict.trace.forecast import requests_for

CARDS = ["RTX 4070", "RTX 4090", "RTX 3060 12GB", "Tesla T4", "H100 SXM"]


def drawn(seed: int) -> tuple[dict[str, Any], str]:
    r = random.Random(seed)
    width = r.choice([128, 256, 384, 512, 768, 1024])
    settings: dict[str, Any] = {
        "n_layer": r.choice([2, 4, 6, 8, 12]), "n_head": width // 64, "n_embd": width,
        "block_size": r.choice([128, 256, 512, 1024]), "batch_size": r.choice([1, 2, 4, 8, 12, 16, 24, 32]),
        "gradient_accumulation_steps": r.choice([1, 2, 3, 8]), "vocab_size": r.choice([256, 4096, 50304, 50304, 50257]),
        "dropout": r.choice([0.0, 0.0, 0.1]), "bias": r.random() < 0.3, "dtype": r.choice(["bfloat16", "float16", "float32"]),
        "compile": r.random() < 0.4, "eval_iters": r.choice([1, 20]), "device": "cuda",
    }  # fmt: skip
    ours = r.random()
    if ours < 0.15:
        settings["activation_checkpointing"] = True
    elif ours < 0.35:
        settings["loss_chunk_size"] = 1024
    elif ours < 0.45:
        settings["optimizer"] = r.choice(["adamw8bit", "muon"])
    elif ours < 0.55:
        settings |= {"recipe": "modern", "dropout": 0.0, "bias": False}
    return settings, r.choice(CARDS)


def compared(settings: dict[str, Any], card: str) -> Iterator[dict[str, Any]]:
    config = from_values(settings).config
    made = plan(config, find(card))
    for memory in made.memory:
        traces = service.traces(
            requests_for(
                StepSpec.of(config, made.gpu, memory.step or made.step, dtype=made.dtype, compiled=made.compiled)
            )
        )
        for trace in traces[:1]:
            run = replay(trace)
            estimated = max(phase.reserved_bytes or 0 for phase in memory.phases if phase.phase != "resume")
            yield {
                "knobs": settings, "gpu": made.gpu.name, "dtype": made.dtype, "step": memory.step,
                "mode": "compiled" if made.compiled else "eager", "estimate_reserved_bytes": estimated,
                "trace_reserved_bytes": run.peak_reserved_bytes, "estimate_allocated_bytes": memory.worst.allocated_bytes,
                "trace_allocated_bytes": run.peak_allocated_bytes, "needed_bytes": smallest_limit_bytes(trace, physical=True),
            }  # fmt: skip


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the errors of the estimate, for each step and mode."""
    found = []
    for mode in ("eager", "compiled"):
        for step in ("foretrain", "nanogpt"):
            if own := [row for row in rows if (row["mode"], row["step"]) == (mode, step)]:
                errors = sorted(row["estimate_reserved_bytes"] / row["trace_reserved_bytes"] - 1 for row in own)
                over = sorted(row["trace_reserved_bytes"] / row["trace_allocated_bytes"] for row in own)
                lives = sorted(row["needed_bytes"] / row["estimate_reserved_bytes"] for row in own)
                found.append({
                    "mode": mode, "step": step, "configs": len(own), "median_abs_error": median(map(abs, errors)),
                    "lowest_error": errors[0], "highest_error": errors[-1],
                    "within_2_percent": sum(abs(e) <= 0.02 for e in errors),
                    "reserved_over_allocated": [over[0], median(over), over[-1]],
                    "needed_over_estimate": [lives[0], median(lives), lives[-1]],
                })  # fmt: skip
    return found


def main() -> None:
    parser = parser_of(__doc__, "reserved")
    parser.add_argument("--pairs", type=int, default=60)
    options = parser.parse_args()
    kept = json.loads(options.out.read_text("utf-8")) if options.out.exists() else {}
    code = service.code_digest()
    rows = [row for row in kept["rows"] if row["seed"] < options.pairs] if kept.get("code") == code else []
    for seed in range(options.pairs):
        if any(row["seed"] == seed for row in rows):
            continue
        settings, card = drawn(seed)
        try:
            rows += [{"seed": seed, **row} for row in compared(settings, card)]
        except (UserError, service.TraceUnavailable) as error:
            print(f"{seed}: {error}", flush=True)
        if seed % 10 == 9 or seed == options.pairs - 1:
            report(options.out, {"code": code, "summary": summary(rows), "rows": rows})


if __name__ == "__main__":
    main()
