"""foretrain tune: the statistics on synthetic times, the space, the search, real child processes, the cache."""

import io
import json
import math
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from foretrain.app import tuning_session as tune_answer
from foretrain.app import tuning_session as tune_memory
from foretrain.app.plan import with_dataset
from foretrain.app.training_session import prepare_data
from foretrain.app.tune import job_of as prepare
from foretrain.base import processes
from foretrain.base.quantities import parse_duration
from foretrain.cli import app
from foretrain.comparison.sources.plans import with_vocabulary
from foretrain.config.checks import check
from foretrain.config.microbatches import sequences_of
from foretrain.config.options import RunConfig
from foretrain.config.resolve import from_values, resolve, to_toml
from foretrain.data.dataset import BUILT_IN_VOCABULARY
from foretrain.data.tokenizer import ByteTokenizer, Gpt2Tokenizer
from foretrain.hardware.calibration import Calibration, KernelTime, StepTime, load, save, save_tuned, tuned_path
from foretrain.hardware.catalogue import find
from foretrain.hardware.cpu import nominal_cpu
from foretrain.measure import trial as single_trial
from foretrain.measure import tuner as tuner_module
from foretrain.measure.pool import Burst, Pool
from foretrain.measure.space import (
    MASTERS,
    TUNABLE,
    Machine,
    Setting,
    apply,
    default_options,
    fitting,
    forecast_memory,
    forecast_s,
    learning,
    levels_of,
    log_forecasts,
    options,
    settings,
)
from foretrain.measure.timed_step import TimedStep, rows_of
from foretrain.measure.trial import Fault
from foretrain.measure.tune_record import LOOKS, ForecastError, Race, TuneTrial, Tuning, estimate, with_pareto
from foretrain.measure.tuner import Limits, Model, Outlook, Tuner
from foretrain.predict.spec import StepSpec
from foretrain.predict.speed.time import step_of, tuned_like
from foretrain.reports import text as text_view
from foretrain.reports.views import tune as tune_view
from tests import machines
from tests.kit.command import foretrain, refused
from tests.kit.tiny import TINY, tiny

with pytest.MonkeyPatch.context() as patch:  # trials take made-up times: what is forecast of them is of one CPU too
    patch.setenv(machines.VARIABLE, str(machines.FILES[machines.USUAL]))
    GPU = nominal_cpu()
CPU = Machine(cuda=False, can_compile=True, threads=(1,))
BASE = tiny(dtype="float32", attention="sdpa", block_size=64, n_embd=64, batch_size=8, gradient_accumulation_steps=6)
ASKED = BASE.model_copy(update={"dtype": "auto", "attention": "auto"})


def space(*wanted: str, base: RunConfig = BASE, asked: RunConfig = ASKED) -> list[Setting]:
    return list(settings(base, options(asked, base, frozenset(), wanted or TUNABLE, CPU)))


# -- the statistics ----------------------------------------------------------------------------------------


def test_an_estimate_shrugs_off_one_bad_round() -> None:
    steady = [0.10, 0.11, 0.09, 0.10, 0.12, 0.08, 0.10]
    assert abs(estimate([*steady, 5.0]).mean - estimate(steady).mean) < 0.01
    assert estimate([0.1]).half == math.inf


def run_race(seed: int, true: list[float], noise: float, drift: float = 0.3, most: int = LOOKS[-1]) -> Race:
    """A race of known settings on a machine that drifts by tens of percent and is hit by something now and then."""
    rng, race = random.Random(seed), Race(range(len(true)))
    while not race.decided and len(race.rounds) < most:
        order = rng.sample(race.alive, len(race.alive))
        level = drift * math.sin(len(race.rounds) / 3 + seed)
        seconds = {}
        for place, n in enumerate(order):
            hit = rng.random() < 0.08
            seconds[n] = true[n] * math.exp(level + 0.01 * place + rng.gauss(0, noise) + hit * rng.random() * 0.6)
        race.add(seconds)
    return race


def test_a_race_finds_the_fastest_whatever_the_drift() -> None:
    picks = [run_race(seed, [1.0, 1.02, 1.05, 1.3], 0.01) for seed in range(100)]
    assert sum(race.best == 0 for race in picks) >= 97
    assert sum(race.decided for race in picks) >= 95
    assert sum(len(race.rounds) for race in picks) / 100 < 17  # and without measuring for ever


def test_a_race_of_equals_drops_nobody_by_chance_and_then_stops() -> None:
    races = [run_race(seed, [1.0, 1.0, 1.0], 0.02) for seed in range(100)]
    assert sum(bool(race.dropped) for race in races) <= 5  # the bounds hold together in 95 of 100
    far = [run_race(seed, [1.0, 2.0], 0.02) for seed in range(20)]
    assert all(len(race.rounds) <= LOOKS[3] and race.dropped for race in far)


