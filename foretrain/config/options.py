"""`RunConfig`: every knob of a run, defined once with its type, default, unit, limits and help.

The command line, the docs and the report read the knobs from here. nanoGPT's knobs keep nanoGPT's names and
defaults (karpathy/nanoGPT train.py); two defaults differ on purpose: `device` and `dtype` are "auto", because
nanoGPT decides both by asking the card, which a plan cannot.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

from pydantic import Field
from pydantic.fields import FieldInfo

from foretrain.base.records import Record
from foretrain.base.units import parse_bytes

# How foretrain carries a step out where nanoGPT has but one way; each decides memory, so traces are kept by them.
OWN_WAYS = (
    "activation_checkpointing", "checkpointed_blocks", "recompute_norm_gelu", "activation_memory_budget",
    "loss_chunk_size", "auto_chunker", "master_weights", "optimizer_offload", "optimizer", "matmul",
    "recipe", "attention", "compile_blocks", "compile_mode",
)  # fmt: skip
# What else nanoGPT has not: evaluation in other sizes, a micro-batch that is chosen.
OWN_SIZES = ("eval_batch_size", "eval_block_size", "auto_batch_size")
GROUPS = ("model", "data", "batch", "optimizer", "evaluation", "run", "system", "cost")


_A_PATH = r"^[^\x00-\x1f\x7f]{1,1000}$"  # not empty, and nothing that could command a terminal

_INIT_FROM = (
    r"^(scratch|resume|gpt2(-medium|-large|-xl)?|[^\x00-\x1f\x7f]{0,500}[/\\][^\x00-\x1f\x7f]{0,500}"
    r"|[^\x00-\x1f\x7f]{1,500}\.(pt|pth|safetensors))$"
)


def knob(
    default: Any,
    help: str,
    *,
    group: str,
    unit: str = "",
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    pattern: str | None = None,
    ours: bool = False,
    inert: bool = False,
) -> Any:
    """One knob. `ours`: nanoGPT has no such knob. `inert`: accepted so that nanoGPT files read, without effect."""
    assert group in GROUPS
    extra = {"unit": unit, "group": group, "ours": ours, "inert": inert}
    return Field(
        default,
        description=help,
        ge=least,
        gt=above,
        le=most,
        lt=below,
        pattern=pattern,
        json_schema_extra=extra,
    )


class RunConfig(Record):
    """What is trained, on what, how. All knobs; see `knobs()` for their metadata."""

    recipe: Literal["nanogpt", "modern"] = knob(
        "nanogpt", "nanogpt: exactly its maths; modern: RoPE, QK-norm, ReLU², RMSNorm, Muon (docs/recipes.md)",
        group="model", ours=True,
    )  # fmt: skip
    n_layer: int = knob(12, "transformer blocks", group="model", unit="blocks", least=1, most=256)
    n_head: int = knob(12, "attention heads; must divide n_embd", group="model", least=1, most=1024)
    n_embd: int = knob(768, "width of the residual stream", group="model", least=1, most=131_072)
    block_size: int = knob(1024, "context length", group="model", unit="tokens", least=1, most=4_194_304)
    vocab_size: int = knob(
        50304, "rows of the token embedding; nanoGPT pads GPT-2's 50257 to 50304, or takes it from meta.pkl",
        group="model", unit="tokens", least=1, most=16_777_216, ours=True,
    )  # fmt: skip
    bias: bool = knob(False, "biases in linear layers and LayerNorms", group="model")
    dropout: float = knob(0.0, "dropout probability", group="model", least=0, below=1)
    init_from: str = knob(
        "scratch",
        "scratch, resume, gpt2, gpt2-medium, gpt2-large, gpt2-xl, or the path (with a slash) of nanoGPT's ckpt.pt, of "
        "safetensors, of a folder with a GPT-2, or of a run",
        group="model", pattern=_INIT_FROM,
    )  # fmt: skip
    init_optimizer: bool = knob(
        False, "with init_from = a ckpt.pt or a run: also load AdamW's moments and step count, to continue there",
        group="model", ours=True,
    )  # fmt: skip

    dataset: str = knob(
        "openwebtext", "folder of prepared tokens, or its name under data/; a mixture (mix.toml); an address such as "
        "s3://bucket/set; or python-stdlib (docs/data-sets.md)", group="data", pattern=_A_PATH,
    )  # fmt: skip
    data_order: Literal["random", "epochs"] = knob(
        "random", "random: draw rows with replacement, as nanoGPT does; epochs: each window once before any repeats",
        group="data", ours=True,
    )  # fmt: skip
    verify_data: bool = knob(
        True, "verify the checksum of each block of prepared shards when it is first read", group="data", ours=True
    )
    dataset_tokens: int = knob(
        0, "tokens in the training split, if the data is not on this machine; 0: look it up",
        group="data", unit="tokens", least=0, most=10**16, ours=True,
    )  # fmt: skip
    tokenizer: Literal["byte", "bpe", "gpt2"] = knob(
        "byte",
        "tokenizer of the built-in corpus; bpe is trained on it up to vocab_size",
        group="data",
        ours=True,
    )
    seed: int = knob(1337, "seed of weights, data order and dropout", group="data", least=0, most=2**63 - 1, ours=True)

    batch_size: int = knob(
        12, "micro-batch: sequences in one forward pass", group="batch", unit="sequences", least=1, most=1_000_000
    )
    gradient_accumulation_steps: int = knob(
        40, "micro-batches in one optimizer step", group="batch", unit="micro-batches", least=1, most=10_000_000
    )
    total_batch_size: int = knob(
        0, "tokens in one optimizer step; gradient_accumulation_steps follows from them. "
        "0: batch_size x gradient_accumulation_steps x block_size",
        group="batch", unit="tokens", least=0, most=10**13, ours=True,
    )  # fmt: skip
    auto_batch_size: bool = knob(
        False, "pick the micro-batch for the memory at hand, with the same tokens per step; as batch_size = auto",
        group="batch", ours=True,
    )  # fmt: skip
    activation_checkpointing: bool = knob(
        False,
        "save only the input of each block and recompute the rest in the backward pass",
        group="batch",
        ours=True,
    )
    checkpointed_blocks: int = knob(
        0, "with activation_checkpointing: how many blocks, from the first; 0: all", group="batch",
        unit="blocks", least=0, most=256, ours=True,
    )  # fmt: skip
    recompute_norm_gelu: bool = knob(
        False,
        "recompute the outputs of norms and GELU in the backward pass instead of saving them",
        group="batch",
        ours=True,
    )
    activation_memory_budget: float = knob(
        1.0,
        "torch.compile: share of the activations that Inductor may save; it recomputes the rest",
        group="batch",
        least=0,
        most=1,
        ours=True,
    )
    loss_chunk_size: int = knob(
        0,
        "tokens whose logits exist at one time, in the head and the loss; 0: the whole micro-batch",
        group="batch",
        unit="tokens",
        least=0,
        most=10**9,
        ours=True,
    )

    optimizer: Literal["adamw", "adamw8bit", "muon"] = knob(
        "adamw",
        "adamw; adamw8bit: AdamW with moments in 8 bits; muon: Muon for matrices, AdamW for the rest",
        group="optimizer",
        ours=True,
    )
    learning_rate: float = knob(6e-4, "highest learning rate", group="optimizer", above=0, most=100)
    muon_learning_rate: float = knob(
        0.02, "highest learning rate of Muon's matrices; learning_rate is then for the rest",
        group="optimizer", above=0, most=100, ours=True,
    )  # fmt: skip
    muon_momentum: float = knob(0.95, "Muon's momentum", group="optimizer", least=0, below=1, ours=True)
    max_iters: int = knob(600_000, "optimizer steps", group="optimizer", unit="steps", least=1, most=10**10)
    weight_decay: float = knob(0.1, "decay of matrices and embeddings", group="optimizer", least=0, most=100)
    beta1: float = knob(0.9, "AdamW's first-moment decay", group="optimizer", least=0, below=1)
    beta2: float = knob(0.95, "AdamW's second-moment decay", group="optimizer", least=0, below=1)
    grad_clip: float = knob(1.0, "largest gradient norm; 0: do not clip", group="optimizer", least=0, most=1e9)
    on_nonfinite: Literal["stop", "skip"] = knob(
        "stop", "if a loss or gradient is not finite, its update is never applied. stop: end with a failure report; "
        "skip: continue with the next step, at most ten times in a thousand steps", group="optimizer", ours=True,
    )  # fmt: skip
    decay_lr: bool = knob(True, "warm up, then decay to min_lr", group="optimizer")
    lr_schedule: Literal["cosine", "linear"] = knob(
        "cosine", "shape of the decay; linear: the full rate until the last cooldown share of lr_decay_iters",
        group="optimizer", ours=True,
    )  # fmt: skip
    cooldown: float = knob(
        0.5, "share of lr_decay_iters in which a linear schedule decays", group="optimizer", above=0, most=1,
        ours=True,
    )  # fmt: skip
    warmup_iters: int = knob(2000, "steps of linear warm-up", group="optimizer", unit="steps", least=0, most=10**10)
    lr_decay_iters: int = knob(
        600_000, "step at which min_lr is reached; set it with max_iters", group="optimizer",
        unit="steps", least=1, most=10**10,
    )  # fmt: skip
    min_lr: float = knob(6e-5, "learning rate at the end of the decay", group="optimizer", least=0, most=100)

    optimizer_offload: bool = knob(
        False,
        "keep optimizer states and fp32 weights in host memory and update them there; slow",
        group="optimizer",
        ours=True,
    )

    eval_interval: int = knob(
        2000, "steps between evaluations; each one also saves", group="evaluation", unit="steps", least=1, most=10**10
    )
    eval_iters: int = knob(
        200, "micro-batches per split in one evaluation, each of batch_size sequences",
        group="evaluation", unit="micro-batches", least=1, most=10**8,
    )  # fmt: skip
    eval_sequences: int = knob(
        0, "sequences per split in one evaluation; 0: eval_iters x batch_size", group="evaluation",
        unit="sequences", least=0, most=10**14, ours=True,
    )  # fmt: skip
    eval_batch_size: int = knob(
        0, "micro-batch of evaluation; 0: as batch_size", group="evaluation",
        unit="sequences", least=0, most=1_000_000, ours=True,
    )  # fmt: skip
    eval_block_size: int = knob(
        0, "context length of evaluation; 0: as block_size", group="evaluation",
        unit="tokens", least=0, most=4_194_304, ours=True,
    )  # fmt: skip
    eval_only: bool = knob(False, "evaluate once and stop", group="evaluation")

    out_dir: str = knob("out", "directory of the run; if it exists, a number is added", group="run", pattern=_A_PATH)
    log_interval: int = knob(
        1, "steps between lines of metrics.jsonl; the terminal shows some of them", group="run", unit="steps",
        least=1, most=10**9,
    )  # fmt: skip
    always_save_checkpoint: bool = knob(
        True, "save at every evaluation, not only when the validation loss improves", group="run"
    )
    keep_checkpoints: int = knob(
        2, "newest checkpoints to keep; the best one is kept as well", group="run", least=1, most=10_000, ours=True
    )

    device: str = knob(
        "auto", "auto, cpu, cuda, cuda:N or mps; auto uses the GPU if there is one", group="system",
        pattern=r"^(auto|cpu|mps|cuda(:\d{1,3})?)$",
    )  # fmt: skip
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = knob(
        "auto", "precision of the matmuls; auto: bfloat16 if the card has it, else float16; on a CPU whichever "
        "measures faster, and float32 in short runs", group="system",
    )  # fmt: skip
    auto_chunker: bool = knob(
        False,
        "torch.compile: let Inductor split head and loss into chunks, instead of loss_chunk_size",
        group="batch",
        ours=True,
    )
    matmul: Literal["dtype", "fp8", "int8", "fp16_accumulation"] = knob(
        "dtype",
        "precision of the blocks' matmuls; dtype: as dtype says; the others are faster on some cards but less exact",
        group="system",
        ours=True,
    )
    master_weights: bool = knob(
        False,
        "keep weights and residual stream in dtype, with fp32 master copies in the optimizer, instead of autocast",
        group="system",
        ours=True,
    )
    torch_version: str = knob(
        "", "torch of the run, such as 2.0, for the time that a plan predicts; empty: the installed one",
        group="system", pattern=r"^(\d{1,3}\.\d{1,3}[A-Za-z0-9.+]{0,30})?$", ours=True,
    )  # fmt: skip
    compile: bool = knob(True, "torch.compile the model", group="system")
    compile_mode: Literal["default", "reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune"] = knob(
        "default", "torch.compile's mode; modes other than default have no forecast", group="system", ours=True
    )
    compile_blocks: bool = knob(
        False,
        "torch.compile one block that all share, instead of the whole model: starts faster; memory has no forecast",
        group="system",
        ours=True,
    )
    attention: Literal["auto", "sdpa", "bmm"] = knob(
        "auto", "attention kernels. sdpa: PyTorch's own; bmm: batched matmuls, for CPUs and without dropout; "
        "auto: sdpa on GPUs, whichever measures faster on CPUs", group="system", ours=True,
    )  # fmt: skip
    cpu_threads: int = knob(
        0, "threads of a run on a CPU; 0: PyTorch's number, or fewer if they measure faster",
        group="system", least=0, most=4096, ours=True,
    )  # fmt: skip
    allocator_settings: str = knob(
        "", "settings of CUDA's allocator, such as expandable_segments:True; PYTORCH_ALLOC_CONF overrides them",
        group="system", pattern=r"^[A-Za-z0-9_:,. \[\]>-]*$", ours=True,
    )  # fmt: skip
    memory_limit: str = knob(
        "",
        "most memory the run may use, such as 10GiB; empty: what the card has free",
        group="system",
        ours=True,
    )

    price_per_kwh: float = knob(
        0.30, "price of electricity", group="cost", unit="currency/kWh", least=0, most=1e6, ours=True
    )
    price_per_hour: float = knob(
        0.0,
        "rent of the card or machine, paid instead of electricity; 0: not rented",
        group="cost",
        unit="currency/h",
        least=0,
        most=1e6,
        ours=True,
    )
    co2_per_kwh: float = knob(
        0.0, "CO2 of the electricity; 0: do not estimate it", group="cost", unit="g/kWh", least=0, most=1e5, ours=True
    )
    currency: str = knob("EUR", "currency of the prices", group="cost", pattern=r"^[^\x00-\x1f]{1,8}$", ours=True)

    wandb_log: bool = knob(False, "nanoGPT's tracker; foretrain keeps its own record", group="run", inert=True)
    wandb_project: str = knob("owt", "nanoGPT's tracker", group="run", inert=True)
    wandb_run_name: str = knob("gpt2", "nanoGPT's tracker", group="run", inert=True)
    backend: str = knob("nccl", "nanoGPT's multi-GPU backend; foretrain uses one GPU", group="system", inert=True)

    @property
    def tokens_per_step(self) -> int:
        """Tokens in one optimizer step: micro-batch x accumulation x context."""
        return self.batch_size * self.gradient_accumulation_steps * self.block_size

    @property
    def checkpointed(self) -> int:
        """How many blocks are checkpointed: the first ones, since the last one's activations are needed at once."""
        return min(self.checkpointed_blocks or self.n_layer, self.n_layer) if self.activation_checkpointing else 0

    def as_nanogpt(self) -> "RunConfig":
        """What nanoGPT would run of it: none of foretrain's own ways, and evaluation at the sizes of training."""
        own = {*OWN_WAYS, "eval_batch_size", "eval_block_size"}
        return self.model_copy(update={name: type(self).model_fields[name].default for name in own})

    @property
    def obstacle_to_bmm(self) -> str:
        """Why attention = bmm cannot serve this model in training; empty where it can."""
        if self.recipe != "nanogpt":
            return "it needs recipe = nanogpt"
        return "it has no dropout" if self.dropout else ""

    @property
    def eval_batch(self) -> int:
        return self.eval_batch_size or self.batch_size

    @property
    def eval_rows(self) -> int:
        """Sequences of one split in one evaluation; eval_batch_size only cuts them."""
        return self.eval_sequences or self.eval_iters * self.batch_size

    @property
    def eval_block(self) -> int:
        return self.eval_block_size or self.block_size

    @property
    def memory_limit_bytes(self) -> int | None:
        return parse_bytes(self.memory_limit) if self.memory_limit else None


@dataclass(frozen=True)
class Knob:
    """Metadata of one knob, for help texts, docs and pages."""

    name: str
    default: Any
    help: str
    unit: str
    group: str
    limits: str
    type: str
    ours: bool
    inert: bool


_SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def _limits(field: FieldInfo) -> str:
    """'≥ 1, ≤ 1000', 'one of float32, …' or ''."""
    choices = get_args(field.annotation)
    if choices:
        return "one of " + ", ".join(map(str, choices))
    found = {}
    for constraint in field.metadata:
        for name in ("pattern", *_SIGNS):
            value = getattr(constraint, name, None)
            if value is not None:
                found[name] = value
    if "pattern" in found and field.description:
        return field.description
    return ", ".join(f"{_SIGNS[name]} {found[name]:,}" for name in _SIGNS if name in found)


def knobs() -> Iterator[Knob]:
    """Every knob in the order of definition."""
    for name, field in RunConfig.model_fields.items():
        extra: Any = field.json_schema_extra
        type_name = getattr(field.annotation, "__name__", "choice")
        yield Knob(
            name=name,
            default=field.default,
            help=field.description or "",
            limits=_limits(field),
            type="choice" if get_args(field.annotation) else type_name,
            **extra,
        )
