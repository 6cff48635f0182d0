"""What is to be trained, and how; and the same made ready to begin."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from foretrain.config.resolve import ResolvedConfig
from foretrain.data.dataset import DatasetInfo
from foretrain.data.remote import Bar
from foretrain.runs.folder import Listener, RunDirectory
from foretrain.runs.state import UNSAID, Label, changed
from foretrain.runs.trackers import asked_for
from foretrain.training.contention import Reading
from foretrain.training.place import ALONE, Place

if TYPE_CHECKING:
    from foretrain.training.device import Placement

__all__ = ["UNSAID", "Label", "Ready", "Request", "changed"]


@dataclass(frozen=True)
class Request:
    """What `train_resolved` is asked. `since`: the machine before torch was imported. `place`: of this rank."""

    resolved: ResolvedConfig
    resume: bool
    trial: bool
    listen: Listener
    bar: Bar
    ends_process: bool
    since: Reading
    place: Place = ALONE
    label: Label = UNSAID

    trackers: tuple[str, ...] = field(init=False)  # that the run is reported to

    def __post_init__(self) -> None:
        """Raise UserError for an unknown tracker, before anything is begun."""
        config = self.resolved.config
        object.__setattr__(self, "trackers", asked_for(config.report_to, wandb_log=config.wandb_log))


@dataclass(frozen=True)
class Ready:
    resolved: ResolvedConfig
    placement: "Placement"
    info: DatasetInfo
    directory: RunDirectory
    resuming: bool
