"""What the documented small-memory configs take: traced for an RTX 4070, beside nanoGPT's own step, and with --cpu
run for real on the CPU's allocator.

python benchmarks/small_memory.py [--cpu] [--out FILE]
python benchmarks/small_memory.py --only gpt2-xl          (the others stay as they were)

`peak`: the highest sum of tensors (torch.cuda.max_memory_allocated). `needs`: what nvidia-smi would show, the
allocator's reserve and 300 MiB of CUDA context included. `time`: the predicted step against nanoGPT's compiled one of
the same model and tokens (catalogue rates; not measured on a GPU).
"""

import json
from pathlib import Path
from typing import Any

from common import parser_of, report

from foretrain.config.options import RunConfig
from foretrain.config.resolve import resolve
from foretrain.hardware.catalogue import Dtype, find
from foretrain.predict.memory import StepName
from foretrain.predict.plan import plan
from foretrain.predict.spec import StepSpec
from foretrain.predict.speed.time import step_time
from foretrain.predict.trace.forecast import answers_for

GPU = find("RTX 4070")
FOLDER = Path(__file__).parent.parent / "examples" / "small-memory"
# Of nanoGPT's eager peak a quarter, of its compiled one half, 1 GiB with a host of 4 GB, 4 GiB with evaluation, and 11
# GiB with AdamW, at 16 x 1024, with low-bit states, with AdamW and gradients on the host.
CASES = (
    "gpt2-124m", "gpt2-124m-half", "gpt2-124m-least", "case-c", "gpt2-350m", "gpt2-350m-16", "gpt2-774m", "gpt2-xl",
)  # fmt: skip


def traced(config: RunConfig, step: StepName, *, compiled: bool) -> dict[str, Any]:
    made = plan(config.model_copy(update={"compile": compiled}), GPU)
    answer = answers_for(made, [step], None)[0].memory
    return {
        "peak_bytes": answer.worst.allocated_bytes,
        "needed_bytes": answer.needed_bytes,
        "phase": answer.worst.phase,
    }


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
        **ours, "nanogpt": {way: {key: m[key] for key in ("peak_bytes", "needed_bytes")} for way, m in own.items()},
        "time_ratio": seconds(config, dtype, "foretrain", compiled=config.compile) / base_s,
    }  # fmt: skip


def on_cpu(name: str) -> dict[str, Any]:
    """Trace the config's eager step on the CPU, and measure the real allocator."""
    from foretrain.predict.trace.self_test import compare

    config = resolve([str(FOLDER / f"{name}.toml")]).config
    small = config.model_copy(update={"gradient_accumulation_steps": 1, "eval_iters": 1})
    truth = compare(small, "bfloat16", "foretrain", compiled=False)
    return {"config": name, "traced_bytes": truth.traced_bytes, "real_bytes": truth.real_bytes}


def main() -> None:
    parser = parser_of(__doc__, "small_memory")
    parser.add_argument("--cpu", action="store_true", help="also run 124M for real on the CPU (about 5 GB, minutes)")
    parser.add_argument("--only", nargs="+", choices=CASES, help="these configs")
    args = parser.parse_args()
    before = json.loads(args.out.read_text("utf-8")) if args.out.exists() else {"cases": []}
    kept = {found["config"]: found for found in before["cases"] if args.only and found["config"] not in args.only}
    cases = [kept.get(name) or case(name) for name in CASES if name in kept or not args.only or name in args.only]
    data: dict[str, Any] = {"gpu": GPU.name, "cases": cases, **({"cpu": before["cpu"]} if "cpu" in before else {})}
    if args.cpu:
        data["cpu"] = on_cpu("gpt2-124m")
    report(args.out, data)


if __name__ == "__main__":
    main()
