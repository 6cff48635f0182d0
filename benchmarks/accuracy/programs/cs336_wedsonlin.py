"""Wedsonlin/assignment2-systems: the sixth training step of a 24-block GPT, recorded in a snapshot."""

from pathlib import Path
from typing import Any

import torch

from benchmarks.accuracy.programs import theirs

# Quotes inside an f-string of the same quotes, which only Python 3.12 reads.
QUOTES = {'{model.config["context_length"]}': "{model.config['context_length']}"}


def run(on: Any, settings: dict[str, Any], checkouts: list[Path]) -> dict[str, int]:
    theirs.use(checkouts[0], checkouts[0] / "cs336-basics")
    theirs.stand_in_version("cs336_basics")
    theirs.records_nothing()
    program = theirs.load(checkouts[0] / "cs336_systems" / "nsys_profile.py", "nsys_profile", QUOTES)
    model = program.AnnotatedBasicsTransformerLM(
        vocab_size=10000,
        context_length=settings["context_length"],
        d_model=1024,
        num_layers=24,
        num_heads=16,
        d_ff=4096,
    )
    model.to(on.device)
    memory: Any = torch.cuda.memory
    memory._record_memory_history = lambda *args, **kwargs: on.phase("recorded") if "enabled" not in kwargs else None
    program.memory_profile(
        model=model, optimizer=program.AdamW(model.parameters()), device=on.device, model_name="medium",
        warmup_steps=5, autocast=settings["autocast"], pattern="full-training-step",
    )  # fmt: skip
    return {"peak": torch.cuda.max_memory_allocated()}
