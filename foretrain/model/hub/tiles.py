"""TRL's loss, which never has whole logits (trl 1.16: trainer/utils.py, add_fused_lm_head, and
kernels/chunked_logprob.py, ChunkedLogProbFunction): head and log-probabilities of a tile of tokens and words at a time.
Backward recomputes each tile, which becomes its own gradient.

A card's tiles are folded by Triton's kernels (kernels.py) and hold only tokens with a label; a CPU's are folded by
PyTorch and hold all tokens.

Shapes: N tokens, n of them in a tile, w words of a tile, C width, V vocabulary.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from foretrain.model.hub.kernels import column_sums, launch, room_for_logits

TOKENS, WORDS = 4096, 32_768  # of a tile; its buffer is as wide where a vocabulary is smaller
IGNORED = -100


class Turn(NamedTuple):
    """What is done to logits before the softmax: times `scale`, then within `softcap`, 0 for none."""

    scale: float = 1.0
    softcap: float = 0.0

    def of(self, logits: Tensor) -> Tensor:
        logits = logits * self.scale
        if self.softcap:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits * 1.0  # a temperature


def _on_a_card(x: Tensor) -> bool:
    return x.device.type == "cuda"


class _Sums:
    """Running sums over the vocabulary for each token: the largest logit, the sum of exponentials, the label's own."""

    def __init__(self, x: Tensor) -> None:
        N = x.shape[0]
        self.largest, self.sums, self.weighted, self.squares, self.totals, self.before, self.own = (
            x.new_zeros((N,), dtype=torch.float32) for _ in range(7)
        )
        for each in (self.largest, self.before):
            each.fill_(-math.inf)

    def fold(self, tile: Tensor, targets: Tensor, first: int, start: int, turn: Turn) -> None:
        end = first + tile.shape[0]
        largest, sums, weighted, before, own = (
            each[first:end] for each in (self.largest, self.sums, self.weighted, self.before, self.own)
        )
        if _on_a_card(tile):
            launch("triton_softmax", (largest, sums, weighted, before, own), tile, targets)
            return
        z = turn.of(tile.float())
        local = targets - start
        earlier = torch.arange(tile.shape[1], device=z.device) < local.unsqueeze(-1)
        before.copy_(torch.maximum(before, z.masked_fill(~earlier, -math.inf).amax(-1)))
        most = torch.maximum(largest, z.amax(-1))
        rescale = torch.exp(largest - most)
        exps = torch.exp(z - most.unsqueeze(-1))
        sums.mul_(rescale).add_(exps.sum(-1))
        weighted.mul_(rescale).add_((exps * z).sum(-1))
        largest.copy_(most)
        within = (local >= 0) & (local < tile.shape[1])
        found = z.gather(-1, local.clamp(0, tile.shape[1] - 1).unsqueeze(-1)).squeeze(-1)
        own.copy_(torch.where(within, found, own))


def _gradient(tile: Tensor, targets: Tensor, log_z: Tensor, grad: Tensor, start: int, turn: Turn) -> None:
    """Turn logits into the gradient of the sum of log-probabilities, each times its own `grad`."""
    if _on_a_card(tile):
        launch("triton_softmax_backward", tile, tile, targets, log_z, grad)
        return
    y = tile.float() * turn.scale
    t = torch.tanh(y / turn.softcap) if turn.softcap else None
    z = y * 1.0 if t is None else turn.softcap * t * 1.0
    log_p = z - log_z.unsqueeze(-1)
    p = torch.exp(log_p)
    found = torch.zeros_like(z)
    own = torch.arange(start, start + tile.shape[1], device=z.device) == targets.unsqueeze(-1)
    found += grad.unsqueeze(-1) * (own.float() - p)
    found = found * 1.0
    if t is not None:
        found = found * (1 - t * t)
    tile.copy_(found * turn.scale)


def _add_product(total: Tensor, a: Tensor, b: Tensor, kind: str) -> None:
    """Add a·b to `total` in fp32, which a card does in one matmul."""
    if _on_a_card(total) and a.dtype != torch.float32:
        launch(kind, total, a, b, total, shape=(*total.shape, b.shape[0]))
    else:
        total.addmm_(a.float(), b.float())


