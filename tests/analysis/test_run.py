"""`foretrain explain RUN`: what a run writes down of itself, and what is made of it."""

import io
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from foretrain.advice.advisor import remedies
from foretrain.analysis.forecast_check import plan_of
from foretrain.analysis.run import RunExplanation, explain_run, failure_of
from foretrain.analysis.run_pace import Slower, pace_of
from foretrain.base import oom_message
from foretrain.base.errors import UserError
from foretrain.base.units import format_bytes
from foretrain.config.options import RunConfig
from foretrain.config.resolve import resolve
from foretrain.hardware.catalogue import catalogue, find
from foretrain.predict.plan import plan
from foretrain.predict.trace import service
from foretrain.reports import text
from foretrain.reports.views import run_explain as run_explain_view
from foretrain.runs.folder import RunDirectory
from foretrain.training import trainer
from foretrain.training.vitals import Vitals, moment_of
from tests.kit.command import REPO, foretrain, refused, said, watched
from tests.kit.nvml import Nvml
from tests.kit.tiny import tiny
from tests.kit.training import NO_MEMORY, fail_in_step, train

GIB, MIB = 1 << 30, 1 << 20
CASE_C = str(REPO / "examples" / "real-cases" / "c.py")
# As torch 2.13 words it (c10/cuda/CUDACachingAllocator.cpp), with the figures of a full RTX 4070.
MESSAGE = (
    "CUDA out of memory. Tried to allocate 3.07 GiB. GPU 0 has a total capacity of 11.99 GiB of which 1.02 GiB is free. "
    "Process 1234 has 2.10 GiB memory in use. Including non-PyTorch memory, this process has 8.87 GiB memory in use. "
    "9.50 GiB allowed; Of the allocated memory 6.20 GiB is allocated by PyTorch, with 80.00 MiB allocated in private pools "
    "(e.g., CUDA Graphs), and 2.41 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large "
    "try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)


def explained(path: str) -> RunExplanation:
    directory = RunDirectory(Path(path))
    record = directory.read_record()
    lines = directory.read_lines("metrics"), directory.read_lines("events")
    return explain_run(record, plan_of(directory.path, record), *lines)


# -- a run that went well ----------------------------------------------------------------------------------


def test_memory_and_time_add_up_and_agree_with_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    train(tiny(max_iters=15, eval_interval=5, always_save_checkpoint=True, out_dir="r"))
    found = explained("r")
    memory = {piece.id: piece for piece in found.memory}
    for side in ("predicted_bytes", "measured_bytes"):
        parts = [getattr(memory[id], side) for id in ("weights", "optimizer", "rest")]
        assert sum(parts) == getattr(memory["peak"], side)
    assert memory["peak"].predicted_bytes == pytest.approx(memory["peak"].measured_bytes, rel=0.02)
    time = {piece.id: piece for piece in found.time}
    assert sum(p.measured_s or 0 for p in found.time if not p.inside) == pytest.approx(found.wall_s)
    assert (time["evaluation"].count, time["saving"].count, time["steps"].count) == (4, 3, 15)
    assert found.failures == found.remedies == ()
    assert RunExplanation.from_json(json.dumps(found.to_json(schema="x"))) == found
    shown = said(capsys, "explain", "r")
    assert "Where the memory went" in shown
    assert "steps at the steady pace" in shown
    line = json.loads(said(capsys, "explain", "r", "--json"))
    assert line["schema"] == "foretrain.explain/1"
    cpu = [m["cpu_s"] for m in RunDirectory(Path("r")).read_lines("metrics") if m["kind"] == "step"]
    assert all(0 <= s < 60 for s in cpu)


def test_the_tensors_peak_and_the_process_are_two_figures() -> None:
    """A forecast of the tensors' peak that is right, with a process that is far off: each is named, and why."""
    train(tiny(max_iters=6, out_dir="r"))
    found = explained("r")
    row, table = found.process, {piece.id: piece for piece in found.memory}
    assert row.low is not None
    assert (row.predicted, row.measured) == (table["process"].predicted_bytes, table["process"].measured_bytes)
    for measured, where in ((row.low, "within the stated range"), (2 * row.high, "outside the stated range")):
        changed = found.model_copy(update={"process": row.model_copy(update={"measured": measured})})
        shown = written(changed)
        assert where in shown
        assert f"{format_bytes(abs(measured - row.predicted))} apart" in shown
        assert "forecast of the tensors' peak is" in shown
        assert "forecast of the peak is" not in shown
    unmeasured = found.model_copy(update={"phase": None})
    assert "has measured its steps, but" in written(unmeasured)  # steps there are
    assert "has not measured a step yet" in written(unmeasured.model_copy(update={"steps_done": 0}))


def written(found: RunExplanation) -> str:
    console = Console(file=io.StringIO(), width=100)
    text.render(run_explain_view.document(found), console)
    return " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]


def test_even_steps_that_are_all_off_the_forecast_are_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty times the step time of the forecast, without one step that stands out."""
    record = train(tiny(max_iters=8, out_dir="r"))
    timing = plan_of(Path("r"), record).timing
    assert timing is not None
    lines = Path("r/metrics.jsonl").read_text("utf-8").splitlines()
    monkeypatch.setenv("COLUMNS", "80")
    for share, words in ((20, "slower than predicted"), (1, None), (0.01, "faster than predicted")):
        took = {"step_s": share * timing.step_s.expected_s}
        changed = [json.dumps(one | took if one["kind"] == "step" else one) for one in map(json.loads, lines)]
        Path("r/metrics.jsonl").write_text("".join(f"{line}\n" for line in changed), "utf-8")
        shown = " ".join(said(capsys, "explain", "r").split())
        assert "Where the steps were slow" in shown
        assert (" than predicted: " in shown) == (words is not None)
        assert (words or "Nowhere") in shown
        assert " error" in shown.split("Where the time went")[1]  # the column


def test_runs_that_are_missing_or_half_written(capsys: pytest.CaptureFixture[str]) -> None:
    told = foretrain("explain", "nothing")
    assert (told.returncode, told.stdout) == (7, "")
    assert told.stderr.count("\n") == 1
    train(tiny(max_iters=3, out_dir="r"))
    whole = Path("r/run.json").read_text()
    for damage in ("", whole[:200], "{}"):
        Path("r/run.json").write_text(damage)
        with refused(code=7):
            said(capsys, "explain", "r")
    Path("r/run.json").write_text(whole)
    for file in ("metrics.jsonl", "events.jsonl"):
        path = Path("r") / file
        path.write_bytes(
            path.read_bytes()[:-20] + b'\xff\n{"kind": "step"}\n[1]\n{"id": "out_of_memory", "values": 3}\n'
        )
    assert "Run explained" in said(capsys, "explain", "r")
    assert "steps that such a run logs" not in said(capsys, "explain", "r")  # a crash may cut off one or two
    Path("r/metrics.jsonl").unlink()
    assert "The run logged no step" in said(capsys, "explain", "r")
    with pytest.raises(UserError):
        said(capsys, "explain", "r", "--config", "baby")


# -- where steps were slow ---------------------------------------------------------------------------------


def lines(count: int = 200, every: int = 1, **slow: Any) -> list[dict[str, Any]]:
    """Steady lines of 0.1 s; `at`: the lines that take twice as long, with what they say besides."""
    at, said_there, usual = slow.pop("at", ()), slow.pop("there", {}), slow.pop("usual", {})
    found = []
    for i in range(count):
        step_s = 0.1 + 0.0005 * (i % 3)
        line = {"kind": "step", "step": i * every, "step_s": 2 * step_s if i in at else step_s, **usual}
        found.append(line | said_there if i in at else line)
    return found


@pytest.mark.parametrize(
    ("cause", "usual", "there"),
    [
        ("data_wait", {"data_wait_s": 0.001}, {"data_wait_s": 0.09}),
        ("thermal", {"clock_ghz": 2.5, "clock_reasons": ["power_cap"]}, {"clock_ghz": 1.2, "clock_reasons": ["thermal"]}),
        ("power_cap", {"clock_ghz": 2.5}, {"clock_ghz": 1.2, "clock_reasons": ["power_cap"]}),
        ("clock", {"clock_ghz": 2.5}, {"clock_ghz": 1.2, "clock_reasons": []}),
        ("others_card", {"clock_ghz": 2.5, "used_by_others_bytes": GIB}, {"clock_ghz": 2.5, "used_by_others_bytes": 3 * GIB}),
        ("others_cpu", {"cpu_s": 0.2}, {"cpu_s": 0.2}),
        ("unknown", {"clock_ghz": 2.5, "data_wait_s": 0.0}, {}),
        ("unknown", {}, {"clock_reasons": "nonsense", "data_wait_s": "x", "clock_ghz": None}),
    ],
)  # fmt: skip
def test_the_cause_is_what_a_figure_shows(cause: str, usual: dict[str, Any], there: dict[str, Any]) -> None:
    at = (50, 51, 52, 120)
    found = pace_of(lines(at=at, usual=usual, there=there), (), compiled=False)
    assert [(one.cause, one.steps, one.first_step, one.last_step) for one in found.slower] == [(cause, 4, 50, 120)]
    assert found.lost_s == pytest.approx(0.4, rel=0.02)
    assert found.steady_s == pytest.approx(0.1005)


def test_slow_first_steps_are_compilation() -> None:
    slow = lines(100, every=10)
    slow[0]["step_s"] = 30.0
    found = pace_of(slow, (), compiled=True)
    (one,) = found.slower
    assert (one.cause, one.steps, found.counted_steps) == ("compilation", 1, 991)
    assert one.lost_s == pytest.approx(29.9, rel=0.01)
    slow[50]["step_s"] = 0.2
    again = pace_of(slow, (), compiled=True)
    assert again.lost_s == pytest.approx(29.9 + 10 * 0.1, rel=0.01)
    resumed = pace_of(slow, (500,), compiled=True)  # what starts again compiles again
    assert [one.cause for one in resumed.slower] == ["compilation"]


def test_waiting_for_data_is_summed_and_nothing_is_invented() -> None:
    found = pace_of(lines(50, every=2, usual={"data_wait_s": 0.01}), (), compiled=False)
    assert found.data_wait_s == pytest.approx(0.01 * 99)
    bare = pace_of(lines(50), (), compiled=False)
    assert (bare.data_wait_s, bare.slower) == (None, ())
    assert pace_of([], (), compiled=False) is None
    assert pace_of([{"kind": "evaluation", "step": 0}], (), compiled=False) is None


# -- out of memory -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "moment"), [("forward", "forward"), ("backward", "backward"), ("optimizer", "optimizer")]
)
def test_a_run_that_memory_ended_says_how(
    where: str, moment: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    NO_MEMORY.__traceback__ = None  # one instance for all tests: it would carry the frames of the last one
    fail_in_step(monkeypatch, 2, 1, where)
    config = tiny(max_iters=4, out_dir="r")
    if where == "optimizer":
        with pytest.raises(UserError):
            train(config)
    else:
        train(config)
    (failure,) = explained("r").failures
    assert (failure.moment, failure.phase, failure.step, failure.micro_step) == (moment, "steady_step", 2, 2)
    assert (failure.fatal, failure.batch_size, failure.accumulation) == (where == "optimizer", 4, 2)
    assert failure.asked_bytes == round(1.54 * GIB)
    weights = 4 * RunDirectory(Path("r")).read_record().n_params
    assert (failure.weights_bytes, failure.gradients_bytes) == (weights, weights)
    assert failure.optimizer_bytes == pytest.approx(2 * weights, rel=0.01)
    assert failure.free_bytes
    shown = " ".join(said(capsys, "explain", "r").split())
    assert f"step 2, micro-step 2 of 2, in the {moment}" in shown
    assert ("What would have prevented it" in shown) == (where == "optimizer")


def test_out_of_memory_in_an_evaluation_and_a_report_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = trainer.evaluation_loss, iter(range(10**6))

    def failing(state: Any, batch: Any) -> Any:
        if next(calls) == 5:
            raise torch.OutOfMemoryError(MESSAGE)
        return original(state, batch)

    monkeypatch.setattr(trainer, "evaluation_loss", failing)
    train(tiny(max_iters=6, out_dir="r"))
    (failure,) = explained("r").failures
    assert (failure.phase, failure.fatal) == ("evaluate_steady", False)
    with monkeypatch.context() as patch:  # a full disk must not become the run's error
        patch.setattr(RunDirectory, "event", lambda *_, **__: 1 / 0)
        Vitals(RunDirectory(Path("r")), torch.device("cpu")).ran_out(MemoryError("x"), None, 0)
    Vitals(RunDirectory(Path("r")), torch.device("cpu")).ran_out(RuntimeError("another error"), None, 0)
    assert len(explained("r").failures) == 1


@pytest.mark.fault(
    "another process takes the card's memory", row="B.1",
    sees="`foretrain explain` says what others held",
    safe="as for out of memory",
)  # fmt: skip
def test_on_a_card_the_driver_is_asked(own_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for torch.cuda and for NVML: whole bytes instead of the message's two decimals."""
    cuda = SimpleNamespace(
        memory_allocated=lambda device: 5 * GIB, memory_reserved=lambda device: 7 * GIB,
        mem_get_info=lambda device: (GIB // 2, 12 * GIB), get_device_properties=lambda device: SimpleNamespace(uuid="b"),
    )  # fmt: skip
    nvml = Nvml()
    nvml.pid = os.getpid()
    nvml.nvmlDeviceGetUUID = lambda handle: "GPU-b"  # type: ignore[attr-defined]
    directory = RunDirectory(own_directory)
    vitals = Vitals(directory, torch.device("cuda:0"), nvml, cuda)
    line = vitals.now()
    assert (line["allocated_bytes"], line["clock_ghz"], line["clock_reasons"]) == (
        5 * GIB,
        2.475,
        ["power_cap", "thermal"],
    )
    assert line["temperature_c"] == 84
    assert "clock_ghz" not in vitals.now()  # once a second is enough
    vitals.ran_out(torch.OutOfMemoryError(MESSAGE), None, 3, phase="steady_step", micro_step=1)
    found = failure_of(directory.read_lines("events")[0]["values"])
    assert (found.allocated_bytes, found.unused_bytes, found.free_bytes) == (5 * GIB, 2 * GIB, GIB // 2)
    assert found.used_by_others_bytes == 2 * GIB
    assert found.over_bytes == (found.asked_bytes or 0) - GIB // 2
    assert not found.fragmented
    nvml.breaks_at = 0
    assert set(Vitals(directory, torch.device("cuda:0"), nvml, cuda).now()) == {"cpu_s", "allocated_bytes"}


def test_the_cap_counts_as_what_was_left() -> None:
    found = failure_of(
        {"asked_bytes": GIB, "free_bytes": 4 * GIB, "allowed_bytes": 6 * GIB, "reserved_bytes": 11 * GIB // 2}
    )
    assert (found.free_bytes, found.over_bytes) == (GIB // 2, GIB // 2)
    odd = failure_of({"asked_bytes": "x", "free_bytes": -1, "phase": 7, "step": None, "weights_bytes": 1.5})
    assert (odd.asked_bytes, odd.free_bytes, odd.over_bytes, odd.step) == (None, None, None, 0)


def test_the_message_is_read() -> None:
    found = oom_message.parse("noise\n" + MESSAGE)
    assert found.asked_bytes == round(3.07 * GIB)
    assert (found.free_bytes, found.card_bytes) == (round(1.02 * GIB), round(11.99 * GIB))
    assert found.process_bytes == round(8.87 * GIB)
    assert found.used_by_others_bytes == pytest.approx(2.10 * GIB, rel=1e-6)
    assert (found.allowed_bytes, found.allocated_bytes) == (round(9.5 * GIB), round(6.2 * GIB))
    assert found.unused_bytes == round(2.41 * GIB)
    host = oom_message.parse(
        "RuntimeError: [enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 4398046511104 bytes. Error code 12"
    )
    assert host.asked_bytes == 1 << 42
    assert oom_message.parse("loss 3.2") is None


def test_the_hosts_own_message_is_read() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    found = oom_message.parse(str(caught.value))
    assert found.asked_bytes == 1 << 60


def test_a_moment_without_a_traceback_is_another() -> None:
    assert moment_of(None) == "other"


# -- what would have saved it ------------------------------------------------------------------------------


def test_case_c_has_three_exact_changes_that_fit() -> None:
    config = resolve([CASE_C]).config
    others = round(2.1e9)
    found = remedies(config, find("RTX 4070"), used_by_others_bytes=others, over_bytes=GIB)
    assert len(found) == 3
    before = plan(config, find("RTX 4070"), used_by_others_bytes=others)
    for remedy in found:
        words = [f"--{name}={value}" for name, value in remedy.options.items()]
        made = plan(resolve([CASE_C, *words]).config, find("RTX 4070"), used_by_others_bytes=others)
        assert made.verdict_of("foretrain") != "does_not_fit"
        assert made.work.tokens_per_step == 524_288
        needed = max(p.needed_expected_bytes for p in made.memory_of("foretrain").phases)
        was = max(p.needed_expected_bytes for p in before.memory_of("foretrain").phases)
        assert needed == pytest.approx(remedy.effect.needed_bytes, rel=0.01)
        assert was - needed == pytest.approx(remedy.effect.saved_bytes, rel=0.01)
        assert remedy.effect.saved_bytes >= GIB


@settings(max_examples=8)
@given(
    card=st.sampled_from([gpu for gpu in catalogue().values() if gpu.kind == "cuda" and gpu.memory_bytes]),
    width=st.sampled_from([256, 768, 1536]), layers=st.integers(2, 24), rows=st.sampled_from([1, 4, 12, 48]),
    others=st.integers(0, 4 * GIB), over=st.integers(0, 2 * GIB),
    step=st.sampled_from(["foretrain", "nanogpt"]),
)  # fmt: skip
def test_no_remedy_is_promised_that_the_plan_denies(
    card: Any, width: int, layers: int, rows: int, others: int, over: int, step: Any
) -> None:
    config = RunConfig(n_layer=layers, n_head=8, n_embd=width, batch_size=rows, gradient_accumulation_steps=8)
    for remedy in remedies(config, card, used_by_others_bytes=others, over_bytes=over, step=step):
        changed = config.model_copy(update=remedy.options)
        made = plan(changed, card, used_by_others_bytes=others)
        taken = "foretrain" if step == "foretrain" or "foretrain_step" in remedy.rules else "nanogpt"
        assert made.verdict_of(taken) != "does_not_fit"
        assert remedy.effect.saved_bytes >= over
        assert changed.tokens_per_step == config.tokens_per_step


def test_a_log_that_ends_in_out_of_memory_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    steps = "".join(f"iter {i}: loss 9.5000, time 3900.{i:02}ms, mfu 12.90%\n" for i in range(20))
    Path("train.log").write_text(steps + "torch.OutOfMemoryError: " + MESSAGE + "\n")
    shown = said(capsys, "explain", "train.log", "--config", CASE_C, "--gpu", "RTX 4070")
    assert "asked for 3.07 GiB, with 911 MiB left" in shown  # of the 9.50 GiB that were allowed
    assert "used by other programs" in shown
    assert "--batch_size=8" in shown
    assert "steady step" in shown
    Path("short.log").write_text("torch.OutOfMemoryError: " + MESSAGE)
    found = json.loads(said(capsys, "explain", "short.log", "--json"))
    assert found["out_of_memory"]["asked_bytes"] == round(3.07 * GIB)
    assert "Give the run's config" in said(capsys, "explain", "short.log")


def test_a_device_is_no_log() -> None:
    result = foretrain("explain", "/dev/zero")
    assert (result.returncode, result.stderr.count("it is a device")) == (7, 1)


def test_one_slow_step_is_said_as_one() -> None:
    def said(steps: int) -> str:
        one = Slower(cause="unknown", steps=steps, first_step=4, last_step=3 + steps, lost_s=0.5, factor=1.5, values={})
        return run_explain_view._why(one).message.text()

    assert "step 4 lost 500 ms; it took 1.50 times the steady step." in said(1)
    assert "3 steps from 4 to 6 lost 500 ms; on average they took 1.50 times the steady step." in said(3)


# -- while it works ------------------------------------------------------------------------------------------------


def test_whoever_waits_sees_what_it_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """At a terminal a line moves while a snapshot, or what a run could have done, is worked out; and while plan traces."""
    monkeypatch.chdir(REPO)
    assert "explaining examples/snapshots/fragmented.pickle" in watched(
        "explain", "examples/snapshots/fragmented.pickle"
    )
    case = ("explain", "examples/logs/c-out-of-memory.log", "--config", "examples/real-cases/c.py", "--gpu", "4070")
    assert "looking for changes that fit" in watched(*case)

    def tells(requests: object, listen: Any, *_: object) -> None:
        listen("1/2 · 3 s")
        raise service.TraceUnavailable("no torch")

    monkeypatch.setattr(service, "traces", tells)
    traced = ("plan", "gpt2-124m", "--gpu", "4070", "--n_layer=3", "--snapshot", str(tmp_path / "s.pickle"))
    assert "tracing on fake tensors" in watched(*traced, code=4)
    assert "tracing" not in watched(*traced, "--quiet", code=4)
    assert "explaining" not in foretrain("explain", "examples/snapshots/fragmented.pickle").stderr
