"""Exact plans from the outside: the cache, what happens without a trace, --exact, --explain, --largest, --snapshot."""

import gzip
import io
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from foretrain.advice.asked import Asked
from foretrain.advice.first_answer import first_answer
from foretrain.analysis.components import Shown, reconcile, timeline, with_numbers
from foretrain.analysis.explanation import explain
from foretrain.app.exact import check_snapshot, largest, write_snapshot
from foretrain.base.cache import Cache
from foretrain.base.errors import UserError
from foretrain.base.messages import has
from foretrain.base.units import GIB, MIB
from foretrain.cli.reading import with_trainer
from foretrain.config.checks import launched
from foretrain.config.options import RunConfig
from foretrain.config.resolve import resolve
from foretrain.hardware.catalogue import find
from foretrain.hardware.devices import LATER_KERNELS_BYTES, published_context_bytes
from foretrain.predict import snapshot
from foretrain.predict.allocator.blocks import Mark
from foretrain.predict.allocator.settings import Settings
from foretrain.predict.forecast import Probe, Range
from foretrain.predict.memory import predict
from foretrain.predict.plan import Plan, plan
from foretrain.predict.pretraining import RANGES, of_plan
from foretrain.predict.search import search_outwards
from foretrain.predict.spec import STEP_NAMES, StepSpec
from foretrain.predict.trace import interpreter, service
from foretrain.predict.trace.forecast import traced
from foretrain.predict.trace.memory import Exact
from foretrain.predict.trace.record import Allocation, Trace
from foretrain.predict.trace.service import Request, TraceUnavailable, traces
from foretrain.reports import text
from foretrain.reports.document import Document, Message, Paragraph
from foretrain.reports.views import explain as explain_view
from foretrain.reports.views import limits as limits_view
from foretrain.reports.views import plan as plan_view
from foretrain.reports.views.lead import lead_of
from tests.kit import fork_server
from tests.kit.calibrations import made_up_calibration
from tests.kit.command import foretrain

GPU = find("RTX 4070")
SMALL = {"n_layer": 2, "n_head": 2, "n_embd": 64, "block_size": 64, "vocab_size": 512, "batch_size": 4,
         "gradient_accumulation_steps": 2}  # fmt: skip
WORDS = [f"--{key}={value}" for key, value in SMALL.items()]


def small_plan(**changes: object) -> Plan:
    return plan(launched({**SMALL, "compile": False, **changes}), GPU)


def request(**changes: object) -> Request:
    return Request(StepSpec.of(launched({**SMALL, **changes}), GPU, dtype="float16", compiled=False))


# -- traces on request -------------------------------------------------------------------------------------


