"""Reports: what their pictures are made of is held against the ledger and closed forms; the file is small, whole and safe."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrain.advice import outlook
from foretrain.analysis import run_pace as vital_signs
from foretrain.analysis.forecast_check import Row, Sources
from foretrain.base import messages
from foretrain.base.errors import UserError
from foretrain.base.messages import format_value, say
from foretrain.base.statistics import extremes
from foretrain.comparison import loss_axes
from foretrain.comparison.compare import compare
from foretrain.comparison.loss_axes import LossCurve, LossCurves
from foretrain.comparison.subject import Curve, Memory, Subject, exact
from foretrain.config.resolve import WORDS, resolve
from foretrain.hardware.catalogue import find
from foretrain.measure.tune_record import TuneTrial, Tuning
from foretrain.predict.plan import Plan, plan
from foretrain.predict.spec import StepName, StepSpec
from foretrain.predict.speed.limit import roofline
from foretrain.predict.step_moments import step_moments
from foretrain.reports import charts, html, making, numbers
from foretrain.reports.document import (
    Curves,
    Document,
    Figures,
    Message,
    Only,
    Paragraph,
    Picture,
    Ranks,
    Scatter,
    Section,
    StackedBars,
    Verbatim,
    cell_text,
)
from foretrain.reports.html import script_json
from foretrain.reports.plots import markup
from foretrain.reports.views import agreement as agreement_view
from foretrain.reports.views import compare as compare_view
from foretrain.reports.views import curves as curves_view
from foretrain.reports.views import memory as memory_view
from foretrain.reports.views import outlook as outlook_view
from foretrain.reports.views import plan as plan_view
from tests.kit.command import REPO
from tests.kit.command import foretrain as run_foretrain
from tests.kit.language import ARABIC, pretending
from tests.kit.reports import CARD, HOSTILE, Tags, gpu_lines, write_long_run


def made(*words: str, gpu: str = CARD, others: int = 0) -> Plan:
    return plan(resolve(list(words)).config, find(gpu), name="p", used_by_others_bytes=others)


def drawn(picture: Picture) -> str:
    return markup(charts.chart(picture).views[0].draw(920).svg())


# -- engines -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["foretrain", "nanogpt"])
@pytest.mark.parametrize(
    "words", [(), ("--compile=false",), ("--activation_checkpointing=true", "--compile=false"), ("--dropout=0.1",)]
)
def test_the_highest_moment_of_a_step_is_the_ledgers_peak(step: Any, words: tuple[str, ...]) -> None:
    p = made("gpt2-124m", *words)
    found = step_moments(StepSpec.of(p.config, p.gpu, step, dtype=p.dtype, compiled=p.compiled))
    steady = p.memory_of(step).phase("steady_step")
    assert found.peak.total_bytes == steady.tensors_bytes
    tensors = {c.id: c.size_bytes for c in steady.components if c.id != "rounding"}  # that is the allocator's
    assert found.peak.components_bytes == tensors
    assert found.peak.moment == steady.moment
    assert found.moments[0].moment.startswith("forward")
    assert len(found.moments) <= 300 < found.events
    assert min(size for m in found.moments for size in m.components_bytes.values()) > 0


def test_roofline_has_the_steps_flops_and_the_cards_peaks() -> None:
    p = made("gpt2-124m", "--gradient_accumulation_steps=4")
    found = roofline(StepSpec.of(p.config, p.gpu, dtype=p.dtype, compiled=True))
    shape = p.config
    layers = 12 * shape.n_layer * shape.n_embd**2 + shape.vocab_size * shape.n_embd
    attention = 7 * shape.n_layer * shape.block_size * shape.n_embd  # causal: 2 forward, 5 backward
    assert sum(o.total_flops for o in found.points) == pytest.approx((6 * layers + attention) * shape.tokens_per_step)
    assert sum(o.share for o in found.points) + found.other_share == pytest.approx(1)
    assert found.ridge_flops_per_byte == pytest.approx(58.3e12 / 504e9, rel=0.01)
    fc = next(o for o in found.points if o.name == "fc" and o.kind == "matmul")
    m, n, k = shape.batch_size * shape.block_size, 4 * shape.n_embd, shape.n_embd
    assert fc.flops_per_byte == pytest.approx(2 * m * n * k / (2 * (m * k + n * k + m * n)))


def test_frontier_has_the_plan_and_only_what_nothing_beats() -> None:
    p = made("gpt2-124m")
    found = outlook.predict_frontier(p, "foretrain")
    own = next(point for point in found.points if point.given)
    assert own.tokens_per_s == pytest.approx(p.timing.tokens_per_s)
    assert own.needed_bytes == max(phase.needed_expected_bytes for phase in p.memory_of("foretrain").phases)
    for point in found.points:
        beaten = [
            o for o in found.points if o.needed_bytes <= point.needed_bytes and o.tokens_per_s > point.tokens_per_s
        ]
        assert point.best is not bool(beaten) or not point.best


def test_what_tune_measured_takes_the_place_of_the_forecast() -> None:
    config = resolve(["baby"]).config
    trials = tuple(
        TuneTrial(
            options={"batch_size": b}, gradient_accumulation_steps=1, learning="exact", verdict="best", step_s=1.0,
            tokens_per_s=rate, peak_bytes=size, given=b == 8,
        )
        for b, rate, size in ((16, 200.0, 3 * 2**30), (8, 100.0, 2**30), (4, 90.0, 2 * 2**30))
    )  # fmt: skip
    values = {name: None for name, field in Tuning.model_fields.items() if field.is_required()}
    values |= {
        "name": "t", "config": config, "given_options": {}, "device": "d", "torch_version": "", "date": "",
        "tokens_per_step": 1, "settings": 3, "fitting": 3, "trials": trials, "given_fits": True, "calibrated": False,
        "stop": "decided", "rounds": 1, "took_s": 1, "budget_s": 1, "most_trials": 3, "clock": "wall", "elsewhere": 0.0,
    }  # fmt: skip
    tuning = Tuning.model_validate(values)
    found = outlook.frontier_of_tuning(tuning, None)
    assert found.source == "measured (tune)"
    assert [(p.batch_size, p.best) for p in found.points] == [(8, True), (4, False), (16, True)]


def test_cards_are_planned_as_plan_does() -> None:
    p = made("gpt2-124m", others=2**30)
    options = {option.name: option for option in outlook.card_options(p, "foretrain")}
    assert options[CARD].own
    assert len(options) > 40
    other = plan(p.config, find("RTX 3090"), used_by_others_bytes=2**30)
    assert options["RTX 3090"].total_s == other.timing.total_s
    assert options["RTX 3090"].verdict == other.verdict_of("foretrain")
    assert all(name in options for name in outlook.USUAL)


def test_no_other_card_is_told_to_be_emptier_than_the_runs_own() -> None:
    """A card of the same size fits no more than the own one does, and whose step it is stands below."""
    p = plan(
        resolve([str(REPO / "examples" / "real-cases" / "c.py")]).config, find(CARD), used_by_others_bytes=2 * 10**9
    )
    options = {option.name: option for option in outlook.card_options(p, "nanogpt")}
    assert options["RTX 4070"].verdict == options["RTX 5070"].verdict == "does_not_fit"
    found = outlook.Outlook("nanogpt", None, None, None, tuple(options.values()))
    (ranks,) = outlook_view.sections(p, found)[0].blocks
    assert isinstance(ranks, Ranks)
    said = ranks.source.text()
    assert said.startswith("nanoGPT's step")
    assert "other programs use 1.86 GiB" in said
    assert "nothing else uses the card" not in said


@given(st.lists(st.floats(-1e9, 1e9), max_size=400), st.integers(4, 60))
def test_thinning_keeps_the_ends_and_the_extremes(values: list[float], most: int) -> None:
    kept = extremes(values, most)
    assert kept == sorted(set(kept))
    assert len(kept) <= max(most, 4)
    if values:
        assert {0, len(values) - 1} <= set(kept)
        assert min(values) == min(values[i] for i in kept)
        assert max(values) == max(values[i] for i in kept)


# -- curves --------------------------------------------------------------------------------------------------


def subject(**changes: Any) -> Subject:
    curve = Curve(steps=(0, 10, 20), losses=(5.0, 4.0, 3.0), seconds_s=(0.0, 3600.0, 7200.0))
    config = resolve(["baby", "--price_per_kwh=0.5", "--price_per_hour=2"]).config
    base = Subject(
        label="a", path="a", kind="run", config=config, gpu=find(CARD), tokens_per_step=1000, train=curve, mfu=0.35
    )
    return dataclasses.replace(base, **changes)


def test_losses_over_tokens_hours_energy_and_money() -> None:
    meter = loss_axes.meter_of([{"elapsed_s": 3600.0, "power_w": 100.0}, {"elapsed_s": 7200.0, "power_w": 300.0}])
    found = loss_axes.loss_curves([subject()], [meter])
    axes = found.curves[0].axes
    assert found.energy_source == "measured"
    assert found.axes == loss_axes.AXES
    assert axes["tokens"] == (0, 10_000, 20_000)
    assert axes["hours"] == pytest.approx((0, 1, 2))
    assert axes["kwh"] == pytest.approx((0, 0.1, 0.4))
    assert axes["cost"] == pytest.approx((0, 2, 4))  # the rent
    bought = subject(config=resolve(["baby", "--price_per_kwh=0.5"]).config)
    assert loss_axes.loss_curves([bought], [meter]).curves[0].axes["cost"] == pytest.approx((0, 0.05, 0.2))
    predicted = loss_axes.loss_curves([subject()])
    assert predicted.energy_source == "estimated"
    assert predicted.curves[0].axes["kwh"][-1] == pytest.approx(2 * 0.97 * 0.2, rel=0.01)  # 97% of 200 W, two hours


def test_an_axis_that_one_curve_lacks_is_none() -> None:
    bare = Curve(steps=(0, 5), losses=(2.0, 1.0))
    found = loss_axes.loss_curves([subject(), subject(label="b", train=bare, tokens_per_step=None)])
    assert found.axes == ("step",)
    timed = loss_axes.loss_curves([subject(), subject(label="b", train=bare, step_s=exact(36.0))])
    assert timed.predicted_hours == ("b",)
    assert timed.curves[1].axes["hours"] == pytest.approx((0, 0.05))


def test_throttling_is_marked_where_it_was() -> None:
    found = vital_signs.of_lines([*gpu_lines(1000), {"elapsed_s": "x"}, {"power_w": float("nan")}], on_card=True)
    assert [s.name for s in found.signs] == list(vital_signs.SIGNS)
    spans = [(t.reason, round(t.from_hours * 3600), round(t.to_hours * 3600)) for t in found.throttled]
    assert spans == [("thermal", 300, 320), ("thermal", 700, 701)]
    blocks = curves_view.signs(found)
    assert isinstance(blocks[0], Paragraph)
    assert "heat" in blocks[0].message.text()
    picture = blocks[1]
    assert isinstance(picture, Curves)
    assert drawn(picture).count('opacity=".16"') == len(picture.spans) == 2
    assert len(picture.traces[0].values) <= vital_signs.MOST


def test_a_processor_says_plainly_that_it_has_no_sensors() -> None:
    lines = [{"elapsed_s": float(i), "tokens_per_s": 1.0} for i in range(1, 9)]
    said = curves_view.signs(vital_signs.of_lines(lines, on_card=False))[0]
    assert isinstance(said, Paragraph)
    assert said.message.id == "report.no_card"


def test_agreement_has_the_line_the_band_and_the_stated_ranges() -> None:
    rows = (
        Row(id="time.step", kind="seconds", predicted=1.1, measured=1.0, low=0.9, high=1.5),
        Row(id="time.run", kind="seconds", predicted=90, measured=100),
    )
    sources: Sources = {"bytes": ("estimated",), "seconds": ("estimated", "calibrated")}
    (picture,) = agreement_view.pictures([("a", rows)], sources)
    assert isinstance(picture, Scatter)
    assert "estimated, calibrated" in picture.source.text()
    dot = picture.clouds[0].dots[0]
    assert (dot.x, dot.y, dot.low, dot.high, cell_text(dot.note)) == (1, 1.1, 0.9, 1.5, "+10.0%")
    said = charts.pointed(charts.chart(picture))["words"]
    assert [text.partition(": ")[2] for text in said[1:3]] == ["1 s", "1.1 s (900 ms – 1.5 s)"]
    assert said[3] == "+10.0%"
    assert all(low == pytest.approx(0.9 * x) and high == pytest.approx(1.1 * x) for x, low, high in picture.band[1])
    assert all(x == y for x, y in picture.lines[0][1])


# -- the file ------------------------------------------------------------------------------------------------


def plan_page(*words: str) -> str:
    p = made(*words)
    return html.render(plan_view.document(p, outlook=outlook.outlook(p, "foretrain")))


def data_of(page: str) -> dict[str, Any]:
    return json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL).group(1))  # type: ignore[union-attr]


def test_a_plan_has_every_picture_with_its_numbers() -> None:
    page = plan_page("gpt2-124m")
    tags = Tags()
    tags.feed(page)
    assert not tags.open
    pictures = data_of(page)["pictures"]
    assert [p["mode"] for p in pictures] == ["rows", "rows", "rows", "along", "near", "near", "rows"]
    assert tags.seen.count("figure") == tags.seen.count("details") == len(pictures)
    assert page.count('<svg viewBox="0 0 360') == len(pictures)
    assert 'lang="en" dir="ltr"' in page
    assert "connect-src" not in page
    assert "default-src 'none'" in page
    assert not re.search(r'(src|href)="?(?!"?#)', page.split("<script>")[0])
    assert len(page.encode()) < 500_000
    with pretending(), messages.speaking(ARABIC):
        right = html.render(Document(Message("report.more"), Message("report.more"), []))
    assert '<html lang="dv" dir="rtl">' in right


def test_times_say_whose_step_they_are_of() -> None:
    """The figures at the top and the section of times are of the step that is meant."""
    steps: dict[str, StepName] = {"foretrain": "foretrain", "nanoGPT": "nanogpt"}
    for whose, step in steps.items():
        p = made("gpt2-124m").model_copy(update={"step": step})
        whole = plan_view.document(p, outlook=outlook.outlook(p, p.step))
        said = {
            title.id: [b.message.text() for b in blocks if isinstance(b, Paragraph)]
            for title, blocks in whole.on("page")
        }
        assert f"For the step of {whose}:" in said["plan.verdict"]
        assert said["plan.time"][0] == f"For the step of {whose}:"


def test_picture_is_for_the_page_and_table_for_the_terminal() -> None:
    """A plan's document is made once; each place takes what is for it, and a section with nothing for it is left out."""
    p = made("gpt2-124m")
    whole = plan_view.document(p, outlook=outlook.outlook(p, p.step))
    terminal, page = ([block for _, blocks in whole.on(place) for block in blocks] for place in ("terminal", "page"))
    assert not any(isinstance(block, Figures) for block in terminal)
    assert sum(isinstance(block, Figures) for block in page) == 1
    one = Document(Message("report.more"), Message("report.more"), [
        Section(Message("report.check"), (Only("page", Verbatim("x")),)),
        Section(Message("report.memory"), (Only("terminal", Verbatim("y")), Verbatim("z"))),
    ])  # fmt: skip
    assert one.on("terminal") == [(Message("report.memory"), (Verbatim("y"), Verbatim("z")))]
    assert [blocks for _, blocks in one.on("page")] == [(Verbatim("x"),), (Verbatim("z"),)]


