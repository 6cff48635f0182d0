"""A card that is not there: fake cuda tensors behave as on the real one, in kernels chosen and dtypes cast.

What PyTorch silently does differently without a card is put right here and asserted in every trace: autocast and
GradScaler would switch themselves off, scaled_dot_product_attention would take the slow path.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.cuda.amp.common as amp_common
import torch.optim.optimizer as optimizer_module
import torch.utils._foreach_utils as foreach_utils
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from foretrain.hardware import Gpu
from foretrain.predict.exact import guard

aten = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Card:
    """What decisions on the CUDA side depend on."""

    name: str
    capability: tuple[int, int]
    sm_count: int
    memory_bytes: int

    @classmethod
    def of(cls, gpu: Gpu) -> "Card":
        return cls(gpu.name, gpu.capability, gpu.sm_count or 1, gpu.memory_bytes or 1 << 34)

    def properties(self) -> SimpleNamespace:
        """As torch.cuda.get_device_properties gives them, as far as Inductor reads them."""
        major, minor = self.capability
        # CUDA C++ programming guide, technical specifications per compute capability.
        threads = {(7, 5): 1024, (8, 0): 2048, (9, 0): 2048, (10, 0): 2048}.get(self.capability, 1536)
        shared = {(7, 5): 65536, (8, 0): 166912, (9, 0): 232448, (10, 0): 232448}.get(self.capability, 101376)
        return SimpleNamespace(
            name=self.name, major=major, minor=minor, total_memory=self.memory_bytes, warp_size=32,
            multi_processor_count=self.sm_count, regs_per_multiprocessor=65536, is_integrated=0, is_multi_gpu_board=0,
            max_threads_per_multi_processor=threads, max_threads_per_block=1024, gcnArchName="",
            shared_memory_per_block=49152, shared_memory_per_block_optin=shared,
            shared_memory_per_multiprocessor=shared + 1024, L2_cache_size=32 << 20,
        )  # fmt: skip


def attention_kind(card: Card, q: Tensor, v: Tensor, masked: bool, dropout: float) -> str:
    """cudnn, flash, efficient or math: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, its order and filters."""
    half, width = q.dtype in HALF, q.shape[-1]
    same = width == v.shape[-1]
    if half and not masked and same and card.capability >= (8, 0):
        if _prefers_cudnn(card) and width <= 128 and width % 8 == 0:
            return "cudnn"
        # Backward with a head wider than 192 and dropout does not fit the shared memory of sm_86, 89 and 12x.
        if width <= 256 and not (width > 192 and dropout > 0 and card.capability not in ((8, 0), (9, 0), (10, 0))):
            return "flash"
    if q.dtype in (*HALF, torch.float32) and same and width % _alignment(card, half) == 0:
        return "efficient"
    return "math"


def _prefers_cudnn(card: Card) -> bool:
    """check_prefer_cudnn_attention: data-centre Hopper and Blackwell with cuDNN 9.15.1 or newer (CUDA 13 wheels)."""
    return card.capability[0] in (9, 10)


def _alignment(card: Card, half: bool) -> int:
    """minimum_gemm_alignment of the same file, in elements."""
    tensor_cores = card.capability >= (8, 0) or (half and card.capability >= (7, 0))
    smallest = 4 if card.capability >= (8, 0) else 1
    return max(smallest, 128 // (16 if half else 32)) if tensor_cores else smallest


def _attention(card: Card, seen: set[str]) -> Callable[..., Tensor]:
    """The composite op as the card would run it; autocast has cast already when the dispatcher comes here."""

    def attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        if enable_gqa and query.shape[-3] != key.shape[-3]:
            times = query.shape[-3] // key.shape[-3]
            key, value = key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)
        kind = attention_kind(card, query, value, attn_mask is not None, dropout_p)
        seen.add(kind)
        width = query.shape[-1]
        factor = 1.0 / math.sqrt(width) if scale is None else scale
        learning = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
        if kind == "flash":
            if pad := -width % 8:
                query, key, value = (torch.nn.functional.pad(t, (0, pad)) for t in (query, key, value))
            out = aten._scaled_dot_product_flash_attention(
                query, key, value, dropout_p, is_causal, False, scale=factor
            )[0]
            return out[..., :width] if pad else out
        if kind == "cudnn":
            return aten._scaled_dot_product_cudnn_attention(
                query, key, value, attn_mask, learning, dropout_p, is_causal, False, scale=factor
            )[0]
        if kind == "efficient":
            return aten._scaled_dot_product_efficient_attention(
                query, key, value, attn_mask, learning, dropout_p, is_causal, scale=factor
            )[0]
        return aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, None, scale=factor
        )[0]

    return attention


def _moved(module: torch.nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> torch.nn.Module:
    """nn.Module._apply for fake tensors, which cannot be swapped in place. Tied parameters stay tied."""
    done: dict[int, Tensor] = {}

    def convert(tensor: Tensor) -> Tensor:
        if id(tensor) not in done:
            with torch.no_grad():
                new = function(tensor)
            if new is not tensor and isinstance(tensor, torch.nn.Parameter):
                new = torch.nn.Parameter(new, tensor.requires_grad)
            done[id(tensor)] = new
            done[id(new)] = new
        return done[id(tensor)]

    for part in module.modules() if recurse else [module]:
        groups: tuple[Any, ...] = (part._parameters, part._buffers)
        for tensors in groups:
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = convert(tensor)
    return module


class Patches(contextlib.ExitStack):
    """Attributes replaced for as long as the context lasts."""

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Like setattr, undone at the end; an attribute that was not there is deleted again."""
        missing = object()
        old = owner.__dict__.get(name, missing) if isinstance(owner, type) else getattr(owner, name, missing)
        setattr(owner, name, value)
        self.callback(delattr, owner, name) if old is missing else self.callback(setattr, owner, name, old)


