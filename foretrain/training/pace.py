"""How fast a run goes: the time of its steps without what stands between them, and what is left of it."""

import math
from array import array
from statistics import median

WARM_STEPS = 3  # the first ones allocate, compile and are measured
RECENT = 20
FORECAST_COUNTS = 2  # as much as so many measured lines


class Pace:
    """Seconds, of a clock that the caller reads. `expected`: of a step and of an evaluation, as they were forecast."""

    def __init__(self, expected: tuple[float, float] | None = None) -> None:
        self.expected = expected
        self.step_times, self.evaluation_times = array("d"), array("d")  # lists take four times the memory
        self._last_s, self._last_step, self._paused_s = 0.0, 0, 0.0

    def begin(self, at_s: float, step: int) -> None:
        """The next step to be timed is this one."""
        self._last_s, self._last_step, self._paused_s = at_s, step, 0.0

    def pause(self, seconds: float) -> None:
        """Something that is no step took so long."""
        self._paused_s += seconds

    def step_s(self, at_s: float, step: int) -> float:
        """Seconds of a step that is done, a mean of those since this was asked last."""
        taken = (at_s - self._last_s - self._paused_s) / (step + 1 - self._last_step)
        self.begin(at_s, step + 1)
        if step >= WARM_STEPS:
            self.step_times.append(taken)
        return taken

    def eta_s(self, step: int, step_s: float, max_iters: int, eval_interval: int) -> float:
        """What the rest of the run takes, its evaluations included.

        The first steps are not like the later ones, so it begins with the forecast, and what is measured replaces that.
        """
        remaining = max_iters - step - 1
        recent = self.step_times[-RECENT:]  # one slow step must not frighten
        each_s = median(recent) if recent else step_s
        if self.expected is not None:
            expected_s = self.expected[0] or each_s
            each_s = (FORECAST_COUNTS * expected_s + len(recent) * each_s) / (FORECAST_COUNTS + len(recent))
            each_s = each_s if recent else expected_s
        evaluation_s = self.median_evaluation_s or (self.expected[1] if self.expected else 0.0)
        return remaining * each_s + math.ceil(remaining / eval_interval) * evaluation_s

    @property
    def median_step_s(self) -> float | None:
        return median(self.step_times) if self.step_times else None

    @property
    def median_evaluation_s(self) -> float | None:
        return median(self.evaluation_times) if self.evaluation_times else None
