"""The GPU suite: what real runs take on a CUDA card. `compare.py` holds the predictions against it, without a card.

    python benchmarks/gpu/suite.py --out gpu.json.gz        (under 9 minutes on one card, no network)
    python benchmarks/gpu/suite.py --device cpu --small      (does the script itself work?)

Each case of cases.py runs in a process of its own, by the very code that `plan --exact` traces (predict/trace/drive.py):
three optimizer steps with evaluation and saving in their place. Written down are torch's allocated and reserved peaks
by phase, the process's memory by NVML, the context, and the allocator's history as a list of sizes, so that
compare.py can say which allocation a trace misses. Cases run side by side. For seconds of a
step see speed.py. What a case raises is written down, and the suite goes on.
"""

import functools
import gzip
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from at_once import head, import_compiler, parser_of, run_all
from cases import CASES, SMALL, Case


def measure_memory(case: Case, device: str) -> dict[str, Any]:
    import torch

    from foretrain.measure.verify_record import Case as Run
    from foretrain.measure.verify_step import Watch, prevent_overflow, run
    from foretrain.predict.trace.drive import Job

    one = Run(name=case.name, options=case.settings, dtype=case.dtype, step=case.step, compiled=case.compiled)  # type: ignore[arg-type]
    where = torch.device(device)
    watch = Watch(where)
    if device == "cpu":
        run(one, where, watch, kind=Job)
        return {"phases": {}, "note": "a CPU has no such counters"}
    prevent_overflow()
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    context = process_bytes() - torch.cuda.memory_reserved()
    torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=400_000)
    run(one, where, watch, kind=Job)
    watch.close()
    snapshot: Any = torch.cuda.memory._snapshot()
    torch.cuda.memory._record_memory_history(enabled=None)
    return {
        "phases": watch.phases, "process_bytes": process_bytes(), "context_at_start_bytes": context,
        "reserved_at_end_bytes": torch.cuda.memory_reserved(), "history": history(snapshot["device_traces"][0]),
        "num_alloc_retries": torch.cuda.memory_stats()["num_alloc_retries"],
    }  # fmt: skip


def history(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Return signed sizes of alloc and free in order, segments, and for each size one place in Python that asked for
    it.
    """
    sizes, segments, places = [], [], {}
    for entry in entries:
        action, size = entry["action"], entry["size"]
        if action == "alloc":
            sizes.append(size)
            frames = [f for f in entry.get("frames", []) if "torch/" not in f["filename"]]
            places.setdefault(str(size), f"{Path(frames[0]['filename']).name}:{frames[0]['line']}" if frames else "")
        elif action == "free_completed":
            sizes.append(-size)
        elif action.startswith("segment_"):
            segments.append([action, size, entry["addr"]])
    return {"sizes": sizes, "segments": segments, "places": places}


def process_bytes() -> int:
    """Return NVML's figure for this process; where it counts none, as in some containers, the card's use."""
    import pynvml
    import torch

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(torch.cuda.current_device())
    for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
        if process.pid == os.getpid() and process.usedGpuMemory:
            return int(process.usedGpuMemory)
    free, total = torch.cuda.mem_get_info()
    return total - free


def main() -> None:
    args = parser_of(__doc__, "gpu_suite.json.gz", minutes=8.0, at_once=4).parse_args()
    import_compiler()  # once for all forks
    from torch._inductor import config as inductor
    from torch._inductor.runtime.benchmarking import benchmarker

    inductor.force_disable_caches = True  # a cached kernel is not autotuned
    cases = SMALL if args.small else [case for case in CASES if re.search(args.only, case.name)]
    end = time.monotonic() + args.minutes * 60
    names = [
        f"{i}: {case.name}, {case.step}, {'compiled' if case.compiled else 'eager'}" for i, case in enumerate(cases)
    ]
    jobs = {name: functools.partial(measure_memory, case, args.device) for name, case in zip(names, cases, strict=True)}
    memory = run_all(jobs, args.at_once, end)
    missing = {"error": "not measured: no time left"}
    rows = [{**case._asdict(), "memory": memory.get(name, missing)} for name, case in zip(names, cases, strict=True)]
    document = {**head(__doc__, args.device), "benchmarker": type(benchmarker).__name__, "rows": rows}
    args.out.write_bytes(gzip.compress(json.dumps(document).encode()))
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
