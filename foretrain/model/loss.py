"""The head and its cross-entropy in chunks of tokens, so that the logits of a micro-batch never exist together.

The forward pass makes the gradients of a chunk while its logits are there; backward only scales them. So nothing is
computed twice, and the hidden states' gradient and the weight's (fp32) are saved instead of logits. The idea is that of
Liger-Kernel and of Cut Your Losses (arXiv:2411.09009). PyTorch's own chunked F.linear_cross_entropy gives a wrong loss
for bfloat16 in torch 2.13, because it sums chunks in bfloat16.

Letters: N tokens of a micro-batch, n tokens of a chunk, C width, V vocabulary.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

IGNORED = -1  # targets of this id count for nothing, as in nanoGPT


def softmax_step_(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum the cross-entropy (nats, fp32) of n x V logits, which become their own gradient in place."""
    x = logits.float()  # no copy if it is fp32
    counts = targets != IGNORED
    column = targets.clamp(min=0).unsqueeze(1)
    x.sub_(x.amax(1, keepdim=True))
    at_target = x.gather(1, column).squeeze(1)
    x.exp_()
    total = x.sum(1)
    loss = ((total.log() - at_target) * counts).sum()
    x.mul_((counts / total).unsqueeze(1))
    if torch.compiler.is_compiling():  # a comparison is fused, a scatter would be its own kernel
        hit = torch.arange(x.shape[1], device=x.device) == column
        x = torch.where(hit, x - counts.unsqueeze(1).float(), x)
    else:
        x.scatter_add_(1, column, counts.unsqueeze(1).float().neg_())
    logits.copy_(x)
    return loss


def _weight_gradient(grad_logits: Tensor, hidden: Tensor) -> Tensor:
    """Return V x C in fp32. CUDA sums in fp32 too, as fp16 needs over many tokens; CPUs have no such kernel."""
    if grad_logits.is_cuda and grad_logits.dtype != torch.float32:
        return torch.mm(grad_logits.t(), hidden, out_dtype=torch.float32)
    return (grad_logits.t() @ hidden).float()


class _Head(torch.autograd.Function):
    """Map hidden (B x T x C, the dtype of the matmuls), weight (V x C), targets (N) to the mean loss, a scalar."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, loss: "ChunkedLoss") -> Tensor:
        low = weight.to(hidden.dtype)
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight, dtype=torch.float32)
        flat, grad_flat = hidden.flatten(0, 1), grad_hidden.flatten(0, 1)
        total = torch.zeros((), device=hidden.device)
        for rows in loss.chunks(targets):
            logits = flat[rows] @ low.t()
            total += loss.softmax_step_(logits, targets[rows])
            torch.mm(logits, low, out=grad_flat[rows])
            grad_weight += _weight_gradient(logits, flat[rows])
            del logits  # before the next chunk's are made
        count = _count(targets)
        # Not save_for_backward: backward scales them in place, so they exist once, and it can run only once.
        ctx.gradients, ctx.count = (grad_hidden, grad_weight), count
        return total / count

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        if ctx.gradients is None:
            raise RuntimeError("the chunked loss can be differentiated once only; set loss_chunk_size = 0")
        (grad_hidden, grad_weight), ctx.gradients = ctx.gradients, None
        scale = grads[0].float() / ctx.count
        return grad_hidden.mul_(scale), grad_weight.mul_(scale), None, None


def _count(targets: Tensor) -> Tensor:
    return (targets != IGNORED).sum()


class ChunkedLoss(nn.Module):
    """Mean cross-entropy of a tied head, `chunk_size` tokens at a time. Only the order of sums differs."""

    def __init__(self, chunk_size: int) -> None:
        super().__init__()
        self.chunk_size = chunk_size
        self.softmax_step_: Callable[[Tensor, Tensor], Tensor] = softmax_step_

    def compile_step(self) -> None:
        """Fuse what is done to a chunk's logits; the loop stays outside, or the compiler would unroll it."""
        self.softmax_step_ = torch.compile(softmax_step_, dynamic=False)

    def stay_eager(self) -> None:
        self.softmax_step_ = softmax_step_

    def chunks(self, targets: Tensor) -> Iterator[slice]:
        for start in range(0, len(targets), self.chunk_size):
            yield slice(start, min(start + self.chunk_size, len(targets)))

    def forward(self, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            loss: Tensor = _Head.apply(hidden, weight, targets, self)
            return loss
        low = weight.to(hidden.dtype)
        total = torch.zeros((), device=hidden.device)
        flat = hidden.flatten(0, 1)
        for rows in self.chunks(targets):
            total += self.softmax_step_(flat[rows] @ low.t(), targets[rows])
        return total / _count(targets)
