"""The contract of every technique: it does what its record says, alone and beside every other one."""

from itertools import combinations

import pytest
import torch

from foretrain.config.checks import check
from foretrain.config.options import RunConfig
from foretrain.hardware.catalogue import find
from foretrain.model.step import build, train_step
from foretrain.model.techniques import TECHNIQUES, Technique, combinable
from foretrain.predict.memory import predict
from foretrain.predict.trace import worker
from foretrain.predict.trace.service import Request
from tests.helpers import tiny
from tests.test_master_weights import batches

CPU, GPU = torch.device("cpu"), find("RTX 4070")
EAGER = [technique for technique in TECHNIQUES if not technique.needs_compile]
COMPILED = [technique for technique in TECHNIQUES if technique.needs_compile]
REFERENCE = RunConfig(
    n_layer=3, n_head=4, n_embd=256, block_size=256, vocab_size=4096, batch_size=8, gradient_accumulation_steps=2
)


def by_id(technique: Technique) -> str:
    return technique.id


def traced_peak(config: RunConfig, *, compiled: bool) -> int:
    trace = worker.trace(Request(config, GPU, "bfloat16", "foretrain", compiled).job())
    return max(peak for peak, _ in trace.peaks().values())


def losses(config: RunConfig, dtype: torch.dtype = torch.float32, steps: int = 4) -> list[float]:
    state = build(config, CPU, dtype, compile=False)
    return [float(train_step(state, batches(config, step), 3e-3).loss) for step in range(steps)]


@pytest.mark.parametrize("technique", EAGER, ids=by_id)
def test_the_traced_peak_falls(technique: Technique) -> None:
    base = REFERENCE.model_copy(update=technique.reference)
    assert traced_peak(technique.applied(base), compiled=False) < 0.99 * traced_peak(base, compiled=False)


@pytest.mark.slow
@pytest.mark.parametrize("technique", TECHNIQUES, ids=by_id)
def test_the_traced_peak_falls_compiled(technique: Technique) -> None:
    base = REFERENCE.model_copy(update=technique.reference)
    assert traced_peak(technique.applied(base), compiled=True) < 0.99 * traced_peak(base, compiled=True)


@pytest.mark.parametrize("technique", EAGER, ids=by_id)
def test_losses_are_unchanged_where_it_says_so(technique: Technique) -> None:
    plain, found = losses(tiny()), losses(technique.applied(tiny()))
    if technique.exactness == "exact":
        assert found == pytest.approx(plain, rel=1e-6)
    elif technique.exactness == "rounding":
        assert found == plain  # in fp32 there is nothing to round
        half = losses(technique.applied(tiny()), torch.bfloat16)
        assert half == pytest.approx(plain, rel=0.01)
    else:
        assert found[0] == plain[0]
        assert found[1:] != plain[1:]


PAIRS = [pair for pair in combinations(EAGER, 2) if combinable(*pair)]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0].id}+{pair[1].id}")
def test_it_works_with_every_other(pair: tuple[Technique, Technique]) -> None:
    config = pair[1].applied(pair[0].applied(tiny()))
    found = losses(config, steps=2)
    exact = [technique for technique in pair if technique.exactness != "other optimizer"]
    alone = losses(tiny() if len(exact) == 2 else next(t for t in pair if t not in exact).applied(tiny()), steps=2)
    assert found == pytest.approx(alone, rel=1e-5)


def test_what_cannot_go_together_is_refused_with_a_sentence() -> None:
    """Those that share a knob cannot be written down together; the others must be refused."""
    for a, b in combinations(TECHNIQUES, 2):
        shared = {knob for knob in a.knobs.keys() & b.knobs.keys() if a.knobs[knob] != b.knobs[knob]}
        config, problems = check({**a.knobs, **b.knobs}, {})
        nested = {a.id, b.id} == {"activation_checkpointing", "checkpointed_blocks"}
        if combinable(a, b) or shared or nested:
            assert config is not None, (a.id, b.id, problems)
        else:
            assert problems, (a.id, b.id)


@pytest.mark.parametrize("technique", EAGER, ids=by_id)
def test_the_ledger_knows_it(technique: Technique) -> None:
    config = technique.applied(REFERENCE.model_copy(update=technique.reference))
    ledger = predict(config, GPU, "bfloat16", "foretrain", compiled=False, available_bytes=None)
    peak = max(phase.tensors_bytes for phase in ledger.phases if phase.phase != "resume")
    assert peak == pytest.approx(traced_peak(config, compiled=False), rel=0.005)


def test_compiled_ones_say_where_the_ledger_does_not_know_them() -> None:
    """The auto_chunker is estimated, but not in the modern recipe."""
    from foretrain.predict.plan import plan

    said = {t.id: any(n.id == "compile_not_modelled" for n in plan(t.applied(REFERENCE), GPU).notes) for t in COMPILED}
    assert said == {t.id: t.id != "auto_chunker" for t in COMPILED}
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
    from foretrain.hardware.cpu import cpu_device
    from foretrain.predict.plan import plan
    from foretrain.training.device import place

    config = tiny(**knobs, dtype=dtype)
    made = plan(config, cpu_device() if gpu == "cpu" else find(gpu))
    assert any(note.id == "no_effect_here" for note in made.notes) == idle
    if gpu == "cpu":
        assert any(id == "no_effect_here" for id, _ in place(config).notes) == idle
