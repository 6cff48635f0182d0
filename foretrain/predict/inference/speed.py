"""How fast a card generates: a token takes as long as what it reads, at a share of the bandwidth, and a time a layer.

t = max(weights / (S·bandwidth), unpacking) + cache / (S_kv·bandwidth) + layers · L of one text at a time; unpacking is
of quantized weights in llama.cpp. With several texts weights are read once for all. What stays in the computer's memory
is read there afterwards, at shares from seven speeds (rows `host`) of 51 GB/s of DDR4-3200 to 96 of DDR5-6000; for a
prompt it goes to the card, 512 tokens at a time. Cards with whole layers read one after the other, else each its part.
Constants come from the rows `tune` of benchmarks/published_inference.csv, none from `held out` (docs/inference.md)."""

from typing import Any

from foretrain.config.hub.facts import ModelFacts
from foretrain.config.hub.parameters import counts_of
from foretrain.config.inference import CACHES, FORMATS, PUBLISHED, Engine, Inference
from foretrain.hardware.catalogue import Gpu
from foretrain.predict.inference.shares import Share, card_and_host, context_of, shares_of, waits_s
from foretrain.predict.inference.stored import bits_of
from foretrain.predict.memory import Component, PhaseMemory, RunMemory, on_cpu
from foretrain.predict.speed.time import Range
from foretrain.predict.timing import PRICES, READINGS, Prices, Timing

BANDWIDTH_SHARE = 0.95  # of the data sheet's, for weights
CACHE_SHARE = 0.69  # of it, for keys and values
LAYER_S = 37e-6  # of a layer's dozen kernels, beside what they read: their starts and ends, in a CUDA graph
EXPERTS_S = 48e-6  # more, where a layer has experts
UNPACKED_PER_CLOCK = 9.4  # weights of few bits that a multiprocessor unpacks in a clock for one token (llama.cpp)
UNPACKED_MORE = 0.17  # of that time, for each further text at once (RTX 3090, ggml-org/llama.cpp#15802)
# HBM against its data sheet: "peak bandwidth is about 1700 GB/s" of an A100 with 2039 (gpt-fast's README).
HBM_SHARE, HBM_BUS_BITS = 0.834, 3000
# torchao's kernels against bf16's; fp8 and published formats have no figures: those of as many bits
KERNEL_SHARE = {"int8": 0.88, "int4": 0.61, "fp8": 0.88, "w8": 0.88, **dict.fromkeys(PUBLISHED[1:], 0.61)}
# Shares for a prompt, of the dense peak of half precision with fp32 sums. llama.cpp's kernels take no more of a
# multiprocessor than a GeForce card's has. Of PyTorch beyond GeForce no row is known: a guess.
PROMPT_SHARE, ATTENTION_SHARE, PROMPT_SHARE_PYTORCH = 0.9, 0.4, 0.5
GEFORCE_FLOP_PER_CLOCK = 512
# For several texts at once llama.cpp's tensor-core kernels reach less, and pad them to about so many (RTX 4090,
# ggml-org/llama.cpp#7676 and #15131).
BATCH_SHARE, PADDED_TEXTS = 0.6, 48
HOST_BYTES_PER_S = (18e9, 36e9, 72e9)  # slow, usual, quick
HOST_SHARES = (0.35, 0.5, 0.75)  # of a bandwidth that is given
TO_CARD_BYTES_PER_S = 16e9  # half of what PCIe 4.0 with 16 lanes has; an assumption
DECODE_RANGE = 0.15  # half the width of the stated range of a speed


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
    host_bytes_per_token: int = 0  # of both, that are read in the computer's memory


