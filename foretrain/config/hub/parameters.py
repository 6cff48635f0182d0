"""Every parameter of a model, from its facts: names, shapes and order of transformers' `named_parameters()` (5.23,
models/NAME/modeling_NAME.py). Of `recipe = modern` sizes alone are so. A tied head is not listed twice."""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, cast

from foretrain.config.hub.facts import CountedParts, LatentAttention, ModelFacts, VisionFacts
from foretrain.config.hub.families import LATENT_FAMILIES

# linear: a matrix of nn.Linear or Conv1D that is not the head, which peft's "all-linear" gives an adapter.
Role = Literal["embedding", "position", "norm", "linear", "bias", "router", "expert", "head", "vision"]


class Parameter(NamedTuple):
    name: str
    shape: tuple[int, ...]
    layer: int | None
    role: Role

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def module(self) -> str:
        """The name of the module that holds it, which peft's target_modules match."""
        return self.name.rpartition(".")[0]


@dataclass(frozen=True)
class _Layout:
    """How a family names its parts. `block` has (name, part) in transformers' order; parts are those of `_shapes`."""

    embedding: str
    blocks: str
    block: tuple[tuple[str, str], ...]
    norm: str
    head: str = "lm_head"
    positions: str = ""


_ATTENTION = (("self_attn.q_proj", "q"), ("self_attn.k_proj", "k"), ("self_attn.v_proj", "v"))
_QK_NORMS = (("self_attn.q_norm", "q_norm"), ("self_attn.k_norm", "k_norm"))
_GATED = (("mlp.gate_proj", "gate"), ("mlp.up_proj", "gate"), ("mlp.down_proj", "down"))
_FUSED = (("mlp.gate_up_proj", "gate_up"), ("mlp.down_proj", "down"))
_BEFORE = (("input_layernorm", "norm"), ("post_attention_layernorm", "norm"))
_AFTER = (("post_attention_layernorm", "norm"), ("post_feedforward_layernorm", "norm"))
_SANDWICH = (*_BEFORE, ("pre_feedforward_layernorm", "norm"), ("post_feedforward_layernorm", "norm"))
_ROUTER = (("mlp.gate", "router"),)
_EXPERTS = (("mlp.experts.gate_up_proj", "expert_gate_up"), ("mlp.experts.down_proj", "expert_down"))
_SHARED = (
    ("mlp.shared_expert.gate_proj", "shared_gate"), ("mlp.shared_expert.up_proj", "shared_gate"),
    ("mlp.shared_expert.down_proj", "shared_down"), ("mlp.shared_expert_gate", "shared_router"),
)  # fmt: skip
_O = (("self_attn.o_proj", "o"),)
_FC = (("mlp.fc1", "fc_in"), ("mlp.fc2", "fc_out"))
_LATENT = tuple(
    (f"self_attn.{module}", part)
    for module, part in zip(
        ("q_proj", "q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj"),
        ("q", "q_a", "q_a_norm", "q_b", "kv_a", "kv_a_norm", "kv_b"),
        strict=True,
    )
)


def _modern(*block: tuple[str, str], model: str = "model", norm: str = "norm") -> _Layout:
    return _Layout(f"{model}.embed_tokens", f"{model}.layers", block, f"{model}.{norm}")


