"""How fast a card generates: a token takes as long as what it reads, at a share of the bandwidth, and a time a layer.

One text at a time reads every weight for every token, and the keys and values of all tokens before it:

    t = max(weights / (S·bandwidth), unpacking) + cache / (S_kv·bandwidth) + layers · L

Unpacking is what quantized weights take in llama.cpp: a multiprocessor unpacks so many in a clock, which holds back
cards with much bandwidth for their clock (A100). With several texts weights are read once for all; then products take
over.

The constants come from the rows `tune` of benchmarks/published_inference.csv; `held out` rows chose nothing. What came
out stands in docs/inference.md.
"""

from typing import Any

from foretrain.config.hub.facts import ModelFacts
from foretrain.config.hub.parameters import counts_of
from foretrain.config.inference.formats import CACHES, FORMATS, PUBLISHED, Engine
from foretrain.config.inference.options import Inference
from foretrain.hardware.catalogue import Gpu
from foretrain.hardware.devices import Context
from foretrain.predict.energy import Prices
from foretrain.predict.memory import Component, PhaseMemory, RunMemory, on_cpu
from foretrain.predict.speed.time import Range
from foretrain.predict.timing import PRICES, READINGS, Timing

BANDWIDTH_SHARE = 0.95  # of the data sheet's, for weights
CACHE_SHARE = 0.69  # of it, for keys and values
LAYER_S = 37e-6  # of a layer's dozen kernels, beside what they read: their starts and ends, in a CUDA graph
EXPERTS_S = 48e-6  # more, where a layer has experts
UNPACKED_PER_CLOCK = 9.4  # weights of few bits that a multiprocessor unpacks in a clock for one token (llama.cpp)
UNPACKED_MORE = 0.17  # of that time, for each further text at once (RTX 3090, ggml-org/llama.cpp#15802)
# HBM against its data sheet: "peak bandwidth is about 1700 GB/s" of an A100 with 2039 (gpt-fast's README).
HBM_SHARE, HBM_BUS_BITS = 0.834, 3000
# torchao's kernels against bf16's; of fp8 and of what repositories publish nobody says: those of as many bits
KERNEL_SHARE = {"int8": 0.88, "int4": 0.61, "fp8": 0.88, "w8": 0.88, **dict.fromkeys(PUBLISHED[1:], 0.61)}
# For a prompt, of what products reach at most: the dense peak of half precision with fp32 sums. llama.cpp's kernels
# take no more of a multiprocessor than a GeForce card's has, also of an A100's. Of PyTorch beyond GeForce no row is
# known: a guess.
PROMPT_SHARE, ATTENTION_SHARE, PROMPT_SHARE_PYTORCH = 0.9, 0.4, 0.5
GEFORCE_FLOP_PER_CLOCK = 512
# For several texts at once llama.cpp's tensor-core kernels reach less, and pad them to about so many (RTX 4090,
# ggml-org/llama.cpp#7676 and #15131).
BATCH_SHARE, PADDED_TEXTS = 0.6, 48
DECODE_RANGE = 0.15  # half the width of what is said beside a speed


class GenerationTiming(Timing):
    """A step is one token of each text; `limited_by`: what takes most of it. Its rent is that of a step."""

    tokens_per_s_low: float
    tokens_per_s_high: float
    prompt_s: float
    prompt_tokens_per_s: float
    first_token_s: float
    weights_bytes_per_token: int
    cache_bytes_per_token: int
    bandwidth_bytes_per_s: float
    limited_by: str


def speed_of(
    facts: ModelFacts, asked: Inference, engine: Engine, gpu: Gpu, prices: Prices = PRICES
) -> GenerationTiming | None:
    """With the context that it has in the middle of an answer; None where a card's figures are not known."""
    bandwidth, peak = memory_bytes_per_s(gpu), gpu.peak_flop_per_s("bfloat16" if gpu.supports_bf16 else "float16")
    if gpu.kind != "cuda" or not bandwidth or not peak or not gpu.sm_count or not gpu.boost_clock_ghz:
        return None
    read = read_bytes(facts, asked)
    middle = round(asked.prompt + max(0, asked.context - asked.prompt) / 2)
    cache = cache_bytes(facts, asked.model_copy(update={"context": middle}))
    parts = decode_parts(facts, asked, engine, gpu, read, cache)
    token_s = sum(parts.values())
    first_s = prompt_s(facts, asked, engine, gpu)
    rate = asked.batch / token_s
    slow, quick = token_s / (1 - DECODE_RANGE), token_s / (1 + DECODE_RANGE)
    step_s = Range(low_s=quick, expected_s=token_s, high_s=slow)
    return GenerationTiming(
        step_s=step_s,
        prices=prices,
        **_rent(step_s, prices),
        tokens_per_s=rate,
        tokens_per_s_low=rate * (1 - DECODE_RANGE),
        tokens_per_s_high=rate * (1 + DECODE_RANGE),
        prompt_s=first_s,
        prompt_tokens_per_s=asked.prompt * asked.batch / first_s,
        first_token_s=first_s + token_s,
        weights_bytes_per_token=read,
        cache_bytes_per_token=cache,
        bandwidth_bytes_per_s=bandwidth,
        limited_by=max(parts, key=lambda name: parts[name]),
    )


