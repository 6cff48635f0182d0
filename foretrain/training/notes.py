"""What a run tells while it goes on."""

from collections.abc import Callable
from typing import Any

from foretrain.training.store import EvaluationMetrics, StepMetrics


class Note:
    """Something that the user should hear of: an id and its values."""

    def __init__(self, id: str, /, **values: Any) -> None:
        self.id = id
        self.values = values


Event = StepMetrics | EvaluationMetrics | Note
Listener = Callable[[Event], None]
