"""Every storage of a device while ordinary PyTorch code runs, from when it first shows in the outputs of an op, by
`Tracer.__torch_dispatch__`, to Python's last reference to it."""

import sys
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from foretrain.predict.trace.card.streams import record_stream
from foretrain.predict.trace.kernels import reductions
from foretrain.predict.trace.kernels.attention import Attention
from foretrain.predict.trace.kernels.choices import Choices
from foretrain.predict.trace.kernels.reals import Reals
from foretrain.predict.trace.kernels.values import Values
from foretrain.predict.trace.kernels.work import MATMULS, Work
from foretrain.predict.trace.record import Recorder
from foretrain.predict.trace.subclasses import held_tensors, wraps

try:
    from torch._prims_common import is_non_overlapping_and_dense_or_false as is_dense
except ImportError:  # torch 2.9 and before
    from torch._prims_common import is_non_overlapping_and_dense as is_dense  # type: ignore[attr-defined,no-redef]

aten = torch.ops.aten
DEVICE = torch.ops.prim.device.default


class Result(NamedTuple):
    number: int


class Workspace(NamedTuple):
    nbytes: int
    name: str


# An op's allocations in order: bytes for itself, below 0 where it frees them, a result. The rest is freed at its end.
# Without any Result all come first; else those not named are on the host.
Step = int | Result | Workspace
InKernel = Callable[["Tracer", str, tuple[Any, ...], Any], list[Step]]

EIGHT_BIT_MATMULS = {"_scaled_mm", "_int_mm"}
# Backward formulas write into zeros of their own, unless a tensor may be a subclass; under a mode every one may
# (torch/csrc/autograd/FunctionsManual.cpp, areAnyTensorSubclassLike).
IN_PLACE_FOR_PLAIN_TENSORS = {
    aten.scatter.src: aten.scatter_.src,
    aten.scatter_add.default: aten.scatter_add_.default,
    aten.index_add.default: aten.index_add_.default,
    aten.index_put.default: aten._index_put_impl_.default,
    aten._unsafe_index_put.default: aten._index_put_impl_.default,
    aten.put.default: aten.put_.default,
}
ZEROS = ("zeros", "new_zeros", "zeros_like")
UNFUSED = {"flex_attention", "flex_attention_backward"}
# Ops that take masks, or whose size depends on values.
BY_MASK = {
    aten.nonzero.default, aten.masked_select.default, aten.bincount.default, aten.index.Tensor, aten.index_put.default,
    aten.index_put_.default, aten._index_put_impl_.default, aten._unsafe_index.Tensor, aten._unsafe_index_put.default,
}  # fmt: skip


@dataclass
class Storage:
    ref: weakref.ref[Any]
    id: int
    nbytes: int