def test_a_race_goes_on_without_those_that_died() -> None:
    race = Race([0, 1, 2])
    race.add({0: 1.0, 1: 1.5, 2: 1.2})
    race.add({1: 1.5, 2: 1.2})
    assert race.alive == [1, 2]
    assert race.best == 2
    assert race.against(1, 0).mean == pytest.approx(math.log(1.5))
    assert not math.isfinite(race.against(1, 0).half)


# -- the space ---------------------------------------------------------------------------------------------

MAY_DIFFER = {
    "batch_size", "gradient_accumulation_steps", "eval_sequences", "compile", "activation_checkpointing",
    "checkpointed_blocks", "recompute_norm_gelu", "loss_chunk_size", "attention", "dtype", "master_weights",
    "cpu_threads",
}  # fmt: skip


@given(
    st.integers(1, 48), st.integers(1, 12), st.sampled_from([1, 2, 5]), st.sampled_from([8, 64, 100]),
    st.sampled_from(["nanogpt", "modern"]), st.booleans(), st.sampled_from(["auto", "float32", "bfloat16"]),
    st.sampled_from([0.0, 0.1]), st.sets(st.sampled_from(TUNABLE)), st.booleans(), st.sampled_from([0, 96]),
)  # fmt: skip
@hypothesis_settings(max_examples=15)
def test_no_setting_ever_changes_what_is_learned(
    batch: int, accumulation: int, layers: int, block: int, recipe: str, checkpoint: bool, dtype: str, dropout: float,
    wanted: set[str], cuda: bool, chunk: int,
) -> None:  # fmt: skip
    asked = tiny(
        batch_size=batch, gradient_accumulation_steps=accumulation, n_layer=layers, block_size=block, recipe=recipe,
        activation_checkpointing=checkpoint, dtype=dtype, dropout=dropout if recipe == "nanogpt" else 0.0, eval_iters=3,
        loss_chunk_size=chunk, attention="auto",
    )  # fmt: skip
    base = asked.model_copy(update={"attention": "sdpa", "dtype": "float32" if dtype == "auto" else dtype})
    machine = Machine(cuda, True, () if cuda else (1, 2))
    found = list(settings(base, options(asked, base, frozenset(), tuple(wanted), machine)))
    assert found[0].config == base
    assert len({setting.levels for setting in found}) == len(found)
    for setting in found:
        config = setting.config
        assert config.tokens_per_step == base.tokens_per_step
        assert sequences_of(config) == sequences_of(base)
        assert config.eval_rows == base.eval_rows
        changed = {k for k in RunConfig.model_fields if getattr(config, k) != getattr(base, k)}
        assert changed <= MAY_DIFFER
        assert levels_of(config) == setting.levels
        assert not check(config.model_dump(), {})[1]
        if dtype != "auto" or cuda:  # arithmetic only where the config leaves it open
            assert (config.dtype, config.master_weights) == (base.dtype, base.master_weights)
            assert learning(base, config) in ("exact", "draws")
        for knob, value in zip(TUNABLE, setting.levels, strict=True):
            assert knob in wanted or value == levels_of(base)[TUNABLE.index(knob)]


def test_the_levels_are_what_they_should_be() -> None:
    found = dict(zip(TUNABLE, options(ASKED, BASE, frozenset(), TUNABLE, CPU), strict=True))
    assert found["batch_size"] == (8, 1, 2, 3, 4, 6, 12, 16, 24, 48)
    assert found["dtype"] == ("float32", "bfloat16", MASTERS)
    assert found["activation_checkpointing"] == (0, 1, 2)
    given = dict(zip(TUNABLE, options(ASKED, BASE, frozenset({"master_weights"}), ("dtype",), CPU), strict=True))
    assert given["dtype"] == ("float32", "bfloat16")
    assert default_options(ASKED, frozenset(), CPU) == TUNABLE
    closed = BASE.model_copy(update={"cpu_threads": 2})
    assert set(TUNABLE) - set(default_options(closed, frozenset(), CPU)) == {"attention", "dtype", "cpu_threads"}
    assert all(s.config.loss_chunk_size < s.config.batch_size * 64 for s in space("batch_size", "loss_chunk_size"))
    masters = apply(BASE, tuple({
        "batch_size": 8, "activation_checkpointing": 1, "recompute_norm_gelu": True, "loss_chunk_size": 0,
        "dtype": MASTERS, "compile": False, "attention": "bmm", "cpu_threads": 1, "strategy": "ddp", "hold_gradients": False,
    }[name] for name in TUNABLE))  # fmt: skip
    assert (masters.dtype, masters.master_weights, masters.checkpointed_blocks) == ("bfloat16", True, 1)
    assert learning(BASE, masters) == "rounding"
    dropped = BASE.model_copy(update={"dropout": 0.1})
    assert learning(dropped, apply(dropped, (4, *levels_of(dropped)[1:]))) == "draws"
    assert learning(dropped, dropped) == "exact"


