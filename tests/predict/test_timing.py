"""Power, energy, cost, rent, CO2 and the table of cards: against closed forms and published readings."""

import contextlib
import json
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.advice.cards import compared
from foretrain.base.quantities import parse_price
from foretrain.base.units import format_duration
from foretrain.config.resolve import resolve
from foretrain.hardware.catalogue import Gpu, catalogue, find
from foretrain.predict.plan import plan
from foretrain.predict.timing import power, power_model
from tests.kit.command import REPO, foretrain

CASES = REPO / "examples" / "real-cases"
D = str(CASES / "d.py")


@pytest.mark.parametrize("gpu", catalogue().values(), ids=lambda gpu: gpu.name)
def test_power_is_between_idle_and_board_and_grows_with_load(gpu: Gpu) -> None:
    if not gpu.board_power_w:
        assert power(gpu, 0.5) is None
        return
    drawn = [power(gpu, mfu) for mfu in (0.0, 0.2, 0.5, 0.9, 3.0)]
    for found in drawn:
        assert 0.2 * gpu.board_power_w < found.low_w < found.expected_w < found.high_w <= 1.04 * gpu.board_power_w
    expected = [found.expected_w for found in drawn if found]
    assert expected == sorted(expected)
    assert expected[2] == expected[4]  # beyond FULL_MFU there is nothing more to draw


READINGS = json.loads((REPO / "benchmarks" / "published_rates.json").read_text("utf-8"))["power_in_training"]


@pytest.mark.parametrize("reading", READINGS, ids=lambda r: f"{r['gpu']} {r['measured_w']} W")
def test_power_against_published_readings(reading: dict) -> None:  # type: ignore[type-arg]
    """What others read off nvidia-smi while nanoGPT trained lies in the range, and near what is expected."""
    found = power(find(reading["gpu"]), 0.4)
    assert found.low_w <= reading["measured_w"] <= found.high_w
    assert found.expected_w == pytest.approx(reading["measured_w"], rel=0.1)


def test_power_against_other_published_figures() -> None:
    """gpu_burn on an RTX 4090 (450 W) and an H100 node in training (76% of its rating) lie in the range."""
    burn, h100 = power(find("RTX 4090"), 0.6), power(find("H100 SXM5 80GB"), 0.45)
    assert burn.low_w <= 450 <= burn.high_w
    assert h100.low_w <= 0.76 * 700 <= h100.high_w


def test_kinds_of_power() -> None:
    kinds = {"RTX 4070": "geforce", "A100 SXM4 80GB": "datacentre", "T4": "capped", "L4": "capped"}
    assert {name: power_model(find(name)) for name in kinds} == kinds
    assert power_model(find("Apple M4 Pro")) is None


def test_energy_and_money_follow_from_hours_and_watts() -> None:
    config = resolve([D, "--price_per_kwh=0.4", "--price_per_hour=0.35", "--co2_per_kwh=336"]).config
    timing = plan(config, find("4070"), logged_step_s=3.9).timing
    assert timing.power
    owned = plan(config.model_copy(update={"price_per_hour": 0.0}), find("4070"), logged_step_s=3.9).timing
    for name in ("low", "expected", "high"):
        seconds, watts = getattr(timing.total_s, f"{name}_s"), getattr(timing.power, f"{name}_w")
        kwh = seconds * watts / 3.6e6
        assert getattr(timing, f"energy_{name}_j") == pytest.approx(kwh * 3.6e6)
        assert getattr(owned, f"cost_{name}") == pytest.approx(0.4 * kwh)
        assert getattr(timing, f"cost_{name}") is None  # who rents pays no electricity
        assert getattr(timing, f"rent_{name}") == pytest.approx(0.35 * seconds / 3600)
        assert getattr(timing, f"co2_{name}_g") == pytest.approx(336 * kwh)
    assert timing.money() == (timing.rent_low, timing.rent_expected, timing.rent_high)
    assert owned.money() == (owned.cost_low, owned.cost_expected, owned.cost_high)


def test_what_was_not_asked_for_is_not_there() -> None:
    timing = plan(resolve([D]).config, find("4070")).timing
    assert timing.rent_expected is None
    assert timing.co2_expected_g is None
    assert timing.cost_expected
    assert "CO2" not in foretrain("plan", D, "--gpu", "4070", "--full").stdout
    shown = foretrain("plan", D, "--gpu", "4070", "--co2", "400", "--price", "€0.35/h", "--full").stdout
    assert "at 400 g per kWh" in shown
    assert "electricity included" in " ".join(shown.split())


def test_a_device_of_unknown_power_has_no_cost_but_a_rent() -> None:
    config = resolve([D, "--price_per_hour=1"]).config
    timing = plan(config, find("Apple M4 Pro"), logged_step_s=3600.0).timing
    assert timing.cost_expected is None
    assert timing.money() == (timing.rent_low, timing.rent_expected, timing.rent_high)


def test_checkpoint_after_each_evaluation_but_first_is_counted() -> None:
    config = resolve([D]).config
    timing = plan(config, find("4070"), logged_step_s=3.9).timing
    parts = 3.9 * 20_000 + timing.compile_s.expected_s + 41 * timing.evaluation_s.expected_s
    assert timing.total_s.expected_s == pytest.approx(parts + 40 * timing.save_s.expected_s)


# -- prices --------------------------------------------------------------------------------------------------


