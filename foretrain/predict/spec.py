"""What is predicted: `StepSpec`, one way to run a config's training step on a device. No torch."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from foretrain.config.checks import check_precision, is_one_graph
from foretrain.config.options import RunConfig
from foretrain.config.shape import ModelShape
from foretrain.config.sharing import Sharing, config_of_rank
from foretrain.hardware.catalogue import Dtype, Gpu, MatmulMode
from foretrain.predict import software
from foretrain.predict.estimate.sdpa import AttentionKind, attention_kind

StepName = Literal["foretrain", "nanogpt"]
DISTINCT_MICRO_BATCHES = 3  # micro-batches of a step, in its memory: later ones are as the third
STEP_NAMES: tuple[StepName, StepName] = ("foretrain", "nanogpt")


@dataclass(frozen=True)
class Variant:
    half: bool  # float16 or bfloat16 in matmuls
    cuda: bool
    keeps_logits: bool  # nanoGPT returns the logits and keeps the Python name until the next forward pass
    checkpointed: int  # blocks, from the first on
    dropout: bool
    bias: bool
    chunked: bool = False  # the head and its loss, a chunk of tokens at a time
    master: bool = False  # the weights and the residual stream are half precision too, without autocast
    auto_chunker: bool = False  # Inductor divides the loss where the logits are large
    pieces: bool = False  # the loss is a graph of its own where Inductor compiles, as each block is
    attention: AttentionKind = "flash"
    evaluation_attention: AttentionKind = "flash"  # without dropout it can be another kernel

    @property
    def casts(self) -> bool:
        """Whether autocast makes half precision of fp32."""
        return self.half and not self.master

    @property
    def wide(self) -> int:
        """Bytes of an element of the residual stream, which norms read and write."""
        return 2 if self.half and self.master else 4


@dataclass(frozen=True)
class StepSpec:
    """One way to run a step; nanoGPT's `config` has none of foretrain's own ways. `sharing`: of the largest rank."""

    config: RunConfig
    gpu: Gpu
    dtype: Dtype  # of matmuls
    step: StepName
    compiled: bool
    sharing: Sharing | None = None

    @classmethod
    def of(
        cls,
        config: RunConfig,
        gpu: Gpu,
        step: StepName = "foretrain",
        *,
        dtype: Dtype | None = None,
        compiled: bool | None = None,
        sharing: Sharing | None = None,
    ) -> "StepSpec":
        """Make the step of a config; `dtype` and `compiled` by default as the config and the device have it."""
        dtype = dtype or choose_dtype(config, gpu, step)[0]
        compiled = compiles(config, gpu) if compiled is None else compiled
        if step == "nanogpt":
            config = config.as_nanogpt()
            if gpu.kind == "cpu":  # its context is null there, whatever --dtype says (train.py)
                dtype = "float32"
        return cls(config, gpu, dtype, step, compiled, sharing)

    @classmethod
    def of_rank(
        cls, config: RunConfig, gpu: Gpu, world: int, per_node: int, *, dtype: Dtype, compiled: bool
    ) -> "StepSpec":
        """Make the step of one of `world` ranks, shared as the config of all says. Raises UserError."""
        sharing = Sharing.of(config, world, per_node)
        return cls.of(config_of_rank(config, world), gpu, dtype=dtype, compiled=compiled, sharing=sharing)

    @classmethod
    def checked(cls, config: RunConfig, gpu: Gpu, step: StepName = "foretrain") -> "StepSpec":
        """As `of`. Raises UserError where the device cannot do what the config asks for."""
        check_precision(config, gpu, choose_dtype(config, gpu)[0])
        return cls.of(config, gpu, step)

    def but(self, **options: Any) -> "StepSpec":
        return replace(self, config=self.config.model_copy(update=options))

    @property
    def torch(self) -> software.Software:
        return software.of(self.config.torch_version)

    @property
    def obstacle(self) -> str:
        """Return an id of does_not_run, or ""; where torch.compile refuses a card, only nanoGPT's train.py ends."""
        asks = self.step == "nanogpt" and self.config.compile and self.torch.compiles
        return "compile" if asks and not self.gpu.has_triton else ""

    @property
    def cuda(self) -> bool:
        """Whether it runs on a card; Apple's are taken for one."""
        return self.gpu.kind != "cpu"

    @property
    def half(self) -> bool:
        return self.dtype != "float32"

    @property
    def shards(self) -> bool:
        """Whether weights are cut among ranks; then they are gathered in half precision, and nothing is autocast."""
        return self.sharing is not None and self.sharing.way.shards_weights

    @property
    def keeps_logits(self) -> bool:
        return self.step == "nanogpt"

    @property
    def offloads(self) -> bool:
        """Whether the optimizer is on the host; what is offloaded stays in the memory of a CPU."""
        return self.config.optimizer_offload and self.cuda

    @property
    def copies_beside(self) -> bool:
        """Whether copies run on a stream of their own (model/host_memory.py)."""
        c = self.config
        return self.gpu.kind == "cuda" and ((c.optimizer_offload and c.gradient_offload) or c.elements_on_host > 0)

    @property
    def updates_in_backward(self) -> bool:
        c = self.config
        return (
            c.optimizer_in_backward and c.gradient_accumulation_steps == 1 and (c.compiles_blocks or not self.compiled)
        )

    @property
    def is_one_graph(self) -> bool:
        """Whether a step is replayed as one CUDA graph, and an evaluation as another (model/graphed.py)."""
        return self.sharing is None and is_one_graph(self.config, self.gpu, self.dtype)

    @property
    def micro_batches_that_count(self) -> int:
        """Of a step, in its memory: a graph has the batches of all."""
        count = self.config.gradient_accumulation_steps
        return count if self.is_one_graph else min(DISTINCT_MICRO_BATCHES, count)

    @property
    def bmm_attention(self) -> bool:
        return self.config.attention == "bmm" and self.config.recipe == "nanogpt"

    @property
    def matmul(self) -> MatmulMode:
        return self.config.matmul

    @cached_property
    def variant(self) -> Variant:
        c, width = self.config, ModelShape.of(self.config).head_dim
        learning = attention_kind(self.gpu, self.dtype, width, c.dropout, self.bmm_attention)
        evaluating = attention_kind(self.gpu, self.dtype, width, 0.0, self.bmm_attention, learns=False)
        return Variant(
            half=self.half, cuda=self.cuda, keeps_logits=self.keeps_logits, checkpointed=c.checkpointed,
            dropout=c.dropout > 0, bias=c.bias, chunked=c.loss_chunk_size > 0, master=c.master_weights or self.shards,
            pieces=c.compiles_blocks, auto_chunker=c.auto_chunker, attention=learning, evaluation_attention=evaluating,
        )  # fmt: skip


