"""A mixture of experts as transformers runs it: one grouped matmul for the tokens of all experts, whose weights are one
tensor (transformers 5.23, integrations/moe.py, grouped_mm_experts_forward, and models/*/modeling_*.py).

Tokens are sorted by expert, once for each of their experts. So allocations depend on the counts of tokens and experts,
not on which expert gets which token.

Shapes: N tokens, X experts, k experts per token, S = N·k, C width, M width of an expert.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretrain.model.hub.linear import Adapter

WIDE = ("mixtral",)  # families whose expert shares, and so expert outputs, stay fp32


class Router(nn.Module):
    def __init__(self, facts: Any, adapter: Adapter | None) -> None:
        super().__init__()
        self.taken, self.wide = facts.experts_per_token, facts.model_type in WIDE
        self.normed = facts.normed_experts
        self.weight = nn.Parameter(torch.empty(facts.n_expert, facts.n_embd))
        self.change = Folded(1, facts.n_expert, facts.n_embd, adapter) if adapter else None
        self.seen: list[Tensor] | None = None  # router logits of a pass, where they are wanted

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weight = self.weight if self.change is None or self.change.off else self.change.added(self.weight)
        logits = F.linear(x.reshape(-1, x.shape[-1]), weight)
        if self.seen is not None:
            self.seen.append(logits)
        chances = F.softmax(logits.float(), dim=-1) if self.wide else F.softmax(logits, dim=-1, dtype=torch.float32)
        shares, chosen = torch.topk(chances, self.taken, dim=-1)
        if self.normed:
            shares /= shares.sum(dim=-1, keepdim=True)
        return shares if self.wide else shares.to(logits.dtype), chosen


def balance(logits: list[Tensor], taken: int, mask: Tensor | None) -> Tensor:
    """Return how unevenly experts are used, 1: evenly (arXiv:2101.03961), of N x X logits; mask: tokens that count."""
    count = logits[0].shape[-1]
    tokens, chances = (torch.zeros(count, dtype=torch.float32, device=logits[0].device) for _ in range(2))
    total = 0.0
    for each in logits:
        shares = F.softmax(each, dim=-1)
        _, chosen = torch.topk(shares, taken, dim=-1)
        if mask is None:
            numbers = chosen.reshape(-1).int() if each.device.type == "cuda" else chosen.reshape(-1).float()
            tokens = tokens + torch.histc(numbers, bins=count, min=0, max=count)
            chances = chances + shares.float().sum(dim=0)
            total = total + shares.shape[0]
        else:
            of_layer = torch.zeros(count, dtype=torch.float32, device=each.device)
            tokens = tokens + of_layer.scatter_add_(0, chosen.reshape(-1), mask.repeat_interleave(taken))
            chances = chances + (shares.float() * mask.unsqueeze(-1)).sum(dim=0)
            total = total + mask.sum()
    return (tokens / total * (chances / total)).sum() * float(count)


class Folded(nn.Module):
    """A LoRA adapter of a bare parameter (peft tuners/lora/layer.py, ParamWrapper): the matmul of its two matrices is
    added to the whole parameter before each forward pass, and the sum is saved for backward; not while it is `off`.
    """

    off = False

    def __init__(self, count: int, n_out: int, n_in: int, adapter: Adapter) -> None:
        super().__init__()
        self.count, self.rank = count, adapter.rank
        self.lora_A = nn.Linear(n_in, adapter.rank * count, bias=False)
        self.lora_B = nn.Linear(adapter.rank * count, n_out, bias=False)
        self.scaling = 2.0

    def factors(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the matrices of each expert, X x out x r and X x r x in; their sum is made once to check its shape."""
        a = self.lora_A.weight.reshape(self.count, self.rank, self.lora_A.weight.shape[-1])
        b = self.lora_B.weight.reshape(self.lora_B.weight.shape[0], self.rank, self.count).permute(2, 0, 1)
        found = b.to(weight.dtype), a.to(weight.dtype)
        self.folded(weight, found)
        return found

    def folded(self, weight: Tensor, factors: tuple[Tensor, Tensor]) -> Tensor:
        return torch.baddbmm(weight, *factors, alpha=self.scaling)

    def added(self, weight: Tensor) -> Tensor:
        """Return out x in of a parameter and its change. The sum is made twice, as in `factors`."""
        product = self.lora_B.weight @ self.lora_A.weight
        product = product * self.scaling
        product = product.to(weight.dtype)
        found = weight + product
        del found
        return weight + product


class Experts(nn.Module):
    def __init__(self, facts: Any, act: Any, adapter: Adapter | None, adapted: frozenset[str]) -> None:
        super().__init__()
        f = facts
        self.count, self.act = f.n_expert, act
        self.gate_up_proj = nn.Parameter(torch.empty(f.n_expert, 2 * f.expert_width, f.n_embd))
        self.down_proj = nn.Parameter(torch.empty(f.n_expert, f.n_embd, f.expert_width))
        self.gate_up = self.down = None
        if adapter is not None and "expert_gate_up" in adapted:  # two layers in one, each with its rank
            twice = adapter._replace(rank=2 * adapter.rank)
            self.gate_up = Folded(f.n_expert, 2 * f.expert_width, f.n_embd, twice)
        if adapter is not None and "expert_down" in adapted:
            self.down = Folded(f.n_expert, f.n_embd, f.expert_width, adapter)

    def forward(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        N, taken, C = x.shape[0], chosen.shape[-1], x.shape[-1]
        # Made first, and held until the end.
        of_down = self.down.factors(self.down_proj) if self.down is not None and not self.down.off else None
        of_gate_up = (
            self.gate_up.factors(self.gate_up_proj) if self.gate_up is not None and not self.gate_up.off else None
        )
        experts, order = torch.sort(chosen.reshape(-1))
        rows = x[order // taken]
        sorted_shares = shares.reshape(-1)[order]
        ends = self.ends(experts)
        gate_up, down = self.gate_up_proj, self.down_proj
        if self.gate_up is not None and of_gate_up is not None:
            gate_up = self.gate_up.folded(gate_up, of_gate_up)
        made = grouped_matmul(rows, gate_up, ends)
        made = self.act_up(made)
        if self.down is not None and of_down is not None:
            down = self.down.folded(down, of_down)
        made = grouped_matmul(made, down, ends)
        weighted = made * sorted_shares.unsqueeze(-1)
        places = torch.empty_like(order)
        places[order] = torch.arange(order.shape[0], device=x.device)
        weighted = weighted[places]
        return weighted.view(N, taken, C).sum(dim=1).to(x.dtype)

    def act_up(self, up: Tensor) -> Tensor:
        gate, up = up.chunk(2, dim=-1)
        return self.act(gate) * up

    def ends(self, experts: Tensor) -> Tensor:
        numbers = experts.int() if experts.device.type == "cuda" else experts.float()
        counts = torch.histc(numbers, bins=self.count, min=0, max=self.count - 1)
        return torch.cumsum(counts, dim=0, dtype=torch.int32)


def grouped_matmul(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return F.grouped_mm(x.to(weight.dtype), weight.transpose(-2, -1), offs=ends)