def test_a_trace_is_made_once(own_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    monkeypatch.setenv("FORETRAIN_CACHE", str(own_directory / "c"))
    monkeypatch.setattr(service, "start_worker", lambda *job: started.append(job) or fork_server.REAL_START(*job))
    first = traces([request()])[0]
    assert traces([request()])[0] == first
    assert len(started) == 1
    monkeypatch.setattr(service, "start_worker", fork_server.start)
    (kept,) = (own_directory / "c" / "traces").iterdir()
    kept.write_bytes(b"damaged")
    assert traces([request()])[0].events == first.events
    kept.write_bytes(gzip.compress(b'{"schema": "another"}'))
    assert traces([request()])[0].events == first.events


def test_damaged_files_are_made_anew(own_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = own_directory / "c"
    monkeypatch.setenv("FORETRAIN_CACHE", str(folder))
    first = traced(small_plan())
    for harm in (b"{}", b"[]", b"\xff", b"[" * 100_000):
        for kept in (folder / "answers").iterdir():
            kept.write_bytes(gzip.compress(harm))
        assert traced(small_plan()) == first
    for position, kept in enumerate(sorted(folder.glob("*/*"))):
        data = kept.read_bytes()
        flipped = data[:40] + bytes(byte ^ 255 for byte in data[40:80]) + data[80:]
        kept.write_bytes(flipped if position else gzip.compress(b"[]"))
    assert traced(small_plan()) == first


def test_a_trace_whose_events_are_of_no_allocation_is_none() -> None:
    data = Trace([0], [], [], []).to_json()
    with pytest.raises(ValueError, match="no allocation"):
        Trace.from_json(data)


def test_a_full_disk_leaves_nothing_behind(own_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*paths: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    service.TRACES.keep(own_directory / "c" / "kept.gz", "text")
    assert list((own_directory / "c").iterdir()) == []


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_signal_ends_the_workers_too(name: str, own_directory: Path) -> None:
    (own_directory / "tmp").mkdir()
    code = "import sys\nfrom foretrain.cli import main\nmain()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "plan", *WORDS, "--compile=false", "--gpu", "4070", "--exact"],
        env={**os.environ, "TMPDIR": str(own_directory / "tmp"), "FORETRAIN_CACHE": str(own_directory / "c")},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    deadline = time.monotonic() + 60
    while not (workers := children.read_text().split()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert workers
    process.send_signal(getattr(signal, name))
    assert process.wait(timeout=600) == (130 if name == "SIGTERM" else -signal.SIGHUP)
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)
    assert list((own_directory / "tmp").iterdir()) == []


def test_what_does_not_shape_memory_shares_a_trace() -> None:
    key = request().key()
    assert request(learning_rate=1e-4, max_iters=7, dataset="other", gradient_accumulation_steps=2).key() == key
    assert request(gradient_accumulation_steps=3).key() == request(gradient_accumulation_steps=40).key()
    assert request(cuda_graph="auto").key() == request(cuda_graph="on").key() != key
    for changed in ({"batch_size": 5}, {"dropout": 0.1}, {"grad_clip": 0.0}, {"eval_batch_size": 9}):
        assert request(**changed).key() != key
    assert (
        Request(StepSpec.of(request().spec.config, find("RTX 3060 12GB"), dtype="float16", compiled=False)).key() != key
    )
    nanos = [
        Request(StepSpec.of(request(**c).spec.config, GPU, "nanogpt", dtype="float16", compiled=False)).key()
        for c in ({}, {"eval_batch_size": 9})
    ]
    assert nanos[0] == nanos[1]  # nanoGPT has no evaluation sizes of its own


def test_a_user_without_a_home_has_an_empty_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORETRAIN_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 54321)  # of which the system knows no home
    kept = Cache("calibrations")
    path = kept.path("a question")
    kept.keep(path, "{}")
    assert kept.value(path) is None


def test_a_cache_that_cannot_be_written_costs_time_only(own_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (own_directory / "file").write_text("")
    monkeypatch.setenv("FORETRAIN_CACHE", str(own_directory / "file"))
    assert traces([request()])[0].events


@pytest.mark.parametrize(
    ("version", "platform", "word"),
    [
        ("", "linux", "needs torch"),
        ("2.5.1", "linux", "2.6 or newer"),
        ("2.13.0", "darwin", "Linux"),
        ("2.13.0", "win32", "Linux"),
    ],
)
def test_without_a_trace_the_ledger_answers_and_says_why(
    version: str, platform: str, word: str, own_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORETRAIN_CACHE", str(own_directory / "c"))
    monkeypatch.setattr(interpreter, "installed_torch", lambda: version)
    monkeypatch.setattr(sys, "platform", platform)
    found = traced(small_plan())
    assert found.memory == small_plan().memory
    assert found.exact == ()
    (note,) = [note for note in found.notes if note.id == "trace_unavailable"]
    assert word in note.values["reason"]
    lead = lead_of(found, Asked(words=()))
    assert Paragraph(Message("note.trace_unavailable", note.values), "warn") in lead  # nobody takes one for the other


def test_a_worker_that_fails_is_one_sentence(own_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORETRAIN_CACHE", str(own_directory / "c"))
    broken = own_directory / "site"
    broken.mkdir()
    (broken / "torch.py").write_text("raise ImportError('libtorch is broken')")
    monkeypatch.setenv("PYTHONPATH", str(broken))
    monkeypatch.setattr(service, "start_worker", fork_server.REAL_START)
    with pytest.raises(TraceUnavailable) as caught:
        traces([request()])
    assert "\n" not in str(caught.value)
    assert "broken" in str(caught.value)


def test_cards_that_are_not_cuda_get_the_ledger() -> None:
    found = traced(plan(small_plan().config, find("Apple M4 Max")))
    assert found.exact == ()
    assert any(note.id == "trace_unavailable" for note in found.notes)


# -- the plan ----------------------------------------------------------------------------------------------


def test_exact_plan_in_the_ledgers_form() -> None:
    found = traced(small_plan())
    for exact in found.exact:
        wanted = small_plan().memory_of(exact.memory.step)
        assert exact.memory.source == "traced"
        for phase in exact.memory.phases:
            ledger = wanted.phase(phase.phase)
            assert phase.allocated_bytes == pytest.approx(ledger.allocated_bytes, rel=0.02, abs=MIB)
            if phase.phase != "resume":
                assert phase.reserved_bytes
                assert phase.allocated_bytes <= phase.reserved_bytes
            assert sum(c.size_bytes for c in phase.components) == pytest.approx(phase.allocated_bytes, abs=64 * 1024)
            assert has(f"moment.{phase.moment}")
            assert all(has(f"component.{c.id}") for c in phase.components)
        assert exact.smallest_limit_bytes <= max(p.reserved_bytes or 0 for p in exact.memory.phases)
    assert Plan.model_validate_json(found.model_dump_json()) == found


def test_the_verdict_is_a_replay_at_the_limit() -> None:
    config = RunConfig(batch_size=8, gradient_accumulation_steps=2, compile=False, dtype="float16")
    lives = traced(plan(config, GPU)).exact_of("nanogpt")
    context = published_context_bytes(GPU)[1] + 200 * MIB
    for available, verdict in (
        (lives.smallest_limit_bytes + context + MIB, "tight"),
        (lives.smallest_limit_bytes // 2, "does_not_fit"),
    ):
        found = traced(plan(config, GPU, used_by_others_bytes=(GPU.memory_bytes or 0) - available))
        assert found.verdict_of("nanogpt") == verdict
        exact = found.exact_of("nanogpt")
        assert (exact.failure is None) == (verdict == "tight")
        if exact.failure is not None:
            dying = exact.memory.phase(exact.failure.phase)
            assert dying.verdict == "does_not_fit"


def test_next_command_runs_the_foretrain_step_where_it_fits() -> None:
    config = RunConfig(batch_size=8, gradient_accumulation_steps=2, compile=False, dtype="float16")
    found = traced(plan(config, GPU).run_by("nanogpt"))
    needs = [found.memory_of(step).needed_bytes for step in ("foretrain", "nanogpt")]
    assert needs[0] < needs[1]
    others = (GPU.memory_bytes or 0) - (needs[0] + 3 * needs[1]) // 4
    tight = traced(plan(config, GPU, used_by_others_bytes=others).run_by("nanogpt"))
    assert (tight.verdict, tight.verdict_of("foretrain")) == ("does_not_fit", "fits")
    assert first_answer(tight, Asked(words=("my.py",))).command[:3] == ("foretrain", "train", "my.py")


def test_weights_that_do_not_fit_are_a_verdict() -> None:
    """The run dies while the model is built, which is no row of the table."""
    found = traced(small_plan(memory_limit="50MiB"))
    for step in ("foretrain", "nanogpt"):
        failure = found.exact_of(step).failure  # type: ignore[arg-type, union-attr]
        assert (failure.phase, failure.moment) == ("build", "build")
        assert found.verdict_of(step) == "does_not_fit"  # type: ignore[arg-type]
    assert "Out of memory in the set-up: it asks for" in str(_texts(plan_view.document(found)))


def _texts(document: Document) -> list[str]:
    blocks = [block for _, shown in document.on("terminal") for block in shown]
    return [block.message.text() for block in blocks if isinstance(block, Paragraph)]


def test_a_fraction_of_the_card_is_a_cap() -> None:
    """per_process_memory_fraction and, counted from it, garbage_collection_threshold; a trainer's own cap wins."""
    config = {"vocab_size": 8192, "batch_size": 16}
    lives = traced(small_plan(**config)).exact_of("foretrain")
    assert lives.failure is None
    half = lives.smallest_limit_bytes / 2 / (GPU.memory_bytes or 0)
    cap = Settings(per_process_memory_fraction=half)
    capped = traced(small_plan(**config), cap)
    exact = capped.exact_of("foretrain")
    assert exact.failure.limit_bytes == cap.cap_bytes(GPU.memory_bytes or 0)
    assert capped.verdict_of("foretrain") == "does_not_fit"
    own = traced(small_plan(**config, memory_limit="11GiB"), cap).exact_of("foretrain")
    assert own.failure is None
    collecting = replace(cap, per_process_memory_fraction=3 * half, garbage_collection_threshold=0.2)
    collected = traced(small_plan(**config), collecting).exact_of("foretrain")
    assert collected is not None
    assert reserved(collected) < reserved(lives)


def reserved(exact: Exact) -> int:
    return max(phase.reserved_bytes or 0 for phase in exact.memory.phases)


@pytest.mark.slow
def test_unaligned_vocabulary_compiled_gives_both_answers() -> None:
    found = traced(small_plan(vocab_size=50257, compile=True, n_layer=1, dtype="float16"))
    assert all(exact.pads_unknown for exact in found.exact)
    assert any(note.id == "pads_unknown" for note in found.notes)
    worst = found.memory_of("nanogpt").worst
    assert worst.needed_high_bytes - worst.needed_low_bytes > 567 * MIB  # more than the context's range alone


# -- explain -----------------------------------------------------------------------------------------------


def test_formulas_with_numbers() -> None:
    assert (
        with_numbers("12 × 8·B·T·C + cuBLAS", {"B": 16, "T": 512, "C": 1384, "cuBLAS": 7})
        == "12 × 8 × 16 × 512 × 1,384 + 7"
    )


def test_numbers_of_the_formulas_are_the_bytes() -> None:
    config = RunConfig.model_validate({**SMALL, "batch_size": 16, "compile": False})
    base = plan(config, GPU)
    for step in STEP_NAMES:
        for row in explain(base, step=step).worst.sums:
            if row.id != "rounding" and "…" not in row.numbers:
                value = eval(row.numbers.replace("×", "*").replace(",", ""))
                assert value == pytest.approx(row.size_bytes, rel=0.01, abs=32 * 1024), row


def test_explanation_of_a_traced_plan() -> None:
    found = traced(small_plan())
    (trace,) = traces([Request(StepSpec.of(found.config, found.gpu, "nanogpt", dtype=found.dtype, compiled=False))])
    answer = explain(found, trace, step="nanogpt")
    assert sum(group.size_bytes for group in answer.worst.tensors) <= answer.worst.memory.allocated_bytes
    assert any(group.where == "transformer.h.*.mlp.c_fc.weight" and group.count == 2 for group in answer.worst.tensors)
    assert max(point.allocated_bytes for point in answer.timeline) == answer.worst.memory.allocated_bytes
    assert len(answer.timeline) <= 401
    for point in answer.timeline:
        assert sum(point.by_component_bytes.values()) <= point.allocated_bytes + 64 * 1024


def test_an_emptied_cache_is_no_event_of_the_timeline() -> None:
    """Neither before an event, which would count twice, nor at the end, where none follows."""
    of = ("activations", "", "aten.mm", "", (MIB,), "uint8")
    made = [Allocation(0, 30 * MIB, 0, 1, *of), Allocation(1, 20 * MIB, 2, None, *of)]
    trace = Trace([0, ~0, 1], made, [Mark(0, "first_step")], [])
    trace.emptied = frozenset({1, 2, 3})
    found = [(point.allocated_bytes, point.by_component_bytes) for point in timeline(trace)]
    assert found == [(30 * MIB, {"activations": 30 * MIB}), (0, {}), (20 * MIB, {"activations": 20 * MIB})]


def test_nvidia_smi_line_by_line() -> None:
    """Case A's reading against its own prediction: 4,464 MiB of the process, 6,582 MiB of the card."""
    found = small_plan()
    context, reserved = found.memory_of("nanogpt").context, 4214 * MIB
    phase = found.memory_of("nanogpt").worst.model_copy(
        update={
            "reserved_bytes": reserved, "allocated_bytes": 3566 * MIB,
            "needed_low_bytes": reserved + context.low_bytes, "needed_high_bytes": reserved + context.high_bytes,
        }
    )  # fmt: skip
    shown = Shown(phase, context, "estimated", found.used_by_others_bytes)
    lines, conclusion = reconcile(shown, 6582 * MIB, 4464 * MIB)
    sizes = {line.id: (line.low_bytes // MIB, line.high_bytes // MIB) for line in lines}
    assert sizes == {
        "allocated": (3566, 3566), "slack": (648, 648), "context_left": (250, 250), "process": (4464, 4464),
        "others": (2118, 2118), "card": (6582, 6582),
    }  # fmt: skip
    assert conclusion == "explained"
    assert reconcile(shown, None, 5200 * MIB)[1] == "too_much"
    assert reconcile(shown, None, 4214 * MIB)[1] == "too_little"
    assert reconcile(shown, 9000 * MIB, None)[1] == "no_process"
    assert reconcile(shown, None, None)[1] == "none"
    assert reconcile(shown, 100 * MIB, None)[1] == "below"


def test_a_cpu_has_no_lines_of_nvidia_smi() -> None:
    shown = foretrain("plan", "baby", "--gpu", "cpu", "--explain")
    assert "At the peak" in shown.stdout
    assert "nvidia-smi" not in shown.stdout
    assert "CUDA" not in shown.stdout


def test_only_a_reading_of_the_process_excludes_the_other_mode() -> None:
    config = RunConfig(batch_size=2, compile=True, dtype="float16")
    for others in (0, 4000 * MIB):
        base = plan(config, GPU, used_by_others_bytes=others)
        for process, excluded in ((None, False), (3000 * MIB, True)):
            found = explain(base, step="nanogpt", observed_bytes=6582 * MIB, process_bytes=process)
            said = "it did not run that way" in str(_texts(explain_view.document(found, base)))
            assert said == excluded, (others, process)
            (line,) = [line for line in found.lines if line.id == "process"]
            assert (line.source == "observed") == (process is not None)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_name_of_a_tensor_is_broken(width: int) -> None:
    found = traced(small_plan())
    (trace,) = traces([Request(StepSpec.of(found.config, found.gpu, "nanogpt", dtype=found.dtype, compiled=False))])
    console = Console(width=width, file=io.StringIO())
    text.render(explain_view.document(explain(found, trace, step="nanogpt"), found), console)
    assert "transformer.h.*.mlp.c_fc.weight" in console.file.getvalue()  # type: ignore[attr-defined]


# -- the largest that fits ---------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [0, 1, 2, 7, 63, 64])
@pytest.mark.parametrize("guess", [1, 5, 40, 64])
def test_search_finds_the_largest(answer: int, guess: int) -> None:
    asked = []

    def fits(value: int) -> bool:
        asked.append(value)
        return value <= answer

    assert search_outwards(fits, guess, 64) == answer
    assert len(asked) < 16


def test_largest_batch_is_one_below_what_dies() -> None:
    base = plan(
        RunConfig.model_validate({**SMALL, "compile": False, "vocab_size": 8192}),
        GPU,
        used_by_others_bytes=GPU.memory_bytes - GIB,
    )  # type: ignore[operator]
    found = largest(of_plan(base), "batch_size", list)
    assert found.value
    assert not found.searched_all
    probes = {probe.value: probe for probe in found.probes}
    assert probes[found.value].fits
    assert not probes[found.value + 1].fits
    # Each row has the verdict that a plan of that value has.
    for value in (found.value, found.value + 1):
        config = base.config.model_copy(update={"batch_size": value})
        again = traced(plan(config, GPU, used_by_others_bytes=base.used_by_others_bytes))
        assert again.memory_of("foretrain").verdict == probes[value].verdict
    text = str(_texts(limits_view.largest(base, found)))
    assert "is the largest that fits" in text


def test_the_end_of_the_search_is_no_limit_of_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RANGES, "batch_size", Range(1, 5))
    found = largest(of_plan(small_plan()), "batch_size", list)
    assert (found.value, found.searched_all) == (5, True)
    text = str(_texts(limits_view.largest(small_plan(), found)))
    assert "fits" in text
    assert "No larger value was tried" in text


def test_contexts_below_the_granule_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    def probe(made: object, option: str, value: int, *rest: object) -> Probe:
        verdict = "fits" if value <= 20 else "does_not_fit"
        return Probe(value=value, verdict=verdict, needed_expected_bytes=0, smallest_limit_bytes=0)

    monkeypatch.setattr("foretrain.app.exact.probe_of", probe)
    found = largest(of_plan(small_plan()), "block_size", list)
    assert found.value == 20
    assert {64, 20, 21} <= {each.value for each in found.probes}


def test_largest_of_what_cannot_be_searched() -> None:
    with pytest.raises(UserError, match="n_layer"):
        largest(of_plan(small_plan()), "dropout", list)
    with pytest.raises(UserError, match="memory_limit"):
        largest(of_plan(plan(small_plan().config, find("Apple M4 Max"))), "batch_size", list)


# -- the command line --------------------------------------------------------------------------------------


def test_exact_on_the_command_line() -> None:
    words = ["plan", *WORDS, "--compile=false", "--gpu", "4070", "--exact"]
    result = foretrain(*words, code=0)
    assert "runs with as little as" in " ".join(result.stdout.split())
    result = foretrain(*words, "--full")
    assert "traced" in result.stdout
    assert "reserved" in result.stdout
    data = json.loads(foretrain(*words, "--json").stdout)
    assert data["memory"][0]["source"] == "traced"
    assert data["exact"][0]["torch"]


def test_explain_on_the_command_line() -> None:
    words = [
        "plan",
        *WORDS,
        "--compile=false",
        "--gpu",
        "4070",
        "--explain",
        "--observed",
        "900MiB",
        "--process",
        "500MiB",
    ]
    result = foretrain(*words, code=0)
    for words_said in ("with your numbers", "transformer.wte.weight", "= the process", "observed (yours)"):
        assert words_said in result.stdout
    data = json.loads(foretrain(*words, "--json").stdout)
    assert data["schema"] == "foretrain.plan/1#explanation"
    assert data["timeline"]


def test_snapshot_on_the_command_line() -> None:
    foretrain(
        "plan", *WORDS, "--compile=false", "--gpu", "4070", "--snapshot", "s.pickle", "--trainer", "nanogpt", code=0
    )
    recording = snapshot.read(Path("s.pickle"))
    assert len(recording.entries) > 500


def test_largest_is_estimated_at_once_and_traces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def traces(*_: object) -> None:
        raise AssertionError("nothing is traced without --exact")

    monkeypatch.setattr(service, "traces", traces)
    words = ("plan", "gpt2-124m", "--gpu", "4070", "--largest", "batch_size")
    data = json.loads(foretrain(*words, "--json").stdout)
    assert (data["option"], data["source"]) == ("batch_size", "estimated")
    found = {probe["value"]: probe["verdict"] for probe in data["probes"]}
    assert found[data["value"]] == "fits"
    assert found[data["value"] + 1] != "fits"
    config = RunConfig(batch_size=data["value"], gradient_accumulation_steps=64)
    assert plan(config, find("4070")).verdict_of("foretrain") == "fits"  # the plan says the same
    shown = foretrain(*words).stdout
    assert "--exact" in shown
    assert "segments" in shown


def test_largest_on_the_command_line() -> None:
    words = (
        "plan",
        *WORDS,
        "--compile=false",
        "--gpu",
        "4070",
        "--used-by-others",
        "11.16GiB",
        "--largest",
        "batch_size",
    )
    result = foretrain(*words, "--exact", "--json", code=0)
    data = json.loads(result.stdout)
    assert data["source"] == "traced"
    assert data["option"] == "batch_size"
    assert data["value"] is None or data["value"] > 0
    assert {probe["verdict"] for probe in data["probes"]} <= {"fits", "tight", "may_not_fit", "does_not_fit"}


def test_check_fails_where_no_value_fits() -> None:
    words = ["plan", *WORDS, "--compile=false", "--gpu", "4070", "--used-by-others", "11.46GiB", "--largest", "n_layer"]
    result = foretrain(*words, "--check", code=3)
    assert "Not even n_layer = 1 fits" in result.stdout
    assert "n_layer" in result.stderr


@pytest.mark.parametrize(
    ("words", "word"),
    [
        (["--largest", "dropout"], "batch_size"),
        (["--largest", "batch_size", "--explain"], "--explain"),
        (["--largest", "batch_size", "--snapshot", "s.pickle"], "--snapshot"),
        (["--explain", "--observed", "many"], "--observed"),
        (["--exact", "--alloc-conf", "colour:red"], "colour"),
        (["--explain", "--gpu", "3060,4070"], "one card"),
        (["--explain", "--trainer", "someone"], "nanogpt"),
        (["--snapshot", "no/such/folder/s.pickle"], "no/such"),
        (["--explain", "--observed", "1GB", "--process", "5GB"], "swapped"),
        (["--explain", "--process", "0"], "--process 0"),
        (["--explain", "--observed", "100GB"], "RTX 4070"),
    ],
)
def test_bad_input_is_one_sentence(words: list[str], word: str) -> None:
    gpu = [] if "--gpu" in words else ["--gpu", "4070"]
    foretrain("plan", *WORDS, "--compile=false", *gpu, *words, code=2, says=word)


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("", "folder"), ("-", "a snapshot goes into a file"), ("folder", "folder"), ("pipe", "not a plain file"),
        ("my.toml", "the config"), ("other.toml", "no snapshot"), ("link.toml", "the config"), ("/dev/null", "plain"),
        ("x" * 300, "long"),
    ],
)  # fmt: skip
def test_a_snapshot_replaces_nothing_else(name: str, word: str, own_directory: Path) -> None:
    (own_directory / "folder").mkdir()
    os.mkfifo(own_directory / "pipe")
    for config in ("my.toml", "other.toml"):
        Path(config).write_text("n_layer = 2\n")
    Path("link.toml").symlink_to("my.toml")
    with pytest.raises(UserError, match=word):
        check_snapshot(Path(name), [Path("my.toml")])
    assert Path("my.toml").read_text() == "n_layer = 2\n"


def test_snapshot_follows_a_link_and_replaces_an_earlier_one(own_directory: Path) -> None:
    Path("target.pickle").write_bytes(pickle.dumps({}))
    Path("link.pickle").symlink_to("target.pickle")
    found = traced(small_plan())
    write_snapshot(of_plan(found.run_by("nanogpt")), Path("link.pickle"), lambda state: None)
    assert Path("link.pickle").is_symlink()
    assert len(snapshot.read(Path("target.pickle")).entries) > 500
    assert len(list(own_directory.iterdir())) == 2


def test_whose_step_is_meant_is_not_read_from_a_folder(own_directory: Path) -> None:
    (own_directory / "my.python").mkdir()
    for name in ("my.python/run.toml", "train.py"):
        Path(name).write_text("n_layer = 2\n")
    assert with_trainer(resolve(["my.python/run.toml"]), "").step == "foretrain"
    assert with_trainer(resolve(["train.py"]), "").step == "nanogpt"
    assert with_trainer(resolve(["train.py"]), "foretrain").step == "foretrain"


@pytest.mark.parametrize(
    ("conf", "trace", "code", "word"),
    [
        ("max_split_size_mb:12MB", False, 0, ""),
        ("max_split_size_mb:12MB", True, 2, "max_split_size_mb"),
        ("backend:cudaMallocAsync", False, 0, "native allocator"),
        ("backend:cudaMallocAsync", True, 0, "native allocator"),
    ],
)
def test_the_environments_allocator(
    conf: str, trace: bool, code: int, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ledger uses no setting, so a broken one does not stop it."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", conf)
    result = foretrain("plan", *WORDS, "--compile=false", "--gpu", "4070", *(["--exact"] if trace else []), code=code)
    assert word in result.stderr


def test_expandable_segments_on_the_command_line() -> None:
    words = ["plan", "gpt2-124m", "--compile=false", "--gpu", "4070", "--exact", "--json"]
    native, expandable = (
        json.loads(foretrain(*words, *extra).stdout)["exact"][1]["smallest_limit_bytes"]
        for extra in ([], ["--alloc-conf", "expandable_segments:True"])
    )
    assert expandable < 0.85 * native


def test_a_measured_context_replaces_the_published_range() -> None:
    """foretrain calibrate measures it on the card: then what is needed is known to a few tens of MiB."""
    config = RunConfig(n_layer=2, n_head=2, n_embd=64, block_size=64, batch_size=2, cuda_graph="off")
    gpu = find("RTX 4070")
    known = gpu.model_copy(
        update={"calibration": made_up_calibration().model_copy(update={"context_bytes": 250 * MIB})}
    )
    plain, measured = (predict(StepSpec.of(config, card, dtype="float16", compiled=False)) for card in (gpu, known))
    assert plain.context.source == "published"
    assert measured.context.source == "calibrated"
    assert measured.worst.needed_low_bytes - plain.worst.needed_low_bytes == (250 - 133) * MIB
    assert measured.context.high_bytes == 250 * MIB + LATER_KERNELS_BYTES


@pytest.mark.parametrize(
    ("gpu", "seen"),  # MiB, each by a process of its own on such a card
    [("RTX 4070", 250), ("RTX 6000 Ada", 426), ("RTX 5090", 635)]
    + [("H100 SXM5 80GB", found) for found in (610, 742, 758, 762, 936)],
)
def test_the_published_context_of_a_card_has_what_was_seen_on_it(gpu: str, seen: int) -> None:
    low, expected, high = published_context_bytes(find(gpu))
    assert low <= expected <= high
    assert low <= seen * MIB <= high
    ledger = predict(StepSpec.of(RunConfig(n_layer=1), find(gpu), dtype="float16", compiled=False))
    needed = ledger.worst.needed_expected_bytes - (ledger.worst.reserved_bytes or 0)
    assert needed == pytest.approx(expected, abs=MIB)


@pytest.mark.parametrize(
    ("options", "copies"),
    [({"optimizer_offload": True}, False), ({"optimizer_offload": True, "gradient_offload": True}, True),
     ({"activation_checkpointing": True, "checkpoint_offload": True}, True),
     ({"activation_checkpointing": True, "checkpoint_offload": True, "checkpointed_blocks": 1}, False)],
)  # fmt: skip
def test_copies_on_their_own_stream_take_what_an_h100_took(options: dict[str, Any], copies: bool) -> None:
    """758 MiB, with them 828; a block alone keeps its input on the card."""
    config = RunConfig(n_layer=3, n_head=2, n_embd=64, block_size=64, batch_size=2, **options)
    found = predict(StepSpec.of(config, find("H100 SXM5 80GB"), dtype="bfloat16", compiled=False)).context
    assert found.expected_bytes == (828 if copies else 758) * MIB
    assert found.low_bytes == 610 * MIB
    as_nanogpt = StepSpec.of(config, find("H100 SXM5 80GB"), "nanogpt", dtype="bfloat16", compiled=False)
    assert predict(as_nanogpt).context.expected_bytes == 758 * MIB


def test_large_card_takes_more_than_a_small_one() -> None:
    small, large, hopper = (published_context_bytes(find(name)) for name in ("RTX 4090", "B200", "H200"))
    assert all(a < b for a, b in zip(small, large, strict=True))
    assert all(a <= b for a, b in zip(large, hopper, strict=True))
