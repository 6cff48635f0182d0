"""Documents, the terminal and the page: numbers arrive, hostile text does not get out of its place."""

import io
import json
import math
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from foretrain.analysis.forecast_check import ForecastCheck, Row, check_forecast
from foretrain.base import messages, quantities, units
from foretrain.base.errors import UserError
from foretrain.base.messages import say
from foretrain.config.resolve import resolve
from foretrain.hardware.catalogue import find
from foretrain.predict.plan import plan
from foretrain.reports import html, making, text
from foretrain.reports.document import (
    Curves,
    Document,
    Message,
    Paragraph,
    Section,
    StackedBars,
    Table,
    Verbatim,
    cell_text,
)
from foretrain.reports.views import plan as plan_view
from foretrain.reports.views import run as run_view
from foretrain.runs.record import MeasuredMemory, MeasuredPhase, TrainedRun
from tests.kit.reports import HOSTILE, Tags, record, run_document


def test_the_page_is_whole_self_contained_and_small(tmp_path: Path) -> None:
    whole = run_document(tmp_path)
    page = html.render(whole)
    parser = Tags()
    parser.feed(page)
    assert not parser.open
    assert len(page) < 500_000
    body = page.split("<script>")[0]
    assert not re.search(r'(src|href)="?(?!"?#)', body)
    assert "default-src 'none'" in page
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL).group(1))["pictures"]  # type: ignore[union-attr]
    assert parser.seen.count("figure") == len(data)
    assert {"along", "rows", "near"} == {p["mode"] for p in data}
    blocks = [block for _, blocks in whole.on("page") for block in blocks]
    curves = next(block for block in blocks if isinstance(block, Curves))
    assert curves.levels[0].value == 3.1
    bars = next(block for block in blocks if isinstance(block, StackedBars))
    measured = dict(next(bar for bar in bars.bars if "measured" in cell_text(bar.label)).parts)
    assert sum(measured.values()) == 4 * 10**8  # what the process took, of which the tensors
    assert sum(measured.values()) - measured["overhead"] == 85_850_748


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    page = html.render(run_document(tmp_path, HOSTILE, name=HOSTILE, reason=HOSTILE))
    parser = Tags()
    parser.feed(page)
    assert "img" not in parser.seen
    assert parser.seen.count("script") == 2
    assert "onerror=alert(1)&gt;" in page