def speed_of(
    facts: ModelFacts, asked: Inference, engine: Engine, gpu: Gpu, prices: Prices = PRICES
) -> GenerationTiming | None:
    """With the context that it has in the middle of an answer; None where a card's figures are not known."""
    bandwidth, peak = memory_bytes_per_s(gpu), gpu.peak_flop_per_s("bfloat16" if gpu.supports_bf16 else "float16")
    if gpu.kind != "cuda" or not bandwidth or not peak or not gpu.sm_count or not gpu.boost_clock_ghz:
        return None
    share = share_at_once(facts, asked, engine)
    read = read_bytes(facts, asked, share)
    middle = round(asked.prompt + max(0, asked.context - asked.prompt) / 2)
    cache = cache_bytes(facts, asked.model_copy(update={"context": middle}), share)
    parts = decode_parts(facts, asked, engine, gpu, read, cache)
    quick, waits, slow = waits_s(facts, asked, gpu, asked.batch)
    host, rates = host_read_bytes(facts, asked, middle), host_bytes_per_s(asked)
    own_s, parts = sum(parts.values()), {**parts, "waits": waits, "host": host / rates[1]}
    quick, waits, slow = (each + host / rate for each, rate in zip((quick, waits, slow), rates[::-1], strict=True))
    token_s, first_s = own_s + waits, prompt_s(facts, asked, engine, gpu)
    rates = [asked.batch / (own_s + slow) * (1 - DECODE_RANGE), asked.batch / (own_s + quick) * (1 + DECODE_RANGE)]
    quick, slow = (own_s + quick) / (1 + DECODE_RANGE), (own_s + slow) / (1 - DECODE_RANGE)
    step_s = Range(low_s=quick, expected_s=token_s, high_s=slow)
    return GenerationTiming(
        step_s=step_s,
        prices=prices,
        **_rent(step_s, prices, asked.world),
        tokens_per_s=asked.batch / token_s,
        tokens_per_s_low=rates[0],
        tokens_per_s_high=rates[1],
        prompt_s=first_s,
        prompt_tokens_per_s=asked.prompt * asked.batch / first_s,
        first_token_s=first_s + token_s,
        weights_bytes_per_token=read,
        cache_bytes_per_token=cache,
        bandwidth_bytes_per_s=bandwidth,
        host_bytes_per_token=host,
        limited_by=max(parts, key=lambda name: parts[name]),
    )


def _rent(step_s: Range, prices: Prices, cards: int) -> dict[str, Any]:
    if not prices.price_per_hour:
        return {}
    return {f"rent_{name}": cards * getattr(step_s, f"{name}_s") / 3600 * prices.price_per_hour for name in READINGS}


def memory_bytes_per_s(gpu: Gpu) -> float | None:
    """What the memory gives in practice at its best."""
    stated = gpu.bandwidth_bytes_per_s
    if not stated:
        return None
    return stated * (HBM_SHARE if has_hbm(gpu) else 1.0)


def host_bytes_per_s(asked: Inference) -> tuple[float, float, float]:
    """Return how fast the computer's memory is read: slow, usual, quick."""
    given = 1e9 * asked.host_bandwidth
    slow, usual, quick = (share * given for share in HOST_SHARES) if given else HOST_BYTES_PER_S
    return slow, usual, quick


def host_read_bytes(facts: ModelFacts, asked: Inference, context: int) -> int:
    """Weights and cache that one step of all texts reads in the computer's memory."""
    shares = card_and_host(facts, asked)
    if shares is None:
        return 0
    cache = cache_bytes(facts, asked.model_copy(update={"context": context}), shares[1])
    return read_bytes(facts, asked, shares[1]) + cache


def share_at_once(facts: ModelFacts, asked: Inference, engine: Engine) -> Share:
    """Return what works at one time: a card's part of every matrix, else one layer after the other of all."""
    if shares := card_and_host(facts, asked):
        return shares[0]
    world = asked.world if asked.split == "tensor" else 1
    return shares_of(facts, world, asked.split if world > 1 else "", engine)[0]


def read_bytes(facts: ModelFacts, asked: Inference, share: Share, *, head: bool = True) -> int:
    """Weights that one step of all texts reads: of experts those that somebody asks for, of the embedding a row."""
    bits, counts = bits_of(facts, asked.weights), share.counts
    unread = (1 - facts.experts_per_token / facts.n_expert) ** asked.batch if facts.n_expert else 1.0
    experts = counts.experts * (1 - unread) * bits.expert  # where each token's experts are drawn evenly
    logits = facts.vocab_size * facts.n_embd / share.parts * bits.head if head and share.head else 0.0
    return round((counts.blocks * bits.block + experts + logits + counts.others * bits.other) / 8)


def _token_params(facts: ModelFacts, share: Share) -> float:
    """Parameters of all blocks that one token is multiplied by: of experts its own."""
    counts = share.counts
    return counts.blocks + (counts.experts * (facts.experts_per_token / facts.n_expert) if facts.n_expert else 0.0)


