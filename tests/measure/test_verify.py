"""`foretrain verify`: which cases are chosen, what is predicted and measured of them, and the file of the results."""

import json
import os
import re
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
import torch
from rich.console import Console

from foretrain.base.errors import UserError
from foretrain.cli import app, common
from foretrain.cli.commands import verify as verify_command
from foretrain.cli.commands.verify import Terminated
from foretrain.hardware.catalogue import Gpu, find
from foretrain.measure import verify_record, verify_session, verify_step
from foretrain.measure.verify_record import Case, Machine, Outcome, Predicted, Verification, Versions
from foretrain.predict.plan import plan
from foretrain.predict.trace import drive, service
from foretrain.predict.trace.forecast import answers_for
from foretrain.predict.trace.service import TraceUnavailable
from tests.kit.command import REPO, Terminal, foretrain

sys.path.insert(0, str(REPO / "docs"))
import product_tables

CARD = find("RTX 4070")
GIB = 2**30
FIXTURE = REPO / "tests" / "data" / "verify_on_a_card_that_computes_nothing.json"
TINY = Case(
    name="tiny", dtype="float32", step="foretrain",
    options={"n_layer": 1, "n_head": 2, "n_embd": 32, "block_size": 16, "vocab_size": 64, "batch_size": 2,
             "gradient_accumulation_steps": 2},
)  # fmt: skip


# -- which cases ----------------------------------------------------------------------------------------------------


def test_a_card_has_24_cases_of_every_kind() -> None:
    found = verify_session.cases_for(CARD, 12 * GIB)
    assert len(found) == 24
    assert len({case.label for case in found}) == 24
    kinds = {(case.step, case.compiled) for case in found}
    assert kinds == {(step, compiled) for step in ("foretrain", "nanogpt") for compiled in (False, True)}
    assert {case.dtype for case in found} == {"float32", "bfloat16", "float16"}
    configs = [case.config for case in found]
    assert {c.gradient_accumulation_steps for c in configs} > {1}
    for moved in ("activation_checkpointing", "loss_chunk_size", "dropout", "bias", "eval_only", "eval_batch_size"):
        assert any(getattr(c, moved) for c in configs), moved
    assert {c.optimizer for c in configs} == {"adamw", "adamw8bit", "muon"}
    assert sum(case.compiled for case in found) >= 6
    assert len(verify_session.cases_for(Gpu(name="CPU", kind="cpu"), 16 * GIB)) == 8


@pytest.mark.parametrize(("card", "free_gib"), [("RTX 4070", 3), ("RTX 4070", 11), ("T4", 6), ("H100 SXM5 80GB", 78)])
def test_each_case_is_expected_to_fit_in_what_is_free(card: str, free_gib: int) -> None:
    gpu = find(card)
    chosen = verify_session.cases_for(gpu, free_gib * GIB)
    assert len({case.label for case in chosen}) == 24
    for case in chosen:
        config = case.config
        assert gpu.supports_bf16 or case.dtype != "bfloat16"
        assert (
            config.batch_size == 1 or verify_session.needed_bytes(case, gpu) <= verify_session.ROOM * free_gib * GIB
        ), case.label
        if config.eval_batch_size:
            assert config.eval_batch_size >= config.batch_size


def test_the_largest_micro_batch_is_the_largest() -> None:
    for free_gib in (6, 12, 24):
        for case in verify_session.cases_for(CARD, free_gib * GIB)[-3:]:
            more = verify_session.with_batch(case, case.config.batch_size + 1)
            assert verify_session.needed_bytes(more, CARD) > verify_session.ROOM * free_gib * GIB
    sizes = [verify_session.cases_for(CARD, g * GIB)[-1].config.batch_size for g in (8, 12, 24)]
    assert sizes == sorted({*sizes})


# -- predicted ------------------------------------------------------------------------------------------------------


