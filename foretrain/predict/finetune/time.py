"""How long a step of a fine-tuning run takes: its code's kernels (program.py) at the rates of the card. No torch."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from typing import Any

from foretrain.config.finetune.options import FineTune, Optim
from foretrain.config.hub.facts import ModelFacts
from foretrain.hardware.catalogue import Dtype, Gpu
from foretrain.predict.abstract.dims import Kernel
from foretrain.predict.abstract.passage import OUTSIDE
from foretrain.predict.finetune.generation import GenerationWork
from foretrain.predict.finetune.memory import MICRO_BATCHES, symbols_of
from foretrain.predict.finetune.optimizers import TRAFFIC
from foretrain.predict.finetune.program import Program, kernels_of
from foretrain.predict.finetune.ranks import Weight, groups_of, waits_s
from foretrain.predict.speed.ops import Operation, flops, flops_of
from foretrain.predict.speed.ranks import GATHER_LAUNCHES, Pace
from foretrain.predict.speed.rates import Rates, busy_s, rates_of
from foretrain.predict.speed.time import Range, range_between
from foretrain.predict.timing import PRICES, Prices, Timing, TimingSource, spending

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
        self.program = Program(facts, tune, gpu)
        self.groups = self.program.shards
        self.trained_bytes = [p.numel() * p.dtype.itemsize for p in self.program.trained().values()]
        symbols = symbols_of(facts, tune, gpu, tune.batch_size)
        symbols |= dict.fromkeys(("flash", "split", "sums1", "sums2", "sums3", "sums4"), 0)
        self.outside: list[Operation] = []  # of no layer
        self.micro = list(self._operations(symbols))
        self.symbols = symbols

    @property
    def model_flops(self) -> int:
        return model_flops(self.program.facts, self.tune, self.gpu)

    @cached_property
    def generation(self) -> GenerationWork | None:
        return GenerationWork(self) if self.tune.generates else None

    def waits_s(self, rates: Rates, work_s: float, host_s: float) -> tuple[float, float, float]:
        """Return seconds that several cards wait for one another in a step: low, expected, high."""
        if self.tune.world == 1:
            return 0.0, 0.0, 0.0
        pace = Pace(0, backward_root=busy_s([op for op in self.micro if op.part != "forward"], rates))
        if self.tune.sharded:
            pace = self.pace(rates)
            pace = pace.scaled(max(work_s, host_s) / ((pace.forward + pace.backward) or 1.0))
        low, expected, high = waits_s(self.tune, self.gpu, self.trained_bytes, pace, self.groups)
        return low, expected, high

    def update_launches(self, kernels: list[Operation]) -> tuple[int, bool]:
        """How many kernels the update launches, and whether they are many small ones."""
        each = LAUNCHES.get(self.tune.optim, 0) * sum(op.name == "optimizer" for op in kernels)
        return FUSED_LAUNCHES + each, each > 0

    def before(self, name: str, symbols: dict[str, int] | None = None) -> list[Operation]:
        """What another pass runs: Program.structure's `before`."""
        return list(self._operations(self.symbols | (symbols or {}), name))

    def _operations(self, symbols: dict[str, int], before: str = "") -> Iterator[Operation]:
        half = _half(self.tune)
        for kernel, runs in kernels_of(self.program, symbols, compiled=self.tune.compile and not before, before=before):
            found = _operation(kernel, runs, half)
            if found.nbytes:  # on tensors without elements PyTorch runs none: what Phi-3 does not rotate
                self.outside += [found] if kernel.layer == OUTSIDE else []
                yield found

    def shared(self) -> list[Operation]:
        """What FSDP copies in a micro-batch: the weights that it gathered, to where matmuls read them."""
        return [
            Operation("gathered", "add", "forward", 1 + group.reshards, (nbytes,), "bfloat16", 0, nbytes, nbytes)
            for group in self.program.shards
            for nbytes in group.gathered
        ]

    def pace(self, rates: Rates) -> Pace:
        layers, times = max(1, len({group.layer for group in self.groups} - {OUTSIDE})), []
        for is_forward in (True, False):
            whole, outside = (
                busy_s([op for op in ops if (op.part == "forward") is is_forward], rates)
                for ops in (self.micro, self.outside)
            )
            times += [outside, max(0.0, whole - outside) / layers]
        return Pace(layers, *times)

    def optimizer(self) -> list[Operation]:
        found = []
        read, written = TRAFFIC[self.tune.optim]
        sharded, zero = self.tune.sharded, bool(self.tune.zero_stage)
        cards = self.tune.world if sharded or zero else 1
        for p in self.program.trained().values():
            width = 4 if zero else self.program.stored_bytes(p) if sharded else p.dtype.itemsize
            n = -(-p.numel() // cards)
            dtype: Dtype = "float32" if width == 4 else "bfloat16"
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
    return "float16" if tune.amp == "fp16" or (tune.amp != "bf16" and tune.dtype == "float16") else "bfloat16"


def _operation(kernel: Kernel, runs: int, half: Dtype) -> Operation:
    """A kernel as the rates know it."""
    read, written = (
        sum(width * math.prod(map(int, shape)) for width, shape in tensors) for tensors in (kernel.reads, kernel.writes)
    )
    dtype: Dtype = "float32" if kernel.item_bytes == 4 else half
    kind: Any = "fill" if kernel.kind == "dequantize" else kernel.kind.removeprefix("triton_")
    shape = tuple(int(size) for size in kernel.shape)
    if kernel.kind == "dequantize":  # four bits are read for each element that is written
        read += written // 4
    if not shape:
        shape = (max((math.prod(map(int, each)) for _, each in kernel.reads + kernel.writes), default=0),)
    part: Any = kernel.part
    return Operation(kernel.name, kind, part, runs, shape, dtype, flops_of(kernel.kind, shape), read, written)


def rates_for(tune: FineTune, gpu: Gpu) -> Rates | None:
    dtype: Any = {"bf16": "bfloat16", "fp16": "float16"}.get(tune.amp, tune.dtype)
    return rates_of(gpu, dtype)


class TracedWork(StepWork):
    """What a traced step runs (predict/trace/kernels/work.py), of a model that has no estimate."""

    def __init__(self, tune: FineTune, gpu: Gpu, rows: Iterable[Sequence[Any]], shared: Sequence[Weight]) -> None:
        self.tune, self.gpu = tune, gpu
        self.micro, self.update, self.outside = [], [], []
        self.groups = groups_of(tune, shared) if tune.sharded else []
        self.trained_bytes = [math.prod((*shape, width)) for _, shape, width, trained in shared if trained]
        traced = min(MICRO_BATCHES, tune.grad_accum)
        for *known, runs in rows:
            part, kind, shape, *sizes = known
            if part == "optimizer":
                self.update.append(Operation("traced", kind, part, runs, shape, *sizes))
            else:  # sums of gradients are of all micro-batches but the first
                each = max(1, round(runs / traced))
                self.micro.append(Operation("traced", kind, part, each, shape, *sizes))

    @property
    def model_flops(self) -> int:
        """Without what checkpoints and flash attention's backward pass make again."""
        run = [op for op in self.micro if op.part != "recompute"]
        return self.tune.world * self.tune.grad_accum * _made_once(run)

    def shared(self) -> list[Operation]:
        return []

    def accumulation(self) -> list[Operation]:
        return []  # the engine's sums are among the kernels of a micro-batch

    def optimizer(self) -> list[Operation]:
        return self.update

    def update_launches(self, kernels: list[Operation]) -> tuple[int, bool]:
        return sum(op.runs for op in kernels), True


def step_s(work: StepWork) -> tuple[Range, int] | None:
    """Return (seconds of one optimizer step, its FLOPs by FlopCounterMode's convention); None without a known speed."""
    tune, gpu = work.tune, work.gpu
    rates = rates_for(tune, gpu)
    if rates is None:
        return None
    copies, later = work.shared(), tune.grad_accum - 1
    work_s, sums_s = busy_s(work.micro + copies, rates), busy_s(work.accumulation(), rates) * later
    launches = sum(op.runs for op in work.micro) + GATHER_LAUNCHES * sum(op.runs for op in copies)
    host_s = launches * rates.launch_s(compiled=tune.compile) + rates.python_s

    update_s = _optimizer_s(work, rates)
    written = work.generation

    def time_s(slower: float, host: float) -> float:
        micro_s = max(slower * work_s, host * host_s)
        own_s = tune.grad_accum * micro_s + slower * (sums_s + TRAINER_S) + update_s(slower, host)
        return own_s + (sum(written.time_s(rates, slower, host)) if written else 0.0)

    found = range_between(time_s, gpu, as_nanogpt=False)
    counted = tune.world * (tune.grad_accum * flops(work.micro) + (written.flops if written else 0))
    low, expected, high = work.waits_s(rates, work_s, host_s)
    found = Range(low_s=found.low_s + low, expected_s=found.expected_s + expected, high_s=found.high_s + high)
    return found, counted


def _optimizer_s(work: StepWork, rates: Rates) -> Callable[[float, float], float]:
    """Clipping and the update, on a device and a host that take so many times as long: of many small kernels the longer
    of running and launching them."""
    kernels = work.optimizer()
    launches, many = work.update_launches(kernels)
    work_s, launching_s = busy_s(kernels, rates), launches * rates.launch_s(compiled=False)
    together = max if many else lambda a, b: a + b
    return lambda slower, host: together(slower * work_s, host * launching_s)


# What MFU of fine-tuning is a share of (PaLM, arXiv:2204.02311, appendix B): the FLOPs of the model's forward and
# backward pass, without recomputation; HFU counts all that runs, with logits that a loss in tiles makes twice and
# scores that flash attention makes again. Both count the full T x T square of attention. With adapters MFU has no
# gradients of frozen weights, which nobody computes, but those that flow through them.

# Options that change how a step runs and not what it needs: the model's plain code, one sample a row.
PLAIN: dict[str, Any] = {
    "gradient_checkpointing": False, "offload_checkpoints": False, "liger": False, "unsloth": False, "compile": False,
    "packing": False, "padded": False, "attn": "sdpa", "grad_accum": 1, "optim": "sgd",
    "max_grad_norm": 0.0, "lora_dropout": 0.0, "evaluate": False, "keeps_logits": False, "max_steps": 0, "epochs": 0.0,
    "dataset_tokens": 0, "world": 1, "per_node": 0, "link": "", "network": "",
}  # fmt: skip
MOST_KEPT = 128


def model_flops(facts: ModelFacts, tune: FineTune, gpu: Gpu) -> int:
    """FLOPs of one optimizer step of all its micro-batches, a multiply-add counted as two. A dense model that is
    trained whole needs 6·N + 12·L·H·D·T a token, with the N parameters of its matrices, the head among them."""
    own = {} if tune.scores else {"loop": "trainer", "training": "sft", "batch_size": tune.sequences}
    asked = (each.model_dump_json() for each in (facts, tune.model_copy(update={**PLAIN, **own}), gpu))
    return tune.world * tune.grad_accum * _counted(*asked, tune.forward_passes)


@lru_cache(maxsize=MOST_KEPT)
def _counted(facts: str, tune: str, gpu: str, forward_passes: float) -> int:
    work = StepWork(
        ModelFacts.model_validate_json(facts), FineTune.model_validate_json(tune), Gpu.model_validate_json(gpu)
    )
    more = forward_passes * flops([op for op in work.micro if op.part == "forward"])
    return _made_once(work.micro) + round(more)


def _made_once(operations: list[Operation]) -> int:
    """Return FLOPs without two of the five products of flash attention's backward pass, made in the forward pass."""
    fused = (op for op in operations if len(op.shape) == 4 and op.kind.endswith("backward"))
    return flops(operations) - sum(op.runs * op.flops // 5 for op in fused)


def timing(work: StepWork, prices: Prices = PRICES) -> Timing | None:
    found = step_s(work)
    if found is None:
        return None
    each, counted = found
    made = _timing(work.tune, work.gpu, prices, each, (work.model_flops, counted))
    rates = rates_for(work.tune, work.gpu)
    if work.generation is None or rates is None:
        return made
    return made.model_copy(update={"generation_s": work.generation.time_s(rates, 1.0, 1.0)[0]})


def logged(work: StepWork, seconds: float, prices: Prices = PRICES) -> Timing:
    """The same from the seconds of a step in a log, on any card."""
    each, tune = Range(low_s=seconds, expected_s=seconds, high_s=seconds), work.tune
    counted = work.model_flops, tune.world * tune.grad_accum * flops(work.micro)
    return _timing(tune, work.gpu, prices, each, counted, "measured (log)")


def _timing(
    tune: FineTune, gpu: Gpu, prices: Prices, each: Range, counted: tuple[int, int], source: TimingSource = "estimated"
) -> Timing:
    """`counted`: FLOPs of a step, those of the model and all that run."""
    peak = gpu.peak_flop_per_s("bfloat16" if gpu.supports_bf16 else "float16")
    mfu, hfu = (each_flops / each.expected_s / (tune.world * peak) if peak else None for each_flops in counted)
    step = Timing(
        flop_per_s=counted[0] / each.expected_s, source=source,
        step_s=each, tokens_per_s=tune.tokens_per_step / each.expected_s,
        flops_per_step=counted[0], hardware_flops_per_step=counted[1], mfu=mfu, hfu=hfu, prices=prices,
    )  # fmt: skip
    return with_steps(step, gpu, tune.steps, tune.world)


def with_steps(found: Timing, gpu: Gpu, steps: int | None, cards: int = 1) -> Timing:
    """Return the timing with another number of steps; of None of one. What is recomputed draws power, too."""
    total = found.step_s.scaled(steps) if steps else None
    spent = spending(found.prices, gpu, found.hfu, total or found.step_s, cards)
    return found.model_copy(update={"steps": steps, "total_s": total, **dict(spent)})
