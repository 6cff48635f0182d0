"""Side by side: what differs, noise, attribution, every source, case B, and whatever else can be given to it."""

import csv
import io
import json
import math
import random
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from statistics import fmean, median, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.base import messages
from foretrain.base.errors import UserError
from foretrain.base.statistics import t_quantile
from foretrain.cli import commands
from foretrain.comparison import questions, repeats, settings
from foretrain.comparison import repeats as stretch
from foretrain.comparison.compare import Comparison, compare
from foretrain.comparison.questions import SAME_CARD_RATIO, meet
from foretrain.comparison.sources import load
from foretrain.comparison.sources.request import SourceRequest, take_apart
from foretrain.comparison.sources.tables import number, read_table
from foretrain.comparison.subject import Curve, Subject, curve, exact
from foretrain.config.options import OPTIONS
from foretrain.config.resolve import to_toml
from foretrain.hardware.catalogue import find
from foretrain.reports import html
from foretrain.reports import text as text_view
from foretrain.reports.views import compare as compare_view
from foretrain.runs.folder import RunDirectory
from foretrain.runs.record import RECORD, WatchedCard, WatchedRun
from tests.kit.command import REPO, foretrain, refused
from tests.kit.runs import GPU, write_measured_run
from tests.kit.tiny import tiny

CASES = REPO / "examples" / "real-cases"
sys.path.insert(0, str(REPO / "benchmarks"))
from compare_power import NOISES, planted, same_pairs, synthetic, unlike_pairs  # noqa: E402


def of(word: str, **more: object) -> Subject:
    return load(replace(take_apart(word), gpu=GPU, **more))


def shown(found: Comparison, width: int = 80) -> str:
    from rich.console import Console

    console = Console(file=io.StringIO(), width=width, color_system=None, highlight=False)
    text_view.render(compare_view.document(found), console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def failed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str, code: int) -> str:
    monkeypatch.setattr(sys, "argv", ["foretrain", "compare", *words])
    assert commands.answered() == code
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("error: ")
    return err


def test_a_watched_run_is_its_log_and_the_memory_that_was_seen(tmp_path: Path) -> None:
    card = WatchedCard(
        index=0, name="NVIDIA GeForce RTX 4070", ours_peak_bytes=4 << 30, used_by_others_peak_bytes=2 << 30
    )
    record = WatchedRun(
        id="w", name="w", command=("python", "train.py"), status="finished", started_at="2026-11-21T10:00:00Z", interval_s=1.0,
        wall_s=77.0, rss_peak_bytes=1 << 30, cards=(card,),
    )  # fmt: skip
    RunDirectory(tmp_path).write_record(record)
    shutil.copy(CASES / "b1.log", tmp_path / "output.log")
    for path in (tmp_path, tmp_path / RECORD):
        found = load(take_apart(str(path)))
        assert (found.memory.expected_bytes, found.memory.source) == (4 << 30, "measured")
        assert (found.used_by_others_bytes, found.wall_s, found.gpu) == (2 << 30, 77.0, find("RTX 4070"))
    assert found.step_times_s == of(f"{CASES}/b1.log").step_times_s
    RunDirectory(tmp_path).write_record(record.model_copy(update={"cards": ()}))
    found = load(take_apart(str(tmp_path)))
    assert found.memory.expected_bytes == 1 << 30


# -- case B ------------------------------------------------------------------------------------------------


def case_b() -> Comparison:
    return compare([of(f"B1={CASES}/b1.log+{CASES}/b1.py"), of(f"B2={CASES}/b2.csv+{CASES}/b2.py")])


def test_case_b_is_not_attributed_and_its_settings_are_named() -> None:
    found = case_b()
    named = [setting.name for setting in found.differing if setting.matters]
    assert named == ["n_embd", "learning_rate", "batch_size x accumulation"]
    for question in ("speed", "flops", "hours", "memory"):
        assert found.verdict(question).attribution == "confounded"
    assert set(found.verdict("speed").settings) == {"n_embd", "batch_size x accumulation"}  # no rate changes a speed
    assert set(found.verdict("flops").settings) == {"n_embd", "learning_rate"}  # no split changes what a token teaches
    text = " ".join(shown(found).split())
    assert "3 settings differ, in model, optimizer and execution" in text
    assert "No single one of them explains a difference below" in text
    # 0.0134 nats apart at iteration 500, in two runs with one seed each.
    tokens = found.verdict("tokens")
    assert tokens.outcome == "within_noise"
    assert (tokens.pair.one_value, tokens.pair.other_value) == (5.5194, 5.5328)
    assert tokens.pair.at == 500 * 524_288


def test_case_b1_does_69_percent_of_its_card_and_not_12_9() -> None:
    side = case_b().sides[0]
    flops = 6 * 40_560_000 + 12 * 12 * 384 * 1024  # nanoGPT's estimate_mfu
    assert side.step_s == pytest.approx(3.9095, rel=1e-3)
    assert side.mfu == pytest.approx(524_288 * flops / side.step_s / 58.3e12, rel=2e-3)
    assert side.mfu is not None
    assert round(side.mfu, 2) == 0.69
    assert side.nanogpt_mfu == pytest.approx(0.129, abs=1e-3)
    assert side.micro_batch_s == pytest.approx(side.step_s / 32)


def test_runs_that_would_settle_case_b_change_one_setting_each() -> None:
    runs = {run.setting: run for run in case_b().ablations}
    assert runs["n_embd"].changes == {"n_embd": 768}
    assert runs["learning_rate"].changes == {"learning_rate": 3e-4, "min_lr": 3e-5}
    assert runs["batch_size x accumulation"].changes == {"batch_size": 8, "gradient_accumulation_steps": 64}
    assert runs["learning_rate"].steps == 500  # as far as the two were compared
    # The other rate costs no time: 500 steps as logged, compilation, evaluations and saving on top.
    assert runs["learning_rate"].time_s == pytest.approx(500 * 3.9095, rel=0.08)
    assert runs["learning_rate"].scaled
    for run in runs.values():
        assert run.energy_j
        assert run.cost == pytest.approx(run.energy_j / 3.6e6 * 0.30)
    assert runs["n_embd"].verdict == "does_not_fit"  # 124M at a micro-batch of 16 on 12 GB


