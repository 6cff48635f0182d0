"""How long a step of a fine-tuning run takes: the kernels of its code at the rates of the card. No torch.

Bytes and FLOPs come from the kernels that the model's own code runs (program.py); rates are those of speed/rates.py.
"""

from collections.abc import Callable, Iterator
from typing import Any

from foretrain.config.finetune.options import FineTune, Optim
from foretrain.config.hub.facts import ModelFacts
from foretrain.hardware.catalogue import Dtype, Gpu
from foretrain.predict.abstract.dims import Kernel
from foretrain.predict.abstract.tensors import float32
from foretrain.predict.finetune.kernels import kernels_of
from foretrain.predict.finetune.optimizers import TRAFFIC
from foretrain.predict.finetune.program import Program
from foretrain.predict.finetune.simulated import attention_kernel, symbols_of
from foretrain.predict.speed.ops import Operation, flops
from foretrain.predict.speed.rates import Rates, busy_s, rates_of
from foretrain.predict.speed.time import Range, range_between

# A step's work of the Trainer itself, once the card is done: it reads whether the loss is a number. 1 to 3 ms of a core
# of an EPYC over the same steps in a plain loop, transformers 5.23.
TRAINER_S = 2e-3
FUSED_LAUNCHES = 40  # kernels of a fused optimizer step and of clipping
# Kernels for each matrix of optimizers that take one weight after the other.
LAUNCHES: dict[Optim, int] = {
    "adamw_8bit": 1, "paged_adamw_8bit": 1, "paged_adamw_32bit": 1, "adafactor": 24, "muon": 22,
}  # fmt: skip


class StepWork:
    """What a step runs: `micro` of each micro-batch, `optimizer` once."""

    def __init__(self, facts: ModelFacts, tune: FineTune, gpu: Gpu) -> None:
        self.tune, self.gpu = tune, gpu

        def attention(learns: bool) -> str:
            return attention_kernel(facts, tune, gpu, learns=learns)

        self.program = Program(facts, tune, attention, gpu)
        symbols = symbols_of(facts, tune, gpu, tune.batch_size)
        symbols |= dict.fromkeys(("flash", "split", "sums1", "sums2", "sums3", "sums4"), 0)
        self.micro = list(self._operations(symbols))

    def _operations(self, symbols: dict[str, int]) -> Iterator[Operation]:
        half = _half(self.tune)
        for kernel, runs in kernels_of(self.program, symbols, compiled=self.tune.compile):
            found = _operation(kernel, runs, half)
            if found.nbytes:  # on tensors without elements PyTorch runs none: what Phi-3 does not rotate
                yield found

    def optimizer(self) -> list[Operation]:
        """Norms, clipping and the update of each trained weight."""
        found = []
        read, written = TRAFFIC[self.tune.optim]
        for p in self.program.trained().values():
            n, width = p.numel(), p.dtype.itemsize
            dtype: Dtype = "float32" if p.dtype == float32 else "bfloat16"
            if self.tune.max_grad_norm:
                found.append(Operation("clipping", "clip", "optimizer", 1, (n,), dtype, 0, 2 * width * n, width * n))
            nbytes = round(read(width) * n), round(written(width) * n)
            found.append(Operation("optimizer", "adamw", "optimizer", 1, (n,), dtype, 0, *nbytes))
        return found

    def accumulation(self) -> list[Operation]:
        """Gradients of a later micro-batch, added to those that are there."""
        found = []
        for p in self.program.trained().values():
            nbytes = p.dtype.itemsize * p.numel()
            found.append(
                Operation("gradients", "accumulate", "accumulate", 1, (p.numel(),), "float32", 0, 2 * nbytes, nbytes)
            )
        return found


def _half(tune: FineTune) -> Dtype:
    """What a number of two bytes is."""
    return "float16" if tune.amp == "fp16" or (tune.amp != "bf16" and tune.dtype == "float16") else "bfloat16"


def _operation(kernel: Kernel, runs: int, half: Dtype) -> Operation:
    """A kernel as the rates know it."""
    read, written = (
        sum(width * _product(shape) for width, shape in tensors) for tensors in (kernel.reads, kernel.writes)
    )
    dtype: Dtype = "float32" if kernel.item_bytes == 4 else half
    kind: Any = "fill" if kernel.kind == "dequantize" else kernel.kind.removeprefix("triton_")
    shape = tuple(int(size) for size in kernel.shape)
    if kernel.kind == "dequantize":  # four bits are read for each element that is written
        read += written // 4
    if not shape:
        shape = (max((_product(each) for _, each in kernel.reads + kernel.writes), default=0),)
    part: Any = kernel.part
    return Operation(kernel.name, kind, part, runs, shape, dtype, _flops(kernel.kind, shape), read, written)


def _product(sizes: Any) -> int:
    found = 1
    for size in sizes:
        found *= int(size)
    return found


def _flops(kind: str, shape: tuple[int, ...]) -> int:
    if len(shape) == 3:
        return 2 * _product(shape)
    if len(shape) == 4:
        return (10 if kind.endswith("backward") else 4) * _product(shape) * shape[2]
    return 0


def rates_for(tune: FineTune, gpu: Gpu) -> Rates | None:
    """What is known of the card's speed in the dtype of this run's matmuls."""
    dtype: Any = {"bf16": "bfloat16", "fp16": "float16"}.get(tune.amp, tune.dtype)
    return rates_of(gpu, dtype)


def step_s(facts: ModelFacts, tune: FineTune, gpu: Gpu) -> tuple[Range, int] | None:
    """(seconds of one optimizer step, its FLOPs by FlopCounterMode's convention); None where the card's speed is not
    known."""
    rates = rates_for(tune, gpu)
    if rates is None:
        return None
    work = StepWork(facts, tune, gpu)
    work_s, sums_s = busy_s(work.micro, rates), busy_s(work.accumulation(), rates) * (tune.grad_accum - 1)
    host_s = sum(op.runs for op in work.micro) * rates.launch_s(compiled=tune.compile) + rates.python_s

    update_s = _optimizer_s(work, rates)

    def time_s(slower: float, host: float) -> float:
        micro_s = max(slower * work_s, host * host_s)
        return tune.grad_accum * micro_s + slower * (sums_s + TRAINER_S) + update_s(slower, host)

    return range_between(time_s, gpu, as_nanogpt=False), tune.grad_accum * flops(work.micro)


def _optimizer_s(work: StepWork, rates: Rates) -> Callable[[float, float], float]:
    """Clipping and the update, on a device and a host that take so many times as long: of many small kernels the longer
    of running and launching them."""
    kernels = work.optimizer()
    each = LAUNCHES.get(work.tune.optim, 0) * sum(op.name == "optimizer" for op in kernels)
    work_s, launching_s = busy_s(kernels, rates), (FUSED_LAUNCHES + each) * rates.launch_s(compiled=False)
    together = max if each else lambda a, b: a + b
    return lambda slower, host: together(slower * work_s, host * launching_s)
