"""kkaitlyn111/cs336-a2-systems: the first training step of a 32-block GPT, the optimizer's states made in it.

Its model and optimizer are those of the owner's assignment 1.
"""

from pathlib import Path
from typing import Any

import torch

from benchmarks.accuracy.programs import theirs


def run(on: Any, settings: dict[str, Any], checkouts: list[Path]) -> dict[str, int]:
    theirs.use(checkouts[1])
    theirs.stand_in_version("cs336_basics")
    theirs.records_nothing()
    theirs.stand_in("pandas")
    # It replaces the model's file by an annotated one that does not parse and was not used in the recording.
    theirs.stand_in("cs336_systems").__dict__["transformer_annotated"] = None
    program = theirs.load(checkouts[0] / "cs336_systems" / "benchmark.py", "their_benchmark")
    torch.set_float32_matmul_precision("high")
    memory: Any = torch.cuda.memory
    memory._record_memory_history = lambda *args, **kwargs: on.phase("recorded") if "enabled" not in kwargs else None
    program.run_memory_foward_fullstep(
        **program.get_model_config("2.7b"), context_length=settings["context_length"], batch_size=4, vocab_size=10000,
        theta=10000, dtype=torch.float32, model_size="2.7b", mixed_precision=False, forward_only=False,
    )  # fmt: skip
    return {}