def test_a_prediction_is_what_plan_exact_says() -> None:
    predicted, peaks = verify_session.predict(TINY, CARD)
    config = TINY.config.model_copy(update={"compile": False, "dtype": "float32"})
    made = plan(config, CARD)
    (exact,) = answers_for(made, ["foretrain"], None)
    ours = [phase for phase in exact.memory.phases if phase.phase != "resume"]
    assert predicted.source == "traced"
    assert predicted.allocated_bytes == max(phase.allocated_bytes for phase in ours)
    assert predicted.reserved_bytes == max(phase.reserved_bytes or 0 for phase in ours)
    assert predicted.process_bytes == max(phase.needed_expected_bytes for phase in ours)
    assert {name: size for name, (size, _) in peaks.items() if name in {p.phase for p in ours}} == {
        phase.phase: phase.allocated_bytes for phase in ours
    }
    assert predicted.step_s == made.timing.step_s.expected_s
    assert predicted.estimate_allocated_bytes == max(
        phase.allocated_bytes for phase in made.memory_of("foretrain").phases if phase.phase != "resume"
    )


def test_without_a_trace_the_estimate_stands_in(no_trace: None) -> None:
    predicted, _ = verify_session.predict(TINY, CARD)
    assert predicted.source == "estimated"
    assert predicted.allocated_bytes == predicted.estimate_allocated_bytes


def test_a_case_that_only_evaluates_has_no_step(no_trace: None) -> None:
    only = TINY.model_copy(update={"options": {**TINY.options, "eval_only": True}})
    assert verify_session.predict(only, CARD)[0].step_s is None


# -- measured -------------------------------------------------------------------------------------------------------


def test_a_case_is_really_measured_in_a_process_of_its_own() -> None:
    case = TINY.model_copy(update={"step": "nanogpt"})
    found = verify_session.ask({"what": "case", "device": "cpu", "case": case.to_json()}, 600)
    assert found["steps"] >= verify_step.FEWEST_STEPS
    assert found["step_s"] > 0
    assert found["process_bytes"] > 50 * 2**20


def test_foretrains_step_is_timed_from_its_second_steady_step_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_step, "_prepare", lambda case, device: None)  # which is for a process of its own
    monkeypatch.setattr(drive, "STEPS", 7)
    found = verify_step.measured(TINY, torch.device("cpu"))
    assert found["steps"] == 7 - 1 - verify_step.UNTIMED  # the first is no steady one
    assert found["step_s"] > 0


def test_what_a_case_raises_is_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_step, "_prepare", lambda case, device: None)
    bad = {**TINY.to_json(), "options": {**TINY.options, "n_head": 3}}  # 32 is no multiple of it
    job = {"what": "case", "device": "cpu"}
    assert "RuntimeError: shape" in verify_step.answer({**job, "case": bad})["error"]

    def full(*words: Any, **named: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(verify_step, "run", full)
    found = verify_step.answer({**job, "case": TINY.to_json()})["out_of_memory"]
    assert found == {"phase": "build", "said": "CUDA out of memory. Tried to allocate 2.00 GiB"}


def test_a_process_that_ends_or_takes_too_long_is_told() -> None:
    with pytest.raises(verify_session.Ended):
        verify_session.ask({"what": "device", "device": "no such device"}, 600)
    with pytest.raises(verify_session.Timeout):
        verify_session.ask({"what": "case", "device": "cpu", "case": TINY.to_json()}, 0.01)


def test_steps_are_timed_until_there_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_step, "ENOUGH_S", 0.0)
    watch = verify_step.Watch(torch.device("cpu"), enough=True)
    for phase in ("evaluate_first", "first_step", "steady_step", "evaluate_steady", "save"):
        watch.enter(phase)
    for _ in range(verify_step.FEWEST_STEPS):
        watch.enter("steady_step")
    with pytest.raises(verify_step.Enough):
        watch.enter("steady_step")
    assert len(watch.times) == verify_step.UNTIMED + verify_step.FEWEST_STEPS