def test_figures_of_a_plan_have_their_ranges() -> None:
    p = made("gpt2-124m")
    shown = {one.label.id: one for one in plan_view.of_plan(p).items}
    worst, timing = p.memory_of("foretrain").worst, p.timing_of("foretrain")
    assert shown["figure.memory_needed"].range == Message(
        "value.low_to_high",
        {"low": format_value(worst.needed_low_bytes, "bytes"), "high": format_value(worst.needed_high_bytes, "bytes")},
    )
    page = html.render(Document(Message("report.more"), Message("report.more"), [
        Section(Message("report.more"), (plan_view.of_plan(p),))
    ]))  # fmt: skip
    for low, high in ((timing.total_s.low_s, timing.total_s.high_s), (timing.step_s.low_s, timing.step_s.high_s)):
        assert f"<span>{format_value(low, 'duration')} – {format_value(high, 'duration')}</span>" in page


def test_what_the_allocator_only_keeps_is_hatched() -> None:
    p = made("gpt2-124m")
    picture = memory_view.phase_bars(p, p.memory_of("foretrain"))
    assert [label for label, key in charts.chart(picture).series if key[2][0] == "path"] == [say("group.kept")]
    kept = [dict(bar.parts).get("kept", 0) for bar in picture.bars]
    assert drawn(picture).count(f'stroke="{charts.COLOURS["overhead"]}"') == 2 * sum(map(bool, kept))


