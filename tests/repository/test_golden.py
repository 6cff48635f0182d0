"""The golden net finds what differs, lets a declared change pass, and refuses a declaration that nothing needs."""

import json
from typing import Any

from tests.golden.case import Case, case
from tests.golden.cases import digest, listed
from tests.golden.compare import Declared, Difference, differences, judged, shifted


def result(stdout: str = "", written: dict[str, str] | None = None, folder: str = "/scratch/golden-aaaaaaaa/12345678", **more: Any) -> dict[str, Any]:  # fmt: skip
    step = {"asked": "plan", "exit": 0, "stdout": stdout, "stderr": "", **more}
    files = {name: {"text": text, "rights": "0o644"} for name, text in (written or {}).items()}
    return {"case": "plan one", "folder": folder, "steps": [step], "written": files, "removed": []}


def found(old: dict[str, Any], new: dict[str, Any], *, measured: bool = False) -> list[tuple[str, str, str]]:
    return [(one.path, one.old, one.new) for one in differences(old, new, measured=measured)]


def test_a_value_that_differs_is_found_by_its_path() -> None:
    old, new = ({"memory": [{"bytes": 1}, {"bytes": bytes_}], "verdict": "fits"} for bytes_ in (2, 3))
    assert found(result(json.dumps(old)), result(json.dumps(new))) == [("steps[0].stdout.memory[1].bytes", "2", "3")]
    assert not found(result(json.dumps(old)), result(json.dumps(old)))


def test_a_key_that_came_or_went_and_an_order_are_differences() -> None:
    assert found(result('{"a": 1}'), result('{"a": 1, "b": 2}')) == [("steps[0].stdout.b", "(nothing)", "2")]
    assert found(result('{"a": 1, "b": 2}'), result('{"b": 2, "a": 1}')) == [
        ("steps[0].stdout (order)", "a, b", "b, a")
    ]
    assert found(result('{"a": 1}'), result('{"a": 1.0}')) == [("steps[0].stdout.a", "1", "1.0")]
    assert found(result('{"a": null}'), result("{}")) == [("steps[0].stdout.a", "None", "(nothing)")]


def test_a_line_that_differs_is_found_and_one_put_in_shifts_none() -> None:
    assert found(result("a\nb\nc\n"), result("a\nB\nc\n")) == [("steps[0].stdout:2", "b", "B")]
    assert found(result("a\nb\nc\n"), result("a\nnew\nb\nc\n")) == [("steps[0].stdout:2", "(nothing)", "new")]


def test_exit_codes_files_and_what_was_imported_count() -> None:
    assert found(result(exit=2), result(exit=3)) == [("steps[0].exit", "2", "3")]
    assert found(result(imported=[]), result(imported=["torch"])) == [("steps[0].imported[0]", "(nothing)", "torch")]
    assert found(result(written={"a.toml": "x\n"}), result(written={"a.toml": "y\n"})) == [("written.a.toml.text:1", "x", "y")]  # fmt: skip
    assert len(found(result(written={"a.toml": "x\n"}), result())) == 1
    page = "<p>one</p><p>two</p>"
    assert found(result(written={"r.html": page}), result(written={"r.html": page.replace("two", "three")})) == [
        ("written.r.html.text:4", "<p>two", "<p>three")
    ]


def test_where_and_when_it_ran_are_no_differences() -> None:
    old = result("at /scratch/golden-aaaaaaaa/\n12345678/out on 2026-11-22 19:40\n")
    new = result(
        "at /scratch/golden-bbbbbbbb/\n12345678/out on 2026-11-23 07:01\n", folder="/scratch/golden-bbbbbbbb/12345678"
    )
    assert not found(old, new)