def test_only_what_is_forecast_not_to_fit_is_left_out() -> None:
    base = RunConfig(
        n_layer=2, n_head=4, n_embd=256, batch_size=4, gradient_accumulation_steps=6, dtype="bfloat16", compile=False
    )
    wanted = [name for name in TUNABLE if name not in ("attention", "dtype", "cpu_threads")]
    found = list(settings(base, options(base, base, frozenset(), wanted, Machine(True, False))))
    for gib in (2, 3, 5):
        verdicts = [forecast_memory(s.config, find("RTX 4070"), "bfloat16", gib * 2**30).verdict for s in found]
        wanted = [s for s, verdict in zip(found, verdicts, strict=True) if verdict != "does_not_fit"]
        assert fitting(found, find("RTX 4070"), "bfloat16", gib * 2**30) == wanted


# -- the search, on a machine that is made up -------------------------------------------------------------


class Machinery:
    """A bench whose true times are known: the forecast times what knobs do that it does not know, with noise, drift
    and hits. Its clock runs by what is measured."""

    def __init__(self, seed: int, *, noise: float = 0.02, hits: float = 0.1, start_s: float = 3.0) -> None:
        self.seed, self.noise, self.hits, self.start_s = seed, noise, hits, start_s
        self.random, self.now = random.Random(seed), 0.0
        self.alive: set[str] = set()
        self.failures: dict[str, Fault] = {}  # by what the config's text has in it
        self.loss = lambda config: 5.5

    def effect(self, spread: float, *what: Any) -> float:
        return random.Random(repr((self.seed, what))).gauss(0, spread)

    def true_s(self, config: RunConfig) -> float:
        known = dict(zip(TUNABLE, levels_of(config), strict=True))
        unknown = sum(self.effect(0.2, knob, known[knob]) for knob in ("compile", "attention", "dtype", "cpu_threads"))
        unknown += self.effect(0.08, known["attention"], known["dtype"]) + self.effect(0.01, levels_of(config))
        unknown += self.effect(0.04, "batch") * math.log2(config.batch_size)
        return (forecast_s(config, GPU, "float32") or 1.0) * math.exp(0.5 + unknown)

    def clock(self) -> float:
        return self.now

    def holds(self, config: RunConfig) -> bool:
        return config.model_dump_json() in self.alive

    def drop(self, config: RunConfig) -> None:
        self.alive.discard(config.model_dump_json())

    def evaluate(self, config: RunConfig, limit_s: float, expected_bytes: int | None) -> int | Fault:
        return self.failures.get("evaluate", 10**8)

    def burst(self, config: RunConfig, seconds: float, limit_s: float, expected_bytes: int | None) -> Burst | Fault:
        text = config.model_dump_json()
        for part, failure in self.failures.items():
            if part in text:
                self.now += self.start_s
                return failure
        started_s = 0.0 if text in self.alive else self.start_s + 20.0 * config.compile
        self.alive.add(text)
        self.now += started_s + seconds
        drift = 0.2 * math.sin(self.now / 7 + self.seed)
        hit = (self.random.random() < self.hits) * self.random.random() * 0.5
        step_s = self.true_s(config) * math.exp(drift + self.random.gauss(0, self.noise) + hit)
        return Burst(step_s=step_s, steps=3, peak_bytes=10**8, started_s=started_s, loss=self.loss(config))


def search(found: list[Setting], bench: Machinery, budget_s: float = 240.0, trials: int | None = None) -> Tuner:
    tuner = Tuner(found, Outlook(GPU, "float32", 8 << 30, False), bench, Limits(budget_s, trials), bench.clock)
    tuner.run()
    return tuner


def test_search_is_within_3_percent_in_a_quarter_of_trials() -> None:
    found, near, trials = space("batch_size", "attention", "dtype"), 0, []
    assert len(found) == 60
    for seed in range(20):
        bench = Machinery(seed)
        tuner = search(found, bench)
        pick = bench.true_s(tune_answer.answer(tuner)["config"])
        near += pick <= 1.03 * min(bench.true_s(setting.config) for setting in found)
        trials.append(len(tuner.tried))
    assert near >= 19
    assert max(trials) <= len(found) // 4


def test_answer_says_the_gain_and_the_error_of_the_forecast() -> None:
    bench = Machinery(3)
    tuner = search(space("batch_size", "attention", "dtype"), bench)
    found = tune_answer.answer(tuner)
    true = bench.true_s(BASE) / bench.true_s(found["config"]) - 1
    assert found["gain_low"] <= true <= found["gain_high"]
    assert found["gain"] == pytest.approx(true, abs=0.05)
    measured = [t for t in found["trials"] if t.step_s]
    for trial in measured:
        config = apply(BASE, tuple(trial.options.values()))
        ratio = bench.true_s(config) / bench.true_s(found["config"])
        assert trial.step_s / measured[0].step_s == pytest.approx(ratio, rel=0.15)  # type: ignore[operator]
        assert trial.tokens_per_s == pytest.approx(config.tokens_per_step / trial.step_s)
    assert measured[0].verdict == "best"
    assert found["time_error"] == ForecastError.of([(t.predicted_s, t.step_s) for t in measured])