def memory(size: int) -> Memory:
    return Memory(low_bytes=size, expected_bytes=size, high_bytes=size, source="measured", what="process")


def test_a_comparison_has_one_colour_for_each_run() -> None:
    """In its curves and in its bars; validation has markers and training has none."""
    curves = [
        LossCurve(label=label, kind=kind, unit="nats per token", losses=(3.0, 2.0), axes={"step": (1.0, 2.0)})
        for label, kind in (("b", "train"), ("b", "val"), ("a", "val"))
    ]  # fmt: skip
    losses = LossCurves(curves=tuple(curves), axes=("step",), energy_source="none", predicted_hours=(), currency="EUR")
    (picture,) = curves_view.losses(losses, order=("a", "b"))
    assert isinstance(picture, Curves)
    assert [(cell_text(trace.label), trace.colour, trace.dashed) for trace in picture.traces] == [
        ("b, training", 1, False), ("b, validation", 1, True), ("a, validation", 0, True),
    ]  # fmt: skip
    svg = drawn(picture)
    assert re.findall(r'<path [^>]*stroke="var\(--line-(\d)[^>]*data-series', svg) == ["1", "1", "0"]
    assert re.findall(r'fill="var[^>]* data-series="(\d)"', svg) == ["1", "2"]
    runs = [
        subject(label=label, path=label, step_s=exact(seconds), memory=measured, settings={"batch_size": seconds})
        for label, seconds, measured in (("a", 36.0, memory(2)), ("b", 18.0, memory(3)))
    ]
    document = compare_view.report(compare(runs), losses, {"a": "fits", "b": "does_not_fit"})
    ranks = [b for _, blocks in document.on("page") for b in blocks if isinstance(b, Ranks)]
    assert ranks
    assert all(re.findall(r'fill="var\(--line-(\d)', drawn(one)) == ["0", "1"] for one in ranks)


