"""Which arithmetic of matrix products a device can do: the conditions of the knob `matmul`. No torch.

FP8 tensor cores came with Ada (compute capability 8.9) and Hopper; INT8 ones that torch._int_mm uses are asked for from
Ampere on; sums in fp16 are a mode of every tensor core since Volta. A CPU has none of them but computes the same
numbers, so that the modes can be tried there.
"""

from collections.abc import Iterator

from foretrain.base.errors import UserError
from foretrain.config.options import OPTIONS, RunConfig, named
from foretrain.hardware.catalogue import Dtype, Gpu, MatmulMode

REFUSED = named(lambda option: bool(option.refused))


def idle(config: RunConfig, gpu: Gpu, dtype: Dtype) -> Iterator[tuple[str, str]]:
    """(what is set, why it does nothing here)."""
    for name, option in OPTIONS.items():
        if (why := option.idle_on(gpu.kind, dtype)) and getattr(config, name) != option.default:
            yield name, why


def check_refused(config: RunConfig, gpu: Gpu) -> None:
    """Raise UserError where an option is set that the device refuses."""
    for name in REFUSED:
        if (why := OPTIONS[name].refused_on(gpu.kind)) and getattr(config, name) != OPTIONS[name].default:
            raise UserError("config.refused_here", option=name, gpu=gpu.name, reason=why)


MULTIPLE = 16  # cuBLAS's FP8 products want every side to be one of 16; INT8 would be content with 8
LEAST_CAPABILITY: dict[MatmulMode, tuple[int, int]] = {"fp8": (8, 9), "int8": (8, 0), "fp16_accumulation": (7, 0)}
LACKING: dict[MatmulMode, str] = {
    "fp8": "gpu.no_fp8", "int8": "gpu.no_int8", "fp16_accumulation": "gpu.no_fp16_accumulation",
}  # fmt: skip
EIGHT_BITS = ("fp8", "int8")


def check_precision(config: RunConfig, gpu: Gpu, dtype: Dtype) -> None:
    """Raise UserError where a device, or the dtype that it leads to, does not allow what the config asks for."""
    check_refused(config, gpu)
    if config.optimizer_in_backward and dtype == "float16":  # gradients are unscaled when all are there
        raise UserError("config.in_backward_dtype", gpu=gpu.name)
    check_matmul(config, gpu, dtype)


def check_matmul(config: RunConfig, gpu: Gpu, dtype: Dtype) -> None:
    """Raise UserError where `matmul` asks for what the device or the sizes of the model do not allow."""
    mode = config.matmul
    if mode == "dtype":
        return
    if gpu.kind == "mps" or (gpu.kind == "cpu" and mode == "fp16_accumulation"):
        raise UserError("gpu.no_matmul_mode", mode=mode, gpu=gpu.name)
    if gpu.kind == "cuda" and gpu.capability < LEAST_CAPABILITY[mode]:
        raise UserError(LACKING[mode], gpu=gpu.name, capability=gpu.compute_capability or "unknown")
    if mode == "fp16_accumulation" and dtype != "float16":
        raise UserError("config.fp16_accumulation_dtype", dtype=dtype)
    if mode in EIGHT_BITS:
        if config.n_embd % MULTIPLE:
            raise UserError("config.matmul_width", mode=mode, n_embd=config.n_embd, multiple=MULTIPLE)
        for tokens, what in (
            (config.batch_size * config.block_size, "batch_size x block_size"),
            (config.eval_batch * config.eval_block, "eval_batch_size x eval_block_size"),
        ):
            if tokens % MULTIPLE or tokens == MULTIPLE:  # torch._int_mm wants more than 16 rows
                raise UserError("config.matmul_rows", mode=mode, what=what, tokens=tokens, multiple=MULTIPLE)
