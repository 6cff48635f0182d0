"""`RunConfig`: every option of a run. nanoGPT's keep its names and defaults (karpathy/nanoGPT train.py), but `device`
and `dtype` are "auto", as nanoGPT decides both by asking the card, which a plan cannot."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from pydantic import field_validator

from foretrain.base.quantities import parse_bytes
from foretrain.base.records import Record
from foretrain.config.option import COST, DTYPE_NAMES, EVERYTHING, LEARNING, NOTHING, Option, Tuned, option, options_of

_A_PATH = r"^[^\x00-\x1f\x7f]{1,1000}$"  # not empty, and nothing that could command a terminal
_INIT_FROM = (
    r"^(scratch|resume|gpt2(-medium|-large|-xl)?|[^\x00-\x1f\x7f]{0,500}[/\\][^\x00-\x1f\x7f]{0,500}"
    r"|[^\x00-\x1f\x7f]{1,500}\.(pt|pth|safetensors))$"
)
# What the options of the Llama family have in common.
_OF_LLAMA: dict[str, Any] = {
    "nanogpt": "cannot", "needs": ("recipe", "llama"), "affects": EVERYTHING, "on_resume": "refuses",
    "reference": "other", "from_weights": True,
}  # fmt: skip
StrategyName = Literal["ddp", "zero1", "fsdp", "fsdp_no_reshard", "hsdp"]
_ON_A_CARD = "it is the number of threads of a run on the CPU"
_SWITCH = {"true": "on", "yes": "on", "1": "on", "false": "off", "no": "off", "0": "off"}
_SHARED_MEMORY = (("mps", "a Mac's GPU shares the computer's memory, so nothing would be saved"),)


class RunConfig(Record):
    # fmt: off
    recipe: Literal["nanogpt", "modern", "llama", "nanochat"] = option(
        "nanogpt", "nanogpt: exactly its maths; modern: RoPE, QK-norm, ReLU², RMSNorm, Muon; llama: Llama and Qwen3; "
        "nanochat: its maths (docs/recipes.md)",
        group="model", affects=EVERYTHING, on_resume="refuses", nanogpt="cannot",
    )
    n_layer: int = option(
        12, "transformer blocks", group="model", unit="blocks", least=1, most=256,
        affects=EVERYTHING, on_resume="refuses", reference="near", from_weights=True, largest=(1, 256),
        basic=1, slider=(1, 64, "each"),
    )
    n_head: int = option(
        12, "attention heads; must divide n_embd", group="model", least=1, most=1024,
        letter="H", affects=EVERYTHING, on_resume="refuses", reference="other", from_weights=True,
        basic=2, slider=(1, 48, "each"),
    )
    n_embd: int = option(
        768, "width of the residual stream", group="model", least=1, most=131_072,
        letter="C", affects=EVERYTHING, on_resume="refuses", reference="near", from_weights=True,
        basic=3, slider=(64, 6144, "by64"),
    )
    block_size: int = option(
        1024, "context length", group="model", unit="tokens", least=1, most=4_194_304,
        letter="W", affects=EVERYTHING, on_resume="refuses", reference="near", from_weights=True, largest=(64, 65_536),
        basic=4, slider=(64, 65_536, "doubling"),
    )
    vocab_size: int = option(
        50304, "rows of the token embedding; nanoGPT pads GPT-2's 50257 to 50304, or takes it from meta.pkl",
        group="model", unit="tokens", least=1, most=16_777_216, nanogpt="lacks",
        letter="V", affects=EVERYTHING, on_resume="refuses", reference="near", from_weights=True,
        basic=5, slider=(256, 262_144, "doubling"),
    )
    bias: bool = option(
        False, "biases in linear layers and LayerNorms", group="model",
        affects=EVERYTHING, on_resume="refuses", reference="other", from_weights=True,
    )
    dropout: float = option(
        0.0, "dropout probability", group="model", least=0, below=1,
        affects=EVERYTHING, on_resume="refuses", reference="other", slider=(0, 0.5, "dimes"),
    )
    n_kv_head: int = option(
        0, "llama: heads of keys and values, each for a group of n_head / n_kv_head heads; 0: n_head",
        group="model", least=0, most=1024, **_OF_LLAMA,
    )
    head_dim: int = option(
        0, "llama: width of a head; 0: n_embd / n_head",
        group="model", least=0, most=256, **_OF_LLAMA,
    )
    mlp_width: int = option(
        0, "llama: width inside the MLP; 0: 8/3 of n_embd, rounded up to a multiple of 256",
        group="model", least=0, most=524_288, **_OF_LLAMA,
    )
    rope_theta: float = option(
        10_000.0, "llama: base of the rotary positions", group="model", above=0, most=1e9,
        **(_OF_LLAMA | {"affects": LEARNING, "reference": "same"}),
    )
    norm_eps: float = option(
        1e-5, "llama: what RMSNorm adds to the mean square", group="model", above=0, most=1,
        **(_OF_LLAMA | {"affects": LEARNING, "reference": "same"}),
    )
    qk_norm: bool = option(
        False, "llama: RMSNorm of queries and keys, as in Qwen3", group="model", **_OF_LLAMA,
    )
    tied_embeddings: bool = option(
        False, "llama: the head is the token embedding", group="model", **_OF_LLAMA,
    )
    init_from: str = option(
        "scratch",
        "scratch, resume, gpt2, gpt2-medium, gpt2-large, gpt2-xl, or a path with a slash: nanoGPT's ckpt.pt, "
        "safetensors, a folder with a GPT-2, Llama, Qwen3 or nanochat, a run",
        group="model", pattern=_INIT_FROM, affects=LEARNING, on_resume="free",
    )
    init_optimizer: bool = option(
        False, "with init_from = a ckpt.pt or a run: also load AdamW's moments and step count",
        group="model", nanogpt="lacks", affects=LEARNING, on_resume="free",
    )

    dataset: str = option(
        "openwebtext", "folder of prepared tokens, or its name under data/; a mixture (mix.toml); an address "
        "(s3://bucket/set); or python-stdlib (docs/data.md)",
        group="data", pattern=_A_PATH, affects=LEARNING, on_resume="refuses",
    )
    data_order: Literal["random", "epochs"] = option(
        "random", "random: rows with replacement, as nanoGPT; epochs: each window once before any repeats",
        group="data", nanogpt="lacks", affects=LEARNING, on_resume="refuses",
    )
    verify_data: bool = option(
        True, "verify the checksum of each block of prepared shards",
        group="data", nanogpt="lacks", affects=NOTHING, on_resume="free",
    )
    dataset_tokens: int = option(
        0, "tokens in the training split, if the data is not on this machine; 0: look it up",
        group="data", unit="tokens", least=0, most=10**16, nanogpt="lacks",
        affects=NOTHING, on_resume="free", compared=False,
    )
    tokenizer: Literal["byte", "bpe", "gpt2"] = option(
        "byte", "tokenizer of the built-in corpus; bpe is trained on it up to vocab_size",
        group="data", nanogpt="lacks", affects=LEARNING, on_resume="refuses",
    )
    seed: int = option(  # another one is another draw of the same noise
        1337, "seed of weights, data order and dropout", group="data", least=0, most=2**63 - 1, nanogpt="lacks",
        affects=NOTHING, on_resume="refuses",
    )

    batch_size: int = option(
        12, "micro-batch: sequences in one forward pass", group="batch", unit="sequences", least=1, most=1_000_000,
        aliases=("micro_batch_size",), affects=COST, on_resume="rounding", compared=False, reference="near",
        largest=(1, 4096), tuned=Tuned(), basic=6, slider=(1, 256, "halves"),
    )
    gradient_accumulation_steps: int = option(
        40, "micro-batches in one optimizer step", group="batch", unit="micro-batches", least=1, most=10_000_000,
        affects=COST, on_resume="rounding", compared=False, by_effect=True, reference="other", basic=7,
        slider=(1, 1024, "halves"),
    )
    total_batch_size: int = option(
        0, "tokens in one optimizer step; gradient_accumulation_steps follows. 0: as the "
        "other options say",
        group="batch", unit="tokens", least=0, most=10**13, nanogpt="lacks",
        affects=NOTHING, on_resume="free", compared=False,
    )
    auto_batch_size: bool = option(
        False, "pick the micro-batch that fits, with the same tokens per step; as batch_size = auto",
        group="batch", nanogpt="cannot", affects=NOTHING, on_resume="free", compared=False,
    )
    activation_checkpointing: bool = option(
        False, "save only the input of each block and recompute the rest in the backward pass",
        group="batch", nanogpt="cannot", aliases=("gradient_checkpointing",),
        affects=COST, on_resume="rounding", reference="other", tuned=Tuned(spread=0.05), basic=11,
    )
    checkpointed_blocks: int = option(
        0, "with activation_checkpointing: how many blocks, from the first; 0: all",
        group="batch", unit="blocks", least=0, most=256, nanogpt="cannot", needs=("activation_checkpointing", True),
        affects=COST, on_resume="rounding", reference="other", slider=(0, 64, "each"),
    )
    checkpoint_offload: bool = option(
        False, "keep the inputs of checkpointed blocks in host memory",
        group="batch", nanogpt="cannot", needs=("activation_checkpointing", True), affects=COST, on_resume="rounding",
        idle=(("cpu", "it is for GPUs"),), refused=_SHARED_MEMORY,
    )
    recompute_norm_gelu: bool = option(
        False, "recompute the outputs of norms and GELU in the backward pass instead of saving them",
        group="batch", nanogpt="cannot", affects=COST, on_resume="rounding", tuned=Tuned(spread=0.05),
    )
    activation_memory_budget: float = option(
        1.0, "torch.compile: share of the activations that Inductor may save; it recomputes the rest",
        group="batch", least=0, most=1, nanogpt="cannot", needs=("compile", True),
        affects=COST, on_resume="rounding", slider=(0, 1, "dimes"),
    )
    loss_chunk_size: int = option(
        0, "tokens whose logits exist at one time, in the head and the loss; 0: the whole micro-batch",
        group="batch", unit="tokens", least=0, most=10**9, nanogpt="cannot",
        letter="n", affects=COST, on_resume="rounding", reference="other", tuned=Tuned(spread=0.08),
        chosen_on_cpu="not given",
        basic=12, slider=(0, 16_384, "doubling"),
    )

    optimizer: Literal["adamw", "adamw8bit", "adamw4bit", "muon"] = option(
        "adamw", "adamw; adamw8bit, adamw4bit: moments in 8 or 4 bits; muon: Muon for matrices, AdamW for the rest",
        group="optimizer", nanogpt="cannot", affects=EVERYTHING, on_resume="refuses", basic=13,
    )
    learning_rate: float = option(
        6e-4, "highest learning rate", group="optimizer", above=0, most=100,
        affects=LEARNING, on_resume="refuses", slider=(1e-5, 1e-1, "decades"),
    )
    muon_learning_rate: float = option(
        0.02, "highest learning rate of Muon's matrices; learning_rate is then for the rest",
        group="optimizer", above=0, most=100, nanogpt="lacks", needs=("optimizer", "muon"),
        affects=LEARNING, on_resume="refuses",
    )
    muon_momentum: float = option(
        0.95, "Muon's momentum", group="optimizer", least=0, below=1, nanogpt="lacks", needs=("optimizer", "muon"),
        affects=LEARNING, on_resume="refuses",
    )
    max_iters: int = option(
        600_000, "optimizer steps", group="optimizer", unit="steps", least=1, most=10**10,
        affects=NOTHING, on_resume="free", basic=8, slider=(100, 1_000_000, "decades"),
    )
    weight_decay: float = option(
        0.1, "decay of matrices and embeddings", group="optimizer", least=0, most=100,
        affects=LEARNING, on_resume="refuses",
    )
    beta1: float = option(
        0.9, "AdamW's first-moment decay", group="optimizer", least=0, below=1, affects=LEARNING, on_resume="refuses"
    )
    beta2: float = option(
        0.95, "AdamW's second-moment decay", group="optimizer", least=0, below=1, affects=LEARNING, on_resume="refuses"
    )
    grad_clip: float = option(
        1.0, "largest gradient norm; 0: do not clip", group="optimizer", least=0, most=1e9,
        affects=("speed", "learning"), on_resume="refuses", reference="other",
    )
    on_nonfinite: Literal["stop", "skip"] = option(
        "stop", "if a loss or gradient is not finite, its update is never applied. stop: end with a failure report; "
        "skip: take the next step, at most ten times in a thousand",
        group="optimizer", nanogpt="lacks", affects=NOTHING, on_resume="free",
    )
    decay_lr: bool = option(
        True, "warm up, then decay to min_lr", group="optimizer", affects=LEARNING, on_resume="refuses"
    )
    lr_schedule: Literal["cosine", "linear"] = option(
        "cosine", "shape of the decay; linear: the full rate until the last cooldown share of lr_decay_iters",
        group="optimizer", nanogpt="lacks", affects=LEARNING, on_resume="refuses",
    )
    cooldown: float = option(
        0.5, "share of lr_decay_iters in which a linear schedule decays", group="optimizer", above=0, most=1,
        nanogpt="lacks", needs=("lr_schedule", "linear"), affects=LEARNING, on_resume="refuses",
    )
    warmup_iters: int = option(
        2000, "steps of linear warm-up", group="optimizer", unit="steps", least=0, most=10**10,
        needs=("decay_lr", True), affects=LEARNING, on_resume="refuses", slider=(0, 10_000, "decades"),
    )
    lr_decay_iters: int = option(
        600_000, "step at which min_lr is reached; set it with max_iters",
        group="optimizer", unit="steps", least=1, most=10**10, needs=("decay_lr", True),
        affects=LEARNING, on_resume="refuses",
    )
    min_lr: float = option(
        6e-5, "learning rate at the end of the decay", group="optimizer", least=0, most=100, needs=("decay_lr", True),
        affects=LEARNING, on_resume="refuses",
    )
    optimizer_offload: bool = option(
        False, "keep optimizer states and fp32 weights in host memory and update them there; slow",
        group="optimizer", nanogpt="cannot", affects=COST, on_resume="rounding",
        idle=(("cpu", "the optimizer of a run on the CPU is in the computer's memory already"),),
        refused=_SHARED_MEMORY,
    )
    gradient_offload: bool = option(
        False, "move each gradient to host memory at once; needs optimizer_offload; slower",
        group="optimizer", nanogpt="cannot", needs=("optimizer_offload", True), affects=COST, on_resume="rounding",
        idle=(("cpu", "it is for GPUs"),), refused=_SHARED_MEMORY,
    )
    optimizer_in_backward: bool = option(
        False, "update each weight once its gradient is there, and free it; no accumulation or clipping",
        group="optimizer", nanogpt="cannot", affects=COST, on_resume="rounding",
        refused=(("mps", "its kernels there may apply an update that is not finite"),),
    )

    eval_interval: int = option(
        2000, "steps between evaluations; each one also saves",
        group="evaluation", unit="steps", least=1, most=10**10,
        affects=NOTHING, on_resume="free", slider=(10, 100_000, "decades"),
    )
    eval_iters: int = option(
        200, "micro-batches per split in one evaluation, each of batch_size sequences",
        group="evaluation", unit="micro-batches", least=1, most=10**8,
        affects=NOTHING, on_resume="evaluation", slider=(1, 1000, "decades"),
    )
    eval_sequences: int = option(
        0, "sequences per split in one evaluation; 0: eval_iters x batch_size",
        group="evaluation", unit="sequences", least=0, most=10**14, nanogpt="lacks",
        affects=NOTHING, on_resume="evaluation",
    )
    eval_batch_size: int = option(
        0, "micro-batch of evaluation; 0: as batch_size",
        group="evaluation", unit="sequences", least=0, most=1_000_000, nanogpt="cannot",
        affects=("memory",), on_resume="evaluation", by_effect=True,
    )
    eval_block_size: int = option(
        0, "context length of evaluation; 0: as block_size",
        group="evaluation", unit="tokens", least=0, most=4_194_304, nanogpt="cannot",
        affects=("memory", "learning"), on_resume="evaluation", by_effect=True,
    )
    eval_only: bool = option(
        False, "evaluate once and stop", group="evaluation",
        affects=EVERYTHING, on_resume="free", compared=False, reference="other",
    )

    out_dir: str = option(
        "out", "directory of the run; if it exists, a number is added",
        group="run", pattern=_A_PATH, affects=NOTHING, on_resume="free",
    )
    log_interval: int = option(
        1, "steps between lines of metrics.jsonl; the terminal shows some",
        group="run", unit="steps", least=1, most=10**9, affects=NOTHING, on_resume="free",
    )
    always_save_checkpoint: bool = option(
        True, "save at every evaluation, not only when the validation loss improves",
        group="run", affects=NOTHING, on_resume="free",
    )
    keep_checkpoints: int = option(
        2, "newest checkpoints to keep, besides the best",
        group="run", least=1, most=10_000, nanogpt="lacks", affects=NOTHING, on_resume="free",
    )

    device: str = option(
        "auto", "auto, cpu, cuda, cuda:N or mps; auto uses a CUDA card if there is one, else the CPU",
        group="system", pattern=r"^(auto|cpu|mps|cuda(:\d{1,3})?)$",
        affects=COST, on_resume="rounding", compared=False, by_effect=True, reference="other",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "precision of the matmuls; auto: bfloat16 if the card has it, else float16; on a CPU the "
        "faster one", group="system", choice_names=DTYPE_NAMES,
        affects=EVERYTHING, on_resume="refuses", by_effect=True, reference="other", chosen_on_cpu="auto",
        tuned=Tuned(spread=0.30, paired=True), basic=9,
    )
    auto_chunker: bool = option(
        False, "torch.compile: let Inductor split head and loss into chunks, instead of loss_chunk_size",
        group="batch", nanogpt="cannot", needs=("compile", True), affects=COST, on_resume="rounding",
    )
    matmul: Literal["dtype", "fp8", "int8", "fp16_accumulation"] = option(
        "dtype",
        "precision of the blocks' matmuls; dtype: as dtype says; the others are faster on some cards but less exact",
        group="system", nanogpt="cannot", affects=EVERYTHING, on_resume="refuses",
    )
    master_weights: bool = option(
        False,
        "keep weights and residual stream in dtype, with fp32 masters in the optimizer",
        group="system", nanogpt="cannot", affects=EVERYTHING, on_resume="refuses", chosen_on_cpu="not given",
        idle=(("float32", "in float32 the weights are their own masters; set dtype to bfloat16"),),
    )
    torch_version: str = option(
        "", "torch of the run, such as 2.0, for the time that a plan predicts; empty: the installed one",
        group="system", pattern=r"^(\d{1,3}\.\d{1,3}[A-Za-z0-9.+]{0,30})?$", nanogpt="lacks",
        affects=("speed",), on_resume="free", compared=False, reference="other",
    )
    compile: bool = option(
        True, "torch.compile the model", group="system",
        affects=COST, on_resume="rounding", by_effect=True, reference="other",
        tuned=Tuned(spread=0.20, paired=True), basic=10,
    )
    compile_mode: Literal["default", "reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune"] = option(
        "default", "torch.compile's mode; only default has a forecast",
        group="system", nanogpt="cannot", needs=("compile", True), affects=COST, on_resume="rounding",
    )
    compile_blocks: bool = option(
        False,
        "torch.compile one block for all: starts sooner, less memory",
        group="system", nanogpt="cannot", needs=("compile", True), affects=COST, on_resume="rounding",
    )
    cuda_graph: Literal["auto", "on", "off"] = option(
        "auto",
        "run the optimizer step as one CUDA graph: much faster for small models; AdamW on one card; auto: where blocks "
        "are small", group="system", bare="on",
        nanogpt="cannot", affects=COST, on_resume="rounding", by_effect=True, reference="other",
        idle=(("cpu", "it is for CUDA"), ("mps", "it is for CUDA")),
    )
    attention: Literal["auto", "sdpa", "bmm"] = option(
        "auto", "attention kernels. sdpa: PyTorch's own; bmm: batched matmuls, for CPUs and without dropout; "
        "auto: sdpa on GPUs, the faster one on CPUs",
        group="system", nanogpt="cannot", affects=COST, on_resume="rounding", chosen_on_cpu="auto",
        tuned=Tuned(spread=0.25, paired=True),
    )
    cpu_threads: int = option(
        0, "threads of a run on a CPU; 0: PyTorch's number, or fewer if faster",
        group="system", least=0, most=4096, nanogpt="lacks",
        affects=("speed",), on_resume="rounding", chosen_on_cpu=0, tuned=Tuned(spread=0.30, paired=True),
        idle=(("cuda", _ON_A_CARD), ("mps", _ON_A_CARD)),
    )
    allocator_settings: str = option(
        "", "settings of CUDA's allocator, such as expandable_segments:True; PYTORCH_ALLOC_CONF overrides them",
        group="system", pattern=r"^[A-Za-z0-9_:,. \[\]>-]*$", nanogpt="lacks",
        affects=COST, on_resume="free", by_effect=True, reference="other",
        idle=(("cpu", "they are for CUDA's allocator"), ("mps", "they are for CUDA's allocator")),
    )
    strategy: StrategyName = option(
        "ddp",
        "how ranks share a step. ddp: each has all weights; zero1: shards optimizer states; fsdp: weights and "
        "gradients, too; fsdp_no_reshard: gathered once a step; hsdp: sharded within a node",
        group="system", nanogpt="cannot", affects=COST, on_resume="rounding", by_effect=True, reference="other",
        tuned=Tuned(spread=0.30),
    )
    hold_gradients: bool = option(
        False,
        "with fsdp: send gradients after the last micro-batch only: less to send, more memory",
        group="system", nanogpt="cannot", affects=COST, on_resume="rounding", by_effect=True, reference="other",
        tuned=Tuned(spread=0.20),
    )
    collective_timeout: int = option(
        600, "seconds that ranks wait for each other before the run ends",
        group="system", least=1, most=86_400, nanogpt="lacks", affects=NOTHING, on_resume="free",
    )
    memory_limit: str = option(
        "", "most memory the run may use, such as 10GiB; empty: what the card has free",
        group="system", nanogpt="lacks", affects=("memory",), on_resume="free", by_effect=True,
    )

    price_per_kwh: float = option(
        0.30, "price of electricity", group="cost", unit="currency/kWh", least=0, most=1e6, nanogpt="lacks",
        affects=NOTHING, on_resume="free", basic=15, slider=(0, 0.6, "cents"),
    )
    price_per_hour: float = option(
        0.0, "rent of the card or machine, paid instead of electricity; 0: not rented",
        group="cost", unit="currency/h", least=0, most=1e6, nanogpt="lacks", affects=NOTHING, on_resume="free",
        basic=14, slider=(0, 4, "dimes"),
    )
    co2_per_kwh: float = option(
        0.0, "CO2 of the electricity; 0: do not estimate it", group="cost", unit="g/kWh", least=0, most=1e5,
        nanogpt="lacks", affects=NOTHING, on_resume="free", slider=(0, 1000, "fifties"),
    )
    currency: str = option(
        "EUR", "currency of the prices", group="cost", pattern=r"^[^\x00-\x1f]{1,8}$", nanogpt="lacks",
        affects=NOTHING, on_resume="free", basic=16,
    )

    report_to: str = option(
        "", "trackers, such as trackio or tensorboard,wandb: tensorboard, trackio, wandb; empty: none",
        group="run", pattern=r"^[A-Za-z0-9_, -]{0,200}$", nanogpt="lacks", adds=True,
        affects=NOTHING, on_resume="free",
    )
    wandb_log: bool = option(
        False, "as report_to = wandb", group="run", label=True, affects=NOTHING, on_resume="free",
    )
    wandb_project: str = option(
        "owt", "project in every tracker; default: foretrain, or what the tracker's own variable says",
        group="run", label=True, affects=NOTHING, on_resume="free",
    )
    wandb_run_name: str = option(
        "gpt2", "name of the run in every tracker; default: that of its directory",
        group="run", label=True, affects=NOTHING, on_resume="free",
    )
    backend: str = option(
        "nccl", "nanoGPT's multi-GPU backend; foretrain uses nccl on GPUs and gloo on CPUs", group="system", inert=True,
        affects=NOTHING, on_resume="free",
    )
    # fmt: on

    @field_validator("cuda_graph", mode="before")
    @classmethod
    def _switch(cls, value: Any) -> Any:
        """A choice that was a switch once, and is still written as one."""
        return _SWITCH.get(str(value).lower(), value)

    @property
    def kv_heads(self) -> int:
        return self.n_kv_head or self.n_head

    @property
    def head_width(self) -> int:
        return self.head_dim or self.n_embd // self.n_head

    @property
    def mlp_inner(self) -> int:
        """Width inside the MLP in the Llama family; Touvron et al.'s own rule where none is given."""
        return self.mlp_width or -(-(8 * self.n_embd // 3) // 256) * 256

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.gradient_accumulation_steps * self.block_size

    @property
    def checkpointed(self) -> int:
        """How many blocks are checkpointed: the first ones, since the last one's activations are needed at once."""
        return min(self.checkpointed_blocks or self.n_layer, self.n_layer) if self.activation_checkpointing else 0

    @property
    def elements_on_host(self) -> int:
        """Count a micro-batch's block inputs that checkpoint_offload moves: of all checkpointed blocks but the last."""
        count = max(0, self.checkpointed - 1) if self.checkpoint_offload else 0
        return count * self.batch_size * self.block_size * self.n_embd

    @property
    def compiles_blocks(self) -> bool:
        """Whether a compiled model is compiled block by block: also where copies to the host run between blocks."""
        return self.compile_blocks or self.checkpoint_offload

    def as_nanogpt(self) -> "RunConfig":
        """What nanoGPT would run of it: none of foretrain's own ways, and evaluation at the sizes of training."""
        return self.model_copy(update=_WITHOUT_OWN_WAYS)

    @property
    def obstacle_to_bmm(self) -> str:
        """Why attention = bmm cannot serve this model in training; empty where it can."""
        if self.recipe != "nanogpt":
            return "it needs recipe = nanogpt"
        return "it has no dropout" if self.dropout else ""

    @property
    def makes_graphs(self) -> bool:
        """Whether torch.compile's mode replays each pass as a CUDA graph of its own."""
        return self.compile_mode in ("reduce-overhead", "max-autotune")

    @property
    def is_recordable(self) -> bool:
        """Whether `cuda_graph` can record the step: nothing in it asks the card something, or has graphs of its own."""
        on_the_card = not self.optimizer_offload and not self.checkpoint_offload
        return self.optimizer == "adamw" and on_the_card and not self.makes_graphs and not self.optimizer_in_backward

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


OPTIONS = options_of(RunConfig)


def named(wanted: Callable[[Option], Any]) -> tuple[str, ...]:
    return tuple(name for name, each in OPTIONS.items() if wanted(each))


def unread(values: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """(option, the other one that keeps it from being read, that one's value); what is not said has its default."""
    for name, each in OPTIONS.items():
        if each.needs is not None:
            other, wanted = each.needs
            now = values.get(other)
            now = OPTIONS[other].default if now is None else now
            if now != wanted:
                yield name, other, now


def step_options(config: RunConfig) -> dict[str, Any]:
    """Return the options that a step's memory and time hang on, by which a cached measurement is named."""
    return {name: getattr(config, name) for name in named(lambda each: {"speed", "memory"} & {*each.affects})}


FORETRAINS_OWN = frozenset(named(lambda each: each.nanogpt == "cannot"))
_WITHOUT_OWN_WAYS = {name: OPTIONS[name].default for name in FORETRAINS_OWN} | {"cuda_graph": "off"}