def test_a_config_that_is_as_good_as_any_is_left_alone() -> None:
    bench = Machinery(0, noise=0.002, hits=0.0)
    bench.true_s = lambda config: 1.0  # type: ignore[method-assign]
    tuner = search(space("batch_size"), bench)
    found = tune_answer.answer(tuner)
    assert found["config"] == BASE
    assert found["trials"][0].given
    assert found["gain"] == 0.0


def test_deaths_teach_and_are_told() -> None:
    bench = Machinery(1)
    bench.failures = {f'"batch_size":{n},': Fault(reason="memory", peak_bytes=9 << 30) for n in (16, 24, 48)}
    tuner = search(space("batch_size"), bench, trials=10)
    tried = [int(tuner.settings[n].levels[0]) for n in tuner.tried]
    dead = [batch for batch in tried if batch >= 16]
    assert dead == sorted(dead, reverse=True)  # what is larger than one that died is never tried after it
    assert tune_answer.answer(tuner)["config"].batch_size < 16
    bench = Machinery(1)
    bench.failures = {'"dtype":"bfloat16"': Fault(reason="failed", problem="RuntimeError: no")}
    tuner = search(space("batch_size", "dtype"), bench, trials=20)
    failed = [t for t in tuner.tried.values() if t.failure is not None]
    assert 1 <= len(failed) <= 4  # two of each level, then the level is left alone
    assert {t.problem for t in tune_answer.answer(tuner)["trials"] if t.verdict == "failed"} == {"RuntimeError: no"}


@pytest.mark.parametrize(
    ("failure", "id"),
    [
        (Fault(reason="memory", peak_bytes=5), "memory.tune_none_lives"),
        (Fault(reason="failed", problem="x"), "environment.tune_failed"),
        (Fault(reason="timeout"), "check.tune_too_slow"),
    ],
)
def test_where_nothing_lives_one_sentence_says_why(failure: Fault, id: str) -> None:
    bench = Machinery(1)
    bench.failures = {"{": failure}
    with refused(id) as caught:
        tune_answer.answer(search(space("batch_size"), bench, trials=5))
    assert str(caught.value)
    with refused("memory.tune_none_fits", match="fits") as caught:
        Tuner(space("batch_size"), Outlook(GPU, "float32", 1 << 20, False), bench, Limits(), bench.clock).run()


def test_another_loss_is_no_way_to_carry_out_the_same_training() -> None:
    bench = Machinery(2)
    bench.loss = lambda config: 5.6 if config.attention == "bmm" else 5.5
    found = tune_answer.answer(search(space("attention"), bench))
    assert [t.verdict for t in found["trials"]] == ["best", "changed"]
    assert found["config"].attention == "sdpa"


def test_a_winner_that_cannot_evaluate_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Machinery(4)
    tuner = Tuner(space("batch_size"), Outlook(GPU, "float32", 8 << 30, False), bench, Limits(60.0), bench.clock)
    asked: list[int] = []

    def evaluate(config: RunConfig, limit_s: float, expected_bytes: int | None) -> int | Fault:
        asked.append(config.batch_size)
        return Fault(reason="memory", peak_bytes=9 << 30) if len(asked) == 1 else 10**8

    monkeypatch.setattr(bench, "evaluate", evaluate)
    tuner.run()
    found = tune_answer.answer(tuner)
    assert len(asked) == 2
    assert found["config"].batch_size == asked[1]
    assert "memory" in {t.verdict for t in found["trials"]}


def test_an_interrupt_ends_with_what_is_known() -> None:
    bench = Machinery(5)
    count = iter(range(100))

    def listen(id: str, values: dict[str, Any]) -> None:
        if id == "trying" and next(count) == 2:
            raise KeyboardInterrupt

    tuner = Tuner(space(), Outlook(GPU, "float32", 8 << 30, False), bench, Limits(), bench.clock, listen)
    tuner.run()
    found = tune_answer.answer(tuner)
    assert found["stop"] == "interrupted"
    assert len([t for t in found["trials"] if t.step_s]) == 2


def test_the_budget_is_kept() -> None:
    bench = Machinery(6, start_s=10.0)
    tuner = search(space(), bench, budget_s=60.0)
    assert tuner.stop == "budget"
    assert bench.now <= 60.0 + 5.0


class SlowMachinery(Machinery):
    """Steps take seconds: a start has two of them, a burst two more, of which a few micro-batches count; what takes
    longer than its limit dies."""

    def __init__(self, seed: int, step_s: float) -> None:
        super().__init__(seed, noise=0.005, hits=0.0)
        self.step_s = step_s

    def true_s(self, config: RunConfig) -> float:
        return self.step_s * math.exp(self.effect(0.1, config.batch_size))

    def burst(self, config: RunConfig, seconds: float, limit_s: float, expected_bytes: int | None) -> Burst | Fault:
        text, micro_s = config.model_dump_json(), self.true_s(config) / config.gradient_accumulation_steps
        timed_s = micro_s * min(config.gradient_accumulation_steps, max(2, math.ceil(1.0 / micro_s)))
        started_s = 0.0 if text in self.alive else self.start_s + 2 * timed_s
        taken_s = started_s + max(seconds, 2 * timed_s)
        self.now += min(taken_s, limit_s)
        if taken_s > limit_s:
            return Fault(reason="timeout")
        self.alive.add(text)
        return Burst(step_s=self.true_s(config), steps=2, peak_bytes=10**8, started_s=started_s, loss=5.5)


