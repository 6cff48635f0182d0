"""A run as every rank but the first has it: it reads what the first one writes, and writes nothing but its own file."""

from pathlib import Path
from typing import Any

from foretrain.training.store import RunDirectory, RunRecord, now

# What happened to this rank and no other. All else is the first one's to tell.
_OWN = ("out_of_memory", "micro_batch_shrunk", "not_compiled", "memory_exceeded", "throttled", "suspended")


class FollowerDirectory(RunDirectory):
    """The directory of a run whose lock another rank has. `rank-N.jsonl` is this rank's own, and so is now.json in
    its scratch folder."""

    def __init__(self, path: Path, rank: int) -> None:
        super().__init__(path)
        self.own = f"rank-{rank}"

    @property
    def scratch(self) -> Path:
        """Its own, since the first one sweeps the run's."""
        folder = self.path / ".ranks" / self.own
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def acquire(self) -> None:
        pass

    def release(self) -> None:
        self._teller.end()

    def write(self, name: str, text: str) -> None:
        pass

    def restore_removed(self) -> tuple[str, ...]:
        return ()

    def write_record(self, record: RunRecord) -> None:
        pass

    def append(self, name: str, record: dict[str, Any]) -> None:
        pass

    def event(self, id: str, /, **values: Any) -> None:
        if id in _OWN:
            super().append(self.own, {"at": now(), "id": id, "values": values})

    def drop_metrics_from(self, step: int, *, keep_evaluation: bool) -> None:
        pass