def _rent(step_s: Range, prices: Prices) -> dict[str, Any]:
    if not prices.price_per_hour:
        return {}
    return {f"rent_{name}": getattr(step_s, f"{name}_s") / 3600 * prices.price_per_hour for name in READINGS}


def memory_bytes_per_s(gpu: Gpu) -> float | None:
    """What the memory gives in practice at its best."""
    stated = gpu.bandwidth_bytes_per_s
    if not stated:
        return None
    return stated * (HBM_SHARE if has_hbm(gpu) else 1.0)


def read_bytes(facts: ModelFacts, asked: Inference, *, head: bool = True) -> int:
    """Weights that one step of all texts reads: of experts those that somebody asks for, of the embedding a row."""
    bits, counts = FORMATS[asked.weights], counts_of(facts)
    unread = (1 - facts.experts_per_token / facts.n_expert) ** asked.batch if facts.n_expert else 1.0
    blocks = counts.blocks + counts.experts * (1 - unread)  # where each token's experts are drawn evenly
    logits = facts.vocab_size * facts.n_embd * bits.head if head else 0.0
    return round((blocks * bits.block + logits + counts.others * (32 if bits.quantized else bits.block)) / 8)


def _token_params(facts: ModelFacts) -> float:
    """Parameters of all blocks that one token is multiplied by: of experts its own."""
    counts = counts_of(facts)
    return counts.blocks + (counts.experts * (facts.experts_per_token / facts.n_expert) if facts.n_expert else 0.0)


def decode_parts(
    facts: ModelFacts, asked: Inference, engine: Engine, gpu: Gpu, read: int, cache: int
) -> dict[str, float]:
    """Seconds of one step of all texts, by what takes them: weights, unpacking or products; cache; layers."""
    bandwidth = memory_bytes_per_s(gpu) or 1.0
    share = BANDWIDTH_SHARE * (KERNEL_SHARE.get(asked.weights, 1.0) if engine == "pytorch" else 1.0)
    bits = FORMATS[asked.weights]
    ways = {"weights": read / (share * bandwidth), "products": 0.0}
    products_s = (
        2 * (_token_params(facts) + facts.vocab_size * facts.n_embd) / (BATCH_SHARE * product_flop_per_s(gpu, engine))
    )
    if bits.quantized and engine == "llama.cpp":
        numbers = 8 * read / bits.block
        unpacking = numbers / (UNPACKED_PER_CLOCK * clocks_per_s(gpu)) * (1 + UNPACKED_MORE * (asked.batch - 1))
        tiles = products_s * max(asked.batch, PADDED_TEXTS)
        if asked.batch == 1 or unpacking <= tiles:
            ways["unpacking"] = unpacking
        else:
            ways["products"] = tiles
    elif asked.batch > 1:
        ways["products"] = products_s * asked.batch
    longest = max(ways, key=lambda name: ways[name])
    layer_s = LAYER_S + (EXPERTS_S if facts.n_expert else 0.0)
    return {longest: ways[longest], "cache": cache / (CACHE_SHARE * bandwidth), "layers": facts.n_layer * layer_s}


def has_hbm(gpu: Gpu) -> bool:
    """Whether its memory is HBM, by the width of its bus."""
    return (gpu.memory_bus_bits or 0) >= HBM_BUS_BITS


def product_flop_per_s(gpu: Gpu, engine: Engine) -> float:
    """What an engine's products could reach on a card."""
    peak = gpu.peak_flop_per_s("bfloat16" if gpu.supports_bf16 else "float16") or 1.0
    if engine == "llama.cpp":
        return min(peak, GEFORCE_FLOP_PER_CLOCK * clocks_per_s(gpu))
    return peak if gpu.is_geforce else peak * PROMPT_SHARE_PYTORCH


def clocks_per_s(gpu: Gpu) -> float:
    """Of all multiprocessors together."""
    return (gpu.sm_count or 1) * (gpu.boost_clock_ghz or 1.0) * 1e9


def prompt_s(facts: ModelFacts, asked: Inference, engine: Engine, gpu: Gpu) -> float:
    """Seconds that all prompts take: products of every token but the head's, causal attention, the weights once."""
    reached = product_flop_per_s(gpu, engine)
    tokens = asked.prompt * asked.batch
    head = facts.vocab_size * facts.n_embd
    products = 2 * _token_params(facts) * tokens + 2 * head * asked.batch
    attention = 2 * facts.n_layer * facts.n_head * facts.head_dim * asked.prompt * tokens
    computing_s = (products / PROMPT_SHARE + attention / ATTENTION_SHARE) / reached
    weights_s = read_bytes(facts, asked) / (BANDWIDTH_SHARE * (memory_bytes_per_s(gpu) or 1.0))
    return max(computing_s, weights_s) + facts.n_layer * LAYER_S


