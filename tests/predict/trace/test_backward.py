"""What backward passes allocate, op by op: a trace against PyTorch's CPU allocator, to the byte."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from foretrain.hardware.catalogue import find
from foretrain.model import allocated
from foretrain.predict.trace.card.torch_cuda import Card
from foretrain.predict.trace.kernels import temporaries as kernels
from foretrain.predict.trace.session import tracing

N = 256


def weight(*shape: int) -> Tensor:
    return torch.ones(*(shape or (N, N))).requires_grad_()


def ids(*shape: int) -> Tensor:
    return torch.zeros(*(shape or (N,)), dtype=torch.int64)


def of_one_pass(x: Tensor) -> Tensor:
    return x.max(dim=1)[0].square()


def twice(x: Tensor) -> None:
    (gradient,) = torch.autograd.grad(of_one_pass(x).sum(), x, create_graph=True)
    torch.autograd.grad(gradient.sum(), x)


# Under a mode PyTorch takes the out-of-place form of what these write: scatter, scatter_add, index_put, put.
IN_PLACE: dict[str, Callable[[], Tensor]] = {
    "max of rows": lambda: of_one_pass(weight()),
    "top": lambda: weight().topk(5, dim=1)[0].square(),
    "median": lambda: weight().median(dim=1)[0].square(),
    "gather": lambda: weight().gather(1, ids(N, N)).square(),
    "along": lambda: torch.take_along_dim(weight(), ids(N, 1), 1).square(),
    "embedding by index": lambda: weight()[ids()].square(),
    "elements": lambda: weight()[torch.arange(N), ids()].square(),
    "take": lambda: weight().take(ids()).square(),
    "checkpointed": lambda: checkpoint(of_one_pass, weight(), use_reentrant=False),
    "checkpointed, reentrant": lambda: checkpoint(of_one_pass, weight(), use_reentrant=True),
}
USUAL: dict[str, Callable[[], Tensor]] = {
    "sort": lambda: weight().sort(dim=1)[0].square(),
    "cumulated": lambda: weight().cumsum(1).square(),
    "scattered": lambda: weight().scatter(1, ids(N, N), weight()).square(),
    "scattered sums": lambda: weight().scatter_add(1, ids(N, N), weight()).square(),
    "index_select": lambda: weight().index_select(0, ids()).square(),
    "index_put": lambda: weight().index_put((ids(),), weight(), accumulate=True).square(),
    "masked": lambda: weight().masked_fill(torch.ones(N, N, dtype=torch.bool), 0.0).square(),
    "where": lambda: torch.where(torch.ones(N, N, dtype=torch.bool), weight(), weight()).square(),
    "norms": lambda: weight().norm(dim=1).square(),
    "normalized": lambda: F.normalize(weight()).square(),
    "logsumexp": lambda: weight().logsumexp(1).square(),
    "variance": lambda: weight().var(1).square(),
    "slice": lambda: weight()[:, :10].square(),
    "rolled": lambda: weight().roll(1, 0).square(),
    "repeated": lambda: weight().repeat_interleave(2, 0).square(),
    "padded": lambda: F.pad(weight(), (1, 1)).square(),
    "stacked": lambda: torch.stack([weight(), weight()]).square(),
    "einsum": lambda: torch.einsum("btd,hdk->bhtk", weight(4, 64, 64), weight(4, 64, 16)).square(),
    "rms_norm": lambda: F.rms_norm(weight(), (N,), weight(N)).square(),
    "group_norm": lambda: F.group_norm(weight(4, 16, 32, 32), 4, weight(16), weight(16)).square(),
    "glu": lambda: F.glu(weight()).square(),
    "interpolated": lambda: F.interpolate(weight(1, 4, 64, 64), scale_factor=2.0, mode="bilinear").square(),
    "loss of smoothed labels": lambda: F.cross_entropy(weight(), ids(), label_smoothing=0.1),
}

# Some are one op to a trace and make the loss of each element first; some keep its memory under their result.
LOSSES: dict[str, Callable[[], Tensor]] = {
    "mse": lambda: F.mse_loss(weight(), torch.ones(N, N)),
    "mse, summed": lambda: F.mse_loss(weight(), torch.ones(N, N), reduction="sum"),
    "two that are kept": lambda: F.mse_loss(weight(), torch.ones(N, N)) + F.mse_loss(weight(), torch.ones(N, N)),
    "each element": lambda: F.mse_loss(weight(), torch.ones(N, N), reduction="none").sum(),
    "smooth l1": lambda: F.smooth_l1_loss(weight(), torch.ones(N, N)),
    "huber": lambda: F.huber_loss(weight(), torch.ones(N, N)),
    "l1": lambda: F.l1_loss(weight(), torch.ones(N, N)),
    "bce": lambda: F.binary_cross_entropy(weight(), torch.ones(N, N)),
    "bce of logits": lambda: F.binary_cross_entropy_with_logits(weight(), torch.ones(N, N)),
    "kl": lambda: F.kl_div(weight(), torch.ones(N, N), reduction="batchmean"),
}
FORWARD: dict[str, Callable[[], object]] = {
    "count": lambda: (torch.ones(N, N) > 0).sum(),
    "sum of integers": lambda: torch.ones(N, N, dtype=torch.int32).sum(1),
    "logsumexp": lambda: torch.ones(N, N).logsumexp(1),
}
# Gradients that the engine adds in place, and some that it may not: two of one memory, or held elsewhere.
SUMS: dict[str, Callable[[Tensor], Tensor]] = {
    "two": lambda x: (x.tanh() * 2) + (x.sigmoid() * 2),
    "four": lambda x: (x.tanh() + x.sigmoid() + x.exp() + x.sin()) * 2,
    "one passed on": lambda x: (x + x.tanh()) * 2,
    "two views": lambda x: (x.view(-1).tanh() + x.view(-1).sigmoid()) * 2,
    "transposed": lambda x: (x @ x.t()) * 2,
    "outer": lambda x: torch.outer(x[0], x[0]) * 2,
    "slices": lambda x: torch.cat([x[:, :64] * 2, x[:, 64:128] * 3, x[:, 128:] * 4], 1) * 2,
    "of rows": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * 2,
}
SCALARS_BYTES = 32  # a mean's count, on a CPU


def peaks(code: Callable[[], object]) -> tuple[int, int]:
    """(traced, real) of what the code makes."""
    with tracing(None, compiled=False) as session:
        code()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        code()
    return max(peak for peak, _ in session.tracer.record.finish().peaks().values()), allocated.peaks_of(run)[1]


def made_bytes(code: Callable[[], object]) -> tuple[int, int]:
    """(traced, real) bytes of all large tensors that the code makes, without what a matrix product takes for itself."""
    with tracing(None, compiled=False) as session:
        code()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        code()
    traced = [a.nbytes for a in session.tracer.record.finish().allocations]
    real = allocated.sizes(run)[1]
    large = lambda sizes: sum(size for size in sizes if size > SCALARS_BYTES)  # noqa: E731
    return large(traced), large(real)


@pytest.mark.parametrize("name", [*IN_PLACE, *USUAL])
def test_a_backward_pass_takes_what_the_real_allocator_says(name: str) -> None:
    make = {**IN_PLACE, **USUAL}[name]
    traced, real = peaks(lambda: make().sum().backward())
    assert traced == real


@pytest.mark.parametrize("name", SUMS)
def test_sums_of_gradients_are_in_place_where_the_engine_sums_so(name: str) -> None:
    """All that is made, not the peak alone, which a sum that is made anew need not raise."""
    traced, real = made_bytes(lambda: SUMS[name](weight() * 1).sum().backward())
    assert traced == real


def test_a_gradient_of_a_gradient_takes_it_too() -> None:
    traced, real = peaks(lambda: twice(weight()))
    assert traced == real


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_takes_what_the_real_allocator_says(name: str) -> None:
    for code in (LOSSES[name], lambda: LOSSES[name]().backward()):
        traced, real = peaks(code)
        assert 0 <= real - traced <= SCALARS_BYTES


@pytest.mark.parametrize("name", FORWARD)
def test_a_reduction_takes_what_the_real_allocator_says(name: str) -> None:
    traced, real = peaks(FORWARD[name])
    assert 0 <= real - traced <= SCALARS_BYTES


@pytest.mark.parametrize(("op", "nbytes"), [("max", 164_626_432), ("sum", 164_626_432 // 4)])
def test_the_buffers_of_reductions_are_those_that_were_recorded(op: str, nbytes: int) -> None:
    """An RTX 4090's history of torch.max(dim=-1) over transposed logits of 512 tokens (gpu-truth results, 5)."""
    logits = torch.empty(10_000, 512, device="meta").t()
    buffer, semaphores = kernels.RULES[op](Card.of(find("RTX 4090")), (logits, -1))
    assert (buffer, semaphores) == (nbytes, 16)
    assert kernels.RULES[op](Card.of(find("RTX 4090")), (logits.contiguous(), -1)) == []
