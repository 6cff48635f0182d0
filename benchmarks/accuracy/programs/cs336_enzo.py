"""EnzoDing-rgb/cs336-assignment2-systems: the peaks of each phase, and of checkpointing every k blocks, as its own code reads them."""

import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.accuracy.programs import theirs


def run(on: Any, settings: dict[str, Any], checkouts: list[Path]) -> dict[str, int]:
    theirs.use(checkouts[0], checkouts[0] / "cs336-basics")
    theirs.stand_in_version("cs336_basics")
    theirs.no_plots()
    theirs.records_nothing()
    if "segment_size" in settings:
        from cs336_systems.gradient_checkpointing import profile as checkpointed  # type: ignore[import-not-found]

        config = checkpointed.CheckpointProfileConfig(**settings)
        found = checkpointed.profile_train_step(config, torch.device("cuda"))
        return {"peak": found.peak_allocated_bytes}
    from cs336_systems.memory_profiling import profile as phases  # type: ignore[import-not-found]

    with tempfile.TemporaryDirectory() as folder:
        cell = phases.profile_cell(phases.MemoryCellConfig(**settings), Path(folder))
    return {name: stage["max_allocated_bytes"] for name, stage in cell["stages"].items()}
