"""What a search of `foretrain tune` is given: what times a setting, where it runs, and how long it may go on."""

from dataclasses import dataclass
from typing import Protocol

from foretrain.config.options import RunConfig
from foretrain.hardware.catalogue import Dtype, Gpu
from foretrain.tuning.pool import Burst, Death


class Bench(Protocol):
    """What times a setting; tuning/pool.py's Pool, or a simulation."""

    def burst(self, config: RunConfig, seconds: float, limit_s: float, expected_bytes: int | None) -> Burst | Death:
        """Some steps of it."""
        ...

    def evaluate(self, config: RunConfig, limit_s: float, expected_bytes: int | None) -> int | Death:
        """An evaluation beside its training state: the peak in bytes."""
        ...

    def holds(self, config: RunConfig) -> bool:
        """Whether a burst of it costs no start."""
        ...

    def drop(self, config: RunConfig) -> None:
        """It is not needed any more."""
        ...


@dataclass(frozen=True)
class Outlook:
    """Where the settings run, for their forecasts. `room_bytes`: what a process may take there."""

    gpu: Gpu
    dtype: Dtype
    room_bytes: int | None
    calibrated: bool


@dataclass(frozen=True)
class Limits:
    """How long, and how many settings at most; None: a quarter of the space, 4 to 24."""

    budget_s: float = 180.0
    most_trials: int | None = None
