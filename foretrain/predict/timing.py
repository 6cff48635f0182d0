"""How long a run takes, with power, energy, cost and CO2 of its cards alone: power = board · (idle + (full − idle) ·
load), load = ½ + ½ · min(1, MFU / 0.35), a split that is assumed and measured nowhere."""

from typing import Literal, get_args

from foretrain.base.records import Record
from foretrain.base.units import JOULES_PER_KWH
from foretrain.config.options import RunConfig
from foretrain.hardware.catalogue import Gpu
from foretrain.predict.speed.time import Range

FULL_MFU = 0.35  # the MFU from which on the matrix units are taken to draw all they can
CAPPED_BOARD_W = 75
# Shares of the board power: idle, and full (low, expected, high). An RTX 4070 of 200 W trains nanoGPT at 207 W and
# idles at 12 W, an H200 of 700 W at 689 to 694 W (benchmarks/published_rates.json); four RTX 4090 draw about 450 W each
# (server-gear.com). A node of eight H100 draws at most 8.4 of 10.2 kW (arXiv:2412.08602), or 76% (arXiv:2506.14551),
# and idle data-centre cards 60 to 105 W of 400 to 700. Boards of 75 W and less run into their limit (arXiv:1903.07486).
# W of a CPU core: EPYC 9654 (360 W for 96) to Ryzen 9 7950X (170 W for 16), by their vendors.
SHARES = {
    "geforce": (0.05, 0.75, 0.97, 1.04),
    "datacentre": (0.15, 0.60, 0.95, 1.00),
    "capped": (0.20, 0.85, 0.97, 1.00),
}
CPU_CORE_W = (3.75, 6.5, 10.6)
Reading = Literal["low", "expected", "high"]
READINGS: tuple[Reading, ...] = get_args(Reading)
TimingSource = Literal["estimated", "calibrated", "measured (log)"]
NO_TIME = Range(low_s=0.0, expected_s=0.0, high_s=0.0)


class Prices(Record):
    """What energy and hours cost, as the config says. 0: no rent, no CO2 factor."""

    price_per_kwh: float
    price_per_hour: float
    co2_per_kwh: float
    currency: str

    @classmethod
    def of(cls, config: RunConfig) -> "Prices":
        return cls.model_validate({name: getattr(config, name) for name in cls.model_fields})


class Power(Record):
    """What a device draws while it trains; `model` says which shares were taken."""

    model: str
    low_w: float
    expected_w: float
    high_w: float


class Spending(Record):
    """What a run takes besides time: electricity as `cost`, or hours as `rent`, in `currency`; None where unknown."""

    power: Power | None = None
    energy_low_j: float | None = None
    energy_expected_j: float | None = None
    energy_high_j: float | None = None
    cost_low: float | None = None
    cost_expected: float | None = None
    cost_high: float | None = None
    rent_low: float | None = None
    rent_expected: float | None = None
    rent_high: float | None = None
    co2_low_g: float | None = None
    co2_expected_g: float | None = None
    co2_high_g: float | None = None

    def money(self) -> tuple[float, float, float] | None:
        """The rent, else electricity: low, expected and high; None where neither is known."""
        if self.rent_low is not None and self.rent_expected is not None and self.rent_high is not None:
            return self.rent_low, self.rent_expected, self.rent_high
        if self.cost_low is not None and self.cost_expected is not None and self.cost_high is not None:
            return self.cost_low, self.cost_expected, self.cost_high
        return None


PRICES = Prices.of(RunConfig())  # of electricity, by default


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


def power_model(gpu: Gpu) -> str | None:
    """Which of SHARES a card follows, 'cpu', or None where nothing is known of its power."""
    if gpu.kind == "cpu":
        return "cpu"
    if not gpu.board_power_w:
        return None
    if gpu.board_power_w <= CAPPED_BOARD_W:
        return "capped"
    return "geforce" if gpu.name.startswith(("RTX", "GTX", "Quadro", "TITAN")) else "datacentre"


def power(gpu: Gpu, mfu: float | None) -> Power | None:
    """Watts of a device that trains at this MFU (None: half of full is assumed)."""
    model = power_model(gpu)
    if model is None:
        return None
    if model == "cpu":
        low, expected, high = (watts * (gpu.sm_count or 1) for watts in CPU_CORE_W)
        return Power(model=model, low_w=low, expected_w=expected, high_w=high)
    board = gpu.board_power_w or 0.0
    idle, low_full, expected_full, high_full = SHARES[model]
    load = 0.5 + 0.5 * min(1.0, (FULL_MFU / 2 if mfu is None else mfu) / FULL_MFU)
    return Power(
        model=model,
        low_w=board * (idle + (low_full - idle) * load),
        expected_w=board * (idle + (expected_full - idle) * load),
        high_w=board * high_full,
    )


def spending(config: RunConfig | Prices, gpu: Gpu, mfu: float | None, total_s: Range, cards: int = 1) -> Spending:
    """Return energy, electricity or rent, and CO2 of a run, of all `cards`; low goes with low."""
    times = (total_s.low_s, total_s.expected_s, total_s.high_s)
    found: dict[str, float] = {}
    drawn = power(gpu, mfu)
    if drawn is not None and cards > 1:
        watts = {name: cards * getattr(drawn, name) for name in ("low_w", "expected_w", "high_w")}
        drawn = drawn.model_copy(update=watts)
    watts = (drawn.low_w, drawn.expected_w, drawn.high_w) if drawn else (None, None, None)
    for name, seconds, watt in zip(("low", "expected", "high"), times, watts, strict=True):
        if watt is not None:
            kwh = watt * seconds / JOULES_PER_KWH
            found[f"energy_{name}_j"] = watt * seconds
            if not config.price_per_hour:
                found[f"cost_{name}"] = kwh * config.price_per_kwh
            if config.co2_per_kwh:
                found[f"co2_{name}_g"] = kwh * config.co2_per_kwh
        if config.price_per_hour:
            found[f"rent_{name}"] = cards * seconds / 3600 * config.price_per_hour
    return Spending(power=drawn, **found)