def test_one_difference_takes_the_credit() -> None:
    found = compare([of(f"a={CASES}/b1.py"), of(f"b={CASES}/b1.py+batch_size=8+gradient_accumulation_steps=64")])
    assert [s.name for s in found.differing if s.matters] == ["batch_size x accumulation"]
    verdict = found.verdict("memory")
    assert (verdict.outcome, verdict.attribution, verdict.settings) == (
        "forecast",
        "one",
        ("batch_size x accumulation",),
    )
    assert not found.ablations
    assert "It explains any difference below" in " ".join(shown(found).split())


# -- noise -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("p", "freedom", "table"),
    [
        (0.975, 1, 12.706), (0.99, 2, 6.9646), (0.975, 3, 3.1824), (0.99, 3, 4.5407), (0.995, 3, 5.8409), (0.975, 4, 2.7764),
        (0.995, 5, 4.0321), (0.995, 10, 3.1693), (0.975, 30, 2.0423), (0.99, 30, 2.4573), (0.995, 1e9, 2.5758),
    ],
)  # fmt: skip
def test_quantiles_of_students_t_are_those_of_the_tables(p: float, freedom: float, table: float) -> None:
    assert t_quantile(p, freedom) == pytest.approx(table, rel=1e-4)


def test_bootstrap_of_independent_values_is_the_classical_error() -> None:
    rng = random.Random(1)
    values = [rng.gauss(10, 1) for _ in range(200)]
    mean, error, _ = repeats.bootstrap(values, fmean)
    assert mean == pytest.approx(fmean(values))
    assert error == pytest.approx(stdev(values) / math.sqrt(200), rel=0.3)


def test_bootstrap_sees_that_neighbours_resemble_each_other() -> None:
    """The mean of an AR(1) series with rho 0.8 has three times the error of an independent one: sqrt(1.8 / 0.2)."""
    rng = random.Random(2)
    values, value = [], 0.0
    for _ in range(2000):
        value = 0.8 * value + rng.gauss(0, 1)
        values.append(value)
    _, error, _ = repeats.bootstrap(values, fmean)
    naive = stdev(values) / math.sqrt(len(values))
    assert 2 < error / naive < 4.5


def test_the_same_input_gives_the_same_answer() -> None:
    assert case_b() == case_b()


def test_pairs_that_differ_only_in_their_seed_are_alike(tmp_path: Path) -> None:
    for name in ("card", "busy"):
        assert same_pairs(tmp_path, NOISES[name], 200, pairs=12)["any"] == 0


def test_three_percent_over_200_steps_is_found(tmp_path: Path) -> None:
    assert planted(tmp_path, NOISES["desktop"], 0.03, 200, pairs=12) >= 11


@pytest.mark.slow
@pytest.mark.parametrize("name", list(NOISES))
def test_of_a_hundred_pairs_95_are_right(tmp_path: Path, name: str) -> None:
    assert same_pairs(tmp_path, NOISES[name], 200)["any"] <= 5
    assert planted(tmp_path, NOISES[name], 0.03, 200) >= 95


def test_committed_result_holds_the_promise() -> None:
    result = json.loads((REPO / "benchmarks" / "results" / "compare_power.json").read_text("utf-8"))
    for row in result["synthetic"]:
        assert row["same"]["any"] <= 5
        assert row["speed_found"]["3%"] >= 95
        assert min(row["unlike_lengths"].values()) >= 95  # called right: of one speed, and 3% apart
    assert result["trained"]["called_different"]["tokens"] <= 0.05 * result["trained"]["pairs"]


def timed(times: list[float], **more: object) -> Subject:
    middle = median(times)
    known = {"label": "x", "path": "x", "kind": "log", "tokens_per_step": 1000, "step_times_s": tuple(times)}
    return Subject(**{**known, "step_s": exact(middle), "step_source": "measured (log)", **more})  # type: ignore[arg-type]


@given(st.integers(0, 10**6), st.floats(0.0001, 0.03), st.floats(-0.5, 1.0))
def test_intervals_hold_the_planted_difference_and_are_symmetric(seed: int, deviation: float, share: float) -> None:
    rng = random.Random(seed)
    one = [1 + rng.gauss(0, deviation) for _ in range(40)]
    other = [(1 + share) * (1 + rng.gauss(0, deviation)) for _ in range(40)]
    forth, back = repeats.of_times(one, other), repeats.of_times(other, one)
    assert forth.low <= (1 + share) * (1 + 4 * deviation / math.sqrt(10)) - 1
    assert forth.high >= (1 + share) * (1 - 4 * deviation / math.sqrt(10)) - 1
    assert (1 + forth.share) * (1 + back.share) == pytest.approx(1)
    assert forth.low <= forth.share <= forth.high


def test_too_few_steps_are_said_to_be_too_few() -> None:
    found = compare([timed([1.0, 1.01, 1.02]), timed([0.5, 0.51, 0.52], label="y", path="y")])
    assert found.verdict("speed").outcome == "few_steps"
    assert "too few steps" in " ".join(shown(found).split())


def test_predicted_ratios_on_one_card_are_as_good_as_stated() -> None:
    """Published runs of one source, card and program: ratios of their steps against the predicted ratios."""
    from time_against_logs import case_of

    logs = json.loads((REPO / "benchmarks" / "published_logs.json").read_text("utf-8"))["logs"]
    cases = [case_of(log) for log in logs if not log["doubtful"]]
    off = [
        abs(math.log((1 + a["error"]) / (1 + b["error"])))
        for a, b in combinations(cases, 2)
        if all(a[key] == b[key] for key in ("gpu", "kind", "compiled"))
        and a["source"].partition("#")[0].partition(":")[0] == b["source"].partition("#")[0].partition(":")[0]
    ]
    assert len(off) >= 15
    assert sum(error <= SAME_CARD_RATIO for error in off) / len(off) >= 0.9


# -- runs of unlike lengths, and repeats -------------------------------------------------------------------


