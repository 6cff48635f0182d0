"""Which runs are tried: small to as large as the card carries, every way of training that moves memory. No torch."""

from collections.abc import Callable
from typing import Any

from foretrain.hardware.catalogue import Gpu
from foretrain.predict.memory import estimated
from foretrain.verification.record import Case

ROOM = 0.9  # of the free memory: a case is made smaller until it is expected to need no more
MOST_SEQUENCES = 512  # of a micro-batch, where the largest one that fits is looked for

_CHARACTERS = {"n_layer": 6, "n_head": 6, "n_embd": 384, "block_size": 256, "batch_size": 64, "vocab_size": 65}
_30M = {"n_layer": 6, "n_head": 6, "n_embd": 384, "block_size": 512, "batch_size": 8, "gradient_accumulation_steps": 4}
_124M = {"n_layer": 12, "n_head": 12, "n_embd": 768, "batch_size": 4, "gradient_accumulation_steps": 5}
_350M = {"n_layer": 24, "n_head": 16, "n_embd": 1024, "batch_size": 1}
_ONE = {"gradient_accumulation_steps": 1}
_SAVING = {"activation_checkpointing": True, "loss_chunk_size": 2048}


def _case(name: str, options: dict[str, Any], dtype: str, step: str = "foretrain", *, compiled: bool = False) -> Case:
    # RunConfig accumulates 40 times unless it is told otherwise.
    return Case(name=name, options={**_ONE, **options}, dtype=dtype, step=step, compiled=compiled)  # type: ignore[arg-type]


# Those of a card, small ones first. Vocabularies that are not divisible by 8 are eager or in fp32: how a compiled step
# pads them otherwise is decided by a measurement on the card, and a plan gives a range.
ON_A_CARD = (
    _case("characters", _CHARACTERS, "bfloat16"),
    _case("characters dropout", {**_CHARACTERS, "dropout": 0.2}, "float16", "nanogpt"),
    _case("characters", _CHARACTERS, "float32", compiled=True),
    _case("30M", _30M, "float32"),
    _case("30M", _30M, "float16"),
    _case("30M", _30M, "float16", "nanogpt"),
    _case("30M", _30M, "float16", "nanogpt", compiled=True),
    _case("30M vocabulary 50257", {**_30M, "vocab_size": 50257}, "bfloat16", "nanogpt"),
    _case("30M own evaluation", {**_30M, "eval_batch_size": 16}, "bfloat16"),
    _case("30M evaluation only", {**_30M, "eval_only": True}, "bfloat16"),
    _case("124M", _124M, "bfloat16"),
    _case("124M", _124M, "bfloat16", "nanogpt"),
    _case("124M", _124M, "bfloat16", compiled=True),
    _case("124M", _124M, "bfloat16", "nanogpt", compiled=True),
    _case("124M no accumulation", {**_124M, **_ONE}, "float16", "nanogpt"),
    _case("124M dropout and bias", {**_124M, "dropout": 0.1, "bias": True}, "bfloat16"),
    _case("124M chunked loss", {**_124M, "batch_size": 8, "loss_chunk_size": 2048}, "bfloat16"),
    _case("124M checkpointing", {**_124M, "batch_size": 8, "activation_checkpointing": True}, "bfloat16"),
    _case("124M checkpointing", {**_124M, "activation_checkpointing": True}, "bfloat16", compiled=True),
    _case("124M adamw8bit", {**_124M, "optimizer": "adamw8bit"}, "bfloat16"),
    _case("124M modern, Muon", {**_124M, "recipe": "modern", "optimizer": "muon"}, "bfloat16"),
)  # fmt: skip
# Their micro-batch is the largest that is expected to fit.
FILLING = (
    _case("124M largest micro-batch", {**_124M, **_ONE}, "bfloat16"),
    _case("124M largest micro-batch", {**_124M, **_ONE}, "bfloat16", "nanogpt", compiled=True),
    _case("350M largest micro-batch", {**_350M, **_SAVING}, "bfloat16"),
)

