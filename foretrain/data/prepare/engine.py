"""`prepare`: sources to token shards, in constant memory, on all cores, and resumable at any moment.

reader process ─ batches in order ─> this process ─> worker processes ─> this process ─> shards, snapshots
                                     (split, dedup)   (tokenizer)         (in order)

Plain JSON lines need no reader: this process gives the workers ranges of the file, which they read by themselves.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

from foretrain.base.errors import UserError
from foretrain.base.files import refuse_links, sync_folder
from foretrain.data.prepare import vocabulary, writer
from foretrain.data.prepare.estimate import Outcome, PreparePlan, Run, Status, estimate
from foretrain.data.prepare.pool import started
from foretrain.data.prepare.preparation import Preparation
from foretrain.data.prepare.sources import PrepareOptions, SourceList, expand
from foretrain.data.prepare.writer import Identity, Snapshot
from foretrain.data.shards import INDEX, ITEM_BYTES, PROGRESS, SPLITS, TokenizerInfo

LOCK = ".prepare.lock"
_MOST_PACKED = 30  # text packs 3 to 10 fold


def plan(options: PrepareOptions) -> PreparePlan:
    """Return what preparing would take; nothing is written in `out`. Raises UserError."""
    sources = _found(options)
    with tempfile.TemporaryDirectory(prefix="foretrain-") as place:
        info, size = vocabulary.make(options, sources, Path(place), plan=True)
        saved = Path(place) / vocabulary.FOLDER
        return estimate(options, sources, saved, info.name, size)


def prepare(
    options: PrepareOptions,
    should_stop: Callable[[], str] = lambda: "",
    listen: Callable[[Status], None] = lambda status: None,
) -> Outcome:
    """Prepare, or resume, the dataset in `options.out`.

    should_stop: the name of a received signal, or ''. Raises UserError; the same command resumes committed work.
    """
    folder = Path(options.out)
    if any(Path(source).is_dir() and Path(source).resolve() == folder.resolve() for source in options.sources):
        raise UserError("usage.out_is_source", path=options.out)
    if (folder / "run.json").exists():
        raise UserError("usage.out_is_run", path=options.out)
    sources = _found(options)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / LOCK)
        lock.acquire(timeout=0)
    except Timeout:
        raise UserError("usage.being_prepared", path=str(folder)) from None
    except OSError as error:
        raise writer.as_user_error(error, folder, 2**20) from None
    try:
        return _prepare_locked(options, folder, sources, should_stop, listen)
    except OSError as error:
        raise writer.as_user_error(error, folder, 2**20) from None
    finally:
        lock.release()
        (folder / LOCK).unlink(missing_ok=True)


def _found(options: PrepareOptions) -> SourceList:
    sources = expand(options.sources)
    if sources.total_bytes == 0:
        raise UserError("data.source_empty", path=sources.description)
    return sources


def _prepare_locked(
    options: PrepareOptions,
    folder: Path,
    sources: SourceList,
    should_stop: Callable[[], str],
    listen: Callable[[Status], None],
) -> Outcome:
    refuse_links([folder / PROGRESS])
    own = (folder / PROGRESS).is_dir() or (folder / INDEX).is_file()
    if not own and any(path for split in SPLITS for path in folder.glob(f"{split}*.bin")):
        raise UserError("data.out_in_use", path=str(folder))
    if options.restart and own:
        writer.clear(folder)
    if (folder / INDEX).is_file():
        info = writer.read_index(folder).tokenizer
        _check_request(options, folder, info)
        index = writer.finished(folder, _identity(options, sources, info))
        assert index is not None
        return Outcome(index, resumed=False, existed=True, tokens=index.tokens)
    (folder / PROGRESS).mkdir(exist_ok=True)
    sync_folder(folder)
    with started(options.workers) as children:
        snapshot = writer.read(folder)
        if snapshot is None or snapshot.is_empty:
            snapshot = None  # nothing was written yet, so anything may change
            vocabulary.forget_other(options.request, folder / PROGRESS)
        info, size = vocabulary.make(options, sources, folder / PROGRESS)
        _check_request(options, folder, info)
        identity = _identity(options, sources, info)
        if snapshot is not None:
            writer.check_same(folder, identity, snapshot.identity)
        saved = folder / PROGRESS / vocabulary.FOLDER
        run = Run(options, folder, sources, identity, size, children, should_stop, listen)
        _check_room(run, saved, snapshot)
        return Preparation(run, snapshot).run()


def _check_request(options: PrepareOptions, folder: Path, info: TokenizerInfo) -> None:
    if info.request != options.request:
        differences = f"tokenizer was {info.request}, is {options.request}"
        raise UserError("data.other_preparation", path=str(folder), differences=differences)


def _identity(options: PrepareOptions, sources: SourceList, info: TokenizerInfo) -> Identity:
    return Identity(settings=options.settings, tokenizer=info, source=sources.fingerprint, stamps=sources.stamps)


def _check_room(run: Run, saved: Path, snapshot: Snapshot | None) -> None:
    """Raise UserError 'disk.no_room_prepare' where the rest does not fit on the disk."""
    free, total = writer.free_bytes(run.folder), run.sources.total_bytes
    packed = any(file.compression or file.kind == "parquet" for file in run.sources.files)
    if total is None or total * 4 * (_MOST_PACKED if packed else 1) < free:
        return
    run.plan = estimate(run.options, run.sources, saved, run.identity.tokenizer.name, run.vocab_size)
    item = ITEM_BYTES[run.plan.dtype]
    splits = snapshot.splits.values() if snapshot else ()
    there = item * sum(split.part.tokens + sum(shard.tokens for shard in split.shards) for split in splits)
    assert run.plan.output_bytes is not None
    if run.plan.output_bytes - there > run.plan.free_bytes:
        raise UserError(
            "disk.no_room_prepare", path=str(run.folder), needs=run.plan.output_bytes - there,
            free=run.plan.free_bytes, tokens=run.plan.tokens,
        )  # fmt: skip