def warming(steps: int, *, factor: float = 1.0, slows: float = 0.02, seed: int = 1, label: str = "x") -> Subject:
    """A card that slows by `slows` as it warms up, within 100 steps or so."""
    rng = random.Random(seed)
    times = [factor * (1 + slows * (1 - math.exp(-i / 100)) + rng.gauss(0, 0.002)) for i in range(steps)]
    return timed(times, label=label, path=label, steps_since_start=tuple(range(steps)))


def test_warm_up_makes_no_difference_of_short_and_long_runs() -> None:
    short, long = warming(150, slows=0.04, seed=1), warming(3000, slows=0.04, seed=2, label="y")
    found = compare([short, long])
    pair = found.verdict("speed").pair
    assert found.verdict("speed").outcome == "within_noise"
    assert pair.stretch_s == pytest.approx(149 * median(short.step_times_s))
    assert pair.one_value == pytest.approx(pair.other_value, rel=0.005)  # over the stretch that both have
    assert found.sides[0].tokens_per_s != pytest.approx(found.sides[1].tokens_per_s, rel=0.01)  # over all of each
    assert "over the first" in " ".join(shown(found).split())
    whole = compare([replace(s, steps_since_start=()) for s in (short, long)])  # as where no source says which step
    other = whole.verdict("speed").pair
    assert other.share > 0.01 > 2 * pair.share


def test_a_difference_over_the_common_stretch_is_found() -> None:
    found = compare([warming(200, seed=1), warming(2000, factor=1 / 1.03, seed=2, label="y")])
    verdict = found.verdict("speed")
    assert (verdict.outcome, verdict.pair and verdict.pair.one) == ("difference", "y")


def test_runs_of_like_lengths_are_compared_whole() -> None:
    pair = compare([warming(200), warming(240, seed=2, label="y")]).verdict("speed").pair
    assert pair.stretch_s is None


def test_long_log_with_few_lines_counts_with_its_possible_drift() -> None:
    """One line each 100 steps: two of them in the stretch of the short run."""
    long = warming(5000, seed=2, label="y")
    sparse = replace(long, step_times_s=long.step_times_s[::100], steps_since_start=tuple(range(0, 5000, 100)))
    found = stretch.shared([warming(200), sparse])
    assert (len(found.times_s[1]), found.floor, found.seconds_s) == (50, stretch.WARM_UP, None)
    assert compare([warming(200), sparse]).verdict("speed").outcome == "within_noise"


def test_steps_count_from_the_start_of_each_process(tmp_path: Path) -> None:
    lines = [f"iter {i}: loss 3.0, time 500.00ms, mfu 30.00%" for i in (*range(1000, 1100), *range(1050, 1200))]
    path = tmp_path / "resumed.log"
    path.write_text("\n".join(lines))
    since = load(take_apart(str(path))).steps_since_start
    assert max(since[:95]) == 99
    assert since[-1] == 149


def starts(count: int, deviation: float, *, factor: float = 1.0, seed: int = 1, **knobs: object) -> list[Subject]:
    rng = random.Random(seed)
    config = tiny(**knobs)
    found = []
    for i in range(count):
        speed = factor * math.exp(rng.gauss(0, deviation))
        times = [speed * (1 + rng.gauss(0, 0.002)) for _ in range(60)]
        known = settings.of_config(config, GPU, "foretrain")
        label = f"{seed}.{i}"
        found.append(timed(times, label=label, path=label, config=config, gpu=GPU, settings=known))
    return found


def test_the_scatter_of_starts_is_learned_from_repeats_and_said() -> None:
    found = compare(starts(8, 0.03))
    (scatter,) = found.scatters
    assert scatter.device == GPU.name
    assert len(scatter.runs[0]) == 8
    assert scatter.seen == pytest.approx(0.03, rel=0.5)
    assert scatter.counted > scatter.assumed == repeats.RUN_TO_RUN
    assert found.verdict("speed").outcome == "within_noise"
    text = " ".join(shown(found).split())
    assert f"with the same settings, the speed on {scatter.device} differs by {scatter.seen * 100:.2f}%" in text
    assert Comparison.from_json(json.dumps(found.to_json())) == found


def test_repeats_that_agree_narrow_the_intervals() -> None:
    for count in (3, 4, 12):
        (scatter,) = compare(starts(count, 0.0002)).scatters
        assert scatter.seen < 0.001
        assert scatter.counted <= scatter.assumed
    assert scatter.counted < 0.8 * scatter.assumed
    assert not compare(starts(2, 0.0002)).scatters  # two runs tell nothing of a deviation


def test_what_differs_in_speed_or_is_unknown_is_no_repeat() -> None:
    runs = [*starts(2, 0.03), *starts(2, 0.03, seed=2, n_layer=3)]
    assert [len(group) for group in compare(runs).scatters[0].runs] == [2, 2]  # two pairs
    assert not compare(
        [*starts(1, 0.03), *starts(1, 0.03, seed=2, n_layer=3), *starts(1, 0.03, seed=3, n_layer=4)]
    ).scatters
    bare = [replace(run, config=None, settings={}) for run in starts(4, 0.03)]
    assert not compare(bare).scatters


def test_fastest_is_compared_with_other_settings_not_repeats() -> None:
    quick = starts(3, 0.001, factor=0.9, learning_rate=1e-3, compile=True)
    verdict = compare([*quick, *starts(3, 0.001, seed=2, learning_rate=1e-3, compile=False)]).verdict("speed")
    assert verdict.outcome == "difference"
    assert (verdict.pair.one[0], verdict.pair.other[0]) == ("1", "2")
    assert verdict.settings == ("compile",)


def test_scatter_of_three_starts_each_misleads_less_often() -> None:
    """Starts 1.5% apart where 0.4% is assumed: the same settings under two names, three runs each."""
    wrong = {"assumed": 0, "learned": 0}
    for seed in range(24):
        runs = [*starts(3, 0.015, seed=2 * seed + 1), *starts(3, 0.015, seed=2 * seed + 2)]
        found = settings.between(runs)
        told, _ = repeats.learned(runs, found)
        for name, those in (("assumed", runs), ("learned", told)):
            pair = questions.speed(those[0], those[3])
            wrong[name] += isinstance(pair, questions.Pair) and pair.outcome == "difference"
    assert wrong["learned"] <= 2
    assert wrong["assumed"] >= 3 * max(1, wrong["learned"])


