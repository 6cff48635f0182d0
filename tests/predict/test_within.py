"""Inverse questions: the answered steps stay within the limit, one more does not, and nonsense is one sentence."""

import contextlib
import json
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from foretrain.base import quantities as q
from foretrain.base.errors import UserError
from foretrain.base.quantities import Limit
from foretrain.config.resolve import resolve, to_toml
from foretrain.hardware.catalogue import find
from foretrain.predict.plan import plan
from foretrain.predict.pretraining import adjusted, of_plan
from foretrain.predict.within import spent_of, within
from tests.kit.command import REPO, foretrain, refused
from tests.kit.tiny import tiny

D = str(REPO / "examples" / "real-cases" / "d.py")

# -- parsers -------------------------------------------------------------------------------------------------


@given(st.integers(0, 300), st.integers(0, 23), st.integers(0, 59), st.integers(0, 59))
def test_durations_are_read_back(days: int, hours: int, minutes: int, seconds: int) -> None:
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    assume(total)
    parts = ((days, "d"), (hours, "h"), (minutes, "m"), (seconds, "s"))
    text = "".join(f"{value}{unit}" for value, unit in parts if value)
    assert q.parse_duration(text) == total
    assert q.parse_limit(text).kind == "time"


@pytest.mark.parametrize(
    ("text", "kind", "amount", "currency"),
    [
        ("12h", "time", 43_200, ""), ("90m", "time", 5400, ""), ("1d12h", "time", 129_600, ""),
        ("30min", "time", 1800, ""), ("1.5 h", "time", 5400, ""), ("2 days", "time", 172_800, ""),
        ("5 min", "time", 300, ""), ("3 day", "time", 259_200, ""), ("3kWh", "energy", 1.08e7, ""),
        ("500 Wh", "energy", 1.8e6, ""), ("2MWh", "energy", 7.2e9, ""), ("5EUR", "money", 5, "EUR"),
        ("5 eur", "money", 5, "EUR"), ("$5", "money", 5, "USD"), ("5€", "money", 5, "EUR"), ("GBP 7", "money", 7, "GBP"),
        ("1,250.50 EUR", "money", 1250.5, "EUR"), ("1e2h", "time", 360_000, ""), ("1_000 kWh", "energy", 3.6e9, ""),
    ],
)  # fmt: skip
def test_a_limit_says_by_its_unit_what_it_is(text: str, kind: str, amount: float, currency: str) -> None:
    found = q.parse_limit(text)
    assert (found.kind, found.amount, found.currency) == (kind, amount, currency)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("10B", 10**10),
        ("3.68 B", 3_680_000_000),
        ("500M", 5 * 10**8),
        ("1e9", 10**9),
        ("1_000", 1000),
        ("2T", 2 * 10**12),
    ],
)
def test_counts(text: str, count: int) -> None:
    assert q.parse_count(text) == count


@given(st.text(max_size=40))
def test_any_text_is_a_limit_or_a_value_error(text: str) -> None:
    for parse in (q.parse_limit, q.parse_count, q.parse_duration, q.parse_energy, q.parse_money):
        with contextlib.suppress(ValueError):
            parse(text)


BAD_LIMITS = [
    "", "0h", "-5h", "12", "nan", "inf", "1e999h", "0 EUR", "-1EUR", "0kWh", "3kW", "10000000d", "12h12h", "30m1h",
    "1h30", "99999999999EUR", "5 EUR x", "1,5h", "h", "kWh", "EUR", "9" * 400 + "h", "\x1b[31m5h",
]  # fmt: skip


