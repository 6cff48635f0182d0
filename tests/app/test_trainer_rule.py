"""Whose step an answer means: one rule for the headline, --check, advise, --explain, --largest and the card table."""

import json
from pathlib import Path

import pytest

from foretrain.advice.cards import compared
from foretrain.advice.micro_batch import choose as choose_batch
from foretrain.advice.planner import Planner
from foretrain.advice.rules.base import State
from foretrain.app.plan import Target, make_plan
from foretrain.base.units import GIB
from foretrain.config.microbatches import with_micro_batch
from foretrain.config.options import RunConfig
from foretrain.config.resolve import Trainer, resolve
from foretrain.hardware.catalogue import find
from foretrain.predict.plan import plan
from foretrain.reports.views import plan as plan_view
from tests.kit.command import REPO, foretrain

C = str(REPO / "examples" / "real-cases" / "c.py")  # nanoGPT's step does not fit beside 2.1 GB, foretrain's does
CARD = ("--gpu", "4070", "--used-by-others", "2.1GB")


def planned(*words: str) -> dict:
    return json.loads(foretrain("plan", *words, *CARD, "--json").stdout)


@pytest.mark.parametrize(
    ("words", "step"),
    [
        ([C], "nanogpt"),
        (["gpt2-124m"], "foretrain"),
        ([C, "--batch_size=4", "--compile=false", "--memory_limit=8GiB"], "nanogpt"),
        ([C, "--loss_chunk_size=1024"], "foretrain"),  # nanoGPT refuses it on its command line
        ([C, "--batch_size=auto"], "foretrain"),
        ([C, "own.toml"], "foretrain"),
        (["own.py"], "nanogpt"),  # nanoGPT ignores the line of foretrain's own
    ],
)
def test_the_rule(words: list[str], step: str) -> None:
    Path("own.toml").write_text("batch_size = 4\n")
    Path("own.py").write_text("batch_size = 4\nloss_chunk_size = 1024\n")
    assert resolve(words).step == step


def test_a_guard_before_nanogpt_stops_what_nanogpt_cannot_run() -> None:
    result = foretrain("plan", C, *CARD, "--check", code=3)
    assert "nanoGPT's training step" in result.stderr
    assert "--trainer foretrain" in result.stderr
    assert foretrain("plan", C, *CARD, "--check", "--trainer", "foretrain").returncode == 0
    assert foretrain("plan", C, *CARD, "--check", "--trainer", "nanogpt").returncode == 3


def test_headline_advice_and_limits_mean_the_same_step_as_check() -> None:
    made = planned(C)
    assert made["step"] == made["advice"]["step"] == "nanogpt"
    assert json.loads(foretrain("advise", C, *CARD, "--json").stdout)["step"] == "nanogpt"
    assert json.loads(foretrain("plan", C, *CARD, "--within", "12h", "--json").stdout)["plan"]["step"] == "nanogpt"
    asked = planned(C, "--trainer", "foretrain")
    assert asked["step"] == "foretrain"


def test_the_plan_shows_the_step_that_is_meant_first() -> None:
    nanos, ours = (
        make_plan(resolve(words), Target(find("4070"), 2_100_000_000)) for words in ([C], [C, "--loss_chunk_size=1024"])
    )
    assert [memory.step for memory in nanos.memories] == ["nanogpt", "foretrain"]
    assert (nanos.verdict, ours.verdict) == ("does_not_fit", "fits")
    assert nanos.timing == nanos.nanogpt_timing != nanos.foretrain_timing
    first = plan_view.document(nanos).sections[0].blocks[0]
    assert first.message.values["step"].values["step"].id == "step.nanogpt"  # type: ignore[union-attr]


def test_the_best_of_several_cards_is_of_the_same_step() -> None:
    """None of them fits nanoGPT's step, so none is the cheapest; foretrain's step fits the first."""
    resolved = resolve([C])
    plans = [make_plan(resolved, Target(find("4070"), 2_100_000_000))]
    assert compared(plans).best.cheapest is None
    assert compared([plan.model_copy(update={"step": "foretrain"}) for plan in plans]).best.cheapest == "RTX 4070"


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("step", ["foretrain", "nanogpt"])
def test_memory_is_judged_by_one_rule_everywhere(compiled: bool, step: Trainer) -> None:
    """The replay of the allocator at the limit, for eager steps too: no share of the tensors is added anywhere."""
    gpu, room = find("4070"), 8 * GIB
    config = RunConfig(compile=compiled, gradient_accumulation_steps=40, memory_limit="8GiB")
    chosen = choose_batch(config, gpu, "bfloat16", room, step)
    for batch, fits in ((chosen.config.batch_size, True), (chosen.next_size, False)):
        assert batch is not None
        made = plan(with_micro_batch(config, batch), gpu)
        outcome = Planner().outcome(State(made.config, gpu, step, 0))
        assert (made.verdict_of(step) == "fits") == outcome.fits == fits
        assert made.memory_of(step).needed_bytes == outcome.needed_bytes
    assert chosen.needed_bytes < chosen.next_needed_bytes == outcome.needed_bytes
