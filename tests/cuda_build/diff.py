"""Where a case's trace first differs from what the CUDA build allocated:  python -m tests.cuda_build.diff NAME

Both are lists of births and deaths. They are aligned as texts are, by sizes in blocks of 512 bytes; what only one of
them has is printed with its phase, and of the trace's side with op and module. A death is told by the size that dies.
"""

import argparse
import difflib
import os
import sys
from collections import Counter
from typing import Any

from foretrain.predict.trace import service
from foretrain.predict.trace.record import Trace
from tests.cuda_build import compare
from tests.cuda_build.__main__ import read
from tests.cuda_build.environment import HOME
from tests.cuda_build.finetuning import __main__ as finetuning
from tests.cuda_build.grid import cases


def blocks(events: list[int], sizes: list[int]) -> list[int]:
    """Signed sizes of births and deaths, in bytes rounded to 512; what takes nothing is left out."""
    rounded = [-(-size // 512) * 512 for size in sizes]
    return [rounded[e] if e >= 0 else -rounded[~e] for e in events]


def settled(blocks: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """(position, size) with deaths that follow each other in order of size: their own order changes nothing."""
    found: list[tuple[int, int]] = []
    deaths: list[tuple[int, int]] = []
    for position, size in [*blocks, (0, 1)]:
        if size < 0:
            deaths.append((position, size))
            continue
        found += sorted(deaths, key=lambda each: each[1])
        deaths = []
        found.append((position, size))
    return found[:-1]


def differences(real: list[int], traced: list[int]) -> list[tuple[int, int, list[int], list[int]]]:
    """(position there, position here, only there, only here), in order."""
    matcher = difflib.SequenceMatcher(None, real, traced, autojunk=False)
    return [
        (a, b, real[a:a_end], traced[b:b_end]) for tag, a, a_end, b, b_end in matcher.get_opcodes() if tag != "equal"
    ]


def where(trace: Trace, position: int) -> str:
    if position >= len(trace.events):
        return "end"
    event = trace.events[position]
    allocation = trace.allocations[event if event >= 0 else ~event]
    return (
        f"{trace.phase_at(position)}/{trace.moment_at(position)} {allocation.op} {allocation.module} {allocation.shape}"
    )


def shown(values: list[int]) -> str:
    return " ".join(f"{v:+,}" for v in values[:12]) + (f" … {len(values)}" if len(values) > 12 else "")


def _of_grid(name: str) -> tuple[Any, Trace | None]:
    case: Any = next((c for c in cases("large") if c.name.startswith(name)), None)
    measured = case and read(case)
    return measured, service.traces(compare.requests(case))[0] if measured else None


def _of_finetuning(name: str) -> tuple[Any, Trace | None] | None:
    """The same of a case of finetuning/cases.py; None where there is none of that name."""
    case = next((c for c in finetuning.cases() if c.name.startswith(name)), None)
    if case is None:
        return None
    return finetuning.measured(case), service.traces([finetuning.request(case)])[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="of a case that was measured; the beginning is enough")
    parser.add_argument("--at-least", type=int, default=0, metavar="BYTES", help="leave smaller blocks out")
    parser.add_argument("--most", type=int, default=20)
    parser.add_argument("--from", dest="start", default="", help="a phase to begin at")
    args = parser.parse_args()
    os.environ["FORETRAIN_CACHE"] = str(HOME / "cache")
    measured, trace = _of_finetuning(args.name) or _of_grid(args.name)
    if trace is None:
        print(f"no case {args.name!r} was measured", file=sys.stderr)
        return 2
    real = blocks(measured["events"], measured["sizes"])
    ours = blocks(trace.events, [a.nbytes for a in trace.allocations])
    keep = settled([(i, v) for i, v in enumerate(ours) if abs(v) > args.at_least])
    real = [v for _, v in settled([(i, v) for i, v in enumerate(real) if abs(v) > args.at_least])]
    found = differences(real, [v for _, v in keep])
    for a, b, there, here in found[: args.most]:
        at = keep[b][0] if b < len(keep) else len(ours)
        print(f"real {a} / traced {at}: {where(trace, at)}\n   only real  {shown(there)}\n   only trace {shown(here)}")
    print(f"{len(found)} differences; sizes that only one has more often:")
    births = Counter(v for v in real if v > 0)
    births.subtract(v for _, v in keep if v > 0)
    for size, count in sorted(((s, c) for s, c in births.items() if c), key=lambda x: -abs(x[0] * x[1]))[:12]:
        print(f"   {size:>14,} bytes: {count:+d} in reality")
    return 0


if __name__ == "__main__":
    sys.exit(main())
