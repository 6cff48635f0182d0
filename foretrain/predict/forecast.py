"""What a run takes on some cards: `forecast(run, where)` of a `Pretraining`, a `FineTuning` or a `Generation`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from foretrain.base.quantities import Limit
from foretrain.base.records import Record
from foretrain.hardware.catalogue import Gpu
from foretrain.hardware.cluster import Cluster
from foretrain.predict.finetune.plan import FineTunePlan
from foretrain.predict.inference.plan import InferencePlan
from foretrain.predict.memory import Verdict
from foretrain.predict.plan import Plan, Reading, Timing
from foretrain.predict.ranks import ClusterPlan
from foretrain.predict.timing import Prices


@dataclass(frozen=True)
class Placement:
    """Where a run runs: one card, or the cards of a cluster, each with memory that other programs use."""

    card: Gpu
    used_by_others_bytes: int = 0
    cluster: Cluster | None = None

    @property
    def world(self) -> int:
        return self.cluster.world if self.cluster else 1


class Range(NamedTuple):
    """Values that a search tries: multiples of `granule` up to `most`; `goes_on`: beyond the training's."""

    granule: int
    most: int
    goes_on: bool = False


class Probe(Record):
    """One tried value. `smallest_limit_bytes`: the least that the allocator may reserve, by a trace."""

    value: int
    verdict: Verdict | None
    needed_expected_bytes: int
    smallest_limit_bytes: int | None = None

    @property
    def fits(self) -> bool:
        return self.verdict == "fits"


class Run(Protocol):
    @property
    def kind(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def tokens_per_step(self) -> int: ...
    @property
    def steps(self) -> int | None: ...
    @property
    def dataset_tokens(self) -> int | None: ...
    @property
    def prices(self) -> Prices: ...
    @property
    def ranges(self) -> Mapping[str, Range]:
        """The options that a search may change."""
        ...

    def but(self, **options: Any) -> "Run":
        """Return the same run with other values of its options. Raises UserError for a value that it cannot have."""
        ...

    def on(self, where: Placement) -> "Forecast":
        """Return the forecast. Raises UserError for what cannot be planned."""
        ...

    def with_steps(self, found: "Forecast", steps: int) -> tuple[Any, tuple[str, ...]]:
        """Return the plan of a forecast with this many steps, and the names of the options that changed with them."""
        ...

    def spent(self, found: "Forecast", limit: Limit, reading: Reading) -> Callable[[int], float]:
        """Return how much of the limit's kind a forecast's run takes by its number of steps."""
        ...

    def check(self, found: "Forecast", text: str, *, steps: bool = False) -> None:
        """Raise UserError where a forecast cannot answer what was asked by `text`; `steps`: about its steps."""
        ...

    def probe(self, found: "Forecast", option: str, value: int) -> Probe: ...


AnyPlan = Plan | ClusterPlan | FineTunePlan | InferencePlan


def kind_of(data: Mapping[str, Any]) -> type[AnyPlan]:
    if "one_card" in data:
        return ClusterPlan
    kinds: dict[str, type[AnyPlan]] = {"fine-tuning": FineTunePlan, "generation": InferencePlan}
    return kinds.get(data.get("kind", ""), Plan)


@dataclass(frozen=True)
class Forecast:
    """What a run takes. `plan` is the record of its kind, which views print."""

    run: Run
    where: Placement
    plan: AnyPlan

    @property
    def peak_bytes(self) -> int:
        """What the run is expected to need on each card, the CUDA context included."""
        return self.plan.needed_bytes

    @property
    def available_bytes(self) -> int | None:
        return self.plan.available_bytes

    @property
    def verdict(self) -> Verdict | None:
        return self.plan.verdict

    @property
    def fits(self) -> bool:
        return self.verdict == "fits"

    @property
    def timing(self) -> Timing | None:
        return self.plan.timing


def forecast(run: Run, where: Placement) -> Forecast:
    return run.on(where)
