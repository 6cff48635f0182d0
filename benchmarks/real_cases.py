"""The logged RTX 4070 runs, traced: case A against nvidia-smi, case C with the place where it runs out of memory.

python benchmarks/real_cases.py

The facts are those of examples/real-cases: A's process held 4,464 MiB; C ran out of memory on 12 GB with a desktop of
about 2.1 GB. Everything else here is predicted; the owner's torch is unknown.
"""

from typing import Any

from common import arguments, console, report

from foretrain.base.units import MIB
from foretrain.config.resolve import resolve
from foretrain.hardware.catalogue import find
from foretrain.hardware.devices import published_context_bytes
from foretrain.predict.allocator.replay import replay
from foretrain.predict.memory import predict
from foretrain.predict.plan import plan
from foretrain.predict.spec import StepSpec
from foretrain.predict.trace.forecast import requests_for, traced
from foretrain.predict.trace.service import traces

LOGGED_BYTES, DESKTOP_BYTES = 4464 * MIB, 2_100_000_000
GPU = find("RTX 4070")


def case_a() -> dict[str, Any]:
    """Compare reserved and context of nanoGPT's compiled step with the log; eager by its tensors alone."""
    config = resolve(["examples/real-cases/a.py"]).config
    forecast = traced(plan(config, GPU))
    found = forecast.memory_of("nanogpt")
    reserved = max(p.reserved_bytes or 0 for p in found.phases)
    eager = predict(StepSpec.of(config, GPU, "nanogpt", dtype=forecast.dtype, compiled=False)).worst
    return {
        "case": "A", "allocated_bytes": found.worst.allocated_bytes, "reserved_bytes": reserved,
        "process_bytes": [reserved + context for context in published_context_bytes(GPU)],
        "logged_bytes": LOGGED_BYTES, "error": (reserved + published_context_bytes(GPU)[1]) / LOGGED_BYTES - 1,
        "left_for_context_bytes": LOGGED_BYTES - reserved, "eager_allocated_bytes": eager.allocated_bytes,
    }  # fmt: skip


def case_c(compiled: bool, others: int) -> dict[str, Any]:
    """Return where nanoGPT's step runs out of memory beside other programs, for the published contexts, and the memory
    that it needs.
    """
    config = resolve(["examples/real-cases/c.py", f"--compile={compiled}"]).config
    base = plan(config, GPU, used_by_others_bytes=others)
    answer = traced(base).exact_of("nanogpt")
    assert answer is not None
    trace = traces(requests_for(StepSpec.of(config, GPU, "nanogpt", dtype=base.dtype, compiled=compiled)))[0]
    failures = []
    for context in published_context_bytes(GPU):
        limit = (base.available_bytes or 0) - context
        failure = replay(trace, limit_bytes=limit, physical=True).failure
        failures.append(
            {"context_bytes": context, "limit_bytes": limit, "death": failure.to_json() if failure else None}
        )
    return {
        "case": "C", "compiled": compiled, "used_by_others_bytes": others, "smallest_limit_bytes": answer.smallest_limit_bytes,
        "peak_reserved_bytes": max(p.reserved_bytes or 0 for p in answer.memory.phases), "under_limits": failures,
    }  # fmt: skip


EXPLAIN = "plan examples/real-cases/a.py --gpu 4070 --explain --observed 6582MiB --process 4464MiB"
VERDICT = "plan examples/real-cases/c.py --gpu 4070 --used-by-others 2.1GB --exact"


def main() -> None:
    options = arguments("real_cases", __doc__ or "")
    a = case_a()
    cs = [case_c(compiled, others) for compiled in (True, False) for others in (0, DESKTOP_BYTES)]
    explained, judged = (console(words.split(), columns=108) for words in (EXPLAIN, VERDICT))
    consoles = {"explain_a": explained, "verdict_c": judged.split("\n\nMemory by phase")[0]}
    report(options.out, {"what": (__doc__ or "").splitlines()[0], "a": a, "c": cs, "consoles": consoles})


if __name__ == "__main__":
    main()
