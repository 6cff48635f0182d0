"""Which token comes next: the likeliest, or one that is drawn."""

from dataclasses import dataclass

import torch
from torch import Tensor

LEAST_TEMPERATURE = 1e-6  # below it logits divided by it overflow fp32; only the likeliest is ever drawn long before


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. `top_k`: of so many likeliest, 0: of all; then `top_p`: of the fewest likeliest that have
    this probability together (nucleus sampling, arXiv:1904.09751), 1: of all."""

    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 1.0


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """The next token, from the logits of all that may come. Temperature 0, or nearly 0, takes the likeliest."""
    if sampling.temperature < LEAST_TEMPERATURE:
        return int(logits.argmax())
    kept = torch.topk(logits, min(sampling.top_k or len(logits), len(logits)))
    probabilities = torch.softmax(kept.values / sampling.temperature, dim=0)
    if sampling.top_p < 1:
        outside = probabilities.cumsum(0) - probabilities >= sampling.top_p
        outside[0] = False
        probabilities = probabilities.masked_fill(outside, 0.0)
    return int(kept.indices[torch.multinomial(probabilities, 1, generator=generator)])