@pytest.mark.slow
@pytest.mark.parametrize("name", list(NOISES))
def test_of_a_hundred_pairs_of_unlike_lengths_95_are_right(tmp_path: Path, name: str) -> None:
    assert unlike_pairs(tmp_path, NOISES[name], 200) >= 95


def test_a_few_pairs_of_unlike_lengths_are_right(tmp_path: Path) -> None:
    assert unlike_pairs(tmp_path, NOISES["card"], 200, pairs=8) == 8
    assert unlike_pairs(tmp_path, NOISES["card"], 200, 0.03, pairs=6) >= 5


# -- losses at equal places --------------------------------------------------------------------------------


def learned(losses: Callable[[int], float], steps: int, **more: object) -> Subject:
    points = [(i, losses(i), float(i)) for i in range(steps)]
    return timed([1.0] * 20, train=curve(points), **more)


def test_equal_tokens_and_equal_hours_are_where_they_ought_to_be() -> None:
    """The second takes half the time a step and has half the tokens a step: closed forms on straight lines."""
    one = learned(lambda i: 10 - i / 100, 100)
    points = [(i, 10 - i / 200, i / 2) for i in range(400)]
    other = timed([0.5] * 20, train=curve(points), tokens_per_step=500, label="y")
    tokens, hours = meet(one, other, "tokens"), meet(one, other, "hours")
    assert tokens.at == 99_000
    assert tokens.one == pytest.approx(10 - 0.9 * 99 / 100, abs=0.01)  # the middle of the last fifth
    assert tokens.other == pytest.approx(tokens.one, abs=0.01)
    assert hours.at == pytest.approx(99 / 3600)
    assert hours.other == pytest.approx(hours.one, abs=0.01)


def test_validation_at_unlike_steps_is_interpolated_in_log() -> None:
    config = tiny()

    def law(x: float) -> float:
        return 8 - math.log(x)

    one = timed([1.0] * 9, val=curve([(i, law(i), None) for i in (100, 200, 400)]), config=config)
    other = timed([1.0] * 9, val=curve([(i, law(i), None) for i in (50, 150, 300, 350)]), config=config, label="y")
    found = meet(one, other, "tokens")
    assert found.at == 200_000
    assert found.one == pytest.approx(found.other)


def test_curves_without_a_common_stretch_are_told_apart() -> None:
    early = timed([1.0] * 9, train=curve([(i, 5.0, None) for i in range(1, 50)]))
    late = timed([1.0] * 9, train=curve([(i, 3.0, None) for i in range(1000, 1100)]), label="late", path="y")
    verdict = compare([early, late]).verdict("tokens")
    assert (verdict.outcome, verdict.reason) == ("not_comparable", "nothing_common")


def test_losses_that_are_not_finite_are_left_out_and_said(tmp_path: Path) -> None:
    lines = synthetic(1, NOISES["card"], steps=200).splitlines()
    lines = ["iter 150: loss nan, time 500.00ms" if line.startswith("iter 150:") else line for line in lines]
    Path("nan.log").write_text("\n".join(lines))
    Path("ok.log").write_text(synthetic(2, NOISES["card"], steps=200))
    found = compare([of("nan.log"), of("ok.log")])
    assert found.sides[0].notes[0].values == {"count": 1, "first": 150}
    assert "not finite" in shown(found)
    assert found.verdict("tokens").outcome == "within_noise"


def test_a_run_that_ends_without_a_loss_has_learned_nothing(tmp_path: Path) -> None:
    lines = synthetic(1, NOISES["card"], steps=200).splitlines()
    lines = [re.sub(r"loss \S+,", "loss nan,", line) if number > 150 else line for number, line in enumerate(lines)]
    Path("nan.log").write_text("\n".join(lines))
    Path("ok.log").write_text(synthetic(2, NOISES["card"], steps=200))
    found = compare([of("nan.log"), of("ok.log")])
    assert {found.verdict(question).reason for question in ("tokens", "hours")} == {"diverged"}
    assert "the last losses of nan are not finite" in " ".join(shown(found).split())


def test_losses_at_equal_steps_are_not_called_those_of_tokens(tmp_path: Path) -> None:
    for seed, name in enumerate(("a.log", "b.log")):
        Path(name).write_text(re.sub(r"tokens per iteration.*\n", "", synthetic(seed, NOISES["card"], steps=200)))
    text = shown(compare([of("a.log"), of("b.log")]))
    assert ("more per step?" in text, "more per token?" in text) == (True, False)


def test_curve_of_a_resumed_run_has_each_step_once() -> None:
    found = curve([(0, 5.0, 0.0), (1, 4.0, 1.0), (2, 3.9, 2.0), (1, 4.1, 5.0), (2, math.nan, 6.0), (3, 3.5, 7.0)])
    assert found == Curve(steps=(0, 1, 3), losses=(5.0, 4.1, 3.5), seconds_s=(0.0, 5.0, 7.0))


# -- other tokens ------------------------------------------------------------------------------------------


def text_run(per_token: float | None, loss: float, **more: object) -> Subject:
    known = {"label": "a", "path": "a", "kind": "table", "tokens_per_step": 1000, "bytes_per_token": per_token}
    points = [(i, loss, None) for i in range(1, 40)]
    return Subject(**{**known, "train": curve(points), **more})  # type: ignore[arg-type]


def test_other_vocabularies_are_compared_in_bits_per_byte() -> None:
    """3.0 nats over 4 bytes are 1.082 bits a byte, 1.0 nat over 1 byte is 1.443."""
    one = text_run(4.0, 3.0, settings={"vocab_size": 50257})
    other = text_run(1.0, 1.0, settings={"vocab_size": 256}, label="b")
    pair = compare([one, other]).verdict("tokens").pair
    assert pair.one == "a"
    assert pair.one_value == pytest.approx(3 / math.log(2) / 4)
    assert pair.other_value == pytest.approx(1 / math.log(2))
    assert pair.unit == "bits a byte"