def test_bars_show_the_card_and_what_is_free_of_it() -> None:
    p = made("gpt2-124m", others=2 * 2**30)
    shown = plan_view.document(p).on("page")
    bars = next(b for _, blocks in shown for b in blocks if isinstance(b, StackedBars))
    assert (bars.limit_bytes, bars.card_bytes) == (p.available_bytes, p.gpu.memory_bytes)
    assert drawn(bars).count("stroke-dasharray") == 2
    for bar, phase in zip(bars.bars, p.memory_of("foretrain").phases, strict=True):
        assert sum(size for _, size in bar.parts) == phase.needed_expected_bytes
    assert "11.56 GiB" in str([cell.text() for row in numbers.behind(bars).rows for cell in row if not isinstance(cell, str)])  # fmt: skip


def test_a_long_run_stays_small_and_keeps_its_throttling(tmp_path: Path) -> None:
    page = html.render(making.run(write_long_run(tmp_path / "long", 6000)))
    assert len(page.encode()) < 500_000
    pictures = data_of(page)["pictures"]
    assert sum(p["mode"] == "along" for p in pictures) == 2 + len(vital_signs.SIGNS)  # and one step
    assert re.search(r"<text [^>]*>[\d.]+ h</text>", page)
    assert len(pictures[0]["stops"]) == 5
    assert max(len(stops) for p in pictures for stops in p["stops"]) <= 400
    assert re.search(r"throttled for [^<]*: heat", page)