def test_tokens_are_random_and_within_the_vocabulary() -> None:
    watch: Any = verify_step.Watch(torch.device("cpu"))
    job = verify_step.RandomJob(TINY.config, torch.device("cpu"), "float32", False, watch, drive.Names(watch))
    for cut in (False, True):
        for tensor in job.batch(32, 16, cut=cut):
            assert tensor.dtype == torch.int64
            assert 0 <= int(tensor.min()) < int(tensor.max()) < 64


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ("/data/anna/x/y.py is not there", "…/y.py is not there"),
        (r"C:\anna\torch\lib.dll failed", "…/lib.dll failed"),
        ("/home/Anna Lee/x/lib.so failed", "…/lib.so failed"),
        ("see src/anna/model.py:7", "see …/model.py:7"),
        ("two\nlines", "two"),
        ("", "nothing was said"),
        ("3 / 4 of it, 50 MiB", "3 / 4 of it, 50 MiB"),
        ("x" * 500, "x" * 160),
        ("\x1b[2Jred", " [2Jred"),
    ],
)
def test_a_reason_has_no_folders(said: str, kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/Anna Lee")
    monkeypatch.setenv("USERPROFILE", "/home/Anna Lee")
    assert verify_step.plain(said) == kept


# -- a session ------------------------------------------------------------------------------------------------------

Ask = Callable[[dict[str, Any], float], dict[str, Any]]


@pytest.fixture
def no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*words: Any) -> None:
        raise TraceUnavailable("not in this test")

    monkeypatch.setattr(service, "traces", refuse)


