"""A stand-in card: fake cuda tensors get the kernels and casts of the real one. What PyTorch silently does otherwise
without a card (autocast, GradScaler, attention) is corrected here and asserted in every trace."""

import contextlib
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch._dynamo  # FakeTensorMode imports it; it must read the real functions of torch.cuda
import torch.cuda.amp.common as amp_common
import torch.optim.optimizer as optimizer_module
import torch.utils._foreach_utils as foreach_utils
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from foretrain.hardware.catalogue import Gpu
from foretrain.predict.trace import subclasses
from foretrain.predict.trace.card import guard
from foretrain.predict.trace.card import torch_cuda as fake_card
from foretrain.predict.trace.card.patches import Patches
from foretrain.predict.trace.card.torch_cuda import Card
from foretrain.predict.trace.kernels import workspaces
from foretrain.predict.trace.kernels.attention import Attention
from foretrain.predict.trace.kernels.values import Values


def _seen_as_real(patches: Patches, module: Any, values: Values) -> None:
    """Keep transformers from building masks as for an export: its attention would take another kernel."""
    patches.set(module, "is_fake_tensor", lambda x: False)


def _unpacked(patches: Patches, module: Any, values: Values) -> None:
    """Answer its test whether positions that count up belong to several sequences, which it would mask."""
    find = module.find_packed_sequence_indices

    def found(position_ids: Any) -> Any:
        if not values.counts(position_ids):
            return find(position_ids)
        with values.planned([True]):
            return find(position_ids)

    patches.set(module, "find_packed_sequence_indices", found)


def _unasked(patches: Patches, module: Any, values: Values) -> None:
    """Skip its look for padding in the tokens, which only warns."""
    patches.set(module.PreTrainedModel, "warn_if_padding_and_no_attention_mask", lambda *args, **kwargs: None)


WAYS: dict[tuple[str, str], Callable[[Patches, Any, Values], None]] = {
    ("transformers.utils.import_utils", "is_fake_tensor"): _seen_as_real,
    ("transformers.modeling_utils", "PreTrainedModel"): _unasked,
    ("transformers.masking_utils", "find_packed_sequence_indices"): _unpacked,
}


def real_ways(patches: Patches, values: Values) -> Callable[[], None]:
    """Return a function that corrects the libraries imported by now; call it again for later ones."""
    done = set[tuple[str, str]]()

    def patch() -> None:
        for place, way in WAYS.items():
            module: Any = sys.modules.get(place[0])
            if module is not None and place not in done and hasattr(module, place[1]):
                done.add(place)
                way(patches, module, values)

    patch()
    return patch


