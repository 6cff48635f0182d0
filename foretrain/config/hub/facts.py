"""What a config.json of Hugging Face says of a model's memory and time. No torch, no transformers."""

from typing import Literal, NamedTuple

from foretrain.base.records import Record
from foretrain.config.hub.keys import MOST_POSITIONS, POSITIONS

LIGER_VERSION = "0.8.2"
BEFORE_THE_MODEL = ("axolotl", "llama-factory")  # loops that patch classes
WITHOUT = ("torchtune", "unsloth")  # loops with models and kernels of their own

UNNAMED = ("",)  # modules that stay in 16 bits, of which no name is known

Loss = Literal["fused", "cross_entropy", ""]  # head and loss together, the loss alone, transformers' own


class Liger(NamedTuple):
    """A family's own kernels. `in_place`: a norm's gradient replaces the incoming one; `heads`: norms of q, k, too."""

    loss: Loss = "fused"
    in_place: bool = True
    last_in_place: bool = True  # of the norm before the head
    heads: bool = False


# Families of ours; Gemma 2 and 3 and OLMo 2 and 3 have a norm whose gradient the residual stream reads, too.
LIGER_FAMILIES: dict[str, Liger] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "smollm3", "phi3", "gemma"), Liger()),
    "gemma2": Liger(in_place=False, last_in_place=False),
    **dict.fromkeys(("gemma3_text", "gemma3"), Liger(in_place=False, last_in_place=False, heads=True)),
    **dict.fromkeys(("olmo2", "olmo3"), Liger(in_place=False)),
    "granite": Liger(loss="cross_entropy"),  # it scales its logits, which the fused loss does not know
}


# Liger has kernels for these that have no stand-in here: of experts, or in blocks that are built otherwise.
UNKNOWN = ("mixtral", "qwen3_moe", "glm4", "hunyuan_v1_dense", "exaone4")

NAMES = {  # of what stands for which
    "": (), "fused": ("LigerFusedLinearCrossEntropyFunction",), "cross_entropy": ("LigerCrossEntropyFunction",),
}  # fmt: skip


def kernels_of(own: Liger, activation: str) -> tuple[str, ...]:
    product = "LigerSiLUMulFunction" if activation == "silu" else "LigerGELUMulFunction"
    return ("LigerRMSNormFunction", product, "LigerRopeFunction", *NAMES[own.loss])


def liger_of(model_type: str, loop: str) -> Liger | None:
    """Return the kernels of a family in a trainer's loop. TRL 1.16 leaves out the fused loss: it has one of its own."""
    found = LIGER_FAMILIES.get(model_type)
    if found is None or loop in WITHOUT:
        return None
    if loop in BEFORE_THE_MODEL:
        found = found._replace(heads=True, last_in_place=found.in_place)
    return found._replace(loss="") if loop == "trl" else found


# Which of unsloth's functions a run has (unsloth and unsloth_zoo 2026.10.9, models/loader.py, models/llama.py): own
# code with adapters alone; a full fine-tuning compiles transformers' blocks and has the loss in common.

UNSLOTH_VERSION = "2026.10.9"


class Unsloth(NamedTuple):
    """Where unsloth's functions stand. `blocks`: norms and rotary positions; `in_place`: a norm's gradient replaces the
    incoming one; `lora`: layers whose adapters run in one function. Every model has head and loss in one function, some
    tokens at a time."""

    blocks: bool = True
    in_place: bool = True
    lora: tuple[str, ...] = ("qkv", "out", "mlp")


# Transformers' blocks, compiled, and a loss in chunks for every model that generates (unsloth_zoo compiler.py,
# apply_fused_lm_head). Gemma 2 has functions, too, but compiles its attention, for which there is no stand-in.
COMPILED = Unsloth(blocks=False, lora=())
UNSLOTH_FAMILIES: dict[str, Unsloth] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), Unsloth()), "gemma": Unsloth(in_place=False),
}  # fmt: skip
OF_LORA = {"qkv": "LoRA_QKV", "out": "LoRA_W", "mlp": "LoRA_MLP"}
ROLES = {"qkv": ("q", "k", "v"), "out": ("out",), "mlp": ("gate", "up", "down")}  # layers of a group
LEAST_OFFLOADED_BYTES = 2 << 20  # of a block's input (gradient_checkpointing.py, MINIMUM_SIZE)
FIRST_TABLE, MORE_ROWS = 4 * 8192, 8192  # of rotary positions (LlamaRotaryEmbedding)