# What generation needs on a card: weights, KV cache, what a prompt is computed in, CUDA context.
#
# Weights and cache are counted (Llama 3 8B in q4_0: 4155.99 MiB on the card by llama.cpp's log, #9881). What a prompt
# is computed in follows the engine: llama.cpp takes 512 tokens of a prompt at one time, in a buffer for their logits
# and width (258.5 MiB of Llama 3 8B, as its log says); PyTorch takes the prompt as a whole, and holds the widest
# layer's input and outputs.

PROMPT_AT_ONCE = 512  # llama.cpp's --ubatch-size
OTHERS_BYTES = 4  # norms and biases stay in fp32
ACTIVATIONS_HIGH = 2.0  # what kernels and the allocator add to the widest layer; an allowance, not measured


def weights_bytes(facts: ModelFacts, weights: str, engine: Engine) -> int:
    """Parameters as they are stored on the card. llama.cpp leaves the embedding on the host and has a tied head for
    itself; PyTorch has all of them, a tied head once."""
    bits, counts = FORMATS[weights], counts_of(facts)
    blocks = (counts.blocks + counts.experts) * bits.block
    others = counts.others * (8 * OTHERS_BYTES if bits.quantized else bits.block)
    head = facts.vocab_size * facts.n_embd * bits.head
    if engine == "llama.cpp":
        return round((blocks + head + others) / 8)
    embedding = counts.embedding * bits.embedding
    return round((blocks + embedding + (0 if facts.tied else head) + others) / 8)


def cache_bytes(facts: ModelFacts, asked: Inference) -> int:
    """Keys and values of all texts at their full length."""
    return round(asked.batch * facts.cached_tokens(asked.context) * facts.kv_numbers * CACHES[asked.kv] / 8)


def _activations_bytes(facts: ModelFacts, asked: Inference, engine: Engine) -> int:
    if engine == "llama.cpp":
        return 4 * min(PROMPT_AT_ONCE, asked.context * asked.batch) * (facts.vocab_size + facts.n_embd)
    size = 4 if asked.weights == "f32" else 2
    queries, keys = facts.n_head * facts.head_dim, 2 * facts.n_kv_head * facts.head_dim
    mlp = facts.expert_width * facts.experts_per_token if facts.n_expert and not facts.latent else facts.mlp_width
    widest = max(2 * mlp, 2 * facts.n_embd if facts.latent else queries + keys)
    return asked.batch * (asked.prompt * size * (3 * facts.n_embd + widest) + 4 * facts.vocab_size)


def memory_of(
    facts: ModelFacts, asked: Inference, engine: Engine, gpu: Gpu, available_bytes: int | None = None
) -> RunMemory:
    """Return what an `asked` with all its values needs, with its verdict where the memory to fit in is known."""
    card, context = gpu.kind != "cpu", Context.of(gpu)
    activations = _activations_bytes(facts, asked, engine)
    parts = (
        Component(
            id="weights", size_bytes=weights_bytes(facts, asked.weights, engine),
            formula=_weights_formula(facts, asked, engine),
        ),
        Component(id="kv_cache", size_bytes=cache_bytes(facts, asked), formula=_cache_formula(facts, asked)),
        Component(id="prompt", size_bytes=activations, formula=_prompt_formula(asked, engine)),
    )  # fmt: skip
    size = sum(part.size_bytes for part in parts)
    low, expected, high = (
        size + (taken if card else 0) for taken in (context.low_bytes, context.expected_bytes, context.high_bytes)
    )
    phase = PhaseMemory(
        phase="generate", moment="last_token", allocated_bytes=size, needed_low_bytes=low,
        needed_expected_bytes=expected, needed_high_bytes=high + round(activations * (ACTIVATIONS_HIGH - 1)),
        components=parts,
    )  # fmt: skip
    return RunMemory(phases=(on_cpu(phase, available_bytes),), context=context)


def _weights_formula(facts: ModelFacts, asked: Inference, engine: Engine) -> str:
    alone = engine == "llama.cpp" and not facts.tied
    count = counts_of(facts).total - (counts_of(facts).embedding if alone else 0)
    return f"{count:,} · {8 * weights_bytes(facts, asked.weights, engine) / count:.2f} / 8"


def _cache_formula(facts: ModelFacts, asked: Inference) -> str:
    bits = f"{CACHES[asked.kv]:g} / 8"
    if sliding := len(facts.sliding_layers):
        short = min(asked.context, facts.sliding_window)
        layers = f"({facts.n_layer - sliding} · {asked.context:,} + {sliding} · {short:,})"
    else:
        layers = f"{facts.n_layer} · {asked.context:,}"
    numbers = f"{facts.kv_numbers}" if facts.latent else f"2 · {facts.n_kv_head} · {facts.head_dim}"
    return f"{asked.batch} · {layers} · {numbers} · {bits}"


def _prompt_formula(asked: Inference, engine: Engine) -> str:
    return "512 · (V + C) · 4" if engine == "llama.cpp" else f"B · ({asked.prompt:,} · (3·C + 2·F) + 2·V)"
