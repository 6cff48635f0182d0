"""What each of several cards holds of a model that generates text, and what they wait for each other.

layer: whole layers a card, by llama.cpp in proportion to memory (`--split-mode layer`, src/llama-model.cpp
load_tensors), by vLLM's pipelines in equal parts, the rest in the middle (vllm/distributed/utils.py get_pp_indices).
tensor: vLLM's --tensor-parallel-size, the vocabulary in multiples of 64 (layers/linear.py,
vocab_parallel_embedding.py); norms, routers, MLA's compression and a head of keys for several cards are whole on each.
After each attention and MLP the cards sum what they have."""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from foretrain.base.errors import UserError
from foretrain.config.hub.facts import ModelFacts
from foretrain.config.hub.parameters import Parameter, ParameterCounts, counts_of, counts_where
from foretrain.config.inference import FORMATS, Engine, Inference
from foretrain.hardware.catalogue import Gpu
from foretrain.hardware.cluster import Cluster, cluster_of
from foretrain.hardware.devices import Context
from foretrain.predict.ranks import context_beside
from foretrain.predict.speed.ranks import scenario_times

PADDED_ROWS = 64  # vLLM's DEFAULT_VOCAB_PADDING_SIZE
WHOLE = ("q_a_proj", "kv_a_proj_with_mqa", "shared_expert_gate")  # vLLM's ReplicatedLinear
NARROWING = ("o_proj", "dense", "c_proj", "down_proj", "fc2", "dense_4h_to_h")  # its RowParallelLinear
KEYS = ("k_proj", "v_proj")
FUSED = ("c_attn", "qkv_proj", "query_key_value")  # queries, keys and values


class Share(NamedTuple):
    """One card's parameters, layers, numbers of a token in a layer's cache. `parts`: of the width inside a layer."""

    counts: ParameterCounts
    layers: range
    kv_numbers: int
    head: bool = True
    parts: int = 1


def cards_of(asked: Inference, gpu: Gpu) -> Cluster | None:
    """Return the cards; None of one alone. Raises UserError for what no cards can be."""
    return cluster_of(gpu, asked.world, asked.per_node, asked.link, asked.network)


def shares_of(facts: ModelFacts, world: int, split: str, engine: Engine) -> tuple[Share, ...]:
    return _shares(facts, world, split, engine)  # type: ignore[arg-type] # a frozen record is hashable


@lru_cache(maxsize=64)
def _shares(facts: ModelFacts, world: int, split: str, engine: Engine) -> tuple[Share, ...]:
    if split == "tensor":
        return (_tensor_share(facts, world),)
    rows, found = facts.vocab_size * facts.n_embd, []
    for card, layers in enumerate(_layers(facts.n_layer, world, engine)):
        first, last = card == 0, card == world - 1
        counts = counts_of(facts) if world == 1 else _counts_of(facts, layers, first=first, last=last)
        llama = engine == "llama.cpp"  # its embedding stays on the host
        embedding, head = rows * (first and not llama), rows * (last and (llama or not (facts.tied and first)))
        found.append(Share(counts._replace(embedding=embedding, head=head), layers, facts.kv_numbers, head=last))
    return tuple(found)


def card_and_host(facts: ModelFacts, asked: Inference) -> tuple[Share, Share] | None:
    """Return what llama.cpp puts on the card and what stays in the computer's memory; None where nothing has to. The
    last layers and the head are on the card, without --n-cpu-moe's experts (load_tensors, common/arg.cpp)."""
    return _card_and_host(facts, asked.n_gpu_layers, asked.n_cpu_moe) if asked.on_host else None  # type: ignore[arg-type]


@lru_cache(maxsize=256)
def _card_and_host(facts: ModelFacts, on_card: int, experts: int) -> tuple[Share, Share]:
    start = 0 if on_card < 0 else min(facts.n_layer, max(0, facts.n_layer + 1 - on_card))

    def here(each: Parameter) -> int:
        inside = start <= each.layer if each.layer is not None else on_card != 0 and each.role != "position"
        return each.elements * (inside and not (each.role == "expert" and (each.layer or 0) < experts))

    card, all_of_it, rows = counts_where(facts, here), counts_of(facts), facts.vocab_size * facts.n_embd
    card = card._replace(embedding=0, head=rows if on_card else 0)
    host = ParameterCounts(*(whole - part for whole, part in zip(all_of_it, card, strict=True)))
    host = host._replace(embedding=all_of_it.embedding, head=0 if on_card else rows)
    above, below = range(start, facts.n_layer), range(start)
    numbers = facts.kv_numbers
    return Share(card, above, numbers, head=on_card != 0), Share(host, below, numbers, head=on_card == 0)