@pytest.mark.parametrize("text", BAD_LIMITS)
def test_bad_limits_are_value_errors(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        q.parse_limit(text)


# -- the property --------------------------------------------------------------------------------------------

KINDS = st.sampled_from(["time", "energy", "money", "tokens"])


@settings(max_examples=20, deadline=None)
@given(
    KINDS, st.floats(0.0, 1.0), st.integers(1, 3000), st.integers(1, 64), st.integers(1, 300), st.booleans(),
    st.sampled_from([None, 0.01, 3.9]), st.sampled_from(["foretrain", "nanogpt"]),
)  # fmt: skip
def test_the_answer_stays_within_and_one_more_does_not(
    kind: str, share: float, interval: int, batch: int, eval_iters: int, rented: bool, logged: float | None, step: str
) -> None:
    """Planned again with the answered max_iters the whole run is within the limit; with one step more it is not."""
    gpu = find("RTX 4070")
    config = tiny(
        eval_interval=interval, batch_size=batch, eval_iters=eval_iters, device="auto", compile=True,
        price_per_hour=0.35 if rented else 0.0, decay_lr=False, max_iters=1,
    )  # fmt: skip

    def taken(steps: int) -> float:
        made = plan(config.model_copy(update={"max_iters": steps}), gpu, logged_step_s=logged)
        timing = made.timing_of(step)
        assert timing
        return (
            float(steps * config.tokens_per_step)
            if kind == "tokens"
            else spent_of(timing.total_s, timing, limit, "expected")
        )

    limit = Limit(kind=kind, amount=1.0, text="x", currency="EUR" if kind == "money" else "")  # type: ignore[arg-type]
    limit = limit.model_copy(update={"amount": taken(1) * 10 ** (4 * share)})
    asked = plan(config, gpu, logged_step_s=logged).run_by(step)  # type: ignore[arg-type]
    answer = within(of_plan(asked), limit)
    assert taken(answer.steps) <= limit.amount < taken(answer.steps + 1)
    assert answer.steps_cautious <= answer.steps <= answer.steps_optimistic
    assert answer.plan == plan(answer.plan.config, gpu, logged_step_s=logged).run_by(step)


@given(st.integers(1, 100_000), st.integers(0, 5000))
def test_an_adjusted_config_is_always_a_valid_one(steps: int, warmup: int) -> None:
    config = tiny(max_iters=100_000, lr_decay_iters=100_000, warmup_iters=warmup)
    fitting, changed = adjusted(config, steps)
    words = [f"--{name}={value}" for name, value in fitting.model_dump().items() if value != ""]
    assert resolve(words).config == fitting
    assert set(changed) <= {"max_iters", "lr_decay_iters", "warmup_iters"}
    assert fitting.lr_decay_iters == steps


def test_not_even_one_step() -> None:
    made = plan(resolve([D]).config, find("4070"))
    for text, id in (("5s", "check.within_time"), ("1Wh", "check.within_energy"), ("0.0001EUR", "check.within_money")):
        with refused(id, code=3):
            within(of_plan(made), q.parse_limit(text))


def test_a_limit_beyond_all_steps_is_doubted() -> None:
    made = plan(tiny(device="auto", eval_interval=10**10), find("H200"), logged_step_s=1e-6)
    with pytest.raises(UserError, match="is that what you meant"):
        within(of_plan(made), q.parse_limit("90y".replace("y", "d")))


# -- the command line ----------------------------------------------------------------------------------------


def test_case_d_in_twelve_hours_written_and_planned_again() -> None:
    """At the logged 3.9 s: 12 h less compilation and evaluations is about 10,900 steps."""
    words = ("plan", D, "--gpu", "4070", "--step-time", "3.9", "--within", "12h", "--write", "shorter.toml", "--json")
    answer = json.loads(foretrain(*words).stdout)
    assert answer["schema"] == "foretrain.plan/1#within"
    assert 10_700 < answer["steps"] < 12 * 3600 / 3.9
    assert answer["epochs"] == pytest.approx(answer["tokens"] / 3.68e9)
    assert answer["changed"] == ["max_iters", "lr_decay_iters", "warmup_iters"]
    written = resolve(["shorter.toml"]).config
    assert written.max_iters == written.lr_decay_iters == answer["steps"]
    again = json.loads(foretrain("plan", "shorter.toml", "--gpu", "4070", "--step-time", "3.9", "--json").stdout)
    assert again["timing"]["total_s"]["expected_s"] <= 12 * 3600
    assert again["timing"] == answer["plan"]["timing"]


@pytest.mark.parametrize(
    ("warmup", "asked", "steps", "fitting"),
    [
        (2000, 600_000, 4538, 226),  # a twentieth, not 44% of the run
        (2000, 600_000, 100_000, 2000),
        (100, 1000, 500, 50),  # a tenth was asked for
        (100, 1000, 2000, 100),
        (100, 50, 40, 2),
        (0, 1000, 10, 0),
    ],
)
def test_the_warm_up_stays_in_proportion(warmup: int, asked: int, steps: int, fitting: int) -> None:
    config = tiny(warmup_iters=warmup, max_iters=asked, lr_decay_iters=asked)
    assert adjusted(config, steps)[0].warmup_iters == fitting


def test_the_warm_up_is_always_said() -> None:
    for words in ([], ["--warmup_iters=10"]):
        shown = foretrain("plan", "gpt2-124m", "--gpu", "4070", "--within", "12h", "--full", *words).stdout
        assert "Warm-up:" in shown


def test_the_answer_says_what_has_to_follow() -> None:
    shown = foretrain("plan", D, "--gpu", "4070", "--within", "12h", "--full").stdout
    assert "lr_decay_iters should follow max_iters" in shown
    assert "To be safe" in shown
    assert "epochs" in shown
    exact = foretrain("plan", D, "--gpu", "4070", "--tokens", "5B", "--full").stdout
    assert "9,536 steps" in exact  # 5e9 // 524,288
    assert "To be safe" not in exact


def test_nothing_is_overwritten() -> None:
    Path("mine.toml").write_text(to_toml(tiny()))
    foretrain("plan", D, "--gpu", "4070", "--within", "12h", "--write", "mine.toml", code=2, says="there already")
    assert Path("mine.toml").read_text() == to_toml(tiny())


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--within", "5USD"], 2, "prices are in EUR"),
        (["--within", "5XYZ"], 2, "prices are in EUR"),
        (["--within", "12"], 2, "--within '12'"),
        (["--within", ""], 2, "--within ''"),
        (["--within", "5s"], 3, "too short"),
        (["--within", "1Wh"], 3, "too little"),
        (["--within", "0.0001EUR"], 3, "too little"),
        (["--tokens", "10"], 3, "less than the 524,288 tokens"),
        (["--tokens", "-1"], 2, "--tokens '-1'"),
        (["--tokens", "1e30"], 2, "--tokens"),
        (["--within", "5h", "--tokens", "1B"], 2, "one of them"),
        (["--within", "5h", "--eval_only=true"], 2, "no steps"),
        (["--within", "5EUR", "--price_per_kwh=0"], 2, "no price"),
        (["--within", "5h", "--exact"], 2, "--exact"),
        (["--within", "5h", "--write", "x.py"], 2, ".toml"),
        (["--within", "5h", "--write", "nowhere/x.toml"], 2, "folder"),
        (["--write", "x.toml"], 2, "--within"),
        (["--within", "5h", "--batch_size=512", "--check"], 3, "does not fit"),
    ],
)
def test_what_cannot_be_answered_is_one_sentence(words: list[str], code: int, says: str) -> None:
    result = foretrain("plan", D, "--gpu", "4070", *words, code=code)
    assert says in result.stderr
    assert result.stderr.count("\n") == 1


def test_money_in_another_currency_when_prices_are_in_it() -> None:
    result = foretrain("plan", D, "--gpu", "4070", "--currency=USD", "--price", "$0.35/h", "--within", "$5", "--json")
    answer = json.loads(result.stdout)
    timing = answer["plan"]["timing"]
    assert timing["rent_expected"] <= 5
    assert answer["limit"]["currency"] == "USD"


def test_several_cards_are_told_apart_from_one() -> None:
    assert "one card" in foretrain("plan", D, "--gpu", "4070,4090", "--within", "5h").stderr
    assert "is unknown" in foretrain("plan", D, "--gpu", "Apple M4 Pro", "--step-time", "3", "--within", "3kWh").stderr
    assert "time cannot be predicted" in foretrain("plan", D, "--gpu", "Apple M4 Pro", "--within", "3h").stderr