SLOW = tiny(dtype="float32", attention="sdpa", block_size=256, n_embd=256, n_layer=6, n_head=4, batch_size=64)


def short_search(step_s: float, budget_s: float, base: RunConfig = SLOW) -> tuple[Tuner, SlowMachinery]:
    bench = SlowMachinery(3, step_s)
    found = space("batch_size", base=base, asked=base)
    return search(found, bench, budget_s), bench


def shown_answer(tuner: Tuner, budget_s: float) -> str:
    known = {name: value for name, value in tune_answer.answer(tuner).items() if name in Tuning.model_fields}
    return " ".join(printed(tuned_with(**known, budget_s=budget_s, given_options=tuner.settings[0].named)).split())


def test_a_short_budget_goes_to_short_trials() -> None:
    """A step of 5 s: the config as given, one micro-batch, needs 20 s and a start; a cut step needs two pieces."""
    tuner, bench = short_search(5.0, 30.0)
    lived = [trial for trial in tuner.tried.values() if trial.lives]
    assert len(lived) >= 2
    assert bench.now <= 30.0 + 10.0
    assert tuner.settings[lived[0].number].config.gradient_accumulation_steps > 1
    text = shown_answer(tuner, 30.0)
    assert "The current config was not timed" in text
    assert "does not run here" not in text


def test_a_longer_budget_begins_with_the_config_as_given() -> None:
    tuner, _ = short_search(5.0, 300.0)
    assert next(iter(tuner.tried)) == tuner.given
    assert tuner.least_budget_s() is None


def test_one_trial_that_took_all_is_no_advice_to_leave_it() -> None:
    """Where only the config as given was timed, nothing is said about the others but what they would need."""
    one = SLOW.model_copy(update={"batch_size": 1, "gradient_accumulation_steps": 2})
    tuner, _ = short_search(20.0, 250.0, one)
    assert [t.number for t in tuner.tried.values() if t.lives] == [tuner.given]
    text = shown_answer(tuner, 250.0)
    assert "There was no time to try others" in text
    assert "Keep the current config" not in text
    assert "at least --budget" in text


def test_where_no_step_ends_in_time_the_least_budget_is_named() -> None:
    tuner, bench = short_search(600.0, 30.0)
    with refused("check.tune_too_slow") as caught:
        tune_answer.answer(tuner)
    assert bench.now <= 30.0 + 20.0
    least = str(caught.value).partition("--budget ")[2].partition(".")[0]
    assert parse_duration(least) >= 60
    assert "30 s" in str(caught.value)


