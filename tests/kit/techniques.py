"""What every memory technique must do, alone and beside another one."""

from functools import cache

import pytest
import torch

from foretrain.config.checks import check
from foretrain.config.options import RunConfig
from foretrain.hardware.catalogue import find
from foretrain.model.step import build, train_step
from foretrain.model.techniques import Technique
from foretrain.predict.memory import predict
from foretrain.predict.spec import StepSpec
from foretrain.predict.trace import self_test
from foretrain.predict.trace.service import Request
from tests.kit.kernels import learnable_batches
from tests.kit.tiny import tiny

CPU, GPU = torch.device("cpu"), find("RTX 4070")

REFERENCE = RunConfig(
    n_layer=3, n_head=4, n_embd=256, block_size=256, vocab_size=4096, batch_size=8, gradient_accumulation_steps=2,
    cuda_graph="off",  # whose moments are there before the first step, which is this small run's peak
)  # fmt: skip


def combinable(a: Technique, b: Technique) -> bool:
    """Whether two techniques can be switched on together: neither is part of the other, and no rule refuses both."""
    both = {**a.options, **b.options}
    if both != {**b.options, **a.options} or both in (a.options, b.options):
        return False
    return not check({**a.beside, **b.beside, **both}, {})[1]


@cache
def traced_peak(config: RunConfig, *, compiled: bool) -> int:
    trace = self_test.trace(Request(StepSpec.of(config, GPU, dtype="bfloat16", compiled=compiled)).job())
    return max(peak for peak, _ in trace.peaks().values())


def losses(config: RunConfig, dtype: torch.dtype = torch.float32, steps: int = 4) -> list[float]:
    state = build(config, CPU, dtype, compile=False)
    return [float(train_step(state, learnable_batches(config, step), 3e-3).loss) for step in range(steps)]


def reference(technique: Technique) -> RunConfig:
    return REFERENCE.model_copy(update={**technique.reference, **technique.beside})


def assert_the_traced_peak_falls(technique: Technique) -> None:
    base = reference(technique)
    assert traced_peak(technique.applied(base), compiled=False) < 0.99 * traced_peak(base, compiled=False)


def assert_losses_are_unchanged_where_it_says_so(technique: Technique) -> None:
    base = tiny(**technique.beside)
    plain, found = losses(base), losses(technique.applied(base))
    if technique.exactness == "exact":
        assert found == pytest.approx(plain, rel=1e-6)
    elif technique.exactness == "rounding":
        assert found == plain  # in fp32 there is nothing to round
        half = losses(technique.applied(base), torch.bfloat16)
        assert half == pytest.approx(plain, rel=0.01)
    else:
        assert found[0] == plain[0]
        assert found[1:] != plain[1:]


def assert_it_works_with_every_other(pair: tuple[Technique, Technique]) -> None:
    base = tiny(**{**pair[0].beside, **pair[1].beside})
    found = losses(pair[1].applied(pair[0].applied(base)), steps=2)
    exact = [technique for technique in pair if technique.exactness != "other optimizer"]
    alone = losses(base if len(exact) == 2 else next(t for t in pair if t not in exact).applied(base), steps=2)
    assert found == pytest.approx(alone, rel=1e-5)


def assert_the_ledger_knows_it(technique: Technique) -> None:
    config = technique.applied(reference(technique))
    ledger = predict(StepSpec.of(config, GPU, dtype="bfloat16", compiled=False))
    peak = max(phase.tensors_bytes for phase in ledger.phases if phase.phase != "resume")
    assert peak == pytest.approx(traced_peak(config, compiled=False), rel=0.005)