@pytest.mark.parametrize(
    "pair",
    [
        ({"vocab_size": 50257}, {"vocab_size": 256}), ({"dataset": "owt"}, {"dataset": "shakespeare"}),
        ({"dataset contents": "01234567", "dataset": "toy"}, {"dataset contents": "76543210", "dataset": "toy"}),
    ],
)  # fmt: skip
def test_other_tokens_without_their_bytes_are_not_compared(pair: tuple[dict[str, object], dict[str, object]]) -> None:
    one, other = (text_run(None, 3.0 + i, settings=known, label=f"r{i}") for i, known in enumerate(pair))
    found = compare([one, other])
    assert found.verdict("tokens").reason == "other_tokens"
    assert found.losses_apart == (next(iter(pair[0])).removesuffix(" contents"),)
    assert "bytes_per_token" in shown(found)


def test_padded_vocabulary_and_fingerprint_name_change_no_loss() -> None:
    one = text_run(None, 3.0, settings={"vocab_size": 50257, "dataset": "owt"})
    other = text_run(None, 2.0, settings={"vocab_size": 50304, "dataset": "owt", "dataset contents": "0123"}, label="b")
    verdict = compare([one, other]).verdict("tokens")
    assert verdict.pair.unit == "nats per token"


# -- sources -----------------------------------------------------------------------------------------------


def test_runs_are_compared_as_measured() -> None:
    write_measured_run(Path("a"))
    write_measured_run(Path("b"), seed=2, step_s=0.08, batch_size=8, gradient_accumulation_steps=1)
    found = compare([of("a"), of("b")])
    assert [side.speed_source for side in found.sides] == ["measured", "measured"]
    assert [side.memory_bytes for side in found.sides] == [2**29, 2**29]
    verdict = found.verdict("speed")
    assert (verdict.outcome, verdict.attribution) == ("difference", "one")
    assert verdict.pair.one == "b"
    assert verdict.pair.share == pytest.approx(0.25, abs=0.01)
    assert verdict.pair.low
    assert verdict.pair.low > 0.2
    assert found.verdict("memory").outcome == "within_noise"
    assert found.verdict("tokens").outcome == "within_noise"
    assert [s.name for s in found.differing if not s.matters] == ["seed", "eval_sequences"]


def test_difference_to_a_runs_own_forecast_is_the_forecasts() -> None:
    write_measured_run(Path("a"), step_s=10.0)
    Path("a/config.toml").write_text(to_toml(load(take_apart("a")).config or tiny()))
    verdict = compare([of("a"), of("plan=a/config.toml")]).verdict("speed")
    assert (verdict.outcome, verdict.attribution, verdict.settings) == ("forecast", "forecast", ())


def test_a_difference_that_no_setting_explains_is_given_to_none() -> None:
    write_measured_run(Path("a"))
    write_measured_run(Path("b"), seed=2, step_s=0.15)
    verdict = compare([of("a"), of("b")]).verdict("speed")
    assert (verdict.outcome, verdict.attribution) == ("difference", "none")


def test_a_plan_of_the_command_line_is_a_source() -> None:
    Path("p.json").write_text(foretrain("plan", "gpt2-124m", "--gpu", "4070", "--json").stdout)
    split = json.loads(Path("p.json").read_text())["config"]
    half, double = split["batch_size"] // 2, split["gradient_accumulation_steps"] * 2
    found = compare([of("p.json"), of(f"gpt2-124m+batch_size={half}+gradient_accumulation_steps={double}")])
    assert found.sides[0].kind == "plan"
    assert found.sides[0].label == "p"
    assert [s.name for s in found.differing if s.matters] == ["batch_size x accumulation"]
    assert found.sides[0].memory_source == "estimated"


def test_a_log_alone_leaves_unknown_what_it_does_not_say() -> None:
    Path("x.log").write_text("Overriding: learning_rate = 1e-3\n" + synthetic(1, NOISES["card"], steps=100))
    Path("y.log").write_text("Overriding: learning_rate = 3e-4\n" + synthetic(2, NOISES["card"], steps=100, step_s=0.4))
    found = compare([of("x.log"), of("y.log")])
    assert [s.name for s in found.differing] == ["learning_rate"]
    assert not found.unknown  # neither says the rest, so nothing is known of one alone
    found = compare([of("x.log"), of(f"y.log+{CASES}/b1.py")])
    assert "n_embd" in [s.name for s in found.unknown]
    assert found.verdict("speed").attribution == "unknown"


def csv_text(names: list[str], rows: list[list[object]]) -> str:
    file = io.StringIO()
    writer = csv.writer(file)
    writer.writerows([names, *rows])
    return file.getvalue()


STEPS = range(0, 400, 10)
EXPORTS: dict[str, Callable[[], str]] = {
    "wandb_chart.csv": lambda: csv_text(
        ["Step", "brisk-1 - train/loss", "brisk-1 - train/loss__MIN", "brisk-1 - train/loss__MAX"],
        [[i, 5 - i / 200, 5 - i / 200, 5 - i / 200] for i in STEPS],
    ),
    "wandb_history.jsonl": lambda: "\n".join(
        json.dumps({"_step": i, "_runtime": i * 0.5, "_timestamp": 1.7e9 + i, "train/loss": 5 - i / 200}) for i in STEPS
    ),
    "wandb_history.json": lambda: json.dumps([{"_step": i, "_runtime": i * 0.5, "train/loss": 5 - i / 200} for i in STEPS]),
    "run-a-tag-train_loss.csv": lambda: csv_text(
        ["Wall time", "Step", "Value"], [[1.7e9 + i * 0.5, i, 5 - i / 200] for i in STEPS]
    ),
    "run-a-tag-loss.json": lambda: json.dumps([[1.7e9 + i * 0.5, i, 5 - i / 200] for i in STEPS]),
    "trackio.csv": lambda: csv_text(
        ["step", "timestamp", "loss"],
        [[i, f"2026-01-01T00:{i // 120:02d}:{i / 2 % 60:06.3f}+00:00", 5 - i / 200] for i in STEPS],
    ),
    "own.tsv": lambda: "step\ttrain_loss\tstep_ms\n" + "\n".join(f"{i}\t{5 - i / 200}\t500" for i in STEPS),
}  # fmt: skip