class Machinery:
    """Stands where the card's processes do: 24 GB, nobody else there, every case takes what was estimated."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.answers: dict[str, Any] = {}  # by a part of the label
        self.free: int | None = 24 * GIB
        self.busy = False
        self.driver = "580.1"
        self.count = 1
        self.obstacle = ""

    def ask(self, job: dict[str, Any], limit_s: float) -> dict[str, Any]:
        if job["what"] == "device":
            named = {"name": "NVIDIA GeForce RTX 4070", "memory_bytes": 24 * GIB, "uuid": "", "sm_count": 46}
            card = (
                {**named, "capability": "8.9", "obstacle": self.obstacle, "free_bytes": 24 * GIB} if self.count else {}
            )
            return {"torch": "2.13.0", "cuda": "13.0", "python": "3.12", "count": self.count, **card}
        case = Case.model_validate(job["case"])
        self.asked.append(case.label)
        for part, answer in self.answers.items():
            if part in case.label:
                if isinstance(answer, BaseException):
                    raise answer
                return answer
        phases = {"first_step": {"allocated_bytes": 2 * GIB, "reserved_bytes": 3 * GIB}}
        return {"phases": phases, "steps": 9, "step_s": 0.1, "process_bytes": 4 * GIB, "context_bytes": GIB}

    def now(self, target: verify_session.Target) -> tuple[int | None, int, bool]:
        return self.free, 0 if self.free is None else 24 * GIB - self.free, self.busy


@pytest.fixture
def machinery(monkeypatch: pytest.MonkeyPatch, no_trace: None) -> Machinery:
    found = Machinery()
    monkeypatch.setattr(verify_session, "ask", found.ask)
    monkeypatch.setattr(verify_session.Target, "now", lambda self: found.now(self))
    monkeypatch.setattr(verify_session, "SETTLE_S", 0.0)
    there = CARD.model_copy(update={"memory_gib": 24.0})
    monkeypatch.setattr(verify_session, "detect", lambda index, **ids: SimpleNamespace(gpu=there))
    return found


def results(path: str = "r.json") -> Verification:
    return verify_record.read(Path(path))


def test_all_cases_are_run_and_shown(machinery: Machinery) -> None:
    result = foretrain("verify", "--out", "r.json", "--name", "octocat", code=0)
    assert len(machinery.asked) == 24
    found = results()
    assert len(found.of("measured")) == 24
    assert found.name == "octocat"
    assert found.machine.device == "NVIDIA GeForce RTX 4070"
    first = found.outcomes[0]
    assert first.error("reserved") == pytest.approx((first.predicted.reserved_bytes or 0) / (3 * GIB) - 1)
    worst = max((o.error("process") or 0 for o in found.outcomes), key=abs)
    summary = {each.quantity: each for each in found.by_quantity}
    assert summary["process"].worst == worst
    assert summary["process"].cases == 24
    assert "How far off" in result.stdout
    assert result.stdout.index("worst") < result.stdout.index("Errors by case")
    assert verify_record.CONTRIBUTED in result.stdout
    assert "24 cases on NVIDIA GeForce RTX 4070" in result.stderr
    assert "min" in result.stderr


def test_nothing_of_the_user_is_in_the_file(machinery: Machinery) -> None:
    machinery.answers = {"Muon": {"error": verify_step.plain(f"OSError: {Path.home()}/x/lib.so: {Path.cwd()}/y")}}
    assert foretrain("verify", "--out", "r.json").returncode == 0
    written = Path("r.json").read_text("utf-8")
    names = [socket.gethostname(), str(Path.home()), str(Path.cwd()), os.environ.get("USER", "")]
    assert [name for name in names if len(name) > 4 and name in written] == []
    assert "lib.so" in written


def test_ctrl_c_keeps_results_and_the_command_continues(machinery: Machinery) -> None:
    machinery.answers = {"30M fp16 compiled": KeyboardInterrupt()}
    stopped = foretrain("verify", "--out", "r.json", code=130)
    done = len(results().of("measured"))
    assert 0 < done < 24
    assert f"{done} of 24 cases are done and kept in r.json" in stopped.stderr
    before, machinery.asked, machinery.answers = set(machinery.asked[:-1]), [], {}
    foretrain("verify", "--out", "r.json", code=0)
    assert len(machinery.asked) == 24 - done
    assert not before & set(machinery.asked)
    assert len(results().of("measured")) == 24
    machinery.asked = []
    assert "Nothing is left" in foretrain("verify", "--out", "r.json").stderr
    assert machinery.asked == []


def test_sigterm_stops_with_its_own_exit_code(machinery: Machinery) -> None:
    machinery.answers = {"30M fp16 compiled": Terminated()}
    assert foretrain("verify", "--out", "r.json", "--quiet").returncode == 75
    assert results().of("measured")


def test_only_and_again(machinery: Machinery) -> None:
    assert foretrain("verify", "--out", "r.json", "--only", "MUON", "--quiet").returncode == 0
    assert len(machinery.asked) == 1
    assert len(results().of("waiting")) == 23
    assert foretrain("verify", "--out", "r.json", "--only", "muon", "--again", "--quiet").returncode == 0
    assert len(machinery.asked) == 2
    wrong = foretrain("verify", "--out", "r.json", "--only", "99B", code=2)
    assert "99B" in wrong.stderr
    assert "124M adamw8bit bf16 eager foretrain" in wrong.stderr


def test_what_goes_wrong_with_a_case_spoils_nothing(machinery: Machinery) -> None:
    machinery.answers = {
        "adamw8bit": {"out_of_memory": {"phase": "first_step", "said": "CUDA out of memory"}},
        "Muon": verify_session.Ended(-9), "dropout and bias": verify_session.Timeout(), "evaluation only": {"error": "ValueError: 7"},
    }  # fmt: skip
    result = foretrain("verify", "--out", "r.json", code=0)
    found = results()
    assert len(found.of("measured")) == 20
    assert len(found.of("out_of_memory")) == 1
    assert len(found.of("failed")) == 3
    assert "1 case ran out of memory, which was not predicted" in result.stdout
    for said in ("exit code -9", "not done after", "failed: ValueError: 7", "--again"):
        assert said in result.stdout, said


def test_case_that_no_longer_fits_is_skipped_and_tried_again(machinery: Machinery) -> None:
    foretrain("verify", "--out", "r.json", "--only", "Muon", "--quiet")
    machinery.free = 3 * GIB
    shown = foretrain("verify", "--out", "r.json", "--only", "350M")
    (skipped,) = results().of("skipped")
    assert "350M" in skipped.case.label
    assert "3.00 GiB free" in shown.stdout
    machinery.free = 24 * GIB
    foretrain("verify", "--out", "r.json", "--only", "350M", "--quiet")
    assert not results().of("skipped")


def test_a_busy_card_is_said_and_its_times_are_left_out(machinery: Machinery) -> None:
    machinery.busy, machinery.free = True, 20 * GIB
    result = foretrain("verify", "--out", "r.json")
    assert "Other programs and the driver use 4.00 GiB of the card; 20.00 GiB are free." in result.stderr
    assert "Another program is computing on the card" in result.stderr
    assert "24 cases" in result.stdout
    assert "time" not in {each.quantity for each in results().by_quantity}
    assert results().outcomes[0].used_by_others_bytes == 4 * GIB


def test_a_card_that_still_works_for_the_case_before_is_not_busy(
    machinery: Machinery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVML's utilisation is of the last second, and memory is freed a moment after a process has ended."""
    monkeypatch.setattr(verify_session, "SETTLE_S", 60.0)
    monkeypatch.setattr(verify_session.time, "sleep", lambda seconds: None)
    moments = [(24 * GIB, 0, False), (1 * GIB, 23 * GIB, True), (24 * GIB, 0, True), (24 * GIB, 0, False)]
    said = iter(moments)  # the first chooses the cases
    monkeypatch.setattr(verify_session.Target, "now", lambda self: next(said))
    foretrain("verify", "--out", "r.json", "--only", "Muon", "--quiet")
    (outcome,) = results().of("measured")
    assert not outcome.busy
    assert outcome.used_by_others_bytes == 0


