"""A run made ready to begin: its device, data, directory, what the config leaves open, and its forecast.

Of several ranks the first one does it, and tells the others what came of it; they look for the data themselves.
"""

from collections.abc import Callable

from foretrain.advice import host_fit
from foretrain.app.training.data import prepare_data
from foretrain.app.training.directories import already_finished, check_start, directory_of
from foretrain.app.training.following import follow, told_of
from foretrain.app.training.inputs import choose, pick_batch, write_inputs
from foretrain.app.training.request import Ready, Request
from foretrain.training.device import Placement, place
from foretrain.training.folder import label
from foretrain.training.host_memory import give_back, keep_memory
from foretrain.training.ranks import meeting
from foretrain.training.ranks.group import Group
from foretrain.training.store import RunRecord


def alone(asked: Request) -> Ready | RunRecord:
    """The run, ready to begin; its record where there is nothing left to do. Raises UserError."""
    return _first(asked, lambda: place(asked.resolved.config), 1)


def together(asked: Request, ranks: Group) -> Ready | RunRecord:
    """The same for one rank of several. Raises UserError."""
    placement = meeting.placed(asked.resolved.config, ranks)
    if ranks.first:
        found = _first(asked, lambda: placement, ranks.world)
        ranks.agree(told_of(found), lambda words: words[0], patient=True)
        return found
    told = ranks.agree(None, lambda words: words[0], patient=True)
    return RunRecord.from_json(told["finished"]) if "finished" in told else follow(asked, placement, told, ranks.rank)


def _first(asked: Request, placed: Callable[[], Placement], world: int) -> Ready | RunRecord:
    if (done := already_finished(asked)) is not None:
        return done
    check_start(asked.resolved, asked.resume)
    return _ready(asked, placed(), world)


def _ready(asked: Request, placement: Placement, world: int) -> Ready:
    """Data, directory and choices, with the directory's lock held. Raises UserError."""
    resolved, listen = asked.resolved, asked.listen
    if placement.device.type == "cpu":
        keep_memory()
    resolved, info = prepare_data(resolved, asked.bar)
    if placement.device.type == "cpu" and not resolved.config.auto_batch_size:  # which looks by itself
        host_fit.check(resolved.config, placement.gpu, compiled=placement.compiled)
    directory, resuming = directory_of(resolved, asked.resume, listen)
    try:
        directory.tell("starting")
        if asked.label:
            label.write(directory.path, label.read(directory.path).with_more(asked.label))
        resolved, placement = choose(resolved, placement, directory, resuming, world)
        give_back()  # what the measurements took is not the training's
        if resolved.config.auto_batch_size and not resuming:  # a resumed run goes on as it was
            resolved = pick_batch(resolved, placement, asked, world)
            split = (resolved.config.batch_size, resolved.config.gradient_accumulation_steps)
            directory.event("auto_batch", batch_size=split[0], accumulation=split[1])
        if not resuming:
            write_inputs(directory, resolved, placement, asked)
    except BaseException:
        directory.release()
        raise
    return Ready(resolved, placement, info, directory, resuming)