def _moved(module: torch.nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> torch.nn.Module:
    """nn.Module._apply (torch/nn/modules/module.py), which makes other objects of fake tensors, but of no real ones."""
    if recurse:
        for child in module.children():
            child._apply(function)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            gradient, parameter.grad = parameter.grad, None
            module._parameters[name] = moved = _converted(parameter, function)
            if gradient is not None:
                moved.grad = _converted(gradient, function)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = function(buffer)
    return module


def _converted(tensor: Any, function: Callable[[Tensor], Tensor]) -> Any:
    with torch.no_grad():
        new = function(tensor)
    future, is_parameter = torch.__future__, isinstance(tensor, torch.nn.Parameter)
    swaps = future.get_swap_module_params_on_conversion() or is_traceable_wrapper_subclass(new)
    overwrites = future.get_overwrite_module_params_on_conversion()
    compatible: Callable[..., bool] = getattr(torch, "_has_compatible_shallow_copy_type")  # noqa: B009
    if not swaps and not overwrites and compatible(tensor, new):
        tensor.data = new
        return tensor
    if is_parameter and not (overwrites and isinstance(new, torch.nn.Parameter)):
        new = torch.nn.Parameter(new, tensor.requires_grad)
    if swaps and new is not tensor:
        torch.utils.swap_tensors(tensor, new)
        return tensor
    return new


def _set_data(tensor: FakeTensor, new: Tensor) -> None:
    """Do `tensor.data = new`, with what a fake tensor stores of itself."""
    torch.Tensor.data.__set__(tensor, new)  # type: ignore[attr-defined]
    if isinstance(new, FakeTensor):
        tensor.fake_device, tensor.constant = new.fake_device, new.constant


@dataclass
class StandIn:
    card: Card
    memory: fake_card.Memory
    attention: Attention
    notes: set[str]


def _patch_for_fakes(patches: Patches) -> FakeTensorMode:
    patches.set(torch.nn.Module, "_apply", _moved)
    patches.set(FakeTensor, "data", property(torch.Tensor.data.__get__, _set_data))  # type: ignore[attr-defined]
    for module in (foreach_utils, optimizer_module):  # or clip_grad_norm_ goes tensor by tensor
        supported = getattr(module, "_foreach_supported_types", None)
        if isinstance(supported, list) and FakeTensor not in supported:
            supported.append(FakeTensor)
            patches.callback(supported.remove, FakeTensor)
    mode = patches.enter_context(FakeTensorMode(allow_fallback_kernels=False, allow_non_fake_inputs=False))
    mode.__deepcopy__ = lambda memo: mode  # type: ignore[attr-defined]  # a copied model stays in the one mode
    patches.enter_context(torch.autograd.set_multithreading_enabled(False))
    _patch_for_values(patches)
    subclasses.patch(patches)
    _quiet(patches)
    return mode


def _patch_for_values(patches: Patches) -> None:
    """Let what prints a tensor print that of .item(): fake tensors have no values, yet a loss is printed."""

    def formatted(tensor: FakeTensor, spec: str) -> str:
        return format(tensor.item() if tensor.dim() == 0 else repr(tensor), spec)

    def as_numpy(tensor: FakeTensor, *, force: bool = False) -> np.ndarray:
        if not force and tensor.device.type != "cpu":
            raise TypeError(f"can't convert {tensor.device} device type tensor to numpy; use .cpu() first")
        return np.broadcast_to(np.ones((), str(tensor.dtype)[6:]), tensor.shape)  # takes no memory

    patches.set(FakeTensor, "__format__", formatted)
    patches.set(FakeTensor, "numpy", as_numpy)


def _quiet(patches: Patches) -> None:
    """Hide torch's warnings about fake tensors and this machine, as the user has neither."""
    patches.enter_context(warnings.catch_warnings())
    for message in (
        "Accessing the data pointer of FakeTensor", "dynamo_pgo force disabled", "'pin_memory' argument is set as true",
        "Sparse invariant checks",
    ):  # fmt: skip
        warnings.filterwarnings("ignore", message)
    patches.set(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True)
    logger = logging.getLogger("torch._inductor.utils")
    about_here = ("Not enough SMs", "get_device_tflops")  # warned for cards below 68 SMs, and where Triton is missing
    other = lambda record: not str(record.msg).startswith(about_here)  # noqa: E731
    logger.addFilter(other)
    patches.callback(logger.removeFilter, other)


@contextlib.contextmanager
def fake_cpu() -> Iterator[FakeTensorMode]:
    """Make fake tensors on the CPU, where the real allocator can check a trace."""
    with Patches() as patches:
        mode = _patch_for_fakes(patches)
        # Checkpointing saves the generator's state, which on this device is memory of the device.
        size = torch._C.default_generator.get_state().numel()
        for module in (torch, torch.random):
            patches.set(module, "get_rng_state", lambda: torch.empty(size, dtype=torch.uint8))
            patches.set(module, "set_rng_state", lambda state: None)
        yield mode


def uncompiled() -> contextlib.AbstractContextManager[Any]:
    """Make compiled code an error within: Inductor would need kernels that nothing here can make."""
    return torch.compiler.set_stance("fail_on_recompile")


@contextlib.contextmanager
def watched_resizes(resized: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    resize = torch.UntypedStorage.resize_

    def resize_and_tell(storage: torch.UntypedStorage, size: int) -> Any:
        out = resize(storage, size)
        resized(storage)
        return out

    with Patches() as patches:
        patches.set(torch.UntypedStorage, "resize_", resize_and_tell)
        yield


def _keep_whole(library: torch.library.Library) -> None:
    """Keep an op whole that a build without its CUDA kernel decomposes: on the card it is one kernel."""
    for name in ("silu_backward", "mish_backward", "_fused_rms_norm"):
        known = hasattr(torch.ops.aten, name)  # torch 2.6 has no _fused_rms_norm
        if known and not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA"):
            library.impl(name, _never_run, "CUDA")


def _never_run(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a kernel of the card runs on fake tensors only")


@contextlib.contextmanager
def stand_in(gpu: Gpu) -> Iterator[StandIn]:
    """Let `device="cuda"` mean fake tensors on this card. Raises guard.StandInError where this torch cannot."""
    guard.install()
    card, notes = Card.of(gpu), set[str]()
    attention = Attention(card, notes)
    with Patches() as patches:
        memory = fake_card.answer_as(patches, card)
        patches.set(amp_common, "amp_definitely_not_available", lambda: False)
        library = patches.enter_context(torch.library._scoped_library("aten", "IMPL"))
        _keep_whole(library)
        for key in ("AutogradCUDA", "CUDA"):
            library.impl("scaled_dot_product_attention", attention, key)
        _patch_for_fakes(patches)
        workspaces.patch_recurrent(patches, library)
        yield StandIn(card, memory, attention, notes)
