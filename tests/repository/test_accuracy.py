"""The record of predicted against measured: the table is well formed, kept predictions survive, bad input is one sentence."""

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from benchmarks.accuracy import __main__ as program
from benchmarks.accuracy import checkouts, predict, results, table
from foretrain.hardware.catalogue import find
from foretrain.predict.trace.record import Recorder

DATA = json.loads(table.CASES.read_text("utf-8"))
TABLE = table.read()
WITH = {"foretrain": "0.1.0", "commit": "abc", "torch": "2.13.0", "python": "3.11", "date": "2026-11-22"}


@pytest.mark.parametrize("case", TABLE.cases, ids=lambda case: case.id)
def test_case(case: table.Case) -> None:
    assert find(case.gpu).name == case.gpu
    assert case.program == "plan" or (results.PROGRAMS / f"{case.program}.py").is_file()
    assert case.program in ("plan", "single_ops") or case.checkouts, "whose program is it?"
    assert all(checkout.split("@")[0] in case.source for checkout in case.checkouts[:1])
    for figure in case.figures:
        assert any(character.isdigit() for character in figure.quote)
        assert (figure.kind in ("step time", "tokens/s", "out of memory")) or case.program != "plan"
        assert figure.kind != "out of memory" or figure.reads.startswith("fits ")


def test_collected_figure_is_predicted_or_has_a_reason_if_not() -> None:
    taken = {figure.id.partition("/")[0] for case in TABLE.cases for figure in case.figures}
    assert len(taken) + sum(row.count for row in TABLE.left_out) == TABLE.collected
    assert all(row.why for row in TABLE.left_out)


def test_sixty_memory_figures_of_single_gpus_can_be_predicted() -> None:
    memory = [f for case in TABLE.cases for f in case.figures if table.KINDS[f.kind] == "memory"]
    assert len(memory) >= 60


@pytest.mark.parametrize(
    ("change", "figure", "says"),
    [
        ({"id": "../up"}, {}, "id"), ({"program": "../theirs"}, {}, "program"), ({"checkouts": ["a/b"]}, {}, "checkouts"),
        ({"settings": []}, {}, "settings"), ({"grade": "S"}, {}, "grade"), ({}, {"measured": "7 GB"}, "measured"),
        ({}, {"measured": 0}, "is not a figure of kind"), ({}, {"unit": "GB"}, "unit"), ({}, {"quote": ""}, "quote"),
        ({}, {"id": "cs-n-002"}, "names one thing"),
    ],
)  # fmt: skip
def test_a_bad_table_is_refused(tmp_path: Path, change: dict[str, Any], figure: dict[str, Any], says: str) -> None:
    data = {**DATA, "cases": [copy.deepcopy(DATA["cases"][0])]}
    data["cases"][0] |= change
    data["cases"][0]["figures"][0].update(figure)
    path = tmp_path / "cases.json"
    path.write_text(json.dumps(data), "utf-8")
    with pytest.raises(ValidationError, match=says):
        table.read(path)


def test_a_missing_checkout_is_said(tmp_path: Path) -> None:
    with pytest.raises(checkouts.Missing, match="give --checkouts DIR"):
        checkouts.find("owner/name@1234567", None)
    with pytest.raises(
        checkouts.Missing, match=r"needs a checkout of owner/name at 1234567 in .*, owner\+name or name"
    ):
        checkouts.find("owner/name@1234567", tmp_path)


@pytest.mark.parametrize("place", ["owner/name", "owner+name", "name"])
def test_a_checkout_may_lie_in_three_places(tmp_path: Path, place: str) -> None:
    (tmp_path / place).mkdir(parents=True)
    assert checkouts.find("owner/name@1234567", tmp_path) == (tmp_path / place).resolve()


def test_a_checkout_of_another_commit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "name" / ".git").mkdir(parents=True)
    done = subprocess.CompletedProcess([], 0, "fedcba9876543210\n", "")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: done)
    with pytest.raises(checkouts.Missing, match="is at fedcba9, and the figures are of owner/name at 1234567"):
        checkouts.find("owner/name@1234567", tmp_path)
    assert checkouts.find("owner/name@fedcba9", tmp_path)