def printed(found: Tuning) -> str:
    from rich.console import Console

    console = Console(file=io.StringIO(), width=100, color_system=None)
    text_view.render(tune_view.document(found), console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_one_trial_speaks_for_its_neighbours() -> None:
    found = space("batch_size", "attention")
    model = Model(found, log_forecasts(found, GPU, "float32"), calibrated=False)
    before, spread = model.posterior()
    model.observe(0, before[0], 0.01)
    slow = next(n for n, s in enumerate(found) if s.named["attention"] == "bmm" and s.levels[0] == 8)
    model.observe(slow, before[slow] + 0.7, 0.01)
    after, narrower = model.posterior()
    other = next(n for n, s in enumerate(found) if s.named["attention"] == "bmm" and s.levels[0] == 24)
    assert after[other] - before[other] > 0.3
    assert (narrower <= spread + 1e-9).all()
    gains = model.improvement()
    assert gains[0] == gains[slow] == 0.0
    assert max(gains, default=0.0) == max(
        g for g, s in zip(gains, found, strict=True) if s.named["attention"] == "sdpa"
    )


# -- real steps and real children --------------------------------------------------------------------------


def test_rows_are_the_same_however_a_step_is_cut() -> None:
    import torch

    assert torch.equal(rows_of(BASE, 4), rows_of(BASE, 48)[:4])


def test_every_way_has_the_same_loss_on_the_same_rows() -> None:
    base = tiny(dtype="float32", attention="sdpa")
    ways: list[dict[str, Any]] = [
        {}, {"batch_size": 2, "gradient_accumulation_steps": 4}, {"attention": "bmm"},
        {"activation_checkpointing": True}, {"loss_chunk_size": 24}, {"dtype": "bfloat16", "master_weights": True},
    ]  # fmt: skip
    losses = [TimedStep(base.model_copy(update=way)).warm_up()["loss"] for way in ways]
    assert losses[1:5] == pytest.approx([losses[0]] * 4, rel=1e-5)
    assert losses[5] == pytest.approx(losses[0], rel=1e-2)


def test_a_step_that_is_cut_short_counts_for_all_of_it() -> None:
    timed = TimedStep(tiny(dtype="float32", attention="sdpa", batch_size=1, gradient_accumulation_steps=8))
    ticks = iter(range(1000))
    timed.clock = lambda: float(next(ticks))  # every look at the clock is a second later
    timed._take(8)
    whole, _ = timed.step()
    assert whole == 1.0  # two looks, and nothing is extrapolated
    timed._take(3)
    part, _ = timed.step()
    # Looks: begin, three micro-batches, their end, the end: 5 s, and five more micro-batches of 1 s each.
    assert part == 5.0 + 5 * 1.0


def alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_children_time_die_and_leave_nothing_behind() -> None:
    config = tiny(dtype="float32", attention="sdpa")
    with Pool(600 << 20, 4 << 30) as pool:
        first = pool.burst(config, 0.05, 600, None)
        assert isinstance(first, Burst)
        assert first.step_s > 0
        assert first.started_s > 0
        assert first.loss is not None
        assert 100 << 20 < first.peak_bytes < 600 << 20
        again = pool.burst(config, 0.05, 600, None)
        assert isinstance(again, Burst)
        assert again.started_s == 0.0
        assert pool.started == 1
        assert isinstance(pool.evaluate(config, 600, None), int)
        child = next(iter(pool._children.values())).process.pid
        os.kill(child, signal.SIGKILL)  # what the system's own killer does
        killed = pool.burst(config, 0.05, 600, None)
        assert isinstance(killed, Fault)
        assert killed.reason == "memory"
        assert not alive(child)
        large = config.model_copy(update={"n_embd": 1536, "n_layer": 12})
        died = pool.burst(large, 0.05, 600, None)
        assert isinstance(died, Fault)
        assert died.reason == "memory"
        assert died.peak_bytes > 600 << 20
        assert not pool._children
        scratch = Path(pool.scratch)
        assert scratch.is_dir()
    assert not scratch.exists()
    shared = Path("/dev/shm")
    assert not shared.is_dir() or not [p for p in shared.iterdir() if str(child) in p.name]


def test_what_hangs_or_fails_is_ended_and_told(own_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORETRAIN_CACHE", str(own_directory / "c"))
    config = tiny(dtype="float32", attention="sdpa")
    with Pool(None, None) as pool:
        assert pool.burst(config, 0.05, 0.0, None).model_dump()["reason"] == "timeout"
        assert not pool._children
        odd = pool.burst(config.model_copy(update={"n_embd": 33}), 0.05, 600, None)
        assert isinstance(odd, Fault)
        assert odd.reason == "failed"
        assert "Error" in odd.problem
        assert "exit code 1" in odd.problem
        (kept,) = (own_directory / "c" / "bugs").iterdir()
        assert str(kept) in odd.problem
        assert "Traceback" in kept.read_text()


def test_why_a_trial_failed_is_said_with_its_exit_code(own_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORETRAIN_CACHE", str(own_directory / "c"))
    said = single_trial.problem_of(
        processes.ProcessExit(1, "Traceback\n  many lines\nRuntimeError: no C++ \x1b[31mcompiler\n")
    )
    (kept,) = (own_directory / "c" / "bugs").iterdir()
    assert said == f"RuntimeError: no C++ \ufffd[31mcompiler (exit code 1; its output is in {kept})"
    assert "many lines" in kept.read_text()
    assert single_trial.problem_of(processes.ProcessExit(4)) == "it printed nothing (exit code 4)"


def test_room_is_made_by_ending_those_asked_longest_ago() -> None:
    class Child:
        def __init__(self, size: int) -> None:
            self.peak_bytes, self.ended = size, False

        def end(self) -> None:
            self.ended = True

    pool = Pool(None, 1000)
    children = {name: Child(200) for name in "abc"}
    pool._children = dict(children)  # type: ignore[assignment]
    pool._make_room(150)
    assert [child.ended for child in children.values()] == [True, False, False]
    pool._make_room(10_000)
    assert not pool._children


# -- the command, its cache, and what it feeds ------------------------------------------------------------


def tuned_with(**changes: Any) -> Tuning:
    trial = TuneTrial(
        options=dict(zip(TUNABLE, levels_of(BASE), strict=True)), gradient_accumulation_steps=6, learning="exact",
        verdict="best", given=True, predicted_s=1.0, predicted_bytes=10, step_s=2.0, low_s=1.95, high_s=2.05,
        tokens_per_s=1536.0, peak_bytes=1 << 30,
    )  # fmt: skip
    fields: dict[str, Any] = {
        "name": "t", "config": BASE, "given_options": trial.options, "device": GPU.name, "torch_version": "2", "date": "d",
        "tokens_per_step": BASE.tokens_per_step, "settings": 10, "fitting": 10, "trials": (trial,), "given_fits": True,
        "gain": 0.0, "gain_low": 0.0, "gain_high": 0.0, "time_error": None, "memory_error": None, "first_choice": None,
        "calibrated": False, "stop": "decided", "rounds": 3, "took_s": 60.0, "budget_s": 180.0, "most_trials": 9,
        "clock": "wall", "elsewhere": 0.0, "cap_bytes": 4 << 30,
    }  # fmt: skip
    return Tuning(**{**fields, **changes})


def test_an_answer_is_kept_as_long_as_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "a.json"
    found = tuned_with()
    tune_memory.keep(found, path)
    assert tune_memory.recall(path, 4 << 30, 180.0, 0) == found.model_copy(update={"known": True})
    assert tune_memory.recall(path, 1 << 29, 180.0, 0) is None  # the pick takes more than there is
    assert tune_memory.recall(path, 4 << 30, 180.0, 20) is None  # more trials are asked for
    assert tune_memory.recall(path, 8 << 30, 180.0, 0) is not None  # memory did not decide it
    tune_memory.keep(tuned_with(fitting=8, stop="budget"), path)
    assert tune_memory.recall(path, 8 << 30, 180.0, 0) is None  # here it did
    assert tune_memory.recall(path, 4 << 30, 180.0, 0) is not None
    assert tune_memory.recall(path, 4 << 30, 600.0, 0) is None  # more time may tell more
    path.write_text("{")
    assert tune_memory.recall(path, 4 << 30, 180.0, 0) is None
    path.unlink()
    tune_memory.keep(tuned_with(stop="interrupted"), path)
    assert not path.exists()


def test_answers_are_named_by_all_that_they_hang_on(monkeypatch: pytest.MonkeyPatch) -> None:
    choices = options(ASKED, BASE, frozenset(), TUNABLE, CPU)
    names = {tune_memory.path_of(BASE, choices, GPU, "1")}
    names |= {tune_memory.path_of(BASE, [*choices[:-1], (0,)], GPU, "1"), tune_memory.path_of(BASE, choices, GPU, "2")}
    names |= {tune_memory.path_of(tiny(n_embd=128), choices, GPU, "1")}
    names |= {tune_memory.path_of(BASE, choices, find("RTX 4070"), "1")}
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    names |= {tune_memory.path_of(BASE, choices, GPU, "1")}
    assert len(names) == 6
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    other = BASE.model_copy(update={"learning_rate": 1.0, "out_dir": "x", "max_iters": 99})
    assert tune_memory.path_of(other, choices, GPU, "1") in names


def test_records_are_read_back_as_they_were() -> None:
    found = tuned_with(time_error=ForecastError.of([(1.0, 2.0), (1.0, 1.0), (3.0, None)]))
    assert Tuning.from_json(json.dumps(found.to_json(schema="foretrain.tune/1"))) == found
    assert (found.time_error.trials, found.time_error.worst) == (2, 0.5)
    assert found.time_error.middle == pytest.approx(0.5**0.5)
    assert ForecastError.of([(None, 1.0)]) is None


def test_the_frontier_has_whom_nobody_beats_in_both() -> None:
    first = tuned_with().best
    points = [(100.0, 10), (90.0, 5), (80.0, 6), (100.0, 12)]
    trials = [first.model_copy(update={"tokens_per_s": rate, "peak_bytes": size}) for rate, size in points]
    trials.append(first.model_copy(update={"tokens_per_s": None, "peak_bytes": 1, "verdict": "memory"}))
    assert [trial.pareto for trial in with_pareto(trials)] == [True, True, False, False, False]


def calibration() -> Calibration:
    products, attention = ("matmul", "matmul_input", "matmul_weight"), ("attention", "attention_backward")
    shapes = {**dict.fromkeys(products, (512, 512, 512)), **dict.fromkeys(attention, (4, 2, 64, 32))}
    kernels = [KernelTime(kind=k, dtype="float32", shape=shape, time_s=1e-3) for k, shape in shapes.items()]
    kernels.append(KernelTime(kind="add", dtype="float32", shape=(1 << 20,), time_s=1e-4))
    return Calibration(
        device=GPU.name, driver="", torch_version=load.__globals__["installed_torch"](), threads=1, date="d",
        took_s=1.0, kernels=tuple(kernels), launch_s=1e-6,
    )  # fmt: skip


def test_timed_steps_correct_plans_of_steps_like_them(own_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORETRAIN_CACHE", str(own_directory / "cache"))
    config = BASE
    assert tune_memory.feed(tuned_with(), [config], GPU, "float32", 1) == 1
    save(calibration())
    found = load(GPU.name)
    assert len(found.tuned) == 1
    calibrated = GPU.model_copy(update={"calibration": found})
    assert forecast_s(config, calibrated, "float32") == pytest.approx(2.0)  # the very step that was timed
    near = config.model_copy(update={"n_layer": 3, "gradient_accumulation_steps": 12})
    bare = GPU.model_copy(update={"calibration": calibration()})
    factor = 2.0 / (forecast_s(config, bare, "float32") or 0)
    assert forecast_s(near, calibrated, "float32") == pytest.approx(factor * (forecast_s(near, bare, "float32") or 0))
    for far in ({"n_layer": 5}, {"attention": "bmm"}, {"activation_checkpointing": True}, {"loss_chunk_size": 64},
                {"cpu_threads": 2}, {"compile": True}, {"optimizer": "muon"}, {"optimizer_offload": True}):  # fmt: skip
        other = config.model_copy(update=far)
        assert tuned_like(found, StepSpec.of(other, GPU, dtype="float32")) is None, far
    # A step that was kept before there was an option is one with its default.
    kept = {name: value for name, value in found.tuned[0].options.items() if name != "optimizer_offload"}
    older = found.model_copy(update={"tuned": (found.tuned[0].model_copy(update={"options": kept}),)})
    assert tuned_like(older, StepSpec.of(config, GPU, dtype="float32")) == older.tuned[0]
    # Unsure or disturbed figures correct nothing; damaged files neither.
    assert tune_memory.feed(tuned_with(elsewhere=0.5), [config], GPU, "float32", 1) == 0
    wide = tuned_with().best.model_copy(update={"low_s": 1.0})
    assert tune_memory.feed(tuned_with(trials=(wide,)), [config], GPU, "float32", 1) == 0
    save_tuned(GPU.name, "", (StepTime(options={"n_layer": -1}, dtype="float32", compiled=False, time_s=1.0),))
    broken = load(GPU.name)
    assert broken is not None
    assert tuned_like(broken, StepSpec.of(config, GPU, dtype="float32")) == found.tuned[0]
    tuned_path(GPU.name, "").write_text("[]")
    assert load(GPU.name) == calibration()
    assert step_of(config, "float32", 1.0, 2).options["cpu_threads"] == 2


def test_the_model_is_the_one_that_train_would_make() -> None:
    """A vocabulary that the config leaves open is the dataset's, in every verb."""
    values = {name: value for name, value in TINY.items() if name != "vocab_size"}
    resolved = from_values({**values, "dataset": "python-stdlib", "tokenizer": "byte"})
    trained = prepare_data(resolved)[0].config
    assert trained.vocab_size == 256
    assert prepare(resolved).base.vocab_size == 256
    assert with_dataset(resolved) == with_vocabulary(resolved, None) == trained
    assert {"byte": ByteTokenizer.vocab_size, "gpt2": Gpt2Tokenizer.vocab_size} == BUILT_IN_VOCABULARY
    asked = from_values({**values, "dataset": "python-stdlib", "tokenizer": "bpe", "vocab_size": 300})
    assert with_dataset(asked).vocab_size == with_vocabulary(asked, None).vocab_size == 300


def test_a_real_search_from_config_to_written_file(own_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two settings, two children; then the same again, from the cache."""
    monkeypatch.setenv("FORETRAIN_CACHE", str(own_directory / "cache"))
    values = {**TINY, "dtype": "float32", "attention": "sdpa", "gradient_accumulation_steps": 1, "batch_size": 2}
    monkeypatch.setattr(tuner_module, "EXPLORE_S", 0.01)
    monkeypatch.setattr(tuner_module, "RACE_S", 0.01)
    job = prepare(from_values(values), ("attention",))
    assert [s.config.attention for s in job.settings()] == ["sdpa", "bmm"]
    told: list[str] = []
    found = job.search(240.0, 4, lambda id, values: told.append(id))
    assert told[:3] == ["predicted", "trying", "tried"]
    assert found.config.tokens_per_step == job.base.tokens_per_step
    assert {t.options["attention"] for t in found.trials} == {"sdpa", "bmm"}
    assert all(t.tokens_per_s and t.peak_bytes and t.predicted_s and t.predicted_bytes for t in found.trials)
    assert found.time_error is not None
    assert found.memory_error is not None
    assert job.recalled(60.0, None) == found.model_copy(update={"known": True})
    Path("tiny.toml").write_text(to_toml(resolve_values(values)))
    result = foretrain(
        "tune", "tiny.toml", "--options=attention", "--trials=2", "--budget=60s", "--write=best.toml", code=0
    )
    assert "Measured before" in result.stdout
    assert resolve(["best.toml"]).config == found.config
    assert json.loads(Path("best.json").read_text())["schema"] == "foretrain.tune/1"
    assert foretrain("tune", "tiny.toml", "--write=best.toml").returncode == 2


def resolve_values(values: dict[str, Any]) -> RunConfig:
    return from_values(values).config


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--budget=soon"], "--budget soon"), (["--budget=2s"], "at least 10 s"), (["--options=n_layer"], "n_layer cannot"),
        (["--options=,"], "cannot be tuned"), (["--write=x.json"], "must end in .toml"),
        (["--write="], "must end in .toml"), (["--trials=0"], "--trials"),
    ],
)  # fmt: skip
def test_bad_input_is_told_before_anything_runs(words: list[str], text: str) -> None:
    from click.testing import CliRunner

    result = CliRunner().invoke(app, ["tune", "baby", "--device=cpu", *words])
    assert result.exit_code != 0
    assert text in (str(result.exception) + result.output)
