"""The kernels that `foretrain calibrate` times, each as the training step runs it: fresh outputs, real layouts.

Names of kinds and shapes are those of predict/speed/ops.py.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from foretrain.model.attention import causal_attention
from foretrain.training.device import TORCH_DTYPES

aten = torch.ops.aten
WIDTH, VOCABULARY = 512, 8192  # of the tensors for kernels that go over rows
# A CPU's attention is quick only where rows are long and heads are wide, in bf16 above all.
CPU_ATTENTION = ((8, 4, 64, 32), (8, 4, 128, 32), (8, 4, 128, 64), (4, 6, 256, 64), (2, 6, 1024, 64))
FEW = 4096  # random numbers
MOST_ON_CPU = 20e9  # of a product's m·n·k: a larger one takes a CPU a second, and a smaller one tells as much
ROWS = 256  # of the embedding: few, as filling its gradient with zeros is an operation of its own


class Kernel(NamedTuple):
    """Something to time. `run` is called again and again; what it returns is thrown away."""

    kind: str
    dtype: str
    shape: tuple[int, ...]
    run: Callable[[], Any]


def product_shapes(*, large: bool) -> list[tuple[int, int, int]]:
    """(rows, out, in) of linear layers as GPTs have them: rows x width x {1, 3, 4} width, the way back, and heads."""
    widths = (768, 1536) if large else (128, 384, 768)
    heads = [(50304, 768)] if large else [(8192, 384), (50304, 256)]
    pairs = [(w * times, w) for w in widths for times in (1, 3, 4)] + [(w, 4 * w) for w in widths] + heads
    rows = (16384, 4096) if large else (512, 2048)
    found = [(m, *pair) for m in rows for pair in pairs] + [(rows[-1] // 8, 3 * widths[0], widths[0])]
    return found if large else [shape for shape in found if math.prod(shape) < MOST_ON_CPU]


def numbers(shape: tuple[int, ...], device: torch.device, dtype: str) -> torch.Tensor:
    """Random numbers, the same few again and again: to draw them all takes longer than the kernel does."""
    few, count = torch.randn(FEW, device=device, dtype=TORCH_DTYPES[dtype]), math.prod(shape)
    return few.repeat(-(-count // FEW))[:count].view(shape)


def products(device: torch.device, dtype: str, *, large: bool) -> Iterator[Kernel]:
    """Each linear layer's product forward and both of its backward pass."""
    for m, wide, narrow in product_shapes(large=large):
        yield from product(device, dtype, m, wide, narrow)


def product(device: torch.device, dtype: str, m: int, wide: int, narrow: int) -> Iterator[Kernel]:
    """A linear layer's matmul forward, the gradient of its input and that of its weight."""
    x, weight, dy = (numbers(shape, device, dtype) for shape in ((m, narrow), (wide, narrow), (m, wide)))
    yield Kernel("matmul", dtype, (m, wide, narrow), lambda: F.linear(x, weight))
    yield Kernel("matmul_input", dtype, (m, narrow, wide), lambda: dy @ weight)
    yield Kernel("matmul_weight", dtype, (wide, narrow, m), lambda: dy.t() @ x)


def attention(device: torch.device, dtype: str, *, large: bool) -> Iterator[Kernel]:
    """Causal attention, forward alone and both passes (backward is their difference, taken by the caller)."""
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
            yield from _products_attention(dtype, shape)


def _products_attention(dtype: str, shape: tuple[int, int, int, int]) -> Iterator[Kernel]:
    """The same as batched products (`attention = bmm`), from q, k and v side by side to the result and back."""
    batch, heads, tokens, width = shape
    qkv = numbers((batch, tokens, 3 * heads * width), torch.device("cpu"), dtype).requires_grad_()
    grad = numbers((batch, tokens, heads * width), torch.device("cpu"), dtype)

    def both() -> Any:
        return torch.autograd.grad(causal_attention(qkv, heads), qkv, grad)

    yield Kernel("attention_bmm", dtype, shape, lambda: causal_attention(qkv.detach(), heads))
    yield Kernel("attention_bmm_both", dtype, shape, both)


def rows_kernels(device: torch.device, dtype: str, elements: int) -> Iterator[Kernel]:
    """Kernels over rows of a matrix: norms (fp32 always), cross-entropy, embedding. Shape is the bytes they move."""
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
    if dtype == "float32" or device.type == "cuda":  # a CPU's cross-entropy is fp32 always
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
    """Kernels over elements, in `dtype` or from and to it."""
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