@pytest.mark.slow
def test_a_hundred_thousand_steps_are_under_half_a_megabyte(tmp_path: Path) -> None:
    assert len(html.render(making.run(write_long_run(tmp_path / "long", 100_000))).encode()) < 500_000


def test_hostile_names_notes_and_samples_stay_text(tmp_path: Path) -> None:
    run = write_long_run(tmp_path / "evil", 60, HOSTILE)
    (run / "sample.txt").write_text(HOSTILE * 3, "utf-8")
    page = html.render(making.run(run))
    tags = Tags()
    tags.feed(page)
    assert "img" not in tags.seen
    assert tags.seen.count("script") == 2
    assert not tags.open
    assert "\x1b" not in page
    assert not set("<>&") & set(page.split('id="data">')[1].split("</script>")[0])


@settings(max_examples=25)
@given(st.text())
def test_no_text_gets_out_of_the_script(text: str) -> None:
    written = script_json({"label": text})
    assert not set("<>&\u2028\u2029") & set(written)
    assert json.loads(written) == {"label": text}


def test_figures_and_regions_have_names() -> None:
    document = Document(
        Message("report.more"), Message("report.more"), [Section(Message("report.more"), (Verbatim("x"),))]
    )
    assert '<pre tabindex="0" role="region" aria-label="' in html.render(document)