@pytest.mark.parametrize("name", list(EXPORTS))
def test_exports_of_trackers_are_read(name: str) -> None:
    Path(name).write_text(EXPORTS[name](), "utf-8")
    subject = of(f"{name}+tokens_per_step=1000")
    assert subject.kind == "table"
    assert subject.train.steps == tuple(STEPS)
    assert subject.train.losses[-1] == pytest.approx(5 - 390 / 200)
    if name != "wandb_chart.csv":  # which has no times
        assert subject.step_s.expected_s == pytest.approx(0.5)
        assert subject.tokens_per_s == pytest.approx(2000)


def test_tensorboard_curves_are_joined_and_columns_can_be_named() -> None:
    for tag, shift in (("train_loss", 0.0), ("val_loss", 0.1)):
        rows = [[1.7e9 + i * 0.5, i, 5 + shift - i / 200] for i in STEPS]
        Path(f"run-a-tag-{tag}.csv").write_text(csv_text(["Wall time", "Step", "Value"], rows))
    subject = of("a=run-a-tag-train_loss.csv+run-a-tag-val_loss.csv")
    assert len(subject.train) == len(subject.val) == len(STEPS)
    Path("odd.csv").write_text(csv_text(["n", "my/loss"], [[i, 4.0] for i in STEPS]))
    assert len(of("odd.csv", columns={"step": "n", "train_loss": "my/loss"}).train) == len(STEPS)


def test_of_a_chart_with_several_runs_one_must_be_chosen() -> None:
    rows = [[i, 4.0, 3.0] for i in STEPS]
    Path("two.csv").write_text(csv_text(["Step", "a - train/loss", "b - train/loss"], rows))
    with pytest.raises(UserError, match="holds several runs"):
        of("two.csv")
    found = compare([of("one=two.csv+run=a"), of("other=two.csv+run=b")])
    assert found.sides[1].train_loss == 3.0
    assert found.verdict("tokens").outcome == "difference"
    assert "at step 390" in " ".join(shown(found).split())


@given(st.text(max_size=400))
def test_no_text_breaks_the_reader_of_tables(content: str) -> None:
    path = Path("t.csv")
    path.write_text(content, "utf-8")
    for name in ("t.csv", "t.jsonl"):
        path = path.rename(name)
        try:
            of(name)
        except UserError as error:
            assert str(error)


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(max_size=5), lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["step", "_step", "loss", "key", "value", "metrics", "x"]), inner, max_size=4), max_leaves=12))  # fmt: skip
def test_no_json_breaks_the_reader_of_tables(value: object) -> None:
    Path("t.json").write_text(json.dumps(value), "utf-8")
    try:
        assert load(SourceRequest(path="t.json"))
    except UserError as error:
        assert str(error)


@pytest.mark.parametrize(
    ("cell", "value"),
    [
        ("1.5", 1.5),
        (2, 2.0),
        (True, None),
        ("", None),
        (None, None),
        ("x", None),
        ("2026-01-01T00:00:00+00:00", 1767225600.0),
    ],
)
def test_cells_become_numbers(cell: object, value: float | None) -> None:
    assert number(cell) == value


@pytest.mark.parametrize(
    ("word", "path", "label", "words"),
    [
        ("b1.log+b1.py", "b1.log", "", ("b1.py",)), ("wide=b1.log+batch_size=8", "b1.log", "wide", ("--batch_size=8",)),
        ("a+b.log+b1.py", "a+b.log", "", ("b1.py",)), ("lr=3.log", "lr=3.log", "", ()),
        ("x=gpt2-124m+--n_layer=6", "gpt2-124m", "x", ("--n_layer=6",)),
    ],
)  # fmt: skip
def test_a_source_is_taken_apart(word: str, path: str, label: str, words: tuple[str, ...]) -> None:
    for name in ("b1.log", "a+b.log", "lr=3.log"):
        Path(name).touch()
    found = take_apart(word)
    assert (found.path, found.label, found.words) == (path, label, words)


# -- settings ----------------------------------------------------------------------------------------------


def test_every_knob_has_a_group_and_effects() -> None:
    for knob in OPTIONS.values():
        if knob.group in settings.GROUP_OF_OPTIONS and not knob.inert:
            group, affects = settings.kind_of(knob.name)
            assert group in settings.GROUPS
            assert set(affects) <= {"speed", "memory", "learning"}


def test_idle_knobs_are_no_difference() -> None:
    one, other = (
        timed(
            [1.0] * 9, settings=settings.of_config(tiny(muon_momentum=m), GPU, "foretrain"), label=f"m{m}", path=f"m{m}"
        )
        for m in (0.9, 0.95)
    )
    assert not settings.between([one, other])


# -- the command line --------------------------------------------------------------------------------------


def test_command_line_shows_case_b_and_its_json_reads_back() -> None:
    words = [f"B1={CASES}/b1.log+{CASES}/b1.py", f"B2={CASES}/b2.csv+{CASES}/b2.py", "--gpu", "RTX 4070"]
    result = foretrain("compare", *words, code=0)
    assert "69.0%" in result.stdout
    data = json.loads(foretrain("compare", *words, "--json").stdout)
    assert data["schema"] == "foretrain.compare/1"
    assert Comparison.from_json(json.dumps(data)).verdict("speed").attribution == "confounded"


def test_many_subjects_fit_80_columns_and_html() -> None:
    subjects = [
        of(f"m{n}=gpt2-124m+batch_size={n}+gradient_accumulation_steps={480 // n}") for n in (12, 10, 8, 6, 5, 4)
    ]
    for count in (2, 3, 4, 6):
        found = compare(subjects[:count])
        text = shown(found)
        assert max(len(line) for line in text.splitlines()) <= 80
        assert "Against m12" in text or count == 2
    assert "<table" in html.render(compare_view.document(found))


def test_rent_decides_what_is_learned_for_the_money() -> None:
    words = ["a=gpt2-124m+gpu=4070", "b=gpt2-124m+gpu=4090", "--price", "RTX 4070=0.1,RTX 4090=0.4", "--json"]
    data = json.loads(foretrain("compare", *words).stdout)
    cheap, dear = (side["cost_per_hour"] for side in data["sides"])
    assert (cheap, dear) == (0.1, 0.4)  # electricity is the owner's


