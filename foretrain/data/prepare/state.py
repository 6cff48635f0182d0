"""What a preparation is (its settings), where it stands (the snapshot), and whether one may be gone on with."""

import shutil
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from foretrain.base.errors import UserError
from foretrain.base.records import Record
from foretrain.base.safe_read import read_text
from foretrain.data.prepare.disk import publish
from foretrain.data.prepare.reader import Position
from foretrain.data.prepare.writer import SplitState
from foretrain.data.shards import (
    INDEX,
    INDEX_BYTES,
    ITEM_BYTES,
    PROGRESS,
    SPLITS,
    DatasetIndex,
    Settings,
    TokenizerInfo,
    read_index,
    sealed,
    shard_name,
    unsealed,
)

SCHEMA = "foretrain.prepare-state/2"
STATE, DIGEST = "state.json", "state_sha256"


class Identity(Record):
    """What must be the same for a preparation to be gone on with."""

    settings: Settings
    tokenizer: TokenizerInfo
    source: str
    stamps: str


class Snapshot(Record):
    """A state that can be gone on from: all tokens of the documents before `position` are on disk."""

    identity: Identity
    position: Position = Position()
    splits: dict[str, SplitState] = Field(default_factory=lambda: {split: SplitState() for split in SPLITS})
    duplicates: int = 0
    separators: int = 0
    seen: int = 0
    digest: str = ""  # over all documents so far, checked when stdin is read again
    finished: bool = False
    elapsed_s: float = 0.0

    @property
    def is_empty(self) -> bool:
        """Whether nothing was written yet."""
        return self.position == Position()


def write(folder: Path, snapshot: Snapshot) -> None:
    """The snapshot, there as a whole or as it was."""
    publish(folder / PROGRESS / STATE, sealed(snapshot, SCHEMA, DIGEST))


def read(folder: Path) -> Snapshot | None:
    """The newest snapshot, None where there is none. Raises UserError 'data.progress_damaged'."""
    path = folder / PROGRESS / STATE
    try:
        fields = unsealed(read_text(path, INDEX_BYTES), DIGEST)
        del fields["schema"]
        return Snapshot.model_validate(fields)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, ValidationError, RecursionError, AttributeError, KeyError):
        raise UserError("data.progress_damaged", path=str(folder), file=f"{PROGRESS}/{STATE}") from None


def check_same(folder: Path, now: Identity, before: Identity) -> None:
    """Raises UserError 'data.other_preparation' that names every difference."""
    differences = _differences(now.settings.to_json(), before.settings.to_json())
    differences += _differences(now.tokenizer.to_json(), before.tokenizer.to_json(), "tokenizer ")
    if now.source != before.source:
        differences.append("the sources have other contents")
    elif now.stamps != before.stamps:
        differences.append("files of the sources were added, moved or written to")
    if differences:
        raise UserError("data.other_preparation", path=str(folder), differences="; ".join(differences))


def _differences(now: dict[str, Any], before: dict[str, Any], what: str = "") -> list[str]:
    return [
        f"{what}{key} was {str(before.get(key))[:16]}, is {str(value)[:16]}"
        for key, value in now.items()
        if value != before.get(key)
    ]


def finished(folder: Path, now: Identity) -> DatasetIndex | None:
    """The index of a folder that was prepared before, in the same way; None where there is none.

    Raises UserError 'data.other_preparation' where it was prepared in another way, and 'data.prepared_damaged' where
    a shard is missing or has another size.
    """
    if not (folder / INDEX).is_file():
        return None
    index = read_index(folder)
    before = Identity(
        settings=index.settings, tokenizer=index.tokenizer, source=index.source.fingerprint, stamps=now.stamps
    )
    check_same(folder, now, before)
    for split in index.splits.values():
        for shard in split.shards:  # "prepared already" must not be said of what a disk or a hand has cut since
            path, size = folder / shard.file, shard.tokens * ITEM_BYTES[index.dtype]
            if not path.is_file() or path.stat().st_size != size:
                raise UserError("data.prepared_damaged", path=str(folder), file=shard.file)
    shutil.rmtree(folder / PROGRESS, ignore_errors=True)  # we were killed between the index and this
    return index


def clear(folder: Path) -> None:
    """Remove what a preparation made, and nothing else, its index first."""
    (folder / INDEX).unlink(missing_ok=True)
    shutil.rmtree(folder / PROGRESS, ignore_errors=True)
    for split in SPLITS:
        for path in folder.glob(f"{split}-*.bin"):
            if path.name == shard_name(split, int(path.stem[len(split) + 1 :] or 0)):
                path.unlink()
