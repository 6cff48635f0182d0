"""Which runs there are to look at: those below the folders that were named, and those alive on this machine."""

from collections.abc import Sequence
from pathlib import Path

from foretrain.analysis.live.observed import LOCKS, ObservedRun, held_here
from foretrain.training.folder import now

RECORDS = ("run.json", "watch.json", "trainer.json", now.FILE)
_DEPTHS = ("", "*/", "*/*/")


def found_in(roots: Sequence[Path], locks: Path | None = LOCKS) -> list[ObservedRun]:
    """Every run in these folders and the two levels below them, and those whose lock a process of `locks` holds: those
    that may be alive first, then the newest first. A folder or file that is a link is not followed."""
    paths = {
        file.parent for root in roots for depth in _DEPTHS for name in RECORDS for file in root.glob(f"{depth}{name}")
    }
    seen = {path.resolve() for path in paths}
    paths |= {path for path in (held_here(locks) if locks else ()) if path.resolve() not in seen and _is_run(path)}
    runs = [run for run in map(ObservedRun, paths) if _is_plain(run)]
    return sorted(runs, key=_newness, reverse=True)


def _is_run(path: Path) -> bool:
    return any((path / name).is_file() for name in RECORDS)


def _is_plain(run: ObservedRun) -> bool:
    try:
        return run.is_plain()
    except OSError:  # it went away, or is not ours to see
        return False


def _newness(run: ObservedRun) -> tuple[bool, float]:
    stamps = [0.0]
    for name in (*RECORDS, "metrics.jsonl"):
        try:
            stamps.append((run.path / name).stat().st_mtime)
        except OSError:
            continue
    return (run.path / now.FILE).is_file(), max(stamps)