def test_on_an_idle_card_times_count(machinery: Machinery) -> None:
    foretrain("verify", "--out", "r.json", "--quiet")
    (time,) = [each for each in results().by_quantity if each.quantity == "time"]
    assert time.cases == 23  # but for the one that only evaluates


def test_a_card_that_the_catalogue_lacks_has_memory_and_no_time(
    machinery: Machinery, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(index: int, **ids: str) -> None:
        raise UserError("gpu.unknown", name="x", near=[], block="")

    monkeypatch.setattr(verify_session, "detect", unknown)
    assert foretrain("verify", "--out", "r.json", "--quiet").returncode == 0
    assert {each.quantity for each in results().by_quantity} == {"allocated", "reserved", "process", "estimate"}


def test_what_cannot_be_compiled_says_why(machinery: Machinery) -> None:
    machinery.obstacle = "Triton is not installed"
    result = foretrain("verify", "--out", "r.json")
    assert len(results().of("skipped")) == 6
    assert result.stdout.count("cannot be compiled: Triton is not installed") == 6


def test_a_moving_line_says_what_is_left(machinery: Machinery, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    for module in (verify_command, common):
        monkeypatch.setattr(module, "ERR", Console(file=screen, force_terminal=True, width=200))
    assert foretrain("verify", "--out", "r.json", "--only", "characters").returncode == 0
    for number, what in enumerate(("bf16 eager foretrain", "dropout fp16 eager nanoGPT", "fp32 compiled foretrain"), 1):
        assert re.search(rf"{number} of 3: characters {what} … about [\d.]+ (ms|s|min) left", screen.getvalue())


def test_cases_that_are_not_ours_are_never_run(machinery: Machinery) -> None:
    foretrain("verify", "--out", "r.json", "--only", "Muon", "--quiet")
    written = json.loads(Path("r.json").read_text("utf-8"))
    written["outcomes"][0]["case"]["options"]["n_layer"] = 200
    Path("r.json").write_text(json.dumps(written), "utf-8")
    resumed = foretrain("verify", "--out", "r.json", "--only", "characters bf16", "--quiet")
    assert "r.before-1.json" in resumed.stderr
    assert results().outcomes[0].case.config.n_layer == 6


def test_no_card_is_one_sentence(machinery: Machinery) -> None:
    machinery.count = 0
    result = foretrain("verify", code=4)
    assert len(result.stderr.strip().splitlines()) == 1
    assert "No CUDA card can be used here (torch 2.13.0" in result.stderr
    assert not list(Path().glob("*.json"))
    machinery.count = 2
    foretrain("verify", "--device", "cuda:1", "--only", "Muon", "--quiet", code=0)
    assert Path("foretrain-verify-nvidia-geforce-rtx-4070.json").is_file()


def test_the_shell_completes_devices_and_words_of_cases() -> None:
    command: Any = app
    options = {option.name: option for option in command.members()["verify"].params}

    def completed(name: str, begun: str) -> list[str]:
        return [item.value for item in options[name].shell_complete(click.Context(command), begun)]

    assert completed("device", "cu") == ["cuda", "cuda:1"]
    assert completed("only", "comp") == ["compiled"]
    assert set(completed("only", "")) > {"124M", "nanoGPT", "bf16", "Muon", "checkpointing"}


@pytest.mark.parametrize(
    "words",
    [
        ("--device", "tpu"),
        ("--device", "cuda:x"),
        ("--name", "a b"),
        ("--name", "-x"),
        ("--name", "x" * 40),
        ("--name", "a-" * 25 + "a"),
    ],
)
def test_wrong_words_are_refused(machinery: Machinery, words: tuple[str, str]) -> None:
    result = foretrain("verify", *words, code=2)
    assert words[0] in result.stderr


def test_unwritable_file_is_refused_before_anything_runs(machinery: Machinery) -> None:
    result = foretrain("verify", "--out", "nowhere/r.json", code=2)
    assert "nowhere/r.json" in result.stderr
    assert machinery.asked == []


def test_results_of_another_driver_are_set_aside(machinery: Machinery, monkeypatch: pytest.MonkeyPatch) -> None:
    foretrain("verify", "--out", "r.json", "--only", "Muon", "--quiet")
    before = Path("r.json").read_text("utf-8")
    monkeypatch.setattr(verify_session, "own_version", lambda: "9.9")
    result = foretrain("verify", "--out", "r.json", "--only", "Muon")
    assert "r.before-1.json" in result.stderr
    assert Path("r.before-1.json").read_text("utf-8") == before
    assert len(machinery.asked) == 2


# -- damaged files --------------------------------------------------------------------------------------------------


def small(**changes: Any) -> dict[str, Any]:
    predicted = Predicted(
        source="traced", allocated_bytes=110, reserved_bytes=220, process_bytes=300, process_low_bytes=250,
        process_high_bytes=400, estimate_allocated_bytes=90, step_s=0.1, step_low_s=0.05, step_high_s=0.2,
    )  # fmt: skip
    taken = verify_record.Measured(allocated_bytes=100, reserved_bytes=200, process_bytes=290, step_s=0.3, steps=5)
    found = Verification(
        date="2026-11-22", machine=Machine(device="NVIDIA GeForce RTX 4070", kind="cuda", driver="580.1"),
        versions=Versions(foretrain="0.1.0", code="abc", python="3.12", torch="2.13.0"),
        outcomes=(Outcome(case=TINY, status="measured", predicted=predicted, measured=taken),),
    )  # fmt: skip
    return {**found.as_json(), **changes}


def test_a_file_is_read_as_it_was_written() -> None:
    Path("r.json").write_text(json.dumps(small()), "utf-8")
    found = results()
    assert found.as_json() == small()
    errors = {each.quantity: (each.worst, each.inside) for each in found.by_quantity}
    assert errors["allocated"] == (pytest.approx(0.1), None)
    assert errors["reserved"] == (pytest.approx(0.1), None)
    assert errors["estimate"] == (pytest.approx(-0.1), None)
    assert errors["process"] == (pytest.approx(300 / 290 - 1), 1)
    assert errors["time"] == (pytest.approx(-2 / 3), 0)


def _outcome(**changes: Any) -> list[dict[str, Any]]:
    return [{**small()["outcomes"][0], **changes}]


def _measured(value: Any) -> str:
    return json.dumps(small()).replace('"step_s": 0.3', f'"step_s": {value}')


DAMAGED: dict[str, str] = {
    "empty": "", "cut short": json.dumps(small())[:-40], "a list": "[]", "a number": "7", "no schema": "{}",
    "another schema": json.dumps(small(schema="foretrain.plan/1")), "nan": _measured("NaN"),
    "infinity": _measured("Infinity"), "beyond floats": _measured("1e999"), "negative": _measured("-1"),
    "zero seconds": _measured("0"), "many digits": _measured("9" * 5000), "text for a number": _measured('"soon"'),
    "nested": "[" * 100_000, "no cases": json.dumps(small(outcomes=[])),
    "too many cases": json.dumps(small(outcomes=_outcome() * 101)), "a case twice": json.dumps(small(outcomes=_outcome() * 2)),
    "an unknown key": json.dumps(small(extra=1)), "a huge size": json.dumps(small(free_bytes=2**80)),
    "no figures": json.dumps(small(outcomes=_outcome(measured=None))),
    "an unknown option": json.dumps(small(outcomes=_outcome(case={**TINY.to_json(), "options": {"n_layers": 3}}))),
    "a huge option": json.dumps(small(outcomes=_outcome(case={**TINY.to_json(), "options": {"n_layer": 10**30}}))),
    "a name that commands": json.dumps(small(name="x](http://y)")),
    "a terminal's command": json.dumps(small(machine={**small()["machine"], "device": "\x1b[2Jcard"})),
    "a turned text": json.dumps(small(machine={**small()["machine"], "device": "\u202ecard"})),
    "a date that is none": json.dumps(small(date="yesterday")), "not UTF-8": "\udcff\udcfe",
    "too large": json.dumps(small()) + " " * (5 * 2**20),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_file_is_one_sentence_and_never_written_over(kind: str, machinery: Machinery) -> None:
    Path("r.json").write_bytes(DAMAGED[kind].encode("utf-8", "surrogateescape"))
    shown = foretrain("verify", "--show", "r.json")
    assert shown.returncode == 7, shown.stdout
    assert shown.stdout == ""
    assert len(shown.stderr.strip().splitlines()) == 1
    assert "r.json: is not a results file of `foretrain verify`" in shown.stderr
    assert "\x1b" not in shown.stderr
    before = Path("r.json").read_bytes()
    resumed = foretrain("verify", "--out", "r.json", "--only", "Muon", "--quiet", code=0)
    assert "r.damaged-1.json" in resumed.stderr
    assert Path("r.damaged-1.json").read_bytes() == before
    assert len(results().of("measured")) == 1


def test_a_missing_file_and_a_folder_are_told() -> None:
    for path in ("none.json", "."):
        result = foretrain("verify", "--show", path, "--json", code=7)
        assert json.loads(result.stdout)["id"] == "data.bad_verification"


def test_a_second_damaged_file_has_a_name_of_its_own(machinery: Machinery) -> None:
    for _ in range(2):
        Path("r.json").write_text("{", "utf-8")
        foretrain("verify", "--out", "r.json", "--only", "Muon", "--quiet")
    assert sorted(path.name for path in Path().glob("r.damaged*")) == ["r.damaged-1.json", "r.damaged-2.json"]


# -- what is shown and contributed ----------------------------------------------------------------------------------


def test_worst_and_median_are_shown_before_the_cases() -> None:
    Path("r.json").write_text(json.dumps(small()), "utf-8")
    shown = foretrain("verify", "--show", "r.json").stdout
    assert re.search(r"allocated peak, traced +1 +10\.0% +\+10\.0%", shown)
    assert re.search(r"time of a step, from the catalogue +1 +66\.7% +-66\.7% +0 / 1", shown)
    assert shown.index("+10.0%") < shown.index("Errors by case")
    assert "tiny fp32 eager foretrain" in shown
    assert verify_record.CONTRIBUTED not in shown  # it may be somebody else's


def test_contributed_files_are_whole_and_of_real_machines() -> None:
    for name, found in product_tables.files():
        assert product_tables.obstacle(found) == "", name
        assert found.versions.foretrain, name


def test_a_card_that_computes_nothing_is_not_contributed(tmp_path: Path) -> None:
    found = verify_record.read(FIXTURE)
    assert len(found.outcomes) == 24
    assert product_tables.obstacle(found)
    (tmp_path / "a.json").write_text(FIXTURE.read_text("utf-8"), "utf-8")
    with pytest.raises(SystemExit, match="not NVIDIA's"):
        product_tables.contributed(tmp_path)


def test_the_page_says_that_there_is_nothing_or_what_there_is(tmp_path: Path) -> None:
    assert product_tables.contributed(tmp_path) == product_tables.NONE
    hostile = {**small()["machine"], "device": "A | B [x](http://y) <b>"}
    (tmp_path / "a.json").write_text(json.dumps(small(name="octocat")), "utf-8")
    (tmp_path / "b.json").write_text(json.dumps(small(machine=hostile)), "utf-8")
    page = product_tables.contributed(tmp_path)
    assert page.count("## ") == 2
    assert "[octocat](https://github.com/octocat)" in page
    assert "A \\| B \\[x\\](http://y) \\<b\\>" in page
    assert "| allocated peak, traced | 1 | 10.0% | +10.0% |  | tiny fp32 eager foretrain |" in page
    (tmp_path / "c.json").write_text("{", "utf-8")
    with pytest.raises(UserError):
        product_tables.contributed(tmp_path)


def test_traces_on_that_card_are_near_what_its_allocator_counted() -> None:
    """Memory is real there: PyTorch's CUDA build and its allocator ran; only kernels did nothing."""
    found = {each.quantity: each for each in verify_record.read(FIXTURE).by_quantity}
    assert found["allocated"].cases == found["reserved"].cases == 24
    assert abs(found["allocated"].worst) < 0.002
    assert (found["allocated"].median, found["reserved"].median) == (0, 0)
    assert abs(found["estimate"].worst) < 0.01