class Tracer(TorchDispatchMode):
    """Records the storages of `device_type`, on fake tensors. `in_kernel(tracer, op, args, out)` returns what an op's
    kernel allocates for itself; `upper` takes the upper end of sizes that nobody can know, which `ranges` lists."""

    supports_higher_order_operators: ClassVar[bool] = True
    # (tensor use count, storage use count) of a gradient that only the engine holds, seen from inside a dispatch.
    in_place_counts: ClassVar[set[tuple[int, int]]] = set()

    def __init__(self, device_type: str = "cuda", in_kernel: InKernel | None = None, *, upper: bool = False) -> None:
        super().__init__()
        self.device_type = device_type
        self.in_kernel = in_kernel
        self.upper = upper
        self.ranges: set[str] = set()  # a sentence for each kind
        self.record = Recorder()
        self.phase = "build"
        self.entered: Callable[[], None] = lambda: None  # called at each new phase
        self.ops: Counter[str] = Counter()  # that ran on the device
        self.matmul_dtypes: Counter[str] = Counter()
        self.modules: list[str] = []
        self.stepping = False  # within the optimizer's step
        self.in_place_sums = self.out_of_place_sums = 0
        self.elsewhere: Counter[str] = Counter()  # matmuls on other devices
        self.sparse = False  # whether a sparse tensor was seen
        self.values = Values()
        self.choices = Choices(upper, self.ranges)
        self.reals: Reals | None = None
        self.attention: Attention | None = None  # of the card
        self._known: dict[int, Storage] = {}
        self.composed = dict(reductions.ALIGNMENTS)  # ops, of libraries too: a function of what they consist of
        self.workspaces: dict[str, int] = {}  # of libraries, kept until they are cleared: the allocation of each name
        self.paged_bytes = 0  # in managed memory, outside the allocator
        self.work: Work | None = None  # where the kernels of a step are counted
        self.autocast = False  # in the program's context: here, below it, it is always off
        self._below_autograd = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, without which Dynamo skips every frame under a mode of ours."""
        return True

    def enter(self, phase: str) -> None:
        self.phase = phase
        self.record.phase(phase)
        self.entered()

    def track(self, tensor: Tensor, op: str, *, on_host: bool = False) -> None:
        """Track what an op returned: a new storage, or one of another size. `on_host`: the real op leaves it there."""
        self.sparse |= tensor.is_sparse
        if tensor.layout == torch.strided and tensor.device.type == self.device_type:
            storage = tensor.untyped_storage()
            known = self._known.get(storage._cdata)
            if known is not None and known.ref() is storage:
                self._resized(storage, known, op, tuple(tensor.shape))
                return
            label = (op, self.module(), tuple(tensor.shape), str(tensor.dtype)[6:])
            nbytes = 0 if on_host else storage.nbytes()
            known = Storage(weakref.ref(storage), self.record.alloc(nbytes, *label), storage.nbytes())
            self._known[storage._cdata] = known
            weakref.finalize(storage, self._gone, storage._cdata, known).atexit = False

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Note that storage.resize_() was called, which no dispatch shows."""
        known = self._known.get(storage._cdata)
        if known is not None and known.ref() is storage:
            self._resized(storage, known, "resize_", self.record.labels[known.id][2])

    def _resized(self, storage: torch.UntypedStorage, known: Storage, op: str, shape: tuple[int, ...]) -> None:
        """Allocate the new memory before the old is freed (aten/src/ATen/native/cuda/Resize.cpp, resize_bytes_cuda)."""
        if storage.nbytes() == known.nbytes:
            return
        old, known.nbytes = known.id, storage.nbytes()
        known.id = self.record.alloc(known.nbytes, op, self.module(), shape, self.record.labels[old][3])
        if old in self.record.tags:
            self.record.tag(known.id, *self.record.tags[old])
        self.record.free(old)

    def _gone(self, key: int, known: Storage) -> None:
        if self._known.get(key) is known:
            del self._known[key]
        self.record.free(known.id)

    def id_of(self, tensor: Tensor) -> int | None:
        # Sparse tensors and those that torch.func wraps have no storage of their own.
        if tensor.layout != torch.strided or is_functorch_wrapped_tensor(tensor):
            return None
        storage = tensor.untyped_storage()
        known = self._known.get(storage._cdata)
        return known.id if known is not None and known.ref() is storage else None

    def keep(self, workspace: Workspace) -> None:
        self.workspaces[workspace.name] = self.record.alloc(workspace.nbytes, "cublas", "", (), "uint8")
        self.record.tag(self.workspaces[workspace.name], "workspace", workspace.name)

    def clear_workspaces(self) -> None:
        while self.workspaces:
            self.record.free(self.workspaces.popitem()[1])

    def tag(self, tensor: Tensor, category: str, name: str = "") -> None:
        for part in held_tensors(tensor):
            id = self.id_of(part)
            if id is not None:
                self.record.tag(id, category, name)

    def written_by(self, tensor: Tensor, kernel: str) -> None:
        """Name a buffer among the arguments of a compiled kernel; the first such kernel names it."""
        self.values.forget(tensor)
        id = self.id_of(tensor)
        if id is not None:
            self.record.name(id, kernel)

    def module(self) -> str:
        """Return the module whose forward (or recomputation) runs, or whose node's backward does."""
        if self.modules:
            return self.modules[-1]
        node = torch._C._current_autograd_node()
        # torch's stub has metadata as a method; it is a dict (torch/csrc/autograd/python_cpp_function.cpp)
        return cast(dict[str, str], node.metadata).get("module", "") if node is not None else ""

    def moment(self) -> str:
        """Return forward, backward or optimizer; a recomputation within backward is forward."""
        if torch._C._current_autograd_node() is not None and not self.modules:
            return "backward"
        return "optimizer" if self.stepping else "forward"

    def part(self) -> str:
        """Return the part of the step, in which a recomputation is one of its own."""
        found = self.moment()
        again = found == "forward" and torch._C._current_autograd_node() is not None
        return "recompute" if again else found

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is DEVICE:  # C++ asks it of a fake tensor twice for each op: no need for the fake mode
            return args[0].device
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.HigherOrderOperator):
            return self._higher_order(func, args, kwargs)
        for kind in types:
            if wraps(kind):
                return NotImplemented
        if (self._below_autograd or torch.is_inference_mode_enabled()) and func._can_decompose():
            return self._taken_apart(func, args, kwargs)
        answer = self._without_values(func, args)
        if answer is not None:
            return answer[0]
        if func is aten.add.Tensor and self._engine_sums_in_place(args, kwargs):
            return args[0].add_(args[1])
        if func is aten.add.Tensor and self.attention is not None and self.attention.masking:
            func = aten.add_.Tensor  # adds the mask to the scores, as above for plain tensors only
        if func in IN_PLACE_FOR_PLAIN_TENSORS and self._is_of_zeros(args[0]) and _called_by_engine(2):
            func = IN_PLACE_FOR_PLAIN_TENSORS[func]
            if func is aten._index_put_impl_.default:
                args = (*args, True)  # its indices were in range before
        if self.reals is not None and (sized := self._sized(func, args, kwargs)) is not None:
            return sized
        if func in BY_MASK and (masked := self._by_mask(func, args, kwargs)) is not None:
            return masked
        if func in reductions.COMPOSED:
            with self:
                return reductions.run_composed(func, args, kwargs)
        if func in self.composed:
            if self.work is not None:
                self.work.add(func, args, kwargs, None, self.part())
            return self._below(self.composed[func], args, kwargs)
        op = func.overloadpacket.__name__
        self.record.moment(self.moment())
        here = self._is_here(args)
        self.ops[op] += here
        if op in MATMULS and not self.stepping:  # Muon's matmuls are in a dtype of its own
            (self.matmul_dtypes if here else self.elsewhere)[str(args[0].dtype)[6:]] += 1
        out = on_fakes(func, args, kwargs)
        steps: list[Step] = []
        if here and self.work is not None:
            self.work.add(func, args, kwargs, out, self.part())
        if here:
            steps += [*reductions.inside(op, args), *reductions.as_large_as_the_input(op, args, kwargs)]
            steps += self.in_kernel(self, op, args, out) if self.in_kernel is not None else []
            reductions.keep(op, args, out)
        results = [out] if isinstance(out, Tensor) else [t for t in tree_iter(out) if isinstance(t, Tensor)]
        self._allocate(op, results, steps)
        if "out" in kwargs and isinstance(out, Tensor):  # a compiled wrapper's matmul into its own buffer
            self.written_by(out, op)
        self.values.after(func, args, kwargs, out)
        if self.reals is not None:
            self.reals.after(func, args, kwargs, out)
        self.choices.after(func, args, kwargs, out)
        return out

    def _allocate(self, op: str, results: list[Tensor], steps: list[Step]) -> None:
        taken: list[tuple[int, int]] = []
        named = {step.number for step in steps if isinstance(step, Result)}
        for index, tensor in enumerate(results):
            if not named:
                self.track(tensor, op)
            elif index not in named:
                self.track(tensor, op, on_host=True)
        for step in steps:
            if isinstance(step, Result):
                if step.number < len(results):
                    self.track(results[step.number], op)
            elif isinstance(step, Workspace):
                self.keep(step)
            elif step >= 0:
                taken.append((step, self.record.alloc(step, f"{op} (inside)", self.module(), (), "uint8")))
            else:
                at = max(i for i, (nbytes, _) in enumerate(taken) if nbytes == -step)
                self.record.free(taken.pop(at)[1])
        for _, id in taken:
            self.record.free(id)

    def _is_here(self, args: tuple[Any, ...]) -> bool:
        """Return whether an op runs on the traced device: by its first argument, or the first of that list."""
        first = args[0] if args else None
        if isinstance(first, list | tuple):
            first = first[0] if first else None
        return isinstance(first, Tensor) and first.device.type == self.device_type

    def _taken_apart(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Decompose a composite op, which without autograd comes here whole; its parts are cast as autocast would."""
        excluded = torch._C._dispatch_tls_local_exclude_set()
        if self.autocast and not self._below_autograd:
            excluded = excluded.remove(DispatchKey.AutocastCUDA)
        with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded), self:
            if func is aten.scaled_dot_product_attention.default and self.attention is not None:
                return self.attention(*args, **kwargs)
            return func.decompose(*args, **kwargs)

    def _higher_order(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the single op that compiled checkpointing wraps to keep random states, which are on the host; eager
        flex_attention is ordinary ops."""
        dense = func.py_kernels.get(DispatchKey.CompositeExplicitAutograd) if func.name() in UNFUSED else None
        if dense is not None and not torch.compiler.is_compiling():
            return self._below(dense, args, kwargs)
        if "rng_state" not in func.name():
            return func(*args, **kwargs)
        inner: list[Any] = [a for a in args if not (isinstance(a, Tensor) and a.dtype == torch.uint8)]
        with self:
            out = inner[0](*inner[1:], **{k: v for k, v in kwargs.items() if k != "rng_state"})
        return (torch.empty(16, dtype=torch.uint8), out) if "and_save" in func.name() else out

    def _below(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before, self._below_autograd = self._below_autograd, True
        try:
            with self:
                return run(*args, **kwargs)
        finally:
            self._below_autograd = before

    def _without_values(self, func: Any, args: tuple[Any, ...]) -> tuple[Any] | None:
        """Answer what only values can tell: (answer,), or None where the op can run on fake tensors."""
        if func is aten._local_scalar_dense.default:
            known = self.values.real is not None and self.values.real(args[0]) is not None
            counted = None if known else self.choices.counted(args[0])
            return (self.values.scalar(args[0]) if counted is None else counted,)
        if func is aten.equal.default or func is aten.allclose.default:
            real = self.reals.run(func, args, {}) if self.reals is not None else None
            return (self.values.alike(args[0], args[1]) if real is None else real,)
        if func is aten._pin_memory.default:
            return (args[0],)
        if func is aten.is_pinned.default:
            return (False,)
        if func is aten.record_stream.default:
            record_stream(self.record, self.id_of(args[0]), args[1])
            return (None,)
        return None

    def know_values(self) -> Reals:
        """Follow the values of integers and masks from here on."""
        self.reals = self.reals or Reals(self.values)
        self.values.real = self.reals.of
        return self.reals

    def _sized(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of an op whose size known values decide; None of any other."""
        assert self.reals is not None
        out = self.reals.sized(func, args, kwargs)
        if out is not None:
            rule, op = self.in_kernel if self._is_here(args) else None, func.overloadpacket.__name__
            results = [each for each in tree_iter(out) if isinstance(each, Tensor)]
            self._allocate(op, results, [] if rule is None else rule(self, op, args, out))
        return out

    def _by_mask(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of an op whose size or rows a mask decides; None without a mask."""
        if func is aten.nonzero.default:
            known = self.values.of(args[0])
            out = self.choices.rows(args[0], bool(known.value) if known.certain else None)
            rule = self.in_kernel if self._is_here(args) else None
            self._allocate("nonzero", [out], [] if rule is None else rule(self, "nonzero", args, out))
            return out
        if func is aten.bincount.default:
            with self:
                return self.choices.tally(args[0], args[2] if len(args) > 2 else 0)
        if func is aten.masked_select.default:
            tensor, mask = torch.broadcast_tensors(args[0], args[1])
            with self:
                return tensor[mask]
        # aten/src/ATen/native/IndexingUtils.h, expandTensors
        if not any(_is_mask(index) for index in args[1]):
            return None
        expanded: list[Tensor | None] = []
        with self:
            for index in args[1]:
                expanded += index.nonzero().unbind(1) if _is_mask(index) else [index]
            return func(args[0], expanded, *args[2:], **kwargs)

    def _engine_sums_in_place(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether the engine adds two gradients in place, when nobody else holds the first, by `calibrate`'s use
        counts: under a mode torch/csrc/autograd/input_buffer.cpp takes every tensor for a subclass."""
        if kwargs or torch.is_grad_enabled() or not _called_by_engine(3):
            return False
        a, b = args
        if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or a.dtype != b.dtype or a.shape != b.shape:
            return False
        if _holders(a) in self.in_place_counts and is_dense(a):
            self.in_place_sums += 1
            return True
        self.out_of_place_sums += 1
        return False

    def _is_of_zeros(self, tensor: Tensor) -> bool:
        """Return whether a formula made it to write into: scatter_reduce wants another tensor to add to."""
        id = self.id_of(tensor)
        return id is not None and self.record.labels[id][0] in ZEROS

    @classmethod
    def calibrate(cls, device_type: str) -> None:
        """Find this torch's use counts of a gradient that only the engine holds. Inside a fake mode."""
        seen: set[tuple[int, int]] = set()

        class Probe(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if func is aten.add.Tensor and not torch.is_grad_enabled():
                    seen.add(_holders(args[0]))
                return func(*args, **(kwargs or {}))

        weight = torch.nn.Parameter(torch.empty(8, 8, device=device_type))
        with Probe():
            hidden = torch.empty(4, 8, device=device_type) @ weight
            ((hidden + torch.tanh(hidden)) * 2).sum().backward()
        cls.in_place_counts = seen


def on_fakes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func is aten._scaled_mm.out:  # torch has no fake kernel for it; its result's storage is there already
        return kwargs["out"]
    if func is aten._fused_adamw_.tensor_lr:  # nor for this one, which changes what is there
        return None
    if func is aten._index_put_impl_.default:  # nor for this one where the indices are on the host
        return aten.index_put_.default(*args[:4])
    if func.overloadpacket.__name__ == "_grouped_mm" and args[0].dtype != torch.bfloat16:
        halves = [each.to(torch.bfloat16) for each in args[:2]]  # all that the fake kernel takes; real ones take more
        return func(*halves, *args[2:], **kwargs).to(args[0].dtype)
    return func(*args, **kwargs)


def _holders(tensor: Tensor) -> tuple[int, int]:
    """Return how often a tensor and its storage are held; torch 2.9 does not count an unheld Python object."""
    key = tensor.untyped_storage()._cdata
    return tensor._use_count(), torch._C._storage_Use_Count(key)  # type: ignore[attr-defined]


def _is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _called_by_engine(depth: int) -> bool:
    """Return whether no Python frame is between the engine and the op, whose dispatch is `depth` calls up."""
    frame = sys._getframe(depth)
    while frame is not None and frame.f_code.co_name in ("inner", "_fn", "wrapper", "__torch_dispatch__"):
        frame = frame.f_back
    return frame is None or frame.f_code.co_name == "_engine_run_backward"