def decode_parts(
    facts: ModelFacts, asked: Inference, engine: Engine, gpu: Gpu, read: int, cache: int
) -> dict[str, float]:
    """Seconds of one step of all texts, by what takes them: weights, unpacking or products; cache; layers."""
    bandwidth = memory_bytes_per_s(gpu) or 1.0
    share = BANDWIDTH_SHARE * (KERNEL_SHARE.get(asked.weights, 1.0) if engine == "pytorch" else 1.0)
    bits = FORMATS[asked.weights]
    ways = {"weights": read / (share * bandwidth), "products": 0.0}
    share = share_at_once(facts, asked, engine)
    params = _token_params(facts, share) + facts.vocab_size * facts.n_embd / share.parts
    matmuls_s = 2 * params / (BATCH_SHARE * product_flop_per_s(gpu, engine))
    if bits.quantized and engine == "llama.cpp":
        numbers = 8 * read / _mean_bits(facts, asked.weights)
        unpacking = numbers / (UNPACKED_PER_CLOCK * clocks_per_s(gpu)) * (1 + UNPACKED_MORE * (asked.batch - 1))
        tiles = matmuls_s * max(asked.batch, PADDED_TEXTS)
        if asked.batch == 1 or unpacking <= tiles:
            ways["unpacking"] = unpacking
        else:
            ways["products"] = tiles
    elif asked.batch > 1:
        ways["products"] = matmuls_s * asked.batch
    longest = max(ways, key=lambda name: ways[name])
    layer_s = LAYER_S + (EXPERTS_S if facts.n_expert else 0.0)
    return {longest: ways[longest], "cache": cache / (CACHE_SHARE * bandwidth), "layers": facts.n_layer * layer_s}


def _mean_bits(facts: ModelFacts, weights: str) -> float:
    """Return the bits of the matrices in all blocks, experts with them."""
    bits, counts = bits_of(facts, weights), counts_of(facts)
    stored = counts.blocks * bits.block + counts.experts * bits.expert
    return stored / max(1, counts.blocks + counts.experts)


def has_hbm(gpu: Gpu) -> bool:
    return (gpu.memory_bus_bits or 0) >= HBM_BUS_BITS


def product_flop_per_s(gpu: Gpu, engine: Engine) -> float:
    peak = gpu.peak_flop_per_s("bfloat16" if gpu.supports_bf16 else "float16") or 1.0
    if engine == "llama.cpp":
        return min(peak, GEFORCE_FLOP_PER_CLOCK * clocks_per_s(gpu))
    return peak if gpu.is_geforce else peak * PROMPT_SHARE_PYTORCH


def clocks_per_s(gpu: Gpu) -> float:
    """Of all multiprocessors together."""
    return (gpu.sm_count or 1) * (gpu.boost_clock_ghz or 1.0) * 1e9


