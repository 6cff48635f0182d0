"""Experts that get what a router gives them: the ends of a trace are what is really allocated at both of them."""

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from foretrain.base.units import MIB
from foretrain.model import allocated
from foretrain.predict.trace.kernels.choices import PICKED, SPLIT
from foretrain.predict.trace.session import Tracing, trace, tracing

TOKENS, WIDTH, EXPERTS, EACH = 2048, 64, 8, 2
Call = Callable[[Tensor, Tensor, nn.ModuleList], Tensor]


def by_one_hot(x: Tensor, chosen: Tensor, experts: nn.ModuleList) -> Tensor:
    mask, out = F.one_hot(chosen, num_classes=EXPERTS).permute(2, 1, 0), torch.zeros_like(x)
    for number, expert in enumerate(experts):
        _, rows = torch.where(mask[number])
        out.index_add_(0, rows, expert(x[rows]))
    return out


def by_experts_hit(x: Tensor, chosen: Tensor, experts: nn.ModuleList) -> Tensor:
    """As its later versions: only experts that have tokens."""
    mask, out = F.one_hot(chosen, num_classes=EXPERTS).permute(2, 1, 0), torch.zeros_like(x)
    for number in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
        _, rows = torch.where(mask[number].squeeze(0))
        out.index_add_(0, rows, experts[int(number)](x[rows]))
    return out


def by_mask(x: Tensor, chosen: Tensor, experts: nn.ModuleList) -> Tensor:
    out = torch.zeros_like(x)
    for number, expert in enumerate(experts):
        mask = (chosen == number).any(-1)
        if mask.any():
            out[mask] = out[mask] + expert(x[mask])
    return out


def by_count(x: Tensor, chosen: Tensor, experts: nn.ModuleList) -> Tensor:
    return by_parts(x, chosen, experts, torch.bincount(chosen.flatten(), minlength=EXPERTS))


def by_scattered_count(x: Tensor, chosen: Tensor, experts: nn.ModuleList) -> Tensor:
    """As JetMoE in transformers: a row of zeros and ones for each token, and their sums."""
    gates = torch.zeros(TOKENS, EXPERTS).to(x.device).scatter(1, chosen, 1)
    return by_parts(x, chosen, experts, gates.long().sum(0))


def by_parts(x: Tensor, chosen: Tensor, experts: nn.ModuleList, counts: Tensor) -> Tensor:
    order = chosen.flatten().argsort()
    parts = x[order // EACH].split(counts.tolist())
    found = [expert(part) for expert, part in zip(experts, parts, strict=True)]
    return torch.zeros_like(x).index_add(0, order // EACH, torch.cat(found))


def by_sum_of_counts(x: Tensor, chosen: Tensor, experts: nn.ModuleList) -> Tensor:
    """As DeepSeek's code: where each expert's tokens end."""
    out, start = torch.zeros_like(x), 0
    order = chosen.flatten().argsort()
    for number, end in enumerate(torch.bincount(chosen.flatten(), minlength=EXPERTS).cumsum(0).tolist()):
        if start < end:
            rows = order[start:end] // EACH
            out.index_add_(0, rows, experts[number](x[rows]))
        start = end
    return out


def by_weights(x: Tensor, chosen: Tensor, experts: nn.ModuleList) -> Tensor:
    """A row of zeros and ones for each token."""
    mask, out = torch.zeros(TOKENS, EXPERTS).to(x.device).scatter_(1, chosen, 1.0), torch.zeros_like(x)
    for number, expert in enumerate(experts):
        rows = mask[:, number].nonzero().squeeze(-1)
        out.index_add_(0, rows, expert(x[rows]))
    return out


WAYS = (by_one_hot, by_experts_hit, by_mask, by_count, by_scattered_count, by_sum_of_counts, by_weights)


def scores(even: bool) -> Tensor:
    """Each token's two experts are its number's and the next, or always the first two."""
    first = torch.arange(TOKENS) % EXPERTS if even else torch.zeros(TOKENS, dtype=torch.int64)
    return 2 * F.one_hot(first, EXPERTS).float() + F.one_hot((first + 1) % EXPERTS, EXPERTS)


def step(way: Call, given: Tensor, rows: list[int]) -> None:
    experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 256), nn.GELU(), nn.Linear(256, WIDTH)) for _ in range(8))
    for expert in experts:
        expert.register_forward_pre_hook(lambda module, inputs: rows.append(inputs[0].shape[0]))
    chosen = given.topk(EACH, dim=-1)[1]
    way(torch.ones(TOKENS, WIDTH), chosen, experts).square().mean().backward()


@pytest.mark.parametrize("even", [True, False], ids=["even", "to the first"])
@pytest.mark.parametrize("way", WAYS)
def test_both_ends_are_what_a_run_really_allocates(way: Call, even: bool) -> None:
    """On the CPU, whose allocator can be asked: routed evenly, and all to the first experts."""
    traced: list[int] = []
    with tracing(None, compiled=False, upper=not even) as session:
        step(way, scores(even), traced)
    given, real = scores(even), list[int]()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        step(way, given, real)
    assert [each for each in traced if each] == [each for each in real if each]
    assert sum(traced) == EACH * TOKENS
    peak = max(peak for peak, _ in session.tracer.record.finish().peaks().values())
    assert peak == pytest.approx(allocated.peaks_of(run)[0] + given.nbytes, rel=0.02)
    assert session.tracer.ranges == {SPLIT}
    assert session.tracer.values.notes() == []


def test_the_answer_has_both_ends_and_says_which() -> None:
    def code(on: Tracing) -> None:
        with torch.device(on.device):
            step(by_one_hot, torch.empty(TOKENS, EXPERTS), [])

    found = trace(code)
    assert found.notes == (SPLIT,)
    assert found.peak_allocated_bytes < found.high.peak_allocated_bytes
    assert re.search(r" to .* allocated", str(found))


def test_of_any_other_mask_the_ends_are_one_row_and_all() -> None:
    def code(on: Tracing) -> None:
        logits = torch.empty(1024, 4096, device=on.device, requires_grad=True)
        targets = torch.randint(0, 4096, (1024,), device=on.device)
        kept = targets != 7
        F.cross_entropy(logits[kept], targets[kept]).backward()

    found = trace(code)
    assert found.notes == (PICKED,)
    # 16 MiB each: logits, their gradient, and at the upper end those picked, their log-probabilities and gradients.
    assert found.peak_allocated_bytes // MIB in range(32, 50)
    assert found.high.peak_allocated_bytes // MIB in range(64, 82)


def test_masks_that_are_known_are_no_range() -> None:
    def code(on: Tracing) -> None:
        x = torch.empty(64, 8, device=on.device)
        assert x[torch.ones(64, dtype=torch.bool, device=on.device)].shape == (64, 8)
        assert x[torch.zeros(64, dtype=torch.bool, device=on.device)].shape == (0, 8)
        assert x.masked_select(torch.ones(64, 1, dtype=torch.bool, device=on.device)).shape == (512,)
        assert [int(row) for row in torch.ones(3, device=on.device).nonzero()] == [0, 1, 2]
        x[torch.ones(64, dtype=torch.bool, device=on.device)] = 0

    assert (trace(code).notes, trace(code).high) == ((), None)
