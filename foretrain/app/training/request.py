"""What is to be trained, and how."""

from dataclasses import dataclass

from foretrain.config.resolve import ResolvedConfig
from foretrain.data.remote import Bar
from foretrain.training.contention import Reading
from foretrain.training.notes import Listener
from foretrain.training.ranks.place import ALONE, Place


@dataclass(frozen=True)
class Request:
    """A run as `train_resolved` is asked for it. `since`: the machine before torch was imported. `place`:
    of this process among the ranks of the run.
    """

    resolved: ResolvedConfig
    resume: bool
    trial: bool
    listen: Listener
    bar: Bar
    ends_process: bool
    since: Reading
    place: Place = ALONE
