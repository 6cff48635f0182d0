"""Does it fit? Runs on the CUDA build under a limit near the smallest that foretrain says they fit in.

    python -m tests.cuda_build.edge [--pairs 100] [--only TEXT]

A seed draws a case and how far its limit lies from the edge: up to 3% above or below, in steps of the 2 MiB that the
allocator reserves at a time. Where one such step is more than 3%, another case is drawn. The limit is set by torch.cuda.set_per_process_memory_fraction, as the trainer sets
`memory_limit`. Then the case really runs. Writes benchmarks/results/cuda_build_edge.json; what is done is kept.
"""

import argparse
import gc
import gzip
import itertools
import json
import os
import random
import subprocess
import sys
import warnings
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

from foretrain.predict.spec import StepSpec

MIB = 2**20
SEED, FURTHEST = 181, 0.03
COMPILED_EVERY = 10  # one pair in so many is of a compiled run


def drawn() -> Iterator[tuple[Any, float, int]]:
    """(case, share of the edge that the limit lies from it, its side), without end."""
    from tests.cuda_build.grid import cases

    source = random.Random(SEED)
    all_cases = [case for case in cases("large") if not case.settings.get("eval_only")]
    for index in itertools.count():
        compiled = index % COMPILED_EVERY == COMPILED_EVERY - 1
        case = source.choice([case for case in all_cases if case.compiled == compiled])
        yield case, source.uniform(0, FURTHEST), source.choice((1, -1))


def decide(case: Any, share: float, side: int) -> dict[str, Any]:
    """The edge of a case as its trace has it, the limit, and what trace and estimate say of that limit."""
    from foretrain.config.checks import launched
    from foretrain.predict.allocator.replay import replay, smallest_limit_bytes
    from foretrain.predict.memory import estimated
    from foretrain.predict.trace import service
    from tests.cuda_build import compare

    trace = service.traces(compare.requests(case))[0]  # of two, the one without padding: that card never pads
    edge = smallest_limit_bytes(trace)
    steps = max(1, round(share * edge / (2 * MIB)))
    limit = edge + side * 2 * MIB * steps - (side < 0) * MIB  # the edge is known to a MiB
    ledger = estimated(
        StepSpec.of(launched(case.settings), compare.card(), case.step, dtype=case.dtype, compiled=case.compiled)
    )
    return {
        "case": case.name, "compiled": case.compiled, "edge_bytes": edge, "limit_bytes": limit,
        "from_edge": limit / edge - 1, "traced": replay(trace, limit_bytes=limit).survives,
        "estimated": ledger._dies_in(limit) is None,
    }  # fmt: skip


def really(job: dict[str, Any]) -> dict[str, Any]:
    """Whether a case survives its limit on this build. Raises what it raises, but for being out of memory."""
    import torch

    from foretrain.predict.trace import drive
    from tests.cuda_build import measure

    drive.MICRO_STEPS = 1_000_000
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((job["limit_bytes"] + 0.5) / total, 0)
    watch = measure.Watch()
    try:
        measure._run(job, job["knobs"], "cuda", watch, compiled=job["compiled"])
        return {"survived": True, "reserved_bytes": torch.cuda.max_memory_reserved()}
    except torch.cuda.OutOfMemoryError as error:
        return {"survived": False, "phase": watch.phase, "message": str(error)[:200]}


def on_the_build() -> None:
    """One process there: jobs on standard input, each in a fork; the answer is a file."""
    import torch._inductor.compile_fx  # noqa: F401  # once for all children

    from tests.cuda_build import measure

    warnings.simplefilter("ignore")
    gc.freeze()
    for line in sys.stdin:
        job = json.loads(line)
        if os.fork() == 0:
            try:
                measure.write(Path(job["out"]), really(job))
            except Exception as error:
                measure.write(Path(job["out"]), {"error": f"{type(error).__name__}: {str(error)[:400]}"})
            finally:
                os._exit(0)
        os.wait()
        print(job["out"], flush=True)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    tried = [row for row in rows if "survived" in row]
    found: dict[str, Any] = {"pairs": len(tried), "failed": len(rows) - len(tried)}
    for who in ("traced", "estimated"):
        found[who] = {
            "wrong": sum(row[who] != row["survived"] for row in tried),
            "said_fits_and_did_not": sum(row[who] and not row["survived"] for row in tried),
        }
    found["survived"] = sum(row["survived"] for row in tried)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases that have this in their name")
    parser.add_argument("--on-the-build", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.on_the_build:
        on_the_build()
        return 0
    from tests.cuda_build.__main__ import RESULTS, kept
    from tests.cuda_build.environment import HOME, PYTHON, make, on_the_card

    make(print)
    os.environ["FORETRAIN_CACHE"] = str(HOME / "cache")
    folder = HOME / "measured" / "edge"
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    pairs = (pair for pair in drawn() if args.only in pair[0].name)
    with subprocess.Popen(
        [PYTHON, "-m", "tests.cuda_build.edge", "--on-the-build"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=(HOME / "edge.log").open("wb"), env=on_the_card(), text=True,
    ) as host:  # fmt: skip
        assert host.stdout is not None
        for case, share, side in pairs:
            row = decide(case, share, side)
            if abs(row["from_edge"]) > FURTHEST:
                continue
            out = folder / f"{kept(case).name.split('.')[0]}-{row['limit_bytes']}.json.gz"
            if not out.exists():
                job = {**case._asdict(), "limit_bytes": row["limit_bytes"], "out": str(out)}
                host.stdin.write(json.dumps(job) + "\n")
                host.stdin.flush()
                host.stdout.readline()
            row |= json.loads(gzip.decompress(out.read_bytes()))
            rows.append(row)
            verdict = row.get("error") or ("survived" if row["survived"] else f"out of memory in {row['phase']}")
            wrong = "" if row.get("survived") == row["traced"] else "  WRONG"
            print(
                f"{len(rows):3}/{args.pairs} {case.name}: {row['limit_bytes'] / MIB:.0f} MiB,"
                f" {row['from_edge']:+.2%} from the edge: {verdict}{wrong}",
                flush=True,
            )
            if len(rows) == args.pairs:
                break
        host.stdin.close()
    print(json.dumps(summary(rows), indent=1))
    if not args.only:
        found = {"made": date.today().isoformat(), "seed": SEED, "summary": summary(rows), "rows": rows}
        (RESULTS / "cuda_build_edge.json").write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