_GPT2 = _Layout(
    "transformer.wte", "transformer.h",
    (("ln_1", "norm"), ("attn.c_attn", "qkv"), ("attn.c_proj", "o"), ("ln_2", "norm"), ("mlp.c_fc", "fc_in"),
     ("mlp.c_proj", "fc_out")), "transformer.ln_f", positions="transformer.wpe",
)  # fmt: skip
_LLAMA = _modern(*_ATTENTION, *_O, *_QK_NORMS, *_GATED, *_ROUTER, *_EXPERTS, *_SHARED, *_BEFORE)
_GEMMA3 = (*_ATTENTION, *_O, *_QK_NORMS, *_GATED, *_SANDWICH)
_OTHERS = {
    "gemma2": _modern(*_GEMMA3), "gemma3_text": _modern(*_GEMMA3),
    "gemma3": _modern(*_GEMMA3, model="model.language_model"),
    "olmo2": _modern(*_ATTENTION, *_O, *_QK_NORMS, *_GATED, *_AFTER),
    "olmo3": _modern(*_ATTENTION, *_O, *_QK_NORMS, *_GATED, *_AFTER),
    "exaone4": _modern(*_ATTENTION, *_O, *_QK_NORMS, *_GATED, *_AFTER),
    "arcee": _modern(*_ATTENTION, *_O, ("mlp.up_proj", "fc_in"), ("mlp.down_proj", "fc_out"), *_BEFORE),
    "glm": _modern(*_ATTENTION, *_O, *_FUSED, *_BEFORE),
    "glm4": _modern(*_ATTENTION, *_O, *_FUSED, *_BEFORE, ("post_self_attn_layernorm", "norm"),
                    ("post_mlp_layernorm", "norm")),
    "hunyuan_v1_dense": _modern(*_ATTENTION, *_O, ("self_attn.query_layernorm", "q_norm"),
                                ("self_attn.key_layernorm", "k_norm"), *_GATED, *_BEFORE),
    "qwen3_moe": _modern(*_ATTENTION, *_O, *_QK_NORMS, *_GATED, *_EXPERTS, *_ROUTER, *_BEFORE),
    "phi": _modern(*_ATTENTION, ("self_attn.dense", "o"), ("mlp.fc1", "fc_in"), ("mlp.fc2", "fc_out"), *_BEFORE,
                   norm="final_layernorm"),
    "phi3": _modern(*_O, ("self_attn.qkv_proj", "qkv"), *_FUSED, *_BEFORE),
    "starcoder2": _modern(*_ATTENTION, *_O, ("mlp.c_fc", "fc_in"), ("mlp.c_proj", "fc_out"), *_BEFORE),
    "gpt_neox": _Layout(
        "gpt_neox.embed_in", "gpt_neox.layers",
        (*_BEFORE, ("attention.query_key_value", "qkv"), ("attention.dense", "o"), ("mlp.dense_h_to_4h", "fc_in"),
         ("mlp.dense_4h_to_h", "fc_out")), "gpt_neox.final_layer_norm"),
    "gpt2": _GPT2, "gpt_bigcode": _GPT2,
    # Its norms have no weights; smear is as wide as one.
    "modern": _Layout("embedding", "blocks", (("skip", "scale"), *_ATTENTION, *_O, *_FC), "smear"),
    "nanochat": _modern(*_ATTENTION, *_O, *_FC),
    **dict.fromkeys(LATENT_FAMILIES, _modern(*_LATENT, *_O, *_GATED, *_ROUTER, *_EXPERTS, *_SHARED[:-1], *_BEFORE)),
    "falcon": _Layout(
        "transformer.word_embeddings", "transformer.h",
        (("self_attention.query_key_value", "qkv"), ("self_attention.dense", "o"), ("mlp.dense_h_to_4h", "fc_in"),
         ("mlp.dense_4h_to_h", "fc_out"), ("post_attention_layernorm", "norm"), ("input_layernorm", "norm")),
        "transformer.ln_f"),
}  # fmt: skip

_EXPERT_PARTS = {"router", "expert_gate_up", "expert_down", "shared_gate", "shared_down", "shared_router"}
_MLP_PARTS = {"gate", "down", "gate_up", "fc_in", "fc_out"}