class _LogProbs(torch.autograd.Function):
    """ChunkedLogProbFunction for SFTTrainer: log-probability of each label, entropy, whether it is the likeliest."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, turn: Turn
    ) -> tuple[Tensor, Tensor, Tensor]:
        N, V, kind = x.shape[0], weight.shape[0], x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        s = _Sums(x)
        room = room_for_logits(x, (min(N, TOKENS), WORDS), dtype)
        for first in range(0, N, TOKENS):
            end = min(first + TOKENS, N)
            part = x[first:end].to(dtype)
            for start in range(0, V, WORDS):
                stop = min(start + WORDS, V)
                tile = room[: end - first, : stop - start]
                torch.mm(part, weight[start:stop].to(dtype).t(), out=tile)
                if bias is not None:
                    tile.add_(bias[start:stop].to(dtype))
                s.fold(tile, targets[first:end], first, start, turn)
        log_z = s.largest + torch.log(s.sums)
        found = s.own - log_z
        entropy = log_z - s.weighted / s.sums
        likeliest = (s.own >= s.largest) & (s.own > s.before)
        ctx.save_for_backward(x, weight, bias, targets, log_z, entropy)
        ctx.dtype, ctx.turn = dtype, turn
        return found, entropy, likeliest

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, targets, log_z, _entropy = ctx.saved_tensors
        N, V, dtype = x.shape[0], weight.shape[0], ctx.dtype
        wanted = zip(ctx.needs_input_grad, (x, weight, bias), strict=False)
        grad_x, grad_weight, grad_bias = (
            torch.zeros_like(each, dtype=torch.float32) if wants else None for wants, each in wanted
        )
        room = room_for_logits(x, (min(N, TOKENS), WORDS), dtype)
        grad = grads[0].float().contiguous()
        for first in range(0, N, TOKENS):
            end = min(first + TOKENS, N)
            part = x[first:end].to(dtype)
            for start in range(0, V, WORDS):
                stop = min(start + WORDS, V)
                own = weight[start:stop].to(dtype)
                tile = room[: end - first, : stop - start]
                torch.mm(part, own.t(), out=tile)
                if bias is not None:
                    tile.add_(bias[start:stop].to(dtype))
                _gradient(tile, targets[first:end], log_z[first:end], grad[first:end], start, ctx.turn)
                if grad_x is not None:
                    _add_product(grad_x[first:end], tile, own, "matmul_input")
                if grad_weight is not None:
                    _add_product(grad_weight[start:stop], tile.t(), part, "matmul_weight")
                if grad_bias is not None:
                    grad_bias[start:stop].add_(column_sums(tile))
        return (
            grad_x.to(x.dtype) if grad_x is not None else None,
            grad_weight.to(weight.dtype) if grad_weight is not None else None,
            grad_bias.to(bias.dtype) if grad_bias is not None and bias is not None else None,
            None, None,
        )  # fmt: skip


def _placed(x: Tensor, mask: Tensor) -> Tensor:
    if _on_a_card(x):
        return x.new_zeros(mask.shape, dtype=x.dtype).masked_scatter(mask, x)
    return x.view(mask.shape).masked_fill(~mask, 0)


class TiledLoss(nn.Module):
    def forward(
        self, states: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, turn: Turn, *, apart: bool = False
    ) -> tuple[Tensor, ...]:
        """Return the mean loss, entropies and where a label is likeliest; `apart`: log-probabilities, no mean."""
        states, labels = states[:, :-1], labels[:, 1:]
        mask = labels != IGNORED
        if _on_a_card(states):
            found = _LogProbs.apply(states[mask], weight, bias, labels[mask], turn)
        else:
            rows, targets = states.reshape(-1, states.shape[-1]), labels.clamp(min=0).reshape(-1)
            found = _LogProbs.apply(rows, weight, bias, targets, turn)
        found = tuple(_placed(x, mask) for x in found)
        if apart:
            return found
        log_probs, entropy, likeliest = found
        loss = (-log_probs).sum() / mask.sum()
        return loss, entropy.detach(), likeliest