# -- the verb ------------------------------------------------------------------------------------------------


def test_words_are_told_apart_from_knobs() -> None:
    words = ["a.toml", "--batch_size=8", "--n_layer", "4", "--compile", "b.log"]
    typed = WORDS.split(words)
    assert [word.typed for word in typed if not word.key] == [("a.toml",), ("b.log",)]
    assert [(word.key, word.value) for word in typed if word.key] == [
        ("batch_size", "8"), ("n_layer", "4"), ("compile", True),
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["plan", "log", "comparison", "run"])
def test_every_kind_of_source(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = REPO / "examples" / "real-cases"
    words = {
        "plan": ["baby", "--gpu", CARD, "--batch_size=4"], "log": [f"{cases}/b1.log+{cases}/b1.py", "--gpu", CARD],
        "comparison": [f"one={cases}/b1.log+{cases}/b1.py", f"two={cases}/b2.csv+{cases}/b2.py", "--gpu", CARD],
        "run": [str(write_long_run(tmp_path / "run", 60))],
    }[kind]  # fmt: skip
    target = tmp_path / "out.html"
    found = run_foretrain("report", *words, "--out", str(target), "--json", code=0)
    said = json.loads(found.stdout)
    assert (said["schema"], said["kind"], said["size_bytes"]) == ("foretrain.report/1", kind, target.stat().st_size)


def test_only_a_report_is_written_over(tmp_path: Path) -> None:
    mine = tmp_path / "notes.html"
    mine.write_text("<p>mine</p>")
    with pytest.raises(UserError, match="no report"):
        making.checked_target(mine)
    for path, reason in ((tmp_path, "folder"), (tmp_path / "no" / "x.html", "folder is not there")):
        with pytest.raises(UserError, match=reason):
            making.checked_target(path)
    mine.write_text(html.render(Document(Message("report.more"), Message("report.more"), [])))
    assert making.checked_target(mine) == mine
