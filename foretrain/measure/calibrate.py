"""`foretrain calibrate`: this device's fastest runs of each kernel, and a few whole steps, which show by how much they
are slower than their kernels. Only the first dtype's are compiled: on an H100 the corrections of three were within
5%."""

import datetime
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from foretrain.base.installation import installed_torch
from foretrain.config.options import RunConfig
from foretrain.hardware.calibration import Calibration, KernelTime, StepTime
from foretrain.hardware.card import Load
from foretrain.hardware.cpu import cpu_flags
from foretrain.measure.timer import Enough, Stepper, Timer, on_host, repeated, timer
from foretrain.model.attention import causal_attention
from foretrain.model.step import TrainState
from foretrain.training.contention import Contention
from foretrain.training.cpu_threads import Waiting
from foretrain.training.device import TORCH_DTYPES, Placement, beside_allocator, identity_of, obstacle_to_compile

aten = torch.ops.aten
WIDTH, VOCABULARY = 512, 8192  # of the tensors for kernels that go over rows
# A CPU's attention is only fast where rows are long and heads are wide, in bf16 above all.
CPU_ATTENTION = ((8, 4, 64, 32), (8, 4, 128, 32), (8, 4, 128, 64), (4, 6, 256, 64), (2, 6, 1024, 64))
FEW = 4096  # random numbers
MOST_ON_CPU = 20e9  # of a matmul's m·n·k: a larger one takes a CPU a second, and a smaller one tells as much
ROWS = 256  # of the embedding: few, as zeroing its gradient is an operation of its own


class Kernel(NamedTuple):
    kind: str
    dtype: str
    shape: tuple[int, ...]
    run: Callable[[], Any]