def test_of_a_measured_case_what_must_repeat_is_compared() -> None:
    line = {"step": 3, "loss": 4.5, "step_s": 0.1, "memory_bytes": 7, "config": {"batch_size": 4}}
    other = {**line, "step_s": 0.2, "memory_bytes": 9}
    texts = [json.dumps(one) + "\n" for one in (line, other, {**other, "loss": 4.6}, {**other, "config": {}})]
    runs = [result("took 3.2 s\n", {"metrics.jsonl": text}) for text in texts]
    assert not found(runs[0], runs[1], measured=True)
    assert found(runs[0], runs[2], measured=True) == [("written.metrics.jsonl.text[0].loss", "4.5", "4.6")]
    assert len(found(runs[0], runs[3], measured=True)) == 1
    assert len(found(runs[0], runs[1])) == 2
    assert not found(result("took 3.2 s"), result("took 140 ms"), measured=True)
    assert found(result("took 3.2 s"), result("needs 3.2 s"), measured=True)


def test_what_a_busy_machine_adds_to_a_run_is_left_out() -> None:
    quiet = result("saved step-4\nstep 4/8  val loss 3.2\n", {"events.jsonl": '{"id": "saved"}\n{"id": "resumed"}\n'})
    told = "busy machine: others\nstep 4/8  val loss 3.1\nsaved step-5\n"
    busy = result(told, {"events.jsonl": '{"id": "machine_busy"}\n{"id": "resumed"}\n{"id": "saved"}\n'})
    assert not found(quiet, busy, measured=True)
    assert found(quiet, result("step 4/8  val loss 3.2\n", {"events.jsonl": '{"id": "resumed"}\n'}), measured=True)


def test_declared_change_passes_and_a_needless_one_fails() -> None:
    changes = [
        Difference("plan a", "steps[0].stdout:3", "old words", "new words"),
        Difference("plan b", "x.y", "1", "2"),
    ]
    words = Declared("plan", r"stdout", "a sentence was shortened", old="old", new="new")
    assert judged(changes, ()) == (changes, [])
    assert judged(changes, (words,)) == (changes[1:], [])
    unneeded = Declared("report", "", "nothing of it is left")
    assert judged(changes, (words, unneeded)) == (changes[1:], [unneeded])
    assert judged(changes, (Declared("plan", "stdout", "other words", new="newer"),))[0] == changes


def test_cases_have_one_name_each_and_a_quick_part_of_every_kind() -> None:
    cases = listed()
    assert len({one.name for one in cases}) == len({digest(one) for one in cases}) == len(cases) > 300
    assert {"plan", "advise", "compare", "explain", "report", "help", "error:"} <= {
        one.command for one in cases if one.quick
    }
    assert all(isinstance(one, Case) and one.steps for one in cases)


def test_every_kind_of_run_is_asked_about() -> None:
    words = [{word for step in one.steps for word in step.words} for one in listed()]
    paths = {request[1] for one in listed() for step in one.steps for request in step.requests}
    for option in ("--method", "--gpus", "--inference"):
        assert sum(any(word.partition("=")[0] == option for word in each) for each in words) > 15, option
    assert {f"/api/{what}" for what in ("plan", "cards", "read", "exact", "advice", "form")} <= paths


def test_a_case_that_changes_is_run_again() -> None:
    assert digest(case("plan x", "plan baby")) != digest(case("plan x", "plan baby --json"))


def test_figures_may_shift_by_a_share_and_nothing_else_may() -> None:
    assert shifted("needs 10.83 GiB (10.56–11.86)", "needs 10.84 GiB (10.57–11.86)", 0.0)  # a last digit
    assert shifted("11,215,568,896 bytes", "11,216,617,472 bytes", 0.001)
    assert not shifted("11,215,568,896 bytes", "11,316,617,472 bytes", 0.001)
    assert not shifted("needs 10.83 GiB", "needs 10.83 MiB", 0.5)
    assert not shifted("fits with 3", "does not fit with 3", 0.5)
    meant = Declared(case="plan", path="", reason="another replay", figures=0.01)
    assert meant.allows(Difference("plan", "stdout:3", "1.00e+12", "1.005e+12"))
    assert not meant.allows(Difference("plan", "stdout:3", "1.00e+12", "1.005e+13"))