def test_a_report_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    """The system stops the writing within the file, as a full disk would."""
    resource = pytest.importorskip("resource")
    old, document = tmp_path / "report.html", run_document(tmp_path / "run")
    making.write(document, old)
    whole, before = old.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))
    try:
        for path in (old, tmp_path / "new.html"):
            with pytest.raises(UserError):
                making.write(document, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert old.read_bytes() == whole
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["report.html"]
    link = tmp_path / "link.html"
    link.symlink_to(old)
    making.write(document, link)
    assert link.is_symlink()
    making.write(document, Path("/dev/null"))
    assert Path("/dev/null").is_char_device()


@settings(max_examples=30)
@given(st.text(max_size=60))
def test_any_sample_gives_a_page(sample: str) -> None:
    document = Document(
        Message("report.learning"),
        Message("report.learning"),
        [Section(Message("report.learning"), (Verbatim(sample),))],
    )
    parser = Tags()
    parser.feed(html.render(document))
    assert not parser.open


def test_comparison_has_signed_errors_and_ranges() -> None:
    run = record()
    comparison = check_forecast(plan(run.config, run.gpu), run)
    rows = {row.id: row for row in comparison.rows}
    assert rows["phase.steady_step"].error == pytest.approx(0, abs=0.001)
    assert rows["component.weights"].error == pytest.approx(0, abs=0.001)
    assert rows["time.step"].low is not None
    assert Row(id="x", kind="bytes", predicted=102, measured=100).error == pytest.approx(0.02)
    assert Row(id="x", kind="bytes", predicted=98, measured=100).error == pytest.approx(-0.02)
    assert Row(id="x", kind="bytes", predicted=1, measured=5, low=0, high=4).in_range is False
    assert ForecastCheck.from_json(comparison.model_dump_json()) == comparison
    assert TrainedRun.from_json(run.model_dump_json()) == run


def test_the_highest_memory_is_one_figure() -> None:
    """Between two phases a process can hold the most; on a card the process is the host's, and says nothing of it."""
    memory = record().memory.model_copy(update={"process_peak_bytes": 3 << 40})
    run = record(memory=memory)
    rows = {row.id: row for row in check_forecast(plan(run.config, run.gpu), run).rows}
    assert rows["process.resident"].measured == run.highest_bytes == 3 << 40
    on_card = record(memory=memory, gpu=find("RTX 4070"))
    assert on_card.highest_bytes is None
    assert "process.reserved" not in {row.id for row in check_forecast(plan(on_card.config, on_card.gpu), on_card).rows}


def test_what_a_card_reserved_is_compared_without_the_context() -> None:
    """A run on a card measures what PyTorch reserved; the CUDA context is no part of that."""
    card = find("RTX 4070")
    made = plan(record().config, card)
    reserved = [made.memory_of("foretrain").phase(name).reserved_bytes for name in ("evaluate_first", "steady_step")]
    phases = tuple(
        MeasuredPhase(phase=name, allocated_bytes=1, reserved_bytes=size)
        for name, size in zip(("evaluate_first", "steady_step"), reserved, strict=True)
    )
    run = record(gpu=card, memory=record().memory.model_copy(update={"phases": phases}))
    row = {row.id: row for row in check_forecast(made, run).rows}["process.reserved"]
    assert row.measured == max(size or 0 for size in reserved)
    assert row.predicted == pytest.approx(row.measured, rel=0.02)  # the estimate's slack, no 300 MiB
    assert row.in_range


def test_a_run_that_measured_nothing_has_no_rows() -> None:
    run = record(memory=MeasuredMemory(method="none"), step_s=None, evaluation_s=None, status="failed")
    comparison = check_forecast(plan(run.config, run.gpu), run)
    assert not comparison.rows
    page = html.render(run_view.comparison_document(comparison))
    assert "no measurements yet" in page


def rendered(document: Document, **options: object) -> str:
    console = Console(file=io.StringIO(), width=100, **options)  # type: ignore[arg-type]
    text.render(document, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("gpu", ["RTX 4070", "Apple M4 Pro", "T4"])
def test_terminal(gpu: str) -> None:
    made = plan(resolve(["gpt2-124m"]).config, find(gpu))
    plain = rendered(plan_view.document(made), color_system=None)
    assert "\x1b" not in plain
    assert "123.59 M" in plain
    assert max(len(line) for line in plain.splitlines()) <= 100
    coloured = rendered(plan_view.document(made), force_terminal=True, color_system="truecolor")
    assert "\x1b[" in coloured


@pytest.mark.parametrize("width", [60, 80, 200])
def test_no_line_ends_in_blanks_and_prose_stays_narrow(width: int) -> None:
    made = plan(resolve(["gpt2-124m", "--batch_size=16"]).config, find("RTX 4070"))
    console = Console(file=io.StringIO(), width=width)
    text.render(plan_view.document(made), console)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert all(line == line.rstrip() for line in lines)
    assert max(map(len, lines)) <= width
    assert max(len(line) for line in lines if line.rstrip().endswith((".", ","))) <= 100  # tables may be wider
    sizes = [line for line in lines if "steady state" in line and "does not fit" in line]
    assert sizes  # a row of numbers is one line at any width
    assert all("12.14 – 13.54 GiB" in line for line in sizes)


@pytest.mark.parametrize("width", [60, 72, 80])
def test_a_column_of_single_words_breaks_none(width: int) -> None:
    cards = Table(("card", "verdict", "needs / free", "time", "cost"), (
        ("RTX 3060 12GB", "fits", "6.02 of 11.63 GiB", "4.8 days (3.7–6.0)", "5.70"),
        ("RTX 4090", "fits", "6.08 of 23.52 GiB", "20.3 h (15.2–25.5)", "7.12"),
    ), frozenset({2, 3, 4}))  # fmt: skip
    console = Console(file=io.StringIO(), width=width)
    text.render(
        Document(Message("plan.time"), Message("plan.time"), (Section(Message("plan.time"), (cards,)),)), console
    )
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert any({"card", "verdict"} <= {*line.split()} for line in lines)


def test_rows_of_phases_do_not_contradict_the_verdict() -> None:
    """A need beyond what there is stays uncut, and the verdict says why it may fit; what is behind the phase that does not
    fit is not reached."""
    made = plan(resolve(["gpt2-124m", "--memory_limit=6.25GiB"]).config, find("RTX 4070"))
    assert made.verdict_of("foretrain") == "tight"
    assert made.memory_of("foretrain").worst.needed_high_bytes > (made.available_bytes or 0)
    ours, theirs = (
        b for s in plan_view.document(made).sections for b in s.blocks if isinstance(b, Table) and b.optional
    )
    highest = max(phase.needed_high_bytes for phase in made.memory_of("foretrain").phases)
    assert max(row[3].value[1] for row in ours.rows) == highest  # type: ignore[union-attr,index,type-var]
    assert "frees its cache" in rendered(plan_view.document(made), color_system=None)
    said = [cell_text(row[-1]) for row in theirs.rows]
    assert said[2:] == ["does not fit", "not reached", "fits"]
    assert "does not fit" not in said[:2]


def test_hostile_names_cannot_command_the_terminal() -> None:
    document = Document(
        Message("plan.title", {"name": HOSTILE}), Message("cards.subtitle"),
        [Section(Message("plan.notes"), (Table(("\x1b[2J",), (("\x1b]0;x\x07",),)), Paragraph(Message("plan.title", {"name": HOSTILE}))))],
    )  # fmt: skip
    assert "\x1b" not in rendered(document, color_system=None)


# -- texts and units -----------------------------------------------------------------------------------------


def test_say() -> None:
    assert messages.say("error.data.empty", path="x.bin") == "x.bin: is empty; prepare the dataset again."
    with pytest.raises(KeyError):
        messages.say("error.data.empty")
    with pytest.raises(KeyError):
        messages.say("no.such.text")
    assert str(UserError("data.id_beyond_vocab", path="p", id=70000, vocab_size=65536)).startswith(
        "p: has token id 70,000"
    )


def test_a_range_is_left_out_where_its_ends_print_the_same() -> None:
    same, apart = {"low": 26.9 * 86400, "high": 26.9 * 86400}, {"low": 26.8 * 86400, "high": 27.0 * 86400}
    assert say("value.duration_range", expected=26.9 * 86400, **same) == "26.9 days"
    assert say("value.duration_range", expected=26.9 * 86400, **apart) == "26.9 days (26.8 days to 27.0 days)"
    assert say("value.range_only", low=3.91, high=3.912) == "3.91 s"
    for lang in ("en", "ar", "hi"):
        alone = say("value.steady_step", lang, median=3.91, count=100, low=3.909, high=3.911)
        assert alone.count("3.91") == 1
        assert "(" not in alone
        assert say("value.steady_step", lang, median=3.91, count=100, low=3.80, high=3.911).count("3.91") == 2
    watts = {
        "watts": 150,
        "watts_low": 150.2,
        "watts_high": 149.8,
        "board": 200,
        "expected": 1e7,
        "low": 9e6,
        "high": 2e7,
    }
    assert "150 W of its 200 W" in say("value.energy", **watts)
    assert "(2.50 kWh to 5.56 kWh)" in say("value.energy", **watts)
    with pytest.raises(KeyError):
        say("value.duration_range", expected=3.0)


@pytest.mark.parametrize(
    ("function", "value", "expected"),
    [
        (units.format_bytes, 0, "0 B"), (units.format_bytes, 1023, "1,023 B"), (units.format_bytes, 1024, "1.0 KiB"),
        (units.format_bytes, 4464 * 2**20, "4.36 GiB"), (units.format_bytes, 786 * 2**20, "786 MiB"),
        (units.format_bytes, -(2**30), "-1.00 GiB"), (units.format_bytes, 3 * 2**40, "3.00 TiB"),
        (units.format_bytes_range, (2**30, 3 * 2**30), "1.00 – 3.00 GiB"),
        (units.format_count, 40_560_000, "40.56 M"), (units.format_count, 524_288, "524,288"),
        (units.format_count, 10_485_760_000, "10.49 B"),
        (units.format_duration, 3.9, "3.9 s"), (units.format_duration, 0.122, "122 ms"),
        (units.format_duration, 78_000, "21.7 h"), (units.format_duration, 900, "15.0 min"),
        (units.format_duration, 86400 * 87, "87.0 days"), (units.format_duration, float("inf"), "unknown"),
        (units.format_flops, 2.5518e18, "2.55e18"), (units.format_flop_rate, 40.33e12, "40.3 TFLOP/s"),
        (units.format_percent, 0.129255, "12.9%"), (units.format_signed_percent, 0.024, "+2.4%"),
        (units.format_signed_percent, -0.00001, "0.0%"), (units.format_energy, 3.6e6 * 4.337, "4.34 kWh"),
        (units.format_energy, 3.6e5, "100 Wh"), (units.format_energy, 3.6e6 * 1757.67, "1,758 kWh"),
        (units.format_energy, 3.6e6 * 980256.3, "980,300 kWh"), (units.format_energy, 3.6e6 * 777.77, "777.8 kWh"),
        (units.format_duration, 86400 * 210536.1, "210,500 days"), (units.format_duration, 86400 * 999.96, "1,000 days"),
        (units.format_percent, 76868.91, "7,687,000%"), (units.format_signed_percent, -57.938, "-5,794%"),
        (units.format_factor, 860.91, "861"), (units.format_factor, 1.274, "1.27"), (units.format_factor, 12.34, "12.3"),
        (units.format_left, 89.96, "1.5 min"), (units.format_left, 80.5, "1.3 min"), (units.format_left, 59.4, "59 s"),
        (units.format_left, 59.7, "1.0 min"), (units.format_left, 90, "1.5 min"), (units.format_left, 0.4, "0 s"),
    ],
)  # fmt: skip
def test_formats(function, value: object, expected: str) -> None:
    assert function(value) == expected


def test_both_ends_of_a_range_of_times_have_one_unit() -> None:
    assert say("value.duration_range", low=3300.0, expected=5500.0, high=7000.0) == "1.5 h (0.9 h to 1.9 h)"
    assert say("value.duration_range", low=3300.0, expected=3800.0, high=5600.0) == "63.3 min (55.0 min to 93.3 min)"
    assert say("value.range_only", low=0.5, high=3.0) == "0.5 s – 3 s"
    assert say("value.range_only", low=20.0, high=5600.0) == "0.0056 h – 1.6 h"
    assert say("value.range_only", low=0.01, high=300.0) == "10 ms – 5.0 min"  # no unit serves both
    assert say("value.range_only", low=60.0, high=math.inf) == "60 s – unknown"
    assert "0.9 h" in say("value.duration_range", "hi", low=3300.0, expected=5500.0, high=7000.0)


@pytest.mark.parametrize(
    ("written", "size"),
    [
        ("2.1GB", 2_100_000_000),
        ("10GiB", 10 * 2**30),
        ("786 MiB", 786 * 2**20),
        ("1048576", 2**20),
        ("1e9", 10**9),
        ("0", 0),
    ],
)
def test_parse_bytes(written: str, size: int) -> None:
    assert quantities.parse_bytes(written) == size


@given(st.text(max_size=15))
def test_parse_bytes_takes_sizes_or_says_so(written: str) -> None:
    try:
        assert 0 <= quantities.parse_bytes(written) <= 1e18
    except ValueError as error:
        assert "size" in str(error)


@given(st.floats(0, 1e17))
def test_bytes_read_back_within_their_rounding(size: float) -> None:
    assert quantities.parse_bytes(units.format_bytes(size).replace(",", "")) == pytest.approx(size, rel=0.06, abs=1)


@pytest.mark.parametrize("width", [30, 60, 88])
def test_a_table_breaks_no_word_in_a_narrow_terminal(width: int) -> None:
    columns = ("strategy", "verdict", "needs / free", "step", "time")
    rows = (
        ("FSDP2, no reshard, held", "fits", "6.26 of 23.52 GiB", "1.99 s", "10.6 h (7.9–21.0)"),
        ("ZeRO-1", "does not fit", "26.79 of 23.52 GiB", "2 s", "10.6 h (7.9–15.2)"),
    )
    out = io.StringIO()
    title = Message("first.said", {"text": "t"})
    shown = Document(title, title, (Section(title, (Table(columns, rows, frozenset({2, 3, 4})),)),))
    text.render(shown, Console(file=out, width=width))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    words = out.getvalue().split()
    assert {word for row in (columns, *rows) for cell in row for word in cell.split()} <= {*words}
