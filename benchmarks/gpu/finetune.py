"""Fine-tuning on a CUDA card: transformers' Trainer with peft, as people write it. What torch counted, phase by phase.

    python benchmarks/gpu/finetune.py --out finetune.json            (two minutes on one card, no network)
    python benchmarks/gpu/finetune.py --compare finetune.json --out compared.json       (on any machine)

The runs are those of tests/cuda_build/finetuning (`make cuda-truth TIER=finetuning`), real sizes first; what needs
bitsandbytes only where that is installed. `--compare` traces and estimates each run with the torch and transformers that are installed, so
install those of the measurement.
"""

import argparse
import functools
import importlib.util
import json
import re
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from at_once import head, import_compiler, run_all

from tests.cuda_build.finetuning.cases import Case, cases

BYTES = ("allocated_bytes", "reserved_bytes")
PACKAGES = ("torch", "transformers", "peft", "accelerate", "bitsandbytes")
NEEDS_BITSANDBYTES = ("8bit", "qlora")


def chosen(pattern: str) -> list[Case]:
    able = [case for case in cases() if re.search(pattern, case.name)]
    if not importlib.util.find_spec("bitsandbytes"):
        able = [case for case in able if not any(word in case.name for word in NEEDS_BITSANDBYTES)]
    order = ("full size", "family", "qlora", "other", "grid")
    return sorted((case for case in able if case.kind in order), key=lambda case: order.index(case.kind))


def measure(case: Case) -> dict[str, Any]:
    import torch

    from tests.cuda_build.finetuning.run import run
    from tests.cuda_build.measure import Watch

    began, watch = time.monotonic(), Watch()
    torch.backends.cuda.matmul.allow_tf32 = False
    with tempfile.TemporaryDirectory() as folder:
        run(case.config, case.tune, "cuda", watch, Path(folder), moved=case.moved)
        watch.close()
    return {"phases": watch.phases, "took_s": round(time.monotonic() - began, 1)}


def measure_all(pattern: str, at_once: int, minutes: float) -> dict[str, Any]:
    end = time.monotonic() + minutes * 60
    import_compiler()
    if not importlib.util.find_spec(
        "bitsandbytes"
    ):  # whose import asks for the card, which a process that forks must not
        import tests.cuda_build.finetuning.run  # noqa: F401  # once for all forks
    found = run_all({case.name: functools.partial(measure, case) for case in chosen(pattern)}, at_once, end)
    document = head(__doc__)
    document["versions"] |= {name: metadata.version(name) for name in PACKAGES if importlib.util.find_spec(name)}
    return {**document, "runs": found}


def compare(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return each run's peaks beside those of its trace and its estimate."""
    from foretrain.config.hub.source import facts_of
    from foretrain.hardware.catalogue import match
    from foretrain.predict.allocator.replay import replay
    from foretrain.predict.finetune.memory import estimated
    from foretrain.predict.finetune.plan import resolved
    from foretrain.predict.trace import service
    from foretrain.predict.trace.finetune.request import FineTuneRequest
    from tests.kit.finetune import source_of

    machine, rows = document["machine"], []
    gpu: Any = match(machine["gpu"], machine["memory_bytes"] / 2**30, machine["sm_count"])
    by_name = {case.name: case for case in cases()}
    for name, real in document["runs"].items():
        if "error" in real:
            rows.append({"name": name, "error": real["error"]})
            continue
        case = by_name[name]
        source = source_of(case.config, case.model)
        trace = service.traces([FineTuneRequest(source, case.tune, gpu)])[0]
        facts: Any = facts_of(case.config, case.model)
        guess = estimated(facts, resolved(source, case.tune, gpu), gpu).memory.phases
        row: dict[str, Any] = {"name": name, "options": case.options}
        for what in BYTES:
            measured = max(phase[what] for phase in real["phases"].values())
            traced = max(getattr(phase, what) or 0 for phase in replay(trace).phases)
            guessed = max(getattr(phase, what) or 0 for phase in guess)
            row[what] = {
                "real": measured, "traced": traced, "estimated": guessed, "trace_error": traced / measured - 1,
                "estimate_error": guessed / measured - 1,
            }  # fmt: skip
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu_finetune.json"))
    parser.add_argument("--only", metavar="PATTERN", default="", help="runs whose name matches")
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--minutes", type=float, default=2.0, help="start no further run after this long")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="predict what FILE measured")
    args = parser.parse_args()
    if not args.compare:
        args.out.write_text(json.dumps(measure_all(args.only, args.at_once, args.minutes)) + "\n", "utf-8")
        return
    document = json.loads(args.compare.read_text("utf-8"))
    rows = compare(document)
    for row in rows:
        far = [
            f"{row[what][f'{who}_error']:+.3%}" for what in BYTES for who in ("trace", "estimate") if "error" not in row
        ]
        print(f"{row['name']}: {row.get('error') or ', '.join(far)}")
    kept = {key: value for key, value in document.items() if key != "runs"}
    args.out.write_text(json.dumps({**kept, "rows": rows}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
