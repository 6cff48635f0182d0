"""Text from a model, token by token."""

from collections.abc import Iterator

import torch

from foretrain.model.language_model import LanguageModel

LEAST_TEMPERATURE = 1e-6  # below it logits divided by it overflow fp32; only the likeliest is ever drawn long before


@torch.no_grad()
def generate(
    model: LanguageModel, ids: list[int], count: int, *, temperature: float, top_k: int, seed: int, vocab_size: int
) -> Iterator[int]:
    """`count` ids that follow `ids`, one by one. Temperature 0, or nearly 0, takes the likeliest; ids >= vocab_size
    never come."""
    model.eval()
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    context = list(ids)
    for _ in range(count):
        window = torch.tensor([context[-model.block_size :]], device=device)
        logits = model.next_logits(window)[0].float().cpu()[:vocab_size]
        if temperature < LEAST_TEMPERATURE:
            chosen = int(logits.argmax())
        else:
            kept = torch.topk(logits, min(top_k or vocab_size, len(logits)))
            probabilities = torch.softmax(kept.values / temperature, dim=0)
            chosen = int(kept.indices[torch.multinomial(probabilities, 1, generator=generator)])
        context.append(chosen)
        yield chosen
