"""Attention in a trace: the kernel that the card takes out of those that the code allows, and what is made for it."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from foretrain.hardware.catalogue import find
from foretrain.predict.trace.card.torch_cuda import Card
from foretrain.predict.trace.kernels import attention
from foretrain.predict.trace.kernels.attention import AttentionCall
from foretrain.predict.trace.session import Tracing, trace, tracing

B, H, T, D = 2, 8, 256, 64


def asked(dtype: torch.dtype = torch.bfloat16, heads: int = H, **changes: Any) -> AttentionCall:
    q = torch.empty(B, H, T, D, dtype=dtype, device="meta", requires_grad=True)
    k = torch.empty(B, heads, T, D, dtype=dtype, device="meta", requires_grad=True)
    return AttentionCall(q, k, k)._replace(**changes)


def kind(gpu: str, **changes: Any) -> str:
    return attention.kind(Card.of(find(gpu)), asked(**changes))


MASK = torch.empty(T, T, device="meta")
CASES: list[tuple[Callable[[], AbstractContextManager[Any]], str, dict[str, Any], str]] = [
    (lambda: sdpa_kernel(SDPBackend.MATH), "RTX 4070", {}, "math"),
    (lambda: sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION), "RTX 4070", {}, "efficient"),
    (lambda: sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]), "RTX 4070", {}, "efficient"),
    (lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION), "RTX 4070", {}, "cudnn"),
    (lambda: sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]), "H200", {}, "flash"),
    (lambda: sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True), "RTX 4070", {}, "math"),
    (lambda: sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]), "RTX 4070", {"mask": MASK}, "math"),
]


@pytest.mark.parametrize(("context", "gpu", "changes", "expected"), CASES)
def test_what_the_code_allows_is_obeyed(
    context: Callable[[], AbstractContextManager[Any]], gpu: str, changes: dict[str, Any], expected: str
) -> None:
    with context():
        assert kind(gpu, **changes) == expected


def test_attention_without_a_kernel_raises_pytorchs_error() -> None:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), pytest.raises(RuntimeError, match="No available kernel"):
        kind("RTX 4070", dtype=torch.float32)


def test_cudnn_is_preferred_where_the_wheel_has_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert kind("H200") == "cudnn"
    assert kind("RTX 5090") == "flash"
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert kind("H200") == "flash"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    assert kind("H200") == "flash"


@pytest.mark.parametrize(
    ("gpu", "changes", "expected"),
    [
        ("RTX 4070", {"heads": 2, "grouped": True}, "flash"),
        ("H200", {"heads": 2, "grouped": True}, "cudnn"),
        ("RTX 4070", {"heads": 2, "grouped": True, "dtype": torch.float32}, "math"),  # efficient takes all heads only
        ("RTX 4070", {"heads": 1}, "math"),
        ("RTX 4070", {"mask": MASK}, "efficient"),
        ("T4", {}, "math"),  # its kernels know no bfloat16
        ("T4", {"dtype": torch.float16}, "efficient"),
        ("RTX 4070", {"key": torch.empty(B, H, T + 1, D, dtype=torch.bfloat16), "causal": True}, "efficient"),
        ("RTX 4070", {"query": torch.empty(H, T, D, dtype=torch.bfloat16)}, "math"),  # three dimensions
    ],
)
def test_what_each_kernel_can(gpu: str, changes: dict[str, Any], expected: str) -> None:
    assert kind(gpu, **changes) == expected


def test_grouped_heads_are_not_repeated_for_flash() -> None:
    """k and v of two heads stay so; their gradients are made for all heads and summed (flash_api.cpp, mha_bwd)."""

    def code(on: Tracing) -> None:
        q = torch.empty(B, H, T, D, dtype=torch.bfloat16, device=on.device, requires_grad=True)
        k, v = (torch.empty(B, 2, T, D, dtype=torch.bfloat16, device=on.device, requires_grad=True) for _ in range(2))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        on.phase("backward")
        out.sum().backward()

    found = trace(code).trace
    start = found.phases[1].position
    whole = 2 * B * H * T * D
    forward = [a.nbytes for a in found.allocations if a.allocated_at < start and a.nbytes]
    assert forward[:5] == [whole, whole // 4, whole // 4, whole, 4 * B * H * T]
    expanded = [a for a in found.allocations if a.op == "_scaled_dot_product_flash_attention_backward (inside)"]
    assert [a.nbytes for a in expanded[-2:]] == [whole, whole]


def scores(q: Tensor, mask: Tensor) -> None:
    with sdpa_kernel(SDPBackend.MATH):
        F.scaled_dot_product_attention(q, q, q, attn_mask=mask).sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_the_math_path_makes_as_many_scores_as_on_the_cpu(dtype: torch.dtype) -> None:
    """It adds the mask in place; under a mode PyTorch makes a copy of the scores for it. On the card the backward pass of
    softmax makes one tensor more: the gradient times the output."""

    def code(device: str) -> None:
        scores(torch.zeros(B, H, T, D, device=device, requires_grad=True), torch.ones(T, T, dtype=dtype, device=device))

    nbytes = 4 * B * H * T * T
    traced = [a.nbytes for a in trace(lambda on: code("cuda")).trace.allocations].count(nbytes)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        code("cpu")
    events: list[Any] = run.profiler.kineto_results.events()  # type: ignore[union-attr]
    real = [event.nbytes() for event in events if event.name() == "[memory]"].count(nbytes)
    assert traced == real + 1 > 1


def test_a_mask_of_booleans_becomes_one_of_numbers() -> None:
    def code(on: Tracing) -> None:
        q = torch.empty(B, H, T, D, dtype=torch.bfloat16, device=on.device)
        mask = torch.ones(T, T - 1, dtype=torch.bool, device=on.device)
        k = torch.empty(B, H, T - 1, D, dtype=torch.bfloat16, device=on.device)
        on.phase("attention")
        F.scaled_dot_product_attention(q, k, k, attn_mask=mask)

    found = trace(code).trace
    made = [a.nbytes for a in found.allocations if a.allocated_at >= found.phases[1].position]
    assert 2 * T * (T - 1) in made  # the numbers
    assert 2 * T * T in made  # with rows that the kernel can read


def test_the_note_on_cudnn_is_given_where_its_wheel_is_assumed() -> None:
    def code(on: Tracing) -> None:
        q = torch.empty(B, H, T, D, dtype=torch.bfloat16, device=on.device)
        F.scaled_dot_product_attention(q, q, q)

    with tracing(find("H200"), compiled=False) as session:
        code(Tracing(torch.device("cuda"), session.tracer))
        assert session.there.attention.seen == {"cudnn"}
        assert any("CUDA 13" in note for note in session.there.notes) == (torch.version.cuda is None)
