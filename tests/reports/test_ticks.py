"""Ticks of axes: round steps, texts that say their values, several densities; hypothesis looks for axes where that fails."""

import math
from itertools import chain, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.base.quantities import parse_bytes, parse_duration
from foretrain.reports.axes import MOST, ticks

ends = st.floats(1e-6, 1e15)


@given(
    ends, ends, st.sampled_from(["bytes", "duration", "number", "percent", "energy", "money", "rate"]), st.booleans()
)
def test_every_density_rises_and_no_two_texts_are_equal(one: float, other: float, format: str, log: bool) -> None:
    low, high = sorted((one, other))
    levels = ticks(format, low, high, log=log)
    assert levels
    counts = [len(level) for level in levels]
    assert max(counts) <= MOST
    for level in levels:
        values = [value for value, _ in level]
        assert values == sorted(set(values))
        assert len({text for _, text in level}) == len(level)


@given(st.floats(0, 1e12), st.floats(1e-3, 1e12))
def test_linear_steps_are_even_and_cover_the_values(low: float, length: float) -> None:
    high = low + length
    if not high - low > 1e-6 * high:
        return
    for level in ticks("number", low, high):
        values = [value for value, _ in level]
        steps = [b - a for a, b in pairwise(values)]
        assert all(step == pytest.approx(steps[0], rel=1e-3) for step in steps)
        if steps:
            lead = steps[0] / 10 ** math.floor(math.log10(steps[0] * 1.0001))
            assert any(lead == pytest.approx(k, rel=1e-3) for k in (1, 2, 5))
            assert values[0] - steps[0] < low
            assert values[-1] + steps[0] > high


@given(st.floats(1024, 1e14))
def test_a_text_says_its_value(high: float) -> None:
    for level in ticks("bytes", 0, high):
        assert [parse_bytes(text.replace(",", "")) for _, text in level] == pytest.approx(
            [value for value, _ in level], abs=high / 500
        )


def texts(format: str, low: float, high: float, log: bool = False) -> list[list[str]]:
    return [[text for _, text in level] for level in ticks(format, low, high, log=log)]


def test_bytes_of_an_axis_have_one_unit_without_idle_zeros() -> None:
    assert texts("bytes", 0, 2 * 2**30)[0][:4] == ["0 GiB", "0.2 GiB", "0.4 GiB", "0.6 GiB"]
    assert texts("bytes", 2**20, 2**34, log=True)[1][:3] == ["1 MiB", "4 MiB", "16 MiB"]


def test_time_goes_by_minutes_and_hours() -> None:
    (first, *_) = texts("duration", 0, 900)
    assert first[:3] == ["0", "2 min", "4 min"]
    steps = texts("duration", 60, 400_000, log=True)[-1]
    assert steps
    assert all(parse_duration(text) for text in steps if "days" not in text)


def test_ticks_separate_thousands_and_keep_digits_of_money() -> None:
    assert "200,000 days" in chain(*texts("duration", 0, 210_536.1 * 86400))
    assert "1,000,000 kWh" in chain(*texts("energy", 0, 980_256.3 * 3.6e6))
    assert texts("money", 0, 0.03)[0][:3] == ["0", "0.005", "0.01"]


@pytest.mark.parametrize(("low", "high"), [(math.nan, 1.0), (0.0, math.inf), (-math.inf, 0.0)])
def test_what_is_not_finite_has_no_ticks(low: float, high: float) -> None:
    assert ticks("number", low, high) == []
    assert ticks("number", 0.0, 0.0, log=True) == []