def unsloth_of(model_type: str, dtype: str, *, adapters: bool) -> Unsloth:
    """Return the functions of a family with weights in this dtype. Those of layers with adapters take 16 bits alone."""
    found = UNSLOTH_FAMILIES.get(model_type, COMPILED) if adapters else COMPILED
    return found._replace(lora=()) if dtype == "float32" else found


def table_rows(max_positions: int, seq_len: int) -> int:
    return max(min(FIRST_TABLE, max_positions), min(-(-seq_len // MORE_ROWS) * MORE_ROWS, max(max_positions, seq_len)))


def functions_of(own: Unsloth, model_type: str, groups: tuple[str, ...]) -> tuple[str, ...]:
    positions = "Fast_QK_Norm_RoPE" if model_type == "qwen3" else "Fast_RoPE_Embedding_QK_Positions"
    blocks = ("Fast_RMS_Layernorm", positions) if own.blocks else ()
    return (*blocks, *(OF_LORA[group] for group in groups), "fused_linear_cross_entropy")


Norm = Literal["rms", "gemma_rms", "layer"]
# gelu_tanh is one kernel; gelu_new and gelu_fast are the same function as transformers computes it, by several.
Activation = Literal["silu", "gelu", "gelu_tanh", "gelu_new", "gelu_fast", "relu", "relu2"]
WeightDtype = Literal["float32", "bfloat16", "float16"]

# Sizes that formulas have letters for.
LETTERS = {
    "n_embd": "C", "n_head": "H", "n_kv_head": "K", "head_dim": "D", "mlp_width": "F", "vocab_size": "V",
    "n_expert": "X", "expert_width": "M",
}  # fmt: skip


class VisionFacts(Record):
    """The tower that reads pictures, beside a decoder that also takes text alone (Gemma 3): SigLIP's sizes."""

    n_layer: int
    n_embd: int
    n_head: int
    mlp_width: int
    image_size: int
    patch_size: int
    n_channel: int = 3


class LatentAttention(Record):
    """Attention whose keys and values are made of one vector (MLA, DeepSeek's models, arXiv:2405.04434)."""

    query_rank: int  # 0: queries are made of the stream itself
    rank: int  # of that vector, which a layer keeps for each token, with a rotated key for all heads
    rotary_dim: int
    key_dim: int  # of a head's keys, what is not rotated
    value_dim: int


class LayerKind(Record):
    """A kind of layer. `token_numbers`: of its cache for each token; `state_bytes`: what it keeps of any text."""

    parameters: tuple[tuple[str, tuple[int, ...], str], ...]  # name, shape, role of parameters.py
    token_numbers: float
    state_bytes: int


class CountedParts(Record):
    """What a model without an estimate is made of, counted in the class that transformers builds from its config."""

    kinds: tuple[LayerKind, ...]
    layers: tuple[int, ...]  # the kind of each
    outside: tuple[tuple[str, tuple[int, ...], str], ...]


class ModelFacts(Record):
    """A decoder as its config.json describes it: sizes, and which parts a block is made of."""

    model_type: str
    n_layer: int
    n_embd: int
    n_head: int
    n_kv_head: int
    head_dim: int
    mlp_width: int
    vocab_size: int
    max_positions: int
    norm: Norm = "rms"
    norm_bias: bool = False  # LayerNorm's; RMSNorm has none
    norm_affine: bool = True  # OLMo's LayerNorm has no weights
    mlp: Literal["gated", "plain"] = "gated"
    activation: Activation = "silu"
    positions: Literal["rotary", "learned", "none"] = "rotary"
    rotary_dim: int = 0  # of a head's width, what is rotated; 0: all
    rotary: Literal["halves", "pairs", "pairs_fp32"] = "halves"  # which columns turn together, and in which dtype
    layers_without_rotary: tuple[int, ...] = ()  # SmolLM3
    scaled_queries: bool = False  # times a number that grows with the position (Ministral 3)
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    tied: bool = False
    fused_qkv: bool = False  # one matrix for queries, keys and values
    fused_gate_up: bool = False
    conv1d: bool = False  # GPT-2's matrices are in x out
    qk_norm: Literal["", "head", "whole"] = ""  # of each head, or of all heads together (OLMo 2)
    qk_norm_after: Literal["view", "transpose", "rotary"] = "view"
    norms: Literal["pre", "sandwich", "post"] = "pre"  # sandwich: before and after each part (Gemma 2 and 3)
    parallel: bool = False  # attention and MLP read the same stream (GPT-NeoX, Phi)
    shared_norm: bool = False  # and the same norm of it (Phi)
    scaled_embedding: bool = False  # times sqrt(n_embd) (Gemma) or a constant (Granite)
    scaled_residual: bool = False  # what attention and MLP add, times a constant (Granite)
    scaled_logits: bool = False  # divided by a constant (Granite)
    attention_softcap: float = 0.0  # Gemma 2
    logit_softcap: float = 0.0
    sliding_window: int = 0
    sliding_layers: tuple[int, ...] = ()  # the layers whose attention has the window
    n_expert: int = 0
    experts_per_token: int = 0
    expert_width: int = 0
    shared_expert_width: int = 0
    normed_experts: bool = False  # a token's shares of its experts add up to 1
    balanced: bool = False  # a loss that balances experts counts, where a trainer asks for it
    dense_layers: tuple[int, ...] = ()  # of a mixture of experts, the layers that have a plain MLP
    embedding_dropout: float = 0.0
    attention_dropout: float = 0.0
    residual_dropout: float = 0.0
    dtype: WeightDtype = "float32"  # that the published weights are in
    quantization: str = ""  # how they are already quantized, if so: bitsandbytes, gptq, awq, fp8, mxfp4, ...
    published: str = ""  # and in which format of config/inference.py, where that is known here
    kept: tuple[str, ...] = ()  # modules that it leaves in 16 bits, as quantization_config names them; UNNAMED: some
    vision: VisionFacts | None = None
    latent: LatentAttention | None = None
    counted: CountedParts | None = None

    @property
    def groups(self) -> int:
        return self.n_head // self.n_kv_head

    @property
    def kv_numbers(self) -> int:
        """Numbers of one token in one layer of a KV cache."""
        return self.head_dim if self.latent else 2 * self.n_kv_head * self.head_dim

    def cached_tokens(self, context: int, layers: range | None = None) -> int:
        layers = range(self.n_layer) if layers is None else layers
        sliding = sum(layer in layers for layer in self.sliding_layers)
        return (len(layers) - sliding) * context + sliding * min(context, self.sliding_window)

    def cached_numbers(self, context: int, layers: range, kv_numbers: int) -> float:
        """Return the numbers that these layers keep of so long a text. `kv_numbers`: of a token in one layer."""
        if self.counted is None:
            return self.cached_tokens(context, layers) * kv_numbers
        sizes = {layer: self.counted.kinds[self.counted.layers[layer]].token_numbers for layer in layers}
        return sum(self.cached_tokens(context, range(at, at + 1)) * size for at, size in sizes.items())

    def state_bytes(self, layers: range) -> int:
        kept = self.counted
        return sum(kept.kinds[kept.layers[layer]].state_bytes for layer in layers) if kept else 0

    def liger_kernels(self, loop: str) -> Liger | None:
        return liger_of(self.model_type, loop)


class ModelSource(Record):
    """A model, where it was found, and its config.json. `code`: Python code that it names (auto_map), which is never
    run; `adapter`: peft's config that named the model."""

    name: str
    where: str  # a path, "hf:owner/name", or the name of a preset
    config: dict[str, object]
    facts: ModelFacts | None  # None: a family whose parts foretrain does not know; its real code can still be traced
    code: bool = False
    adapter: dict[str, object] | None = None

    @property
    def max_positions(self) -> int:
        """Return the tokens of the longest row; of tables of positions the first have no token (RoBERTa)."""
        text = self.config.get("text_config", self.config)
        sizes = [text.get(name) for name in POSITIONS] if isinstance(text, dict) else []
        longest = min((size for size in sizes if type(size) is int and size > 0), default=MOST_POSITIONS)
        return self.facts.max_positions if self.facts else longest // 8 * 8 or longest
