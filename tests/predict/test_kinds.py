"""A made-up kind of run is asked every question: a kind of run is one class that says what `predict.forecast.Run` wants."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest

from foretrain.base.errors import UserError
from foretrain.base.quantities import Limit, parse_limit
from foretrain.hardware.catalogue import Gpu, catalogue, find
from foretrain.predict.forecast import Forecast, Placement, Probe, Range, forecast
from foretrain.predict.largest import largest, smallest_card
from foretrain.predict.memory import Verdict
from foretrain.predict.plan import Reading
from foretrain.predict.timing import PRICES, Prices
from foretrain.predict.within import within

GIB = 1 << 30


@dataclass(frozen=True)
class SortingPlan:
    gpu: Gpu
    rows: int
    notes: tuple[()] = ()

    @property
    def needed_bytes(self) -> int:
        return self.rows * GIB

    @property
    def available_bytes(self) -> int | None:
        return self.gpu.memory_bytes

    @property
    def verdict(self) -> Verdict:
        return "fits" if self.needed_bytes <= (self.gpu.memory_bytes or 0) else "does_not_fit"

    @property
    def place(self) -> str:
        return self.gpu.name

    @property
    def timing(self) -> str:
        return "known"


@dataclass(frozen=True)
class Sorting:
    """A run that needs a GiB for each row, and a second for each step."""

    rows: int = 3
    steps: int | None = 100
    name: str = "sorting"
    kind: str = "sorting"
    tokens_per_step: int = 10
    dataset_tokens: int | None = None
    prices: Prices = PRICES

    @property
    def ranges(self) -> Mapping[str, Range]:
        return {"rows": Range(1, 1000)}

    def but(self, **options: Any) -> "Sorting":
        return replace(self, **options)

    def on(self, where: Placement) -> Forecast:
        if where.card.kind != "cuda":
            raise UserError("usage.finetune_needs_cuda", gpu=where.card.name)
        return Forecast(self, where, SortingPlan(where.card, self.rows))  # type: ignore[arg-type]

    def with_steps(self, found: Forecast, steps: int) -> tuple[Any, tuple[str, ...]]:
        return found.plan, ("steps",)

    def spent(self, found: Forecast, limit: Limit, reading: Reading) -> Callable[[int], float]:
        return lambda steps: steps * {"low": 0.5, "expected": 1.0, "high": 2.0}[reading]

    def no_time(self, found: Forecast, text: str) -> UserError:
        raise AssertionError

    def check(self, found: Forecast, text: str, *, steps: bool = False) -> None: ...

    def probe(self, found: Forecast, option: str, value: int) -> Probe:
        made = SortingPlan(found.where.card, value)
        return Probe(value=value, verdict=made.verdict, needed_expected_bytes=made.needed_bytes)


def test_questions_answer_for_a_kind_of_run_they_never_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    made = forecast(Sorting(), Placement(find("RTX 4070")))
    assert (made.verdict, made.peak_bytes) == ("fits", 3 * GIB)
    assert largest(made, "rows").value == (find("RTX 4070").memory_bytes or 0) // GIB
    found = smallest_card(made, catalogue().values())
    assert found.too_small.memory_bytes < 3 * GIB <= min(card.memory_bytes for card in found.fitting)
    assert found.fitting[0].needed_bytes == 3 * GIB
    with monkeypatch.context() as patched:  # its plan is no record of ours, which an answer would keep
        patched.setattr("foretrain.predict.within.Within", lambda **values: values)
        spent = within(made, parse_limit("1h"))
    assert [spent[name] for name in ("steps", "steps_cautious", "steps_optimistic")] == [3600, 1800, 7200]