def test_bad_sources_are_one_sentence_and_a_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("x.log").write_text(synthetic(1, NOISES["card"], steps=60))
    Path("copy.log").write_text(synthetic(1, NOISES["card"], steps=60))
    Path("empty.log").touch()
    Path("binary.csv").write_bytes(b"\x00\x01" * 50)
    Path("binary.log").write_bytes(b"\x00\x01" * 50)
    Path("other.log").write_text("Epoch 1: 100%|####| loss=3.2\n")
    Path("columns.csv").write_text("a,b\n1,2\n")
    Path("words.csv").write_text("step,loss\nx,y\n")
    Path("error.json").write_text('{"schema": "foretrain.error/1", "id": "x"}')
    Path("half.json").write_text('{"schema": "foretrain.plan/1", "name"')
    Path("nothing").mkdir()
    half = write_measured_run(Path("half"))
    (half / "run.json").write_text((half / "run.json").read_text()[:200])
    for source in ("empty.log", "binary.csv", "binary.log", "other.log", "columns.csv", "words.csv", "error.json",
                   "half.json", "nothing", "half", "missing.log"):  # fmt: skip
        with pytest.raises(UserError) as caught:
            of(source)
        assert int(caught.value.exit_code) == 7, source
        assert "\n" not in str(caught.value)
    for words, says, code in (
        (["x.log", "copy.log"], "same", 2), (["x.log"], "second source", 2), (["x.log", "missing.log"], "missing.log", 7),
        (["x.log", "columns.csv", "--column", "nothing=a"], "--column", 2), (["x.log", "x.log"], "same", 2),
    ):  # fmt: skip
        assert says in failed(monkeypatch, capsys, *words, code=code)


def test_half_written_runs_are_compared_by_what_they_have() -> None:
    write_measured_run(Path("a"))
    b = write_measured_run(Path("b"), seed=2)
    record = json.loads((b / "run.json").read_text())
    (b / "run.json").write_text(json.dumps({**record, "status": "running", "steps_done": 30}))
    lines = (b / "metrics.jsonl").read_text().splitlines()
    (b / "metrics.jsonl").write_text("\n".join(lines[:30]) + "\n" + lines[30][:20])
    found = compare([of("a"), of("b")])
    assert found.sides[1].notes[0].values["status"] == "killed"
    assert found.verdict("tokens").outcome == "within_noise"


def test_a_run_whose_steps_are_damaged_is_said_so() -> None:
    write_measured_run(Path("a"))
    b = write_measured_run(Path("b"), seed=2)
    assert not of("b").notes
    lines = (b / "metrics.jsonl").read_text().splitlines()
    (b / "metrics.jsonl").write_text("\n".join(lines[:30]) + "\n")
    found = compare([of("a"), of("b")])
    assert [note.id for note in found.sides[1].notes] == ["steps_lost"]
    assert found.sides[1].notes[0].values == {"there": 27, "expected": 60}
    assert "27 of the 60 steps" in " ".join(shown(found).split())


def test_a_lower_loss_is_a_share_of_the_higher_one() -> None:
    one, other = (learned(lambda _, loss=loss: loss, 1000, label=str(loss)) for loss in (4.0, 5.0))
    pair = compare([other, one]).verdict("tokens").pair
    assert (pair.one_value, pair.other_value) == (4, 5)
    assert pair.share == pytest.approx(0.2)


@pytest.mark.parametrize(
    "word", ["run+run=x", "run+tokens_per_step=5", "run+gpu=4070", "gpt2-124m+run=x", "x.log+run=x", "x.log+other.csv"]
)
def test_keys_that_a_source_has_no_use_for_are_refused(word: str) -> None:
    write_measured_run(Path("run"))
    Path("x.log").write_text(synthetic(1, NOISES["card"], steps=60))
    with pytest.raises(UserError) as caught:
        of(word)
    assert caught.value.id in ("usage.source_key_unused", "usage.source_table_unused")


def test_others_hold_no_more_than_the_card_has() -> None:
    with refused("gpu.others_beyond"):
        of("gpt2-124m+gpu=4070+used_by_others=13GiB")


def test_a_table_keeps_no_more_than_it_must() -> None:
    Path("wide.csv").write_text(",".join(f"c{i}" for i in range(3000)) + "\n")
    with pytest.raises(UserError, match="3,000 columns"):
        read_table(Path("wide.csv"))


def test_every_reason_has_a_text_and_names_who_lacks_what() -> None:
    bare = Subject(label="bare", path="bare", kind="table", train=curve([(0, 3.0, None)]))
    found = compare([timed([1.0] * 9, settings={"seed": 1}), replace(bare, settings={"seed": 2})])
    assert {v.reason for v in found.verdicts} >= {"no_speed", "no_mfu", "no_memory", "no_loss"}
    assert "bare" in shown(found)
    both = compare([replace(bare, label="a", settings={"seed": 1}), replace(bare, path="b", settings={"seed": 2})])
    assert both.verdict("tokens").reason == "nothing_common"  # nothing but step 0
    assert shown(both)
    for reason in ("no_tokens", "no_flops", "no_hours", "no_money"):
        assert messages.has(f"side_reason.{reason}")


LOG = """Overriding: {key} = {value}
tokens per iteration will be: 65,536
iter 0: loss 10.8, time 900.00ms, mfu -100.00%
iter 1: loss 10.7, time {ms}ms, mfu 10.00%
iter 2: loss 10.6, time {ms}ms, mfu 10.00%
iter 3: loss 10.5, time {ms}ms, mfu 10.00%
iter 4: loss 10.4, time {ms}ms, mfu 10.00%
iter 5: loss 10.3, time {ms}ms, mfu 10.00%
iter 6: loss 10.2, time {ms}ms, mfu 10.00%
"""


def test_logs_that_print_an_option_of_any_group_are_compared(tmp_path: Path) -> None:
    """Each option that nanoGPT could print: none of them is unknown to the comparison."""
    other = tmp_path / "other.log"
    for name, knob in OPTIONS.items():
        value = {"bool": "True", "int": "3", "float": "0.5"}.get(knob.type, "x")
        one = tmp_path / f"{name}.log"
        one.write_text(LOG.format(key=name, value=value, ms="400.00"))
        other.write_text(LOG.format(key=name, value=value + "1" if knob.type != "bool" else "False", ms="500.00"))
        found = compare([load(take_apart(str(one))), load(take_apart(str(other)))])
        assert found.verdict("speed").outcome, name
        names = {setting.name for setting in found.differing}
        if name in ("log_interval", "out_dir", "wandb_log", "price_per_kwh"):  # these say nothing of the training
            assert name not in names
        if name in ("learning_rate", "dropout", "n_layer", "weight_decay"):
            assert name in names


