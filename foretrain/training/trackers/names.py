"""What a line of metrics.jsonl is called in a tracker, so that a run of ours and one of the Trainer share their charts.

The Trainer's names are those of transformers 5.23 (integrations/integration_utils.py): `rewrite_logs` makes `eval/loss`
of `eval_loss` and `train/loss` of `loss`, and `train/global_step` is what charts are drawn over. What the Trainer does
not log (time of a step, MFU, memory, energy) stands beside it with the unit in its name.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from foretrain.base.units import JOULES_PER_KWH

STEP = "train/global_step"
OF_STEP = {
    "loss": "train/loss", "grad_norm": "train/grad_norm", "learning_rate": "train/learning_rate",
    "tokens_per_s": "train/tokens_per_second", "step_s": "train/step_time_s", "mfu": "train/mfu",
    "data_wait_s": "train/data_wait_s", "elapsed_s": "train/elapsed_s", "memory_bytes": "train/memory_bytes",
    "power_w": "train/power_w",
}  # fmt: skip
OF_EVALUATION = {"val_loss": "eval/loss", "train_loss": "eval/train_loss", "evaluation_s": "eval/runtime"}
OF_PLAN, ENERGY = "train/memory_of_plan", "train/energy_kwh"


class Namer:
    """Names the lines of one run. `planned_bytes`: the memory that its plan expects; None where there is no plan."""

    def __init__(self, planned_bytes: float | None) -> None:
        self.planned_bytes = planned_bytes
        self._energy_j = 0.0
        self._last: tuple[float, float] | None = None  # seconds and watts of the last line with a power

    def named(self, line: Mapping[str, Any]) -> dict[str, float]:
        """{metric: value} of a line; what it does not say is left out."""
        names = OF_STEP if line["kind"] == "step" else OF_EVALUATION
        found = {name: float(line[key]) for key, name in names.items() if isinstance(line.get(key), int | float)}
        if line["kind"] != "step":
            return found
        if self.planned_bytes and (held := found.get("train/memory_bytes")):
            found[OF_PLAN] = held / self.planned_bytes
        if (power_w := found.get("train/power_w")) is not None:
            self._add_energy(found["train/elapsed_s"], power_w)
        if self._last:
            found[ENERGY] = self._energy_j / JOULES_PER_KWH
        return found

    def skip(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Take the energy of lines that were reported before."""
        for line in lines:
            self.named(line)

    def _add_energy(self, elapsed_s: float, power_w: float) -> None:
        """A card is asked once a second at most; between two answers it drew the mean of both."""
        if self._last is not None and elapsed_s > self._last[0]:
            self._energy_j += (elapsed_s - self._last[0]) * (power_w + self._last[1]) / 2
        self._last = elapsed_s, power_w
