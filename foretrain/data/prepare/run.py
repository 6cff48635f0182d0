"""What one preparation is asked for, what it tells while it runs, and how it ended."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from foretrain.data.prepare.estimate import PreparePlan
from foretrain.data.prepare.ipc import Child
from foretrain.data.prepare.options import PrepareOptions
from foretrain.data.prepare.sources import SourceList
from foretrain.data.prepare.writer import Identity
from foretrain.data.shards import DatasetIndex


@dataclass(frozen=True)
class Status:
    """Where it stands, for the live line."""

    documents: int
    tokens: int
    read_bytes: int
    total_bytes: int | None
    elapsed_s: float
    shards: int


@dataclass(frozen=True)
class Outcome:
    """How it ended: the index, or None and the signal that stopped it."""

    index: DatasetIndex | None
    resumed: bool
    existed: bool = False
    signal: str = ""
    tokens: int = 0
    elapsed_s: float = 0.0


@dataclass
class Run:
    options: PrepareOptions
    folder: Path
    sources: SourceList
    identity: Identity
    vocab_size: int
    children: list[Child]  # its workers to be
    should_stop: Callable[[], str]
    listen: Callable[[Status], None]
    plan: PreparePlan | None = None
