"""What the documented small-memory configs take: traced for an RTX 4070, beside nanoGPT's own step, and with --cpu
run for real on the CPU's allocator.

python benchmarks/small_memory.py [--cpu] [--out FILE]
python benchmarks/small_memory.py --only gpt2-xl          (the others stay as they were)

`peak`: the highest sum of tensors (torch.cuda.max_memory_allocated). `needs`: what nvidia-smi would show, the
allocator's reserve and 300 MiB of CUDA context included. `time`: the predicted step against nanoGPT's compiled one of
the same model and tokens (catalogue rates; not measured on a GPU).
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretrain.predict.spec import StepSpec

sys.path.insert(0, str(Path(__file__).parent))
from common import RESULTS, report

from foretrain.config.options import RunConfig
from foretrain.config.resolve import resolve
from foretrain.hardware.catalogue import Dtype, find
from foretrain.predict.memory import StepName
from foretrain.predict.plan import plan
from foretrain.predict.speed.time import step_time
from foretrain.predict.trace.forecast import answers_for

GPU = find("RTX 4070")
FOLDER = Path(__file__).parent.parent / "examples" / "small-memory"
# config file, its limit in GiB, and what the limit is of
CASES = (
    ("gpt2-124m", 12.86 / 4, "a quarter of nanoGPT's eager peak"),
    ("gpt2-124m-half", None, "half of nanoGPT's compiled peak"),
    ("gpt2-124m-least", 1.0, "1 GiB, with a host of 4 GB"),
    ("case-c", 4.0, "4 GiB, evaluation included"),
    ("gpt2-350m", 11.0, "11 GiB with AdamW"),
    ("gpt2-350m-16", 11.0, "11 GiB at 16 x 1024"),
    ("gpt2-774m", 11.0, "11 GiB with low-bit states"),
    ("gpt2-xl", 11.0, "11 GiB, AdamW and gradients on the host"),
)
GIB = 2**30


@dataclass(frozen=True)
class Memory:
    """Of one way to run a config."""

    peak_bytes: int
    needed_bytes: int
    phase: str


def traced(config: RunConfig, step: StepName, *, compiled: bool) -> Memory:
    made = plan(config.model_copy(update={"compile": compiled}), GPU)
    answer = answers_for(made, [step], None)[0].memory
    return Memory(answer.worst.allocated_bytes, answer.needed_bytes, answer.worst.phase)


def seconds(config: RunConfig, dtype: Dtype, step: StepName, *, compiled: bool) -> float:
    found = step_time(StepSpec.of(config, GPU, step, dtype=dtype, compiled=compiled))
    assert found
    return found.expected_s


def case(name: str) -> dict[str, Any]:
    config = resolve([str(FOLDER / f"{name}.toml")]).config
    dtype: Any = config.dtype
    ours = traced(config, "foretrain", compiled=config.compile)
    own = {"eager": traced(config, "nanogpt", compiled=False), "compiled": traced(config, "nanogpt", compiled=True)}
    base_s = seconds(config, dtype, "nanogpt", compiled=True)
    return {
        "config": name, "compiled": config.compile, "batch": f"{config.batch_size} x {config.block_size}",
        "peak_bytes": ours.peak_bytes, "needed_bytes": ours.needed_bytes, "phase": ours.phase,
        "nanogpt": {way: {"peak_bytes": m.peak_bytes, "needed_bytes": m.needed_bytes} for way, m in own.items()},
        "time_ratio": seconds(config, dtype, "foretrain", compiled=config.compile) / base_s,
    }  # fmt: skip


def on_cpu(name: str) -> dict[str, Any]:
    """The same config's step on the CPU, eager: traced, and as the allocator had it."""
    from foretrain.predict.trace.self_test import compare

    config = resolve([str(FOLDER / f"{name}.toml")]).config
    small = config.model_copy(update={"gradient_accumulation_steps": 1, "eval_iters": 1})
    truth = compare(small, "bfloat16", "foretrain", compiled=False)
    return {"config": name, "traced_bytes": truth.traced_bytes, "real_bytes": truth.real_bytes}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="also run 124M for real on the CPU (about 5 GB, minutes)")
    parser.add_argument("--only", nargs="+", choices=[name for name, _, _ in CASES], help="these configs")
    parser.add_argument("--out", type=Path, default=RESULTS / "small_memory.json", help="where to write the JSON")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    before = json.loads(args.out.read_text("utf-8")) if args.out.exists() else {"cases": []}
    kept = {found["config"]: found for found in before["cases"] if args.only and found["config"] not in args.only}
    cases = [kept.get(name) or case(name) for name, _, _ in CASES if name in kept or not args.only or name in args.only]
    asked = {name: (limit, of) for name, limit, of in CASES}
    rows = []
    for found in cases:
        limit, of = asked[found["config"]]
        eager, compiled = (found["nanogpt"][way]["peak_bytes"] for way in ("eager", "compiled"))
        rows.append(
            [
                found["config"], found["batch"], f"{found['peak_bytes'] / GIB:.2f}", f"{found['needed_bytes'] / GIB:.2f}",
                f"{eager / GIB:.2f}", f"{compiled / GIB:.2f}", f"{found['peak_bytes'] / eager:.2f}",
                f"{found['peak_bytes'] / compiled:.2f}", f"{found['time_ratio']:.2f}",
                of if limit is None else f"{of} ({limit:.2f})",
            ]
        )  # fmt: skip
    data: dict[str, Any] = {"gpu": GPU.name, "cases": cases, **({"cpu": before["cpu"]} if "cpu" in before else {})}
    if args.cpu:
        data["cpu"] = on_cpu("gpt2-124m")
        print(
            f"on the CPU: traced {data['cpu']['traced_bytes'] / GIB:.3f} GiB, real {data['cpu']['real_bytes'] / GIB:.3f}"
        )
    columns = [
        "config",
        "batch",
        "peak GiB",
        "needs",
        "nanoGPT eager",
        "compiled",
        "/eager",
        "/compiled",
        "time",
        "asked",
    ]
    report(args.out, f"Small-memory configs, traced for the {GPU.name}", columns, rows, data)


if __name__ == "__main__":
    main()
