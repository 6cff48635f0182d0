"""The contract of every technique: it does what its record says, alone and beside every other one."""

import subprocess
import sys
from itertools import combinations

import pytest

from foretrain.config.checks import check
from foretrain.hardware.catalogue import find
from foretrain.hardware.cpu import cpu_device
from foretrain.model.techniques import TECHNIQUES, Technique
from foretrain.predict.plan import plan
from foretrain.training.device import place
from tests.kit.techniques import (
    GPU,
    REFERENCE,
    assert_it_works_with_every_other,
    assert_losses_are_unchanged_where_it_says_so,
    assert_the_ledger_knows_it,
    assert_the_traced_peak_falls,
    combinable,
    reference,
    traced_peak,
)
from tests.kit.tiny import tiny

EAGER = [technique for technique in TECHNIQUES if not technique.needs_compile]
COMPILED = [technique for technique in TECHNIQUES if technique.needs_compile]


def by_id(technique: Technique) -> str:
    return technique.id


@pytest.mark.slow
@pytest.mark.parametrize("technique", TECHNIQUES, ids=by_id)
def test_the_traced_peak_falls_compiled(technique: Technique) -> None:
    base = reference(technique)
    assert traced_peak(technique.applied(base), compiled=True) < 0.99 * traced_peak(base, compiled=True)


PAIRS = [pair for pair in combinations(EAGER, 2) if combinable(*pair)]


@pytest.mark.parametrize("technique", EAGER, ids=by_id)
def test_the_traced_peak_falls(technique: Technique) -> None:
    assert_the_traced_peak_falls(technique)


@pytest.mark.parametrize("technique", EAGER, ids=by_id)
def test_losses_are_unchanged_where_it_says_so(technique: Technique) -> None:
    assert_losses_are_unchanged_where_it_says_so(technique)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0].id}+{pair[1].id}")
def test_it_works_with_every_other(pair: tuple[Technique, Technique]) -> None:
    assert_it_works_with_every_other(pair)


@pytest.mark.parametrize("technique", EAGER, ids=by_id)
def test_the_ledger_knows_it(technique: Technique) -> None:
    assert_the_ledger_knows_it(technique)


# Pairs that cannot be switched on together, and the rule that says so; None: one option has one value.
APART = {
    ("optimizer_in_backward", "master_weights"): "config.excluded",
    ("optimizer_in_backward", "adamw8bit"): "config.in_backward_step",
    ("optimizer_in_backward", "adamw4bit"): "config.in_backward_step",
    ("optimizer_in_backward", "muon"): "config.in_backward_step",
    ("optimizer_in_backward", "optimizer_offload"): "config.excluded",
    ("optimizer_in_backward", "gradient_offload"): "config.excluded",
    ("chunked_loss", "auto_chunker"): "config.two_chunkers",
    ("auto_chunker", "master_weights"): "config.auto_chunker_with_masters",
    ("recompute_norm_gelu", "activation_checkpointing"): "config.recomputed_twice",
    ("recompute_norm_gelu", "checkpoint_offload"): "config.recomputed_twice",
    ("activation_checkpointing", "checkpointed_blocks"): None,
    ("activation_checkpointing", "checkpoint_offload"): None,
    ("optimizer_offload", "gradient_offload"): None,
    ("adamw8bit", "adamw4bit"): None,
    ("adamw8bit", "muon"): None,
    ("adamw4bit", "muon"): None,
}


def test_what_cannot_go_together_is_refused_with_a_sentence() -> None:
    assert {(a.id, b.id) for a, b in combinations(TECHNIQUES, 2) if not combinable(a, b)} == APART.keys()
    for a, b in combinations(TECHNIQUES, 2):
        _, problems = check({**a.beside, **b.beside, **a.options, **b.options}, {})
        refusal = APART.get((a.id, b.id))
        assert [problem.id for problem in problems] == ([refusal] if refusal else []), (a.id, b.id)


def test_conflicts_are_known_wherever_configs_are_checked() -> None:
    """config/ asks for the rules of techniques itself; nothing else has to be imported before."""
    code = "from foretrain.config.checks import check\nprint(check({'auto_chunker': True, 'loss_chunk_size': 512}, {})[1][0].id)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "config.two_chunkers"


def test_compiled_ones_say_where_the_ledger_does_not_know_them() -> None:
    """Blocks that are compiled one by one are estimated; the auto_chunker is, but not in the modern recipe."""
    said = {t.id: any(n.id == "compile_not_modelled" for n in plan(t.applied(REFERENCE), GPU).notes) for t in COMPILED}
    assert said == {t.id: t.needs_trace and t.id != "auto_chunker" for t in COMPILED}
    modern = REFERENCE.model_copy(update={"recipe": "modern", "compile": True, "auto_chunker": True})
    assert any(note.id == "compile_not_modelled" for note in plan(modern, GPU).notes)


@pytest.mark.parametrize(
    ("knobs", "gpu", "dtype", "idle"),
    [
        ({"optimizer_offload": True}, "cpu", "bfloat16", True), ({"optimizer_offload": True}, "RTX 4070", "bfloat16", False),
        ({"master_weights": True}, "cpu", "float32", True), ({"master_weights": True}, "cpu", "bfloat16", False),
        ({"allocator_settings": "expandable_segments:True"}, "cpu", "float32", True),
        ({"cpu_threads": 1}, "RTX 4070", "bfloat16", True), ({"cpu_threads": 1}, "cpu", "float32", False),
    ],
)  # fmt: skip
def test_what_has_no_effect_is_said(knobs: dict[str, object], gpu: str, dtype: str, idle: bool) -> None:
    config = tiny(**knobs, dtype=dtype)
    made = plan(config, cpu_device() if gpu == "cpu" else find(gpu))
    assert any(note.id == "no_effect_here" for note in made.notes) == idle
    if gpu == "cpu":
        assert any(id == "no_effect_here" for id, _ in place(config).notes) == idle
