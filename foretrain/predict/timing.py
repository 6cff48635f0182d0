"""`Timing`: how long any run takes and what that costs."""

from typing import Literal, get_args

from foretrain.config.options import RunConfig
from foretrain.predict.energy import Prices, Spending
from foretrain.predict.speed.time import Range

Reading = Literal["low", "expected", "high"]
READINGS: tuple[Reading, ...] = get_args(Reading)
TimingSource = Literal["estimated", "calibrated", "measured (log)"]
PRICES = Prices.of(RunConfig())  # of electricity, where nobody says others
NO_TIME = Range(low_s=0.0, expected_s=0.0, high_s=0.0)


class Timing(Spending):
    """Times of a run. `total_s` None: the number of steps is unknown; energy and money are those of one step. `mfu`:
    the share of the card's peak of what the model needs; `hfu`: of all that runs. `save_s`: one checkpoint."""

    source: TimingSource = "estimated"
    step_s: Range
    steps: int | None = None
    total_s: Range | None = None
    tokens_per_s: float
    flop_per_s: float | None = None
    mfu: float | None = None
    hfu: float | None = None
    flops_per_step: int | None = None
    hardware_flops_per_step: int | None = None
    generation_s: float | None = None  # of a step, to write what is learned from
    evaluation_s: Range | None = None
    n_evaluations: int | None = None
    save_s: Range | None = None
    compile_s: Range | None = None
    nanogpt_mfu: float | None = None
    torch: str = ""  # the version that an estimated time is for; "" on a CPU
    prices: Prices = PRICES

    @property
    def length_s(self) -> Range:
        return self.total_s or self.step_s
