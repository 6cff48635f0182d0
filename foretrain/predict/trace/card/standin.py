"""A card that is not there: fake cuda tensors behave as on the real one, in kernels chosen and dtypes cast.

What PyTorch silently does differently without a card is put right here and asserted in every trace: autocast and
GradScaler would switch themselves off, scaled_dot_product_attention would take the slow path.
"""

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch._dynamo  # FakeTensorMode imports it; it must read torch.cuda's functions before they are replaced
import torch.cuda.amp.common as amp_common
import torch.optim.optimizer as optimizer_module
import torch.utils._foreach_utils as foreach_utils
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from foretrain.hardware.catalogue import Gpu
from foretrain.predict.trace import subclasses
from foretrain.predict.trace.card import guard
from foretrain.predict.trace.card import torch_cuda as fake_card
from foretrain.predict.trace.card.patches import Patches
from foretrain.predict.trace.card.torch_cuda import Card
from foretrain.predict.trace.kernels import recurrent
from foretrain.predict.trace.kernels.attention import Attention


def _moved(module: torch.nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> torch.nn.Module:
    """nn.Module._apply for fake tensors, which cannot be swapped in place. Tied parameters stay tied."""
    parts = list(dict.fromkeys(_children_first(module))) if recurse else [module]
    holders: dict[int, list[tuple[Any, str]]] = {}
    for part in parts:
        for name, tensor, tensors in _tensors_of(part):
            holders.setdefault(id(tensor), []).append((tensors, name))
    made = set[int]()
    for part in parts:
        for name, tensor, tensors in _tensors_of(part):
            if id(tensor) not in made:
                old = id(tensor)
                del tensor  # at once everywhere, so that the old one goes now, as where it is swapped
                new = _converted(tensors[name], function)
                made.add(id(new))
                for its, own in holders[old]:
                    its[own] = new
        if isinstance(part, torch.nn.RNNBase):
            part._init_flat_weights()  # it keeps a list of its weights
    return module


def _children_first(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """A module and all within it, in the order in which _apply comes to their own tensors."""
    for child in module.children():
        yield from _children_first(child)
    yield module


def _tensors_of(part: torch.nn.Module) -> Iterator[tuple[str, Tensor, Any]]:
    """Names and tensors of its own, with the dict that holds them."""
    groups: tuple[Any, ...] = (part._parameters, part._buffers)
    for tensors in groups:
        for name in list(tensors):
            if tensors[name] is not None:
                yield name, tensors[name], tensors


def _converted(tensor: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    with torch.no_grad():
        new = function(tensor)
    wanted = isinstance(tensor, torch.nn.Parameter) and not isinstance(new, torch.nn.Parameter)
    return torch.nn.Parameter(new, tensor.requires_grad) if wanted else new


@dataclass
class StandIn:
    """What is running: the card and its memory, the attention kernels taken, and what a trace leaves out."""

    card: Card
    memory: fake_card.Memory
    attention: Attention
    notes: set[str]


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
    _patch_for_values(patches)
    subclasses.patch(patches)
    _quiet(patches)
    return mode


def _patch_for_values(patches: Patches) -> None:
    """Fake tensors have no values, yet a loss is printed: what shows one shows that of .item()."""

    def formatted(tensor: FakeTensor, spec: str) -> str:
        return format(tensor.item() if tensor.dim() == 0 else repr(tensor), spec)

    def as_numpy(tensor: FakeTensor, *, force: bool = False) -> np.ndarray:
        if not force and tensor.device.type != "cpu":
            raise TypeError(f"can't convert {tensor.device} device type tensor to numpy; use .cpu() first")
        return np.broadcast_to(np.ones((), str(tensor.dtype)[6:]), tensor.shape)  # takes no memory

    patches.set(FakeTensor, "__format__", formatted)
    patches.set(FakeTensor, "numpy", as_numpy)


def _quiet(patches: Patches) -> None:
    """What torch says of fake tensors and of this machine is nothing to the user, who has neither."""
    patches.enter_context(warnings.catch_warnings())
    for message in (
        "Accessing the data pointer of FakeTensor", "dynamo_pgo force disabled", "'pin_memory' argument is set as true",
        "Sparse invariant checks",
    ):  # fmt: skip
        warnings.filterwarnings("ignore", message)
    patches.set(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True)
    logger = logging.getLogger("torch._inductor.utils")
    about_here = ("Not enough SMs", "get_device_tflops")  # said of cards below 68 SMs, and where Triton is missing
    other = lambda record: not str(record.msg).startswith(about_here)  # noqa: E731
    logger.addFilter(other)
    patches.callback(logger.removeFilter, other)


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


def uncompiled() -> contextlib.AbstractContextManager[Any]:
    """Within it compiled code is an error: Inductor would be asked for kernels that nothing here can make."""
    return torch.compiler.set_stance("fail_on_recompile")


@contextlib.contextmanager
def watched_resizes(resized: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Tell of every storage that is resized by its own method, which no dispatch shows."""
    resize = torch.UntypedStorage.resize_

    def resize_and_tell(storage: torch.UntypedStorage, size: int) -> Any:
        out = resize(storage, size)
        resized(storage)
        return out

    with Patches() as patches:
        patches.set(torch.UntypedStorage, "resize_", resize_and_tell)
        yield


def _keep_whole(library: torch.library.Library) -> None:
    """Where a build has no CUDA kernel of an op, it takes the op apart; on the card it is one kernel."""
    for name in ("silu_backward", "mish_backward", "_fused_rms_norm"):
        known = hasattr(torch.ops.aten, name)  # torch 2.6 has no _fused_rms_norm
        if known and not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA"):
            library.impl(name, _never_run, "CUDA")


def _never_run(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a kernel of the card runs on fake tensors only")


@contextlib.contextmanager
def stand_in(gpu: Gpu) -> Iterator[StandIn]:
    """Within it `device="cuda"` means fake tensors on this card.

    Raises guard.StandInError where this torch cannot be made to believe it.
    """
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
        recurrent.patch(patches, library)
        yield StandIn(card, memory, attention, notes)