def test_a_case_without_its_checkout_is_shown_and_not_dropped() -> None:
    case = TABLE.cases[0]
    found = results.document(TABLE, {}, {case.id: "needs a checkout of x at y"}, {})
    row = found["cases"][0]
    assert row["state"] == "needs a checkout of x at y"
    assert [figure["measured"] for figure in row["figures"]] == [figure.value for figure in case.figures]
    assert found["predicted"] == 0
    assert found["summary"] == []


def figure_of(kind: Any, measured: float, unit: Any, reads: str) -> table.Figure:
    return table.Figure(id="a", kind=kind, measured=measured, unit=unit, reads=reads, quote=f"{measured} {unit}")


def test_an_error_is_positive_where_too_much_is_predicted() -> None:
    figure = figure_of("allocated", 2.0, "GiB", "peak")
    assert results.figure_row(figure, {"peak": 3 * 2**30})["error"] == 0.5
    late = figure_of("step time", 200, "ms", "step")
    row = results.figure_row(late, {"step": {"low": 0.1, "expected": 0.15, "high": 0.19}})
    assert row["error"] == pytest.approx(-0.25)
    assert row["inside"] is False
    full = figure_of("out of memory", 0, "OOM", "fits 16")
    assert results.figure_row(full, {"fits 16": True})["right"] is False
    assert results.figure_row(full, {"fits 16": False})["right"] is True


def test_same_means_in_all_published_digits() -> None:
    rounded = figure_of("allocated", 18.053, "GiB", "peak")
    assert rounded.same(18.0534 * 2**30)
    assert not rounded.same(18.0541 * 2**30)
    whole = figure_of("requested", 7013335044, "B", "peak")
    assert whole.same(7013335044)
    assert not whole.same(7013335045)


def test_a_phase_says_its_peaks_and_what_was_there_before_it() -> None:
    """Also where an empty phase begins at the same event."""
    recorder = Recorder()
    weights = recorder.alloc(1000, "empty", "", (1000,), "uint8")
    recorder.phase("nothing")
    recorder.phase("recorded")
    recorder.free(recorder.alloc(3000, "empty", "", (3000,), "uint8"))
    said = predict.by_phase(recorder.finish())
    assert weights == 0
    assert said["at rest/recorded"] == said["at rest/nothing"] == 1024
    assert said["requested/recorded"] == 4000
    assert said["allocated/recorded"] == said["allocated"] == 1024 + 3072
    assert said["reserved"] == 2 * 2**20


def test_an_explanation_is_no_part_of_the_prediction() -> None:
    """The reasons named for a difference, and the measured figures, never reach what predicts."""
    case = next(case for case in TABLE.cases if any(figure.named for figure in case.figures))
    figures = [f.model_copy(update={"measured": 2 * f.measured, "named": "another reason"}) for f in case.figures]
    assert results.fingerprint(case.model_copy(update={"figures": figures})) == results.fingerprint(case)
    other = case.model_copy(update={"settings": {**case.settings, "more": 1}})
    assert results.fingerprint(other) != results.fingerprint(case)
    said = {figure.reads: 5 for figure in case.figures}
    assert all(results.figure_row(figure, said)["predicted"] == 5 for figure in case.figures)


def test_stop_keeps_predictions_and_the_next_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "accuracy.json"
    asked: list[str] = []
    first, second = [case.id for case in TABLE.cases if case.program == "single_ops"][:2]

    def said_of(case: table.Case, folder: Path | None) -> dict[str, Any]:
        asked.append(case.id)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return {"said": {"peak": 4096}}

    monkeypatch.setattr(program, "prediction_of", said_of)
    monkeypatch.setattr(program, "commit", lambda: "")
    monkeypatch.setattr(sys, "argv", ["accuracy", "--out", str(out), "--only", first, second])
    with pytest.raises(KeyboardInterrupt):
        program.main()
    assert list(results.read(out)) == [first]
    assert program.main() == 0
    assert asked == [first, second, second]
    assert set(results.read(out)) == {first, second}
    assert not [path for path in tmp_path.iterdir() if path != out]


def test_a_result_does_not_say_where_the_checkouts_lie() -> None:
    said = predict.without_places(
        {"allocated/since /a/b/owner+name/x.py:3": 5, "notes": ["/a/b/owner+name/y.py:1: …"]}, [Path("/a/b/owner+name")]
    )
    assert said == {"allocated/since owner+name/x.py:3": 5, "notes": ["owner+name/y.py:1: …"]}