@dataclass
class StandIn:
    """What is running: the fake mode, the card, and the attention kernels that were taken."""

    card: Card
    mode: FakeTensorMode
    attention: set[str]


def _patch_for_fakes(patches: Patches) -> FakeTensorMode:
    """What any fake run needs: modules that move, foreach kernels that are taken, one thread, the fake mode."""
    patches.set(torch.nn.Module, "_apply", _moved)
    for module in (foreach_utils, optimizer_module):  # or clip_grad_norm_ goes tensor by tensor
        supported = getattr(module, "_foreach_supported_types", None)
        if isinstance(supported, list) and FakeTensor not in supported:
            supported.append(FakeTensor)
            patches.callback(supported.remove, FakeTensor)
    mode = patches.enter_context(FakeTensorMode(allow_fallback_kernels=False, allow_non_fake_inputs=False))
    mode.__deepcopy__ = lambda memo: mode  # type: ignore[attr-defined]  # a copied model stays in the one mode
    patches.enter_context(torch.autograd.set_multithreading_enabled(False))
    return mode


@contextlib.contextmanager
def fake_cpu() -> Iterator[FakeTensorMode]:
    """Fake tensors on the CPU, where the real allocator can be asked whether a trace is right."""
    with Patches() as patches:
        mode = _patch_for_fakes(patches)
        # Checkpointing keeps the generator's state, which on this device is memory of the device.
        size = torch._C.default_generator.get_state().numel()
        for module in (torch, torch.random):
            patches.set(module, "get_rng_state", lambda: torch.empty(size, dtype=torch.uint8))
            patches.set(module, "set_rng_state", lambda state: None)
        yield mode


@contextlib.contextmanager
def stand_in(gpu: Gpu) -> Iterator[StandIn]:
    """Within it `device="cuda"` means fake tensors on this card.

    Raises guard.StandInError where this torch cannot be made to believe it.
    """
    guard.install()
    card, seen = Card.of(gpu), set[str]()
    with Patches() as patches:
        patches.set(amp_common, "amp_definitely_not_available", lambda: False)
        patches.set(torch.cuda, "is_bf16_supported", lambda *a, **k: card.capability >= (8, 0))
        patches.set(torch.cuda, "get_device_capability", lambda *a, **k: card.capability)
        patches.set(torch.cuda, "get_device_properties", lambda *a, **k: card.properties())
        library = patches.enter_context(torch.library._scoped_library("aten", "IMPL"))
        for key in ("AutogradCUDA", "CUDA"):
            library.impl("scaled_dot_product_attention", _attention(card, seen), key)
        yield StandIn(card, _patch_for_fakes(patches), seen)
