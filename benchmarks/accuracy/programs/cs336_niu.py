"""NiuHuangxiaozi/assignment2-systems: three steps of a small GPT from the start of the process, recorded in a snapshot."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.accuracy.programs import theirs


def run(on: Any, settings: dict[str, Any], checkouts: list[Path]) -> dict[str, int]:
    theirs.use(checkouts[0])
    theirs.records_nothing()
    program = theirs.load(checkouts[0] / "cs336_systems" / "profile_memory" / "profile_memory.py", "profile_memory")
    on.phase("recorded")
    program.profile_memory(SimpleNamespace(mode="forward_and_backward", context_length=settings["context_length"]))
    return {}