def compiles(config: RunConfig, gpu: Gpu) -> bool:
    """Return whether the step is compiled as the config says; on Apple GPUs and cards without Triton never."""
    return config.compile and gpu.kind != "mps" and gpu.has_triton


def choose_dtype(config: RunConfig, gpu: Gpu, step: StepName = "foretrain") -> tuple[Dtype, str]:
    """The dtype of the matmuls, and the id of the reason."""
    if config.dtype != "auto":
        return config.dtype, "config"
    if gpu.kind == "cpu":
        return "float32", "cpu"
    if gpu.supports_bf16:
        return "bfloat16", "has_bf16"
    emulates = step == "nanogpt" and software.of(config.torch_version).emulates_bf16
    return ("bfloat16", "emulated_bf16") if emulates else ("float16", "no_bf16")


def letters_of(config: RunConfig, batch: int, block: int) -> dict[str, int]:
    """Return the letters of the formulas that are sizes of the model and of its micro-batch; E is a head's width padded
    to a multiple of 8, A that of all; K heads of keys are read by G of queries each."""
    shape = ModelShape.of(config)
    padded = -(-shape.head_dim // 8) * 8
    return {
        "B": batch, "T": block, "C": shape.n_embd, "H": shape.n_head, "L": shape.n_layer, "V": shape.vocab_size,
        "W": shape.block_size, "P": shape.n_params, "n": min(config.loss_chunk_size, batch * block),
        "A": shape.n_head * padded, "D": shape.head_dim, "E": padded,
        "K": shape.n_kv_head, "G": shape.n_head // shape.n_kv_head,
        **{letter: getattr(config, name) for name, letter in shape.family.letters.items()},
    }  # fmt: skip
