"""The directory of a run: a new one, or the one to go on with, unless there is nothing left to do in it."""

from foretrain.app.training.request import Request
from foretrain.base.errors import UserError
from foretrain.config.options import RunConfig
from foretrain.config.resolve import ResolvedConfig
from foretrain.training import starting, store
from foretrain.training.notes import Listener, Note
from foretrain.training.store import RunDirectory, RunRecord


def already_finished(asked: Request) -> RunRecord | None:
    """The record of a run that there is nothing left of to resume."""
    if not asked.resume or (done := _finished(asked.resolved.config)) is None:
        return None
    record = done.read_record()
    values = {"path": str(done.path), "steps": record.steps_done, "total": asked.resolved.config.max_iters}
    asked.listen(Note("train.already_finished", **values))
    return record


def _steps_wanted(config: RunConfig) -> int:
    """A run with as many steps has nothing left to do; an evaluation is of any run."""
    return 1 << 62 if config.eval_only else config.max_iters


def _finished(config: RunConfig) -> RunDirectory | None:
    """The run that there is nothing left of to resume; None where there is none, or another one has steps to do."""
    if store.newest_unfinished(config.out_dir, _steps_wanted(config)) is not None:
        return None
    return store.newest(config.out_dir)


def check_start(resolved: ResolvedConfig, resume: bool) -> None:
    """What a run starts from, looked for before its data: what is lacking is said at once. Raises UserError."""
    config = resolved.config
    if not resume:
        starting.find(config.init_from)
    elif store.newest_unfinished(config.out_dir, _steps_wanted(config)) is None:
        left = store.base_path(config.out_dir) / "ckpt.pt"
        if left.is_file():  # nanoGPT's own init_from = 'resume' means this file
            raise UserError("usage.resume_nanogpt", path=str(left))


def directory_of(resolved: ResolvedConfig, resume: bool, listen: Listener) -> tuple[RunDirectory, bool]:
    """(the run's directory with its lock held, whether it holds a run to go on with)."""
    out_dir = resolved.config.out_dir
    if resume:
        found = store.newest_unfinished(out_dir, _steps_wanted(resolved.config))
        if found is not None:
            found.acquire()
            return found, True
        listen(Note("train.nothing_to_resume", out_dir=out_dir))
    return store.create(out_dir), False
