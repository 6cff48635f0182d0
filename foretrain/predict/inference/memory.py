"""What generation needs on a card: weights, KV cache, what a prompt is computed in, CUDA context. No torch.

Weights and cache are counted (Llama 3 8B in q4_0: 4155.99 MiB on the card by llama.cpp's log, #9881). What a prompt is
computed in follows the engine: llama.cpp takes 512 tokens of a prompt at one time, in a buffer for their logits and
width (258.5 MiB of Llama 3 8B, as its log says); PyTorch takes the prompt as a whole, and holds the widest layer's
input and outputs.
"""

from foretrain.base.records import Record
from foretrain.config.inference.formats import CACHES, FORMATS, Engine
from foretrain.config.inference.options import Inference
from foretrain.hardware.catalogue import Gpu
from foretrain.hardware.devices import Context
from foretrain.predict.inference.model import InferenceModel
from foretrain.predict.memory import Component, Verdict, of_range

PROMPT_AT_ONCE = 512  # llama.cpp's --ubatch-size
OTHERS_BYTES = 4  # norms and biases stay in fp32
ACTIVATIONS_HIGH = 2.0  # what kernels and the allocator add to the widest layer; an allowance, not measured


class InferenceMemory(Record):
    """Bytes on the card, each component with its formula."""

    components: tuple[Component, ...]
    needed_low_bytes: int
    needed_expected_bytes: int
    needed_high_bytes: int
    source: str = "estimated"

    def bytes_of(self, id: str) -> int:
        """The bytes of one component."""
        return next(part.size_bytes for part in self.components if part.id == id)


def weights_bytes(model: InferenceModel, weights: str, engine: Engine) -> int:
    """Parameters as they are stored on the card. llama.cpp leaves the embedding on the host and has a tied head for
    itself; PyTorch has all of them, a tied head once."""
    bits = FORMATS[weights]
    blocks = (model.block_params + model.expert_params) * bits.block
    others = model.other_params * (8 * OTHERS_BYTES if bits.quantized else bits.block)
    head = model.vocab_size * model.n_embd * bits.head
    if engine == "llama.cpp":
        return round((blocks + head + others) / 8)
    embedding = model.embedding_params * bits.embedding
    return round((blocks + embedding + (0 if model.tied else head) + others) / 8)


def cache_bytes(model: InferenceModel, asked: Inference) -> int:
    """Keys and values of all texts at their full length."""
    return round(asked.batch * model.cached_tokens(asked.context) * model.kv_numbers * CACHES[asked.kv] / 8)


def _activations_bytes(model: InferenceModel, asked: Inference, engine: Engine) -> int:
    if engine == "llama.cpp":
        return 4 * min(PROMPT_AT_ONCE, asked.context * asked.batch) * (model.vocab_size + model.n_embd)
    size = 4 if asked.weights == "f32" else 2
    queries, keys = model.n_head * model.head_dim, 2 * model.n_kv_head * model.head_dim
    widest = max(2 * model.mlp_width, queries + keys if not model.latent else 2 * model.n_embd)
    return asked.batch * (asked.prompt * size * (3 * model.n_embd + widest) + 4 * model.vocab_size)


def memory_of(model: InferenceModel, asked: Inference, engine: Engine, gpu: Gpu) -> InferenceMemory:
    """What an `asked` with all its values needs."""
    context = Context.of(gpu)
    card = gpu.kind != "cpu"
    activations = _activations_bytes(model, asked, engine)
    stored = weights_bytes(model, asked.weights, engine)
    parts = [
        Component(id="weights", size_bytes=stored, formula=_weights_formula(model, asked, engine)),
        Component(id="kv_cache", size_bytes=cache_bytes(model, asked), formula=_cache_formula(model, asked)),
        Component(id="prompt", size_bytes=activations, formula=_prompt_formula(asked, engine)),
    ]
    if card:
        parts.append(Component(id="overhead", size_bytes=context.expected_bytes, formula=""))
    total = sum(part.size_bytes for part in parts)
    low = total - (context.expected_bytes - context.low_bytes if card else 0)
    high = total + (context.high_bytes - context.expected_bytes if card else 0)
    high += round(activations * (ACTIVATIONS_HIGH - 1))
    return InferenceMemory(
        components=tuple(parts), needed_low_bytes=low, needed_expected_bytes=total, needed_high_bytes=high
    )


def _weights_formula(model: InferenceModel, asked: Inference, engine: Engine) -> str:
    alone = engine == "llama.cpp" and not model.tied
    count = model.n_params - (model.embedding_params if alone else 0)
    return f"{count:,} · {8 * weights_bytes(model, asked.weights, engine) / count:.2f} / 8"


def _cache_formula(model: InferenceModel, asked: Inference) -> str:
    bits = f"{CACHES[asked.kv]:g} / 8"
    if model.sliding_layers:
        full, short = model.n_layer - model.sliding_layers, min(asked.context, model.sliding_window)
        layers = f"({full} · {asked.context:,} + {model.sliding_layers} · {short:,})"
    else:
        layers = f"{model.n_layer} · {asked.context:,}"
    numbers = f"{model.kv_numbers}" if model.latent else f"2 · {model.n_kv_head} · {model.head_dim}"
    return f"{asked.batch} · {layers} · {numbers} · {bits}"


def _prompt_formula(asked: Inference, engine: Engine) -> str:
    return "512 · (V + C) · 4" if engine == "llama.cpp" else f"B · ({asked.prompt:,} · (3·C + 2·F) + 2·V)"


def verdict_of(memory: InferenceMemory, available_bytes: int | None) -> Verdict | None:
    """Whether it fits; None where the memory to fit in is not known."""
    if available_bytes is None:
        return None
    span = memory.needed_low_bytes, memory.needed_expected_bytes, memory.needed_high_bytes
    return of_range(span, available_bytes)