def _matrices(facts: ModelFacts) -> dict[str, tuple[int, int, bool]]:
    width, mlp, shared = facts.n_embd, facts.mlp_width, facts.shared_expert_width
    queries, keys = facts.n_head * facts.head_dim, facts.n_kv_head * facts.head_dim
    latent = _latent_matrices(facts, facts.latent) if facts.latent else {}
    return {
        "q": (queries, width, facts.qkv_bias), "k": (keys, width, facts.qkv_bias), "v": (keys, width, facts.qkv_bias),
        "qkv": (queries + 2 * keys, width, facts.qkv_bias), "o": (width, queries, facts.out_bias),
        "gate": (mlp, width, facts.mlp_bias), "down": (width, mlp, facts.mlp_bias),
        "gate_up": (2 * mlp, width, facts.mlp_bias), "fc_in": (mlp, width, facts.mlp_bias),
        "fc_out": (width, mlp, facts.mlp_bias), "shared_gate": (shared, width, False),
        "shared_down": (width, shared, False), "shared_router": (1, width, False), **latent,
    }  # fmt: skip


def _latent_matrices(facts: ModelFacts, latent: LatentAttention) -> dict[str, tuple[int, int, bool]]:
    heads, rank = facts.n_head, latent.query_rank
    queries = heads * (latent.key_dim + latent.rotary_dim)
    return {
        "q": (0 if rank else queries, facts.n_embd, False), "q_a": (rank, facts.n_embd, False),
        "q_b": (queries, rank, False), "kv_a": (facts.head_dim, facts.n_embd, False),
        "kv_b": (heads * (latent.key_dim + latent.value_dim), latent.rank, False),
        "o": (facts.n_embd, heads * latent.value_dim, False),
    }  # fmt: skip


def _norm_width(facts: ModelFacts, part: str) -> int:
    if part == "norm":
        return facts.n_embd if facts.norm_affine else 0
    if part == "scale":
        return 1
    if facts.latent:
        return facts.latent.query_rank if part == "q_a_norm" else facts.latent.rank
    heads = facts.n_head if part == "q_norm" else facts.n_kv_head
    return {"": 0, "head": facts.head_dim, "whole": heads * facts.head_dim}[facts.qk_norm]


def _has(facts: ModelFacts, layer: int, name: str, part: str) -> bool:
    mixture = bool(facts.n_expert) and layer not in facts.dense_layers
    if part in _EXPERT_PARTS:
        return mixture and (bool(facts.shared_expert_width) or not part.startswith("shared"))
    if part in _MLP_PARTS:
        return not mixture
    return not (facts.shared_norm and name == "post_attention_layernorm")


def _part(
    facts: ModelFacts, matrices: dict[str, tuple[int, int, bool]], name: str, part: str, layer: int | None
) -> Iterator[Parameter]:
    if part in matrices:
        out, into, bias = matrices[part]
        if not out * into:
            return
        yield Parameter(f"{name}.weight", (into, out) if facts.conv1d else (out, into), layer, "linear")
        if bias:
            yield Parameter(f"{name}.bias", (out,), layer, "bias")
    elif part == "router":
        yield Parameter(f"{name}.weight", (facts.n_expert, facts.n_embd), layer, "router")
    elif part == "expert_gate_up":
        yield Parameter(name, (facts.n_expert, 2 * facts.expert_width, facts.n_embd), layer, "expert")
    elif part == "expert_down":
        yield Parameter(name, (facts.n_expert, facts.n_embd, facts.expert_width), layer, "expert")
    elif width := _norm_width(facts, part):
        yield Parameter(f"{name}.weight", (width,), layer, "norm")
        if facts.norm_bias and part == "norm":
            yield Parameter(f"{name}.bias", (width,), layer, "norm")