def test_other_models_are_not_called_better_for_being_small(tmp_path: Path) -> None:
    """Report and terminal: no check mark, and the reason."""
    small = write_measured_run(tmp_path / "small", step_s=0.05)
    large = write_measured_run(tmp_path / "large", seed=2, step_s=0.5, n_embd=256)
    found = compare([load(take_apart(str(small))), load(take_apart(str(large)))])
    verdict = found.verdict("speed")
    assert (verdict.outcome, verdict.unlike_models) == ("difference", ("n_embd",))
    assert "The models differ (n_embd), so this does not make one of them better." in " ".join(shown(found).split())
    out = tmp_path / "r.html"
    assert foretrain("report", str(small), str(large), "--out", str(out)).returncode == 0
    page = out.read_text()
    assert "The models differ, so this does not make one of them better." in page
    assert "Better by tokens/s" not in page
    assert "Better by memory" not in page
    same = compare(
        [load(take_apart(str(small))), load(take_apart(str(write_measured_run(tmp_path / "b", seed=3, step_s=0.5))))]
    )
    assert same.verdict("speed").unlike_models == ()


def test_token_of_bytes_is_a_byte_and_other_files_the_reason(tmp_path: Path) -> None:
    one, other = (write_measured_run(tmp_path / name, seed=seed) for name, seed in (("one", 1), ("other", 2)))
    for path, print_ in ((one, "a" * 16), (other, "b" * 16)):
        record = json.loads((path / "run.json").read_text())
        record["dataset"] |= {"tokenizer": "byte", "fingerprint": print_}
        record["config"] |= {"batch_size": 2, "gradient_accumulation_steps": 4} if path == other else {}
        (path / "run.json").write_text(json.dumps(record))
    subjects = [load(take_apart(str(path))) for path in (one, other)]
    assert [subject.bytes_per_token for subject in subjects] == [1.0, 1.0]
    found = compare(subjects)
    assert {run.setting: run.impossible for run in found.ablations}["dataset contents"] == "contents"
    assert "the tokens per step would not divide" not in shown(found)


def test_plans_of_every_kind_are_compared_and_reported(tmp_path: Path) -> None:
    asked = {
        "alone": ("gpt2-124m", "--gpu", "3060"), "pair": ("gpt2-124m", "--gpus", "2 x 3060"),
        "lora": ("smollm2-135m", "--method", "lora", "--gpu", "3060"),
        "more": ("smollm2-135m", "--method", "lora", "--lora-r", "64", "--gpu", "3060"),
        "text": ("smollm2-135m", "--inference", "--gpu", "3060"),
    }  # fmt: skip
    for name, words in asked.items():
        (tmp_path / f"{name}.json").write_text(foretrain("plan", *words, "--json").stdout, "utf-8")
        foretrain("report", str(tmp_path / f"{name}.json"), "--out", str(tmp_path / f"{name}.html"), code=0)
        assert "fits" in (tmp_path / f"{name}.html").read_text("utf-8").lower()
    trained = [name for name in asked if name != "text"]
    found = json.loads(foretrain("compare", *(str(tmp_path / f"{name}.json") for name in trained), "--json").stdout)
    plans = {name: json.loads((tmp_path / f"{name}.json").read_text("utf-8")) for name in trained}
    assert {each["label"]: each["memory_bytes"] for each in found["sides"]} == {
        name: plan["needed_bytes"] for name, plan in plans.items()
    }
    refused = foretrain("compare", str(tmp_path / "text.json"), str(tmp_path / "lora.json"))
    assert (refused.returncode, "text generates text and lora does not" in refused.stderr) == (2, True)
    (tmp_path / "bad.json").write_text(json.dumps(plans["lora"] | {"available_bytes": -1}), "utf-8")
    damaged = foretrain("report", str(tmp_path / "bad.json"))
    assert (damaged.returncode, "available_bytes: Input should be greater" in damaged.stderr) == (7, True)
    two = json.loads(foretrain("compare", str(tmp_path / "lora.json"), str(tmp_path / "more.json"), "--json").stdout)
    assert [(each["name"], each["values"]) for each in two["differing"]] == [("lora_r", [16, 64])]


def test_a_report_plans_on_several_cards_and_names_a_model_whole(tmp_path: Path) -> None:
    out = tmp_path / "r.html"
    for words in (("gpt2-124m", "--gpus", "2 x 3060"), ("smollm2-135m", "--method=lora", "--gpus=2", "--gpu=3060")):
        foretrain("report", *words, "--out", str(out), code=0)
        assert "2 x RTX 3060" in out.read_text("utf-8")
    named = foretrain("report", "llama-3.1-8b", "--method=lora", "--gpu", "3060", cwd=tmp_path)
    assert named.stdout.strip() == "report-llama-3.1-8b.html"
    refused = foretrain("report", str(out), "--gpus", "2 x 3060")
    assert (refused.returncode, "--gpus has no effect" in refused.stderr) == (2, True)
    model = foretrain("compare", "llama-3.1-8b", str(out))
    assert (model.returncode, "is compared by its plan" in model.stderr) == (2, True)


def test_losses_of_preferences_and_of_tokens_stay_apart(tmp_path: Path) -> None:
    runs = []
    for name, more in (("tokens", {}), ("pairs", {"train/rewards/margins": 0.2}), ("policy", {"eval_reward": 0.4})):
        rows = [{"step": step, "train/loss": (3 + len(runs)) / step, **more} for step in range(10, 400, 10)]
        path = tmp_path / f"{name}.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)))
        runs.append(of(str(path)))
    for other in runs[1:]:
        found = compare([runs[0], other])
        assert (found.verdict("tokens").reason, found.losses_apart) == ("other_units", ("unit",))
        text = " ".join(shown(found).split())
        assert f"the loss of {other.label} is for preferences or a policy" in text
        assert "repeats of one run" not in text
