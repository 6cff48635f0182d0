"""Published formulas beside measured peaks: each is its source's, and the record is of today's table."""

import json
from collections.abc import Callable

import pytest

from benchmarks.accuracy import calculators, table
from benchmarks.accuracy.calculators import GPT2, LARGE, NIU, Shape
from benchmarks.common import RESULTS

GIB = 2**30
# nanoGPT's GPT-2 124M at micro-batch 12, about which the programs themselves were asked.
ASKED = Shape(12, 768, 12, 3072, 50_304, 1024, 12, linears=2, mixed=True)
TIED = 50_304 * 768  # weights that are not there twice


def test_the_cookbooks_formula_is_the_one_that_its_program_ran() -> None:
    assert calculators.cookbook(ASKED) / GIB == pytest.approx(14.76, abs=0.01)


@pytest.mark.parametrize(
    ("says", "mixed", "told_gib"),  # by accelerate 1.15.0 in float32 and float16, and by deepspeed 0.19.8
    [(calculators.accelerate, False, 1.85), (calculators.accelerate, True, 0.93), (calculators.deepspeed, True, 2.32)],
)
def test_a_formula_says_what_its_program_said(says: Callable[[Shape], float], mixed: bool, told_gib: float) -> None:
    """Of the weights that the program was given, which were tied."""
    run = ASKED._replace(mixed=mixed)
    assert says(run) / run.parameters * (run.parameters - TIED) / GIB == pytest.approx(told_gib, abs=0.01)


def test_megatrons_formula_by_hand() -> None:
    """One layer of width 2, worked out on paper."""
    run = Shape(1, 2, 1, 8, 10, 4, 3, linears=2)
    weights = (2 * 2 * (8 + 1) + 4 * 4) + 2 + 2 * 10 * 2
    activations = 12 * 2 * 34 + 8 * 12 + 24 + 2 * (120 + 24)
    assert calculators.megatron(run) == pytest.approx(18 * weights + 1.05 * activations)


@pytest.mark.parametrize(("run", "parameters"), [(NIU, 22_696_448), (LARGE, 3_406_809_600), (GPT2, 162_991_872)])
def test_shapes_have_the_weights_of_their_programs(run: Shape, parameters: int) -> None:
    assert run.parameters == pytest.approx(parameters, rel=1e-3)


def test_the_record_is_that_of_the_kept_predictions() -> None:
    record = json.loads(calculators.OUT.read_text("utf-8"))
    accuracy = json.loads((RESULTS / "accuracy.json").read_text("utf-8"))
    assert record["rows"] == json.loads(json.dumps(calculators.rows(accuracy["cases"])))
    assert (
        {row["case"] for row in record["rows"]} == set(calculators.SHAPES) <= {case.id for case in table.read().cases}
    )
    ours, *others = record["summary"]
    assert ours["calculator"] == "foretrain"
    assert all(one["figures"] == ours["figures"] for one in others)