_SMALL = {"n_layer": 4, "n_head": 4, "n_embd": 256, "block_size": 256, "batch_size": 8, "vocab_size": 4096}
# Those of a CPU: eager, and done in a minute or two. There is no trace of a CPU's memory, only the estimate.
ON_A_CPU = (
    _case("small", _SMALL, "float32"),
    _case("small", _SMALL, "float32", "nanogpt"),
    _case("small accumulation", {**_SMALL, "batch_size": 4, "gradient_accumulation_steps": 4}, "float32"),
    _case("small dropout and bias", {**_SMALL, "dropout": 0.1, "bias": True}, "float32"),
    _case("small checkpointing", {**_SMALL, "activation_checkpointing": True}, "float32"),
    _case("small chunked loss", {**_SMALL, "vocab_size": 50304, "loss_chunk_size": 512}, "float32"),
    _case("small adamw8bit", {**_SMALL, "optimizer": "adamw8bit"}, "float32"),
    _case("30M", {**_30M, "batch_size": 2, **_ONE}, "float32"),
)


def cases_for(gpu: Gpu, free_bytes: int | None) -> tuple[Case, ...]:
    """The cases of a device with so much free memory. bfloat16 is float16 where the card has none; a micro-batch is
    halved until the case is expected to fit, or is one sequence."""
    if gpu.kind == "cpu":
        return tuple(_fitting(case, gpu, free_bytes) for case in ON_A_CPU)
    return tuple(
        make(_in_a_dtype_of(gpu, case), gpu, free_bytes)
        for cases, make in ((ON_A_CARD, _fitting), (FILLING, _filling))
        for case in cases
    )


def is_ours(case: Case, gpu: Gpu) -> bool:
    """Whether this version has the case, whatever its micro-batch: a file of results may come from anywhere."""

    def without_batch(each: Case) -> Case:
        kept = {name: value for name, value in each.options.items() if name not in ("batch_size", "eval_batch_size")}
        return each.model_copy(update={"options": kept})

    own = ON_A_CPU if gpu.kind == "cpu" else (*ON_A_CARD, *FILLING)
    return without_batch(case) in [without_batch(_in_a_dtype_of(gpu, each)) for each in own]


def needed_bytes(case: Case, gpu: Gpu) -> int:
    """What the estimate says that a case's process needs on a device."""
    return estimated(case.spec(gpu)).memory.needed_bytes


def _in_a_dtype_of(gpu: Gpu, case: Case) -> Case:
    return case if gpu.supports_bf16 or case.dtype != "bfloat16" else case.model_copy(update={"dtype": "float16"})


def _batch(case: Case) -> int:
    return case.config.batch_size


def with_batch(case: Case, size: int) -> Case:
    """With this micro-batch; an evaluation's own one shrinks with it."""
    options = {**case.options, "batch_size": size}
    if own := case.config.eval_batch_size:
        options["eval_batch_size"] = max(1, own * size // _batch(case))
    return case.model_copy(update={"options": options})


def _room(gpu: Gpu, free_bytes: int | None) -> Callable[[Case], bool]:
    return lambda case: free_bytes is None or needed_bytes(case, gpu) <= ROOM * free_bytes


def _fitting(case: Case, gpu: Gpu, free_bytes: int | None) -> Case:
    fits = _room(gpu, free_bytes)
    while not fits(case) and _batch(case) > 1:
        case = with_batch(case, _batch(case) // 2)
    return case


def _filling(case: Case, gpu: Gpu, free_bytes: int | None) -> Case:
    """With the largest micro-batch that is expected to fit; of one sequence where none is, or nothing is known."""
    fits = _room(gpu, free_bytes)
    low, high = 1, 2
    if free_bytes is None:
        return case
    while high <= MOST_SEQUENCES and fits(with_batch(case, high)):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(with_batch(case, middle)) else (low, middle)
    return with_batch(case, low)