@given(st.floats(1e-4, 1e5), st.sampled_from(["", "EUR", "$", "€", "usd"]), st.booleans(), st.booleans())
def test_prices_are_read_in_every_form(amount: float, currency: str, before: bool, an_hour: bool) -> None:
    number = f"{amount:.6f}"
    text = f"{currency}{number}" if before else f"{number} {currency}".rstrip()
    found = parse_price(text + ("/h" if an_hour else ""))
    assert found.amount == pytest.approx(amount, abs=1e-6)
    assert found.currency == {"": "", "EUR": "EUR", "$": "USD", "€": "EUR", "usd": "USD"}[currency]


@given(st.text(max_size=30))
def test_any_other_price_is_a_value_error(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert parse_price(text).amount > 0


@pytest.mark.parametrize(
    "price", ["", "0", "-1", "nan", "inf", "1e9", "9" * 400, "0,35", "0.35/day", "4070=", "=3", "4090=1", "xyz=1", "$1"]
)
def test_prices_that_cannot_be_meant_are_one_sentence(price: str) -> None:
    result = foretrain("plan", D, "--gpu", "4070", f"--price={price}", code=2)
    assert result.stderr.startswith("error: --price")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("co2", ["0", "-1", "nan", "inf", "1e9"])
def test_co2_factors_that_cannot_be(co2: str) -> None:
    result = foretrain("plan", D, "--gpu", "4070", "--co2", co2, code=2)
    assert "--co2" in result.stderr


# -- the table of cards --------------------------------------------------------------------------------------


def test_cards_are_marked_by_their_own_figures() -> None:
    words = ("plan", "gpt2-124m", "--gpu", "3060,4090,H200", "--price", "3060=0.05,4090=0.35,H200=9")
    made = json.loads(foretrain(*words, "--json").stdout)
    totals = {p["gpu"]["name"]: p["timing"] for p in made["plans"]}
    assert all(t["cost_expected"] is None for t in totals.values())
    assert made["best"]["cheapest"] == min(totals, key=lambda name: totals[name]["rent_expected"])
    assert made["best"]["fastest"] == "H200 SXM 141GB"
    assert made["best"]["least_energy"] == min(totals, key=lambda name: totals[name]["energy_expected_j"])
    assert {p["config"]["price_per_hour"] for p in made["plans"]} == {0.05, 0.35, 9}
    shown = foretrain(*words, "--full").stdout
    assert f"{made['best']['cheapest']}: cheapest" in shown


def test_rented_and_own_cards_are_compared_by_cost() -> None:
    """Rent alone against electricity alone; the electricity of a rented card once made it lose."""
    config = resolve(["gpt2-124m"]).config
    own = plan(config, find("4070"))
    hours = plan(config, find("4090")).timing.total_s.expected_s / 3600  # type: ignore[union-attr]
    rent = 0.99 * own.timing.money()[1] / hours  # type: ignore[union-attr,index]
    rented = plan(config.model_copy(update={"price_per_hour": rent}), find("4090"))
    assert compared([own, rented]).best.cheapest == "RTX 4090"


def test_a_card_that_does_not_fit_is_never_marked() -> None:
    config = resolve(["gpt2-1558m", "--batch_size=4"]).config
    plans = [plan(config, find(name)) for name in ("4070", "H200")]
    assert plans[0].verdict_of("foretrain") == "does_not_fit"
    choice = compared(plans).best
    assert choice.cheapest == choice.fastest == choice.least_energy == "H200 SXM 141GB"
    assert compared(plans[:1]).best.fastest is None
    assert "not known to fit any of these cards" in foretrain("plan", "gpt2-1558m", "--gpu", "4070,3060").stdout


def test_one_name_of_several_cards_prices_each_of_them() -> None:
    words = ("plan", "gpt2-124m", "--gpu", "A100-SXM4-40GB,A100-SXM4-80GB,4090", "--price", "A100=1.2", "--json")
    made = json.loads(foretrain(*words).stdout)
    assert [p["config"]["price_per_hour"] for p in made["plans"]] == [1.2, 1.2, 0.0]
    assert made["best"]["mixed_prices"]


def test_the_table_is_readable_at_80_columns() -> None:
    result = subprocess.run(
        [sys.executable, "-c", "from foretrain.cli import main; main()", "plan", "gpt2-124m", "--gpu",
         "3060,RTX 4070 Ti SUPER,A100-SXM4-80GB", "--price", "0.35", "--co2", "336", "--full"],
        capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": "80", "NO_COLOR": "1"},
    )  # fmt: skip
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    for word in ("range", "rent", "CO2", "best", "steady state", "fits"):
        assert word in result.stdout


def test_a_rent_leaves_the_range_of_the_hours_in_its_place() -> None:
    """In 80 columns something has to go: not what says how sure the hours are."""
    words = ["plan", "gpt2-124m", "--gpu", "3060,4070,4090", "--price", "4090=0.35", "--full"]
    command, env = [sys.executable, "-m", "foretrain", *words], {**os.environ, "COLUMNS": "80", "NO_COLOR": "1"}
    shown = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    assert max(map(len, shown.splitlines())) <= 80
    timing = plan(resolve(["gpt2-124m"]).config, find("4070")).timing_of("foretrain")
    total = timing.total_s
    assert f"{format_duration(total.low_s)} – {format_duration(total.high_s)}" in shown
    assert " rent " in shown