def _layers(count: int, world: int, engine: Engine) -> Iterator[range]:
    start = 0
    for card in range(world):
        if engine == "llama.cpp":
            stop = min(count, -(-(card + 1) * (count + 1) // world))
        else:
            left = count % world
            stop = start + count // world + (world - 1 - left <= card < world - 1)
        yield range(start, stop)
        start = stop


def _counts_of(facts: ModelFacts, layers: range, *, first: bool, last: bool) -> ParameterCounts:
    outside = ("position",) if first else ("norm", "head") if last else ()

    def here(each: Parameter) -> int:
        return each.elements * (each.layer in layers if each.layer is not None else each.role in outside)

    return counts_where(facts, here)


def check_shares(facts: ModelFacts, asked: Inference, engine: Engine) -> None:
    """Raise UserError for a model that these cards cannot share, with a number of cards that can."""
    if asked.split == "layer" and asked.world > facts.n_layer:
        raise UserError("usage.inference_layers", layers=facts.n_layer, world=asked.world)
    if asked.split != "tensor":
        return
    if facts.counted:
        raise UserError("usage.family_alone", option="--split tensor", model=facts.model_type)
    if engine == "llama.cpp":
        raise UserError("usage.inference_tensor_engine", weights=asked.weights)
    if wrong := _indivisible(facts, asked.weights, asked.world):
        fewer = next(count for count in range(asked.world - 1, 0, -1) if not _indivisible(facts, asked.weights, count))
        raise UserError(f"usage.inference_tensor.{wrong[0]}", number=wrong[1], world=asked.world, fewer=fewer)


def _indivisible(facts: ModelFacts, weights: str, world: int) -> tuple[str, int] | None:
    """Return what vLLM refuses to divide among so many cards, and how many of it there are."""
    mlp = facts.mlp_width if not facts.n_expert or facts.dense_layers else 0
    widths, keys = (mlp, facts.expert_width, facts.shared_expert_width), 1 if facts.latent else facts.n_kv_head
    for what, number in (("heads", facts.n_head), *(("mlp", width) for width in widths), ("rows", _rows(facts))):
        if number % world:
            return what, number
    if keys % world and world % keys:
        return "keys", keys
    group = int(weights.removeprefix("w4_g")) if weights.startswith("w4_g") else 1
    wrong = any(width // world % group for width in (*widths, facts.n_head * facts.head_dim))
    return ("groups", group) if wrong else None


def _rows(facts: ModelFacts) -> int:
    return -(-facts.vocab_size // PADDED_ROWS) * PADDED_ROWS


def _tensor_share(facts: ModelFacts, world: int) -> Share:
    keys = max(1, facts.n_kv_head // world)
    counts, rows = counts_where(facts, lambda each: _divided(facts, each, world, keys)), _rows(facts) // world
    counts = counts._replace(embedding=rows * facts.n_embd, head=0 if facts.tied else rows * facts.n_embd)
    kv_numbers = facts.kv_numbers if facts.latent else 2 * keys * facts.head_dim
    return Share(counts, range(facts.n_layer), kv_numbers, parts=world)


def _divided(facts: ModelFacts, each: Parameter, world: int, keys: int) -> int:
    """Return how many elements of a parameter each card has; `keys`: heads of keys."""
    module, bias = each.module.rpartition(".")[2], each.name.endswith(".bias")
    if each.role in ("norm", "router", "position") or module in WHOLE or (bias and module in NARROWING):
        return each.elements
    if module in KEYS:
        return each.elements * keys // facts.n_kv_head
    if module in FUSED:
        return each.elements * (facts.n_head // world + 2 * keys) // (facts.n_head + 2 * facts.n_kv_head)
    return each.elements // world


def context_of(asked: Inference, gpu: Gpu) -> Context:
    """Return what a card has beside the tensors: the CUDA context, and NCCL's memory where it sums with others."""
    return context_beside(cards_of(asked, gpu) if asked.split == "tensor" else None, "ddp", gpu)


def waits_s(facts: ModelFacts, asked: Inference, gpu: Gpu, tokens: int) -> tuple[float, float, float]:
    """Return seconds that so many tokens at once wait for other cards, with fast, usual and slow links: two sums a
    layer, one of the embedding, and logits gathered (tensor), or a text sent to the next card (layer)."""
    cards = cards_of(asked, gpu)
    if cards is None:
        return 0.0, 0.0, 0.0
    size = 4 if FORMATS[asked.weights].block == 32 else 2
    width, logits = size * tokens * facts.n_embd, size * asked.batch * facts.vocab_size
    if asked.split == "layer":  # from one card to the next, in another machine where there are several
        pair = cards.model_copy(update={"per_node": 1, "nodes": 2} if cards.nodes > 1 else {"per_node": 2})
        low, usual, high = ((asked.world - 1) * times("broadcast", width) for times in scenario_times(pair))
    else:
        sums = 2 * facts.n_layer + 1
        both = (sums * times("all_reduce", width) + times("all_gather", logits) for times in scenario_times(cards))
        low, usual, high = both
    return low, usual, high