def prompt_s(facts: ModelFacts, asked: Inference, engine: Engine, gpu: Gpu) -> float:
    """Seconds that all prompts take: products of every token but the head's, causal attention, the weights once."""
    whole = asked.model_copy(update={"n_gpu_layers": -1, "n_cpu_moe": 0})
    reached, share = product_flop_per_s(gpu, engine), share_at_once(facts, whole, engine)
    tokens = asked.prompt * asked.batch
    head = facts.vocab_size * facts.n_embd / share.parts
    matmul_flops = 2 * _token_params(facts, share) * tokens + 2 * head * asked.batch
    attention = 2 * facts.n_layer * facts.n_head * facts.head_dim * asked.prompt * tokens / share.parts
    computing_s = (matmul_flops / PROMPT_SHARE + attention / ATTENTION_SHARE) / reached
    weights_s = read_bytes(facts, asked, share) / (BANDWIDTH_SHARE * (memory_bytes_per_s(gpu) or 1.0))
    host = host_weights_bytes(facts, asked) * -(-tokens // PROMPT_AT_ONCE) / TO_CARD_BYTES_PER_S
    return max(computing_s, weights_s) + host + facts.n_layer * LAYER_S + waits_s(facts, asked, gpu, tokens)[1]


def host_weights_bytes(facts: ModelFacts, asked: Inference) -> int:
    """Return what stays in the computer's memory of the layers and the head."""
    shares = card_and_host(facts, asked)
    return (
        weights_bytes(facts, shares[1]._replace(counts=shares[1].counts._replace(embedding=0)), asked.weights)
        if shares
        else 0
    )


# What generation needs on a card. Llama 3 8B in q4_0 has 4155.99 MiB there (llama.cpp's log, #9881), and 258.5 MiB in a
# buffer for 512 tokens of a prompt; PyTorch takes the prompt as a whole, with the widest layer's input and outputs.
PROMPT_AT_ONCE = 512  # llama.cpp's --ubatch-size
ACTIVATIONS_HIGH = 2.0  # what kernels and the allocator add to the widest layer; an allowance, not measured


def weights_bytes(facts: ModelFacts, share: Share, weights: str) -> int:
    """Parameters on the card: llama.cpp's without the embedding, with a copy of a tied head; PyTorch's all, once."""
    stored = zip(share.counts, bits_of(facts, weights), strict=True)
    return round(sum(count * bits for count, bits in stored) / 8)


def cache_bytes(facts: ModelFacts, asked: Inference, share: Share) -> int:
    numbers = facts.cached_numbers(asked.context, share.layers, share.kv_numbers)
    return round(asked.batch * (numbers * CACHES[asked.kv] / 8 + facts.state_bytes(share.layers)))


def _activations_bytes(facts: ModelFacts, asked: Inference, engine: Engine, share: Share) -> int:
    if engine == "llama.cpp":
        return 4 * min(PROMPT_AT_ONCE, asked.context * asked.batch) * (facts.vocab_size + facts.n_embd)
    size = 4 if asked.weights == "f32" else 2
    queries, keys = facts.n_head * facts.head_dim, 2 * facts.n_kv_head * facts.head_dim
    mlp = facts.expert_width * facts.experts_per_token if facts.n_expert and not facts.latent else facts.mlp_width
    widest = max(2 * mlp, 2 * facts.n_embd if facts.latent else queries + keys)
    inside = asked.prompt * size * (3 * facts.n_embd + widest // share.parts)
    return asked.batch * (inside + 4 * facts.vocab_size * share.head)


def memory_of(
    facts: ModelFacts, asked: Inference, engine: Engine, gpu: Gpu, available_bytes: int | None = None
) -> RunMemory:
    """Return what an `asked` with all its values needs on the card with most, judged where its memory is known."""
    card, context = gpu.kind != "cpu", context_of(asked, gpu)
    _, share, sizes = neediest_card(facts, asked, engine)
    formulas = (
        _weights_formula(share, sizes["weights"]),
        _cache_formula(facts, asked, share),
        _prompt_formula(asked, engine),
    )
    parts = tuple(
        Component(id=id, size_bytes=size, formula=formula)
        for (id, size), formula in zip(sizes.items(), formulas, strict=True)
    )
    size, activations = sum(sizes.values()), sizes["prompt"]
    low, expected, high = (
        size + (taken if card else 0) for taken in (context.low_bytes, context.expected_bytes, context.high_bytes)
    )
    phase = PhaseMemory(
        phase="generate", moment="last_token", allocated_bytes=size, needed_low_bytes=low,
        needed_expected_bytes=expected, needed_high_bytes=high + round(activations * (ACTIVATIONS_HIGH - 1)),
        components=parts,
    )  # fmt: skip
    return RunMemory(phases=(on_cpu(phase, available_bytes),), context=context)


def neediest_card(facts: ModelFacts, asked: Inference, engine: Engine) -> tuple[int, Share, dict[str, int]]:
    """Return the number of the card that needs most, from 1, its share, and bytes of each part of it."""
    offloaded = card_and_host(facts, asked)
    shares = offloaded[:1] if offloaded else shares_of(facts, asked.world, asked.split, engine)
    sizes = [_sizes(facts, asked, engine, share) for share in shares]
    worst = max(range(len(shares)), key=lambda card: sum(sizes[card].values()))
    return worst + 1, shares[worst], sizes[worst]


def _sizes(facts: ModelFacts, asked: Inference, engine: Engine, share: Share) -> dict[str, int]:
    return {
        "weights": weights_bytes(facts, share, asked.weights),
        "kv_cache": cache_bytes(facts, asked, share),
        "prompt": _activations_bytes(facts, asked, engine, share),
    }


def _weights_formula(share: Share, size_bytes: int) -> str:
    count = sum(share.counts)
    return f"{count:,} · {8 * size_bytes / count:.2f} / 8"


def _cache_formula(facts: ModelFacts, asked: Inference, share: Share) -> str:
    bits, layers = f"{CACHES[asked.kv]:g} / 8", len(share.layers)
    if facts.counted:
        numbers = facts.cached_numbers(asked.context, share.layers, 0)
        return f"{asked.batch} · ({numbers:,.0f} · {bits} + {facts.state_bytes(share.layers):,})"
    if sliding := sum(layer in share.layers for layer in facts.sliding_layers):
        short = min(asked.context, facts.sliding_window)
        tokens = f"({layers - sliding} · {asked.context:,} + {sliding} · {short:,})"
    else:
        tokens = f"{layers} · {asked.context:,}"
    heads = share.kv_numbers // (2 * facts.head_dim)
    numbers = f"{share.kv_numbers}" if facts.latent else f"2 · {heads} · {facts.head_dim}"
    return f"{asked.batch} · {tokens} · {numbers} · {bits}"


def _prompt_formula(asked: Inference, engine: Engine) -> str:
    return "512 · (V + C) · 4" if engine == "llama.cpp" else f"B · ({asked.prompt:,} · (3·C + 2·F) + 2·V)"
