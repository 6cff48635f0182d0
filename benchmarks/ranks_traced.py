"""One rank of many: its trace against real tensors, and what a trace of a thousand ranks costs.

    python benchmarks/ranks_traced.py [--real] [--cost]        (both without)

Real: small models in fp32 on the CPU, fake tensors and real ones in the same process group, which talks to nobody; the
largest difference of peaks in bytes, for each way, over families and numbers of ranks. Cost: GPT-2 124M, 8 x 1024 tokens
in bf16 for an RTX 4090, a worker from its start to its end; processor seconds, since other work makes it wait.
"""

import os
import resource
import tempfile
import time
from typing import Any

from common import arguments, report

from foretrain.base.units import MIB
from foretrain.config.options import RunConfig
from foretrain.config.sharing import STRATEGIES, Sharing
from foretrain.hardware.catalogue import find
from foretrain.predict.allocator.replay import replay
from foretrain.predict.spec import StepSpec
from foretrain.predict.trace import ranks, self_test
from foretrain.predict.trace.service import Request, traces

SMALL = RunConfig(
    n_layer=4, n_head=2, n_embd=128, block_size=32, vocab_size=256, batch_size=2, gradient_accumulation_steps=3
)
FAMILIES: dict[str, dict[str, Any]] = {"GPT-2": {}, "Llama": {"recipe": "llama"}}
WORLDS = (1, 2, 3, 8)
WAYS: dict[str, dict[str, Any]] = {
    **{name: {"strategy": name} for name in STRATEGIES},
    "ddp without views": {"strategy": "ddp", "bucket_view": False},
    "fsdp held back": {"strategy": "fsdp", "syncs_each": False},
}
LARGE = RunConfig(batch_size=8, gradient_accumulation_steps=4)
COST_WORLDS = (8, 1024)
A_NODE = 8


def sharing(way: str, world: int) -> Sharing:
    """Nodes of two ranks at least two for HSDP where that is possible."""
    hsdp = way == "hsdp" and world % 2 == 0
    return Sharing(world=world, per_node=min(world // 2, A_NODE) if hsdp else min(world, A_NODE), **WAYS[way])


def against_real(way: str, *, compiled: bool) -> dict[str, Any]:
    """The largest difference of a way, in bytes and per rank: a mesh has four bytes a rank on the host."""
    found = []
    for family, knobs in FAMILIES.items():
        for world in WORLDS:
            config = SMALL.model_copy(update={**knobs, "compile_blocks": compiled})
            with ranks.group(sharing(way, world)) as share:
                truth = self_test.compare(config, "float32", "foretrain", compiled=compiled, share=share)
            difference = truth.traced_bytes - truth.real_bytes
            found.append({"family": family, "world": world, "real": truth.real_bytes, "difference": difference})
    worst = max(found, key=lambda row: abs(row["difference"]))
    return {"way": way, "compiled": compiled, "worst_bytes": worst["difference"], "rows": found}


def cost(way: str, world: int) -> dict[str, Any]:
    """Seconds of a worker that traces one rank, with all that it imports."""
    spec = StepSpec.of(LARGE, find("RTX 4090"), dtype="bfloat16", compiled=False, sharing=sharing(way, world))
    with tempfile.TemporaryDirectory() as cache:
        os.environ["FORETRAIN_CACHE"] = cache
        before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        (trace,) = traces([Request(spec)])
        wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    run = replay(trace)
    return {
        "way": way, "world": world, "wall_s": wall,
        "processor_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "allocated_bytes": run.peak_allocated_bytes, "reserved_bytes": run.peak_reserved_bytes,
    }  # fmt: skip


def main() -> None:
    options = arguments("ranks_traced", __doc__ or "", real="only against real tensors", cost="only what it costs")
    both = options.real == options.cost
    data: dict[str, Any] = {"what": (__doc__ or "").splitlines()[0]}
    table = []
    if both or options.cost:
        data["cost"] = [cost(way, world) for way in WAYS for world in COST_WORLDS]
        table += [
            [f"{row['way']}, {row['world']} ranks", f"{row['processor_s']:.1f}", f"{row['wall_s']:.1f}",
             f"{row['allocated_bytes'] / MIB:,.0f}", f"{row['reserved_bytes'] / MIB:,.0f}", ""]
            for row in data["cost"]
        ]  # fmt: skip
    if both or options.real:
        data["real"] = [against_real(way, compiled=compiled) for compiled in (False, True) for way in WAYS]
        table += [
            [
                f"{row['way']}, {'compiled blocks' if row['compiled'] else 'eager'}",
                "",
                "",
                "",
                "",
                f"{row['worst_bytes']:+d}",
            ]
            for row in data["real"]
        ]
    head = ["", "processor s", "wall s", "allocated MiB", "reserved MiB", "traced less real, bytes"]
    report(options.out, "one rank of many", head, table, data)


if __name__ == "__main__":
    main()
