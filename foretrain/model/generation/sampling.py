"""Which token comes next: the likeliest, or one that is drawn."""

import torch
from torch import Tensor

from foretrain.model.generation.options import Sampling

LEAST_TEMPERATURE = 1e-6  # below it logits divided by it overflow fp32; only the likeliest is ever drawn long before


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