def _vision(tower: VisionFacts, n_embd: int) -> Iterator[Parameter]:
    """SigLIP's, and what takes its output to the decoder's width."""

    def module(name: str, *shape: int, role: Role = "vision") -> Iterator[Parameter]:
        yield Parameter(f"model.vision_tower.{name}.weight", shape, None, role)
        yield Parameter(f"model.vision_tower.{name}.bias", shape[:1], None, "bias" if role == "linear" else role)

    width, mlp = tower.n_embd, tower.mlp_width
    yield from module("embeddings.patch_embedding", width, tower.n_channel, tower.patch_size, tower.patch_size)
    patches = (tower.image_size // tower.patch_size) ** 2
    yield Parameter("model.vision_tower.embeddings.position_embedding.weight", (patches, width), None, "vision")
    for layer in range(tower.n_layer):
        block = f"encoder.layers.{layer}"
        yield from module(f"{block}.layer_norm1", width)
        for each in ("k_proj", "v_proj", "q_proj", "out_proj"):
            yield from module(f"{block}.self_attn.{each}", width, width, role="linear")
        yield from module(f"{block}.layer_norm2", width)
        yield from module(f"{block}.mlp.fc1", mlp, width, role="linear")
        yield from module(f"{block}.mlp.fc2", width, mlp, role="linear")
    yield from module("post_layernorm", width)
    yield Parameter("model.multi_modal_projector.mm_input_projection_weight", (width, n_embd), None, "vision")
    yield Parameter("model.multi_modal_projector.mm_soft_emb_norm.weight", (width,), None, "vision")


def _counted(parts: CountedParts) -> Iterator[Parameter]:
    for layer, kind in enumerate(parts.layers):
        for name, shape, role in parts.kinds[kind].parameters:
            yield Parameter(f"layers.{layer}.{name}", shape, layer, cast("Role", role))
    for name, shape, role in parts.outside:
        yield Parameter(name, shape, None, cast("Role", role))


def _all(facts: ModelFacts) -> Iterator[Parameter]:
    if facts.counted:
        yield from _counted(facts.counted)
        return
    layout, matrices = _OTHERS.get(facts.model_type, _LLAMA), _matrices(facts)
    if facts.vision:
        yield from _vision(facts.vision, facts.n_embd)
    yield Parameter(f"{layout.embedding}.weight", (facts.vocab_size, facts.n_embd), None, "embedding")
    if facts.positions == "learned":
        yield Parameter(f"{layout.positions}.weight", (facts.max_positions, facts.n_embd), None, "position")
    for layer in range(facts.n_layer):
        for name, part in layout.block:
            if _has(facts, layer, name, part):
                yield from _part(facts, matrices, f"{layout.blocks}.{layer}.{name}", part, layer)
    yield from _part(facts, matrices, layout.norm, "norm", None)
    if not facts.tied:
        yield Parameter(f"{layout.head}.weight", (facts.vocab_size, facts.n_embd), None, "head")
    if facts.head_bias:
        yield Parameter(f"{layout.head}.bias", (facts.vocab_size,), None, "head")


def parameters_of(facts: ModelFacts) -> list[Parameter]:
    return list(_all(facts))


def text_parameters(facts: ModelFacts) -> Iterator[Parameter]:
    """Yield those that read and write text: none of a tower that reads pictures."""
    return (each for each in _all(facts) if each.role != "vision" and "vision_tower" not in each.name)


def parameter_count(facts: ModelFacts) -> int:
    return sum(each.elements for each in _all(facts))


class ParameterCounts(NamedTuple):
    """Parameters by how they are read when text is generated, but a picture tower's. `head`: 0 where it is the
    embedding."""

    blocks: int
    experts: int
    embedding: int
    head: int
    others: int

    @property
    def total(self) -> int:
        return sum(self)


def counts_of(facts: ModelFacts) -> ParameterCounts:
    return _counts(facts)  # type: ignore[arg-type] # a frozen record is hashable


@lru_cache(maxsize=64)
def _counts(facts: ModelFacts) -> ParameterCounts:
    return counts_where(facts, lambda each: each.elements)


def counts_where(facts: ModelFacts, elements: Callable[[Parameter], int]) -> ParameterCounts:
    """Return the counts of a part of the model. `elements`: how many of a parameter are in it."""
    counts: Counter[Role] = Counter()
    for each in text_parameters(facts):
        counts["bias" if each.name.endswith(".bias") else each.role] += elements(each)
    others = counts["norm"] + counts["bias"] + counts["position"]
    return ParameterCounts(
        counts["linear"] + counts["router"], counts["expert"], counts["embedding"], counts["head"], others
    )