def matmul_shapes(*, large: bool) -> list[tuple[int, int, int]]:
    """Return (rows, out, in) of a GPT's linear layers: rows x width x {1, 3, 4} width, the reverse, and heads."""
    widths = (768, 1536) if large else (128, 384, 768)
    heads = [(50304, 768)] if large else [(8192, 384), (50304, 256)]
    pairs = [(w * times, w) for w in widths for times in (1, 3, 4)] + [(w, 4 * w) for w in widths] + heads
    rows = (16384, 4096) if large else (512, 2048)
    found = [(m, *pair) for m in rows for pair in pairs] + [(rows[-1] // 8, 3 * widths[0], widths[0])]
    return found if large else [shape for shape in found if math.prod(shape) < MOST_ON_CPU]


def numbers(shape: tuple[int, ...], device: torch.device, dtype: str) -> torch.Tensor:
    """Repeat the same few random numbers: to draw them all takes longer than the kernel does."""
    few, count = torch.randn(FEW, device=device, dtype=TORCH_DTYPES[dtype]), math.prod(shape)
    return few.repeat(-(-count // FEW))[:count].view(shape)


def matmuls(device: torch.device, dtype: str, *, large: bool) -> Iterator[Kernel]:
    for m, wide, narrow in matmul_shapes(large=large):
        yield from product(device, dtype, m, wide, narrow)


def product(device: torch.device, dtype: str, m: int, wide: int, narrow: int) -> Iterator[Kernel]:
    x, weight, dy = (numbers(shape, device, dtype) for shape in ((m, narrow), (wide, narrow), (m, wide)))
    yield Kernel("matmul", dtype, (m, wide, narrow), lambda: F.linear(x, weight))
    yield Kernel("matmul_input", dtype, (m, narrow, wide), lambda: dy @ weight)
    yield Kernel("matmul_weight", dtype, (wide, narrow, m), lambda: dy.t() @ x)


def attention(device: torch.device, dtype: str, *, large: bool) -> Iterator[Kernel]:
    """Yield causal attention, forward alone and both passes; the caller takes their difference."""
    shapes = ((16, 12, 1024, 64), (4, 12, 2048, 128)) if large else CPU_ATTENTION
    for shape in shapes:
        q, k, v = (torch.randn(*shape, device=device, dtype=TORCH_DTYPES[dtype], requires_grad=True) for _ in range(3))
        grad = torch.randn(*shape, device=device, dtype=TORCH_DTYPES[dtype])

        def forward(q: torch.Tensor = q, k: torch.Tensor = k, v: torch.Tensor = v) -> torch.Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        def both(
            q: torch.Tensor = q, k: torch.Tensor = k, v: torch.Tensor = v, grad: torch.Tensor = grad,
            forward: Callable[[], torch.Tensor] = forward,
        ) -> Any:  # fmt: skip
            return torch.autograd.grad(forward(), (q, k, v), grad)

        yield Kernel("attention", dtype, shape, forward)
        yield Kernel("attention_both", dtype, shape, both)
        if device.type == "cpu":
            yield from _matmul_attention(dtype, shape)


def _matmul_attention(dtype: str, shape: tuple[int, int, int, int]) -> Iterator[Kernel]:
    """Yield attention as batched matmuls (`attention = bmm`), from q, k and v side by side to the result and back."""
    batch, heads, tokens, width = shape
    qkv = numbers((batch, tokens, 3 * heads * width), torch.device("cpu"), dtype).requires_grad_()
    grad = numbers((batch, tokens, heads * width), torch.device("cpu"), dtype)

    def both() -> Any:
        return torch.autograd.grad(causal_attention(qkv, heads), qkv, grad)

    yield Kernel("attention_bmm", dtype, shape, lambda: causal_attention(qkv.detach(), heads))
    yield Kernel("attention_bmm_both", dtype, shape, both)


def rows_kernels(device: torch.device, dtype: str, elements: int) -> Iterator[Kernel]:
    """Yield kernels over rows of a matrix: norms (fp32), cross-entropy, embedding. Shape is the bytes they move."""
    n = max(1, elements // WIDTH)
    f32: dict[str, Any] = {"device": device}
    if dtype == "float32":
        x, dy, weight = torch.randn(n, WIDTH, **f32), torch.randn(n, WIDTH, **f32), torch.ones(WIDTH, **f32)
        _, mean, rstd = torch.native_layer_norm(x, [WIDTH], weight, None, 1e-5)
        mask = [True, True, False]
        yield Kernel("norm", dtype, (8 * n * WIDTH,), lambda: torch.native_layer_norm(x, [WIDTH], weight, None, 1e-5))
        yield Kernel(
            "norm_backward", dtype, (16 * n * WIDTH,),
            lambda: aten.native_layer_norm_backward(dy, x, [WIDTH], mean, rstd, weight, None, mask),
        )  # fmt: skip
        ids = torch.randint(0, ROWS, (n,), device=device)
        table = torch.randn(ROWS, WIDTH, **f32)
        yield Kernel("gather", dtype, (8 * n * WIDTH,), lambda: F.embedding(ids, table))
        yield Kernel(
            "scatter", dtype, (4 * n * WIDTH,), lambda: aten.embedding_dense_backward(dy, ids, ROWS, -1, False)
        )
    if dtype == "float32" or device.type == "cuda":  # a CPU's cross-entropy is always fp32
        width = 4 if dtype == "float32" else 2
        rows = max(1, elements // VOCABULARY)
        logits = torch.randn(rows, VOCABULARY, device=device, dtype=TORCH_DTYPES[dtype])
        output = torch.log_softmax(logits, 1)
        yield Kernel("softmax", dtype, (2 * width * logits.numel(),), lambda: torch.log_softmax(logits, 1))
        yield Kernel(
            "softmax_backward", dtype, (3 * width * logits.numel(),),
            lambda: aten._log_softmax_backward_data(logits, output, 1, logits.dtype),
        )  # fmt: skip


def element_kernels(device: torch.device, dtype: str, elements: int) -> Iterator[Kernel]:
    low, E = (4 if dtype == "float32" else 2), elements
    x, y = (torch.randn(E, device=device, dtype=TORCH_DTYPES[dtype]) for _ in range(2))
    full = torch.randn(E, device=device)
    yield Kernel("gelu", dtype, (2 * low * E,), lambda: F.gelu(x))
    yield Kernel("gelu_backward", dtype, (3 * low * E,), lambda: aten.gelu_backward(y, x))
    yield Kernel("add", dtype, ((8 + low) * E,), lambda: full + x)
    thirds = x[: E // 3 * 3].view(3, -1)
    yield Kernel("join", dtype, (2 * low * thirds.numel(),), lambda: torch.cat(tuple(thirds)))
    yield Kernel("dropout", dtype, ((3 if device.type == "cpu" else 2.5) * low * E,), lambda: F.dropout(x, 0.1))  # type: ignore[arg-type]
    if dtype != "float32":
        yield Kernel("cast", dtype, (6 * E,), lambda: full.to(x.dtype))
        return
    gradient = torch.zeros(E, device=device)
    yield Kernel("accumulate", dtype, (12 * E,), lambda: gradient.add_(full))
    yield Kernel("fill", dtype, (4 * E,), lambda: torch.zeros(E, device=device))
    yield Kernel("clip", dtype, (8 * E,), lambda: gradient.mul_(0.999))
    yield Kernel("gradient_norm", dtype, (4 * E,), lambda: torch.linalg.vector_norm(full))
    parameter = torch.nn.Parameter(full.clone())
    parameter.grad = y
    optimizer = torch.optim.AdamW([parameter], fused=True)
    yield Kernel("adamw", dtype, (28 * E,), optimizer.step)


Listen = Callable[[str, float], None]  # what is being measured, and the share that is done
SIZES = (16_384, 262_144, 4_194_304)  # elements
LARGE_SIZES = (262_144, 4_194_304, 67_108_864)
ENOUGH_S, FEWEST, MOST = 0.02, 3, 100
REFERENCE: dict[str, int | float | bool | str] = {
    "n_layer": 2, "n_head": 6, "n_embd": 384, "block_size": 256, "vocab_size": 8192, "batch_size": 8,
    "gradient_accumulation_steps": 2, "dropout": 0.0,
}  # fmt: skip
LARGE_REFERENCE: dict[str, int | float | bool | str] = {
    **REFERENCE, "n_layer": 6, "n_head": 12, "n_embd": 768, "block_size": 1024, "vocab_size": 50304,
}  # fmt: skip
# A CPU's second one: of small operations, in which threads wait for each other and for Python.
SMALL_REFERENCE: dict[str, int | float | bool | str] = {
    **REFERENCE, "n_layer": 3, "n_head": 4, "n_embd": 128, "block_size": 128, "vocab_size": 256, "batch_size": 16,
    "gradient_accumulation_steps": 1,
}  # fmt: skip
# A card's second ones, of few and of many blocks: so narrow that the card waits for its host (predict/speed/time.py).
NARROW_REFERENCE: dict[str, int | float | bool | str] = {
    **REFERENCE, "n_layer": 2, "n_head": 4, "n_embd": 128, "block_size": 64, "vocab_size": 256, "batch_size": 4,
    "gradient_accumulation_steps": 4,
}  # fmt: skip
MANY_BLOCKS = (("n_layer", 6),)
REFERENCE_STEPS, SMALL_STEPS, ROUNDS = 2, 8, 2
LONG_S = 0.1  # of a steady kernel: one run per round is enough
CARD_SHARE = 0.5  # of a CPU's runs: kernels on a card are steadier (0.3% between the median and the fast ones)
BUILDING, COMPILING = 0.5, 5  # building's share of all steps, and a compiled one over an eager one


def usual_dtypes(device: torch.device, *, quick: bool) -> list[str]:
    """Return fp32 on a CPU, and bf16 where it has instructions for it; on a card the dtype of `auto` first."""
    if device.type == "cuda":
        half = "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
        return [half, "float32"]  # half of a half-precision step's kernels are fp32
    fast = bool({"avx512_bf16", "amx_bf16"} & cpu_flags())
    return ["float32", "bfloat16"] if fast and not quick else ["float32"]


def modes_for(placement: Placement) -> list[bool]:
    return [False] if obstacle_to_compile(placement.device) else [False, True]


def samples_of(run: Callable[[], Any], timed: Timer, share: float = 1.0) -> list[float]:
    return repeated(run, timed, Enough(share * ENOUGH_S, FEWEST, round(share * MOST), LONG_S))


def quick(samples: list[float]) -> float:
    return sorted(samples)[len(samples) // 4]


def _kernels(device: torch.device, dtypes: list[str]) -> Iterator[Kernel]:
    large = device.type == "cuda"
    for dtype in dtypes:
        yield from matmuls(device, dtype, large=large)
        yield from attention(device, dtype, large=large)
        for elements in LARGE_SIZES if large else SIZES:
            yield from element_kernels(device, dtype, elements)
            yield from rows_kernels(device, dtype, elements)


Samples = dict[tuple[str, str, tuple[int, ...]], list[float]]  # of (kind, dtype, shape)


def sample_kernels(
    device: torch.device, dtypes: list[str], found: Samples, listen: Callable[[str, float], None]
) -> None:
    timed, share = timer(device), CARD_SHARE if device.type == "cuda" else 1.0
    for done, kernel in enumerate(_kernels(device, dtypes)):
        listen(f"{kernel.kind} {kernel.dtype}", min(1.0, done / (100 * len(dtypes))))
        key = kernel.kind, kernel.dtype, tuple(round(size) for size in kernel.shape)
        if key in found and found[key][0] > LONG_S:
            continue
        found.setdefault(key, []).extend(samples_of(kernel.run, timed, share))


def kernel_times(found: Samples) -> tuple[list[KernelTime], float]:
    times, slower = list[KernelTime](), list[float]()
    for (kind, dtype, shape), samples in found.items():
        time_s = quick(samples)
        slower.append(statistics.median(samples) / time_s - 1)
        name = kind
        if kind.endswith("_both"):
            forward = kind.removesuffix("_both")
            name, time_s = f"{forward}_backward", max(time_s - quick(found[forward, dtype, shape]), time_s / 2)
        times.append(KernelTime(kind=name, dtype=dtype, shape=shape, time_s=time_s))
    return times, statistics.median(slower)


def launch_time(device: torch.device) -> float:
    x = torch.ones(8, device=device, requires_grad=True)

    def chain() -> None:
        y = x
        for _ in range(50):
            y = y * 1.0001
        y.sum().backward()

    return quick(samples_of(chain, on_host)) / 100  # the host's clock: launching alone


@dataclass
class Reference:
    options: dict[str, int | float | bool | str]
    stepper: Stepper
    built_s: float  # with its first two steps
    count: int
    times: list[float] = field(default_factory=list)
    forward: list[float] = field(default_factory=list)
    rounds: list[float] = field(default_factory=list)  # seconds of a step in each

    def run(self) -> None:
        times = self.stepper.times(self.count)
        self.times += times
        self.rounds.append(statistics.median(times))
        self.forward += self.stepper.forward_times(self.count)

    def result(self) -> StepTime:
        return StepTime(
            options=self.options, dtype=self.stepper.dtype, compiled=self.stepper.compiled, time_s=quick(self.times),
            forward_s=statistics.median(self.forward),  # an evaluation is the sum of many
        )  # fmt: skip

    @property
    def drift(self) -> float:
        return max(self.rounds) / min(self.rounds) - 1

    @property
    def start_s(self) -> float:
        return max(0.0, self.built_s - 2 * quick(self.times))


@dataclass(frozen=True)
class ReferenceRequest:
    """`small`: of small models, which on a CPU `train` runs in one of several `ways`."""

    dtype: str
    compiled: bool
    small: bool = False
    way: tuple[tuple[str, str | bool | int], ...] = ()

    def __str__(self) -> str:
        named = [str(value) if isinstance(value, str) else name for name, value in self.way]
        return " ".join(["step", self.dtype, *named, *(["compiled"] if self.compiled else [])])


def references_for(device: torch.device, dtypes: list[str], modes: list[bool]) -> list[ReferenceRequest]:
    """Choose what corrects other steps on a device; compiled are one size and dtype, and a narrow model."""
    found = list[ReferenceRequest]()
    for dtype in dtypes:
        if device.type == "cpu":
            masters = (False, True) if dtype != "float32" else (False,)
            ways = [("sdpa", False), *((kind, on) for kind in ("sdpa", "bmm") for on in masters)]
            for kind, on in dict.fromkeys(ways):
                way = (("attention", kind),) if kind != "sdpa" else ()
                found.append(ReferenceRequest(dtype, False, True, (*way, *((("master_weights", True),) if on else ()))))
        once = device.type == "cuda" and dtype != dtypes[0] and False in modes
        found += [ReferenceRequest(dtype, compiled) for compiled in ([False] if once else modes)]
    if device.type == "cuda" and dtypes:  # a launch costs the same in every dtype
        narrow = [ReferenceRequest(dtypes[0], compiled, True) for compiled in modes]
        found += [*narrow, *([ReferenceRequest(dtypes[0], False, True, MANY_BLOCKS)] if False in modes else [])]
    return found


def _reference(placement: Placement, wanted: ReferenceRequest, built: dict[str, TrainState]) -> Reference:
    small, dtype, compiled = wanted.small, wanted.dtype, wanted.compiled
    card = placement.device.type == "cuda"
    sizes = (NARROW_REFERENCE if card else SMALL_REFERENCE) if small else (LARGE_REFERENCE if card else REFERENCE)
    options = {**sizes, **dict(wanted.way)}
    started = time.perf_counter()
    config, key = RunConfig.model_validate(options), str(sorted(options.items()))
    stepper = Stepper(config, placement, dtype, compiled=compiled, like=built.get(key))
    built_s = time.perf_counter() - started
    if card:
        built.setdefault(key, stepper.state)
        stepper.forward_times(0)  # compiled for itself
    return Reference(options, stepper, built_s, SMALL_STEPS if small else REFERENCE_STEPS)


def _work(wanted: list[ReferenceRequest]) -> int:
    return sum(COMPILING if each.compiled else 1 for each in wanted)


def _drift(references: list[Reference], device: torch.device) -> float:
    """Return the median drift of those that show the device's: a card's narrow ones show its host's."""
    width = NARROW_REFERENCE["n_embd"]
    own = [each for each in references if device.type == "cpu" or each.options["n_embd"] != width]
    return statistics.median(each.drift for each in own) if own else 0.0


def calibrate(placement: Placement, dtypes: list[str], modes: list[bool], listen: Listen) -> Calibration:
    """Measure these dtypes, writing nothing; `modes`: which of eager (False) and compiled (True) steps to time."""
    device, started = placement.device, time.perf_counter()
    was, contention = torch.get_rng_state(), Contention(torch.get_num_threads())
    samples: Samples = {}
    card = (device.index or 0) if device.type == "cuda" else None
    with Load(card, **identity_of(device)) as load, Waiting() as waiting:
        wanted, references, built = references_for(device, dtypes, modes), list[Reference](), dict[str, TrainState]()
        for number, each in enumerate(wanted):
            listen(str(each), BUILDING * _work(wanted[:number]) / _work(wanted))
            references.append(_reference(placement, each, built))
            if device.type == "cpu" and contention.begin():
                waiting.sleep()  # else the threads would hold each other up, and this would take minutes
        for done in range(ROUNDS):  # a machine's speed drifts; what is compared has to be measured side by side
            for reference in references:
                reference.run()
            width = (1 - BUILDING) / ROUNDS
            base = BUILDING + done * width
            sample_kernels(device, dtypes, samples, lambda what, share: listen(what, base + width * share))  # noqa: B023
        for reference in references:
            reference.run()
        launch_s = launch_time(device)
    found, unsteadiness = kernel_times(samples)
    others = contention.result() if device.type == "cpu" else None
    torch.set_rng_state(was)
    return Calibration(
        device=placement.gpu.name, driver=load.driver, torch_version=installed_torch(),
        threads=torch.get_num_threads(), date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        took_s=time.perf_counter() - started, kernels=tuple(found),
        steps=tuple(reference.result() for reference in references), launch_s=launch_s, unsteadiness=unsteadiness,
        drift=_drift(references, device),
        others_share=others.others_share if others else None,
        start_s=references[0].start_s if device.type == "cpu" and references else None,
        context_bytes=beside_allocator(device), clock_ghz=load.clock_ghz, power_w=load.power_w,
    )  # fmt: skip
