"""What is asked of an evaluation. No torch."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VALIDATION_TOKENS = 1_000_000  # of validation data, unless more are asked for

Listen = Callable[[str, dict[str, Any]], None]  # hears what begins, and how far it is, by the id of a text


@dataclass(frozen=True)
class Asked:
    """As the arguments of `foretrain.evaluate`, whose docstring says what they mean."""

    source: Path
    tasks: tuple[str, ...]
    texts: tuple[Path, ...]
    best: bool
    include_path: Path | None
    stride: int | None
    tokens: int | None
    shots: int | None
    documents: int | None
    batch_size: int | None
    device: str
    bars: bool
    listen: Listen
