"""torch.compile for a stand-in card: Inductor is real, its Triton kernels do nothing, its wrapper runs on fake tensors.
Importing this takes as long as Inductor does, so session.py does it for a compiled trace only."""

import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo import guards
from torch._dynamo.device_interface import CudaInterface
from torch._dynamo.variables.optimizer import OptimizerVariable
from torch._inductor import codecache, compile_fx, scheduler
from torch._inductor import config as inductor_config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codegen import triton_utils
from torch._inductor.fx_passes import pad_mm
from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder as Folder
from torch._inductor.runtime import hints, triton_heuristics
from torch._subclasses import fake_tensor
from torch.utils import _triton as triton
from torch.utils._pytree import tree_iter

from foretrain.base.units import MIB
from foretrain.predict.trace.card.guard import StandInError
from foretrain.predict.trace.card.patches import Patches
from foretrain.predict.trace.card.torch_cuda import Card, Generator, Memory
from foretrain.predict.trace.kernels.temporaries import Workspace, torch_version
from foretrain.predict.trace.tracer import Tracer

# Inductor measures kernel configs, and matmuls with padded sides. Between timed runs a measurement writes a buffer as
# large as the card's cache (torch/_inductor/runtime/benchmarking.py, benchmark_gpu), or Triton's with do_bench.
TRITON_BUFFER_BYTES = 256 * MIB  # triton/backends/nvidia/driver.py, get_empty_cache_for_benchmark
HEURISTICS = ("pointwise", "reduction", "cooperative_reduction", "persistent_reduction", "split_scan")


@dataclass
class TritonConfig:
    kwargs: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 2
    num_ctas: int = 1
    maxnreg: int | None = None
    dynamic_scale_rblock: bool = True


@dataclass(frozen=True)
class KernelConfigs:
    """Configs of a kernel that Inductor tries, and positions of the arguments it changes. `spares`: whether copies of
    those may go to the host; only in backward passes and without gradients."""

    count: int
    changes: tuple[int, ...]
    spares: bool = True


@cache
def kernel_configs(source: str) -> KernelConfigs:
    """Ask Inductor's own heuristics about a generated kernel (torch/_inductor/runtime/triton_heuristics.py)."""
    head = re.search(r"^@(triton_heuristics\.(\w+)\(.*?^\))\n@triton\.jit", source, re.MULTILINE | re.DOTALL)
    signature = re.search(r"^def \w+\(([^)]*)\)", source, re.MULTILINE)
    if head is None or signature is None or head[2] not in HEURISTICS:
        return KernelConfigs(1, ())

    def found(
        size_hints: Any, configs: list[Any], triton_meta: Any, inductor_meta: dict[str, Any], **_: Any
    ) -> KernelConfigs:
        changed = set(inductor_meta.get("mutated_arg_names", ()))
        names = [word.split(":")[0].strip() for word in signature[1].split(",")]
        unique = {(tuple(sorted(each.kwargs.items())), each.num_warps, each.num_stages) for each in configs}
        changes = tuple(i for i, name in enumerate(names) if name in changed)
        return KernelConfigs(len(unique), changes, inductor_meta.get("optimize_mem", True))

    names = {"triton_heuristics": triton_heuristics, "__file__": "", "AttrsDescriptor": SimpleNamespace, **vars(hints)}
    with Patches() as patches:
        patches.set(triton_heuristics, "cached_autotune", found)
        if getattr(triton_heuristics, "Config", object) is object:
            for name in ("Config", "InductorConfig"):
                patches.set(triton_heuristics, name, TritonConfig)
        return eval(head[1], names)  # Inductor wrote this text in this process


def _stored_bytes(tensor: Tensor) -> int:
    """Return the bytes from the first element to the last, which clone_preserve_strides copies."""
    if tensor.numel() == 0:
        return 0
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return int(span) * tensor.element_size()


@dataclass
class Autotuning:
    tracer: Tracer
    memory: Memory
    pads: bool = False
    _tuned: set[str] = field(default_factory=set)
    _timed: set[str] = field(default_factory=set)
    _padded: dict[str, bool] = field(default_factory=dict)

    def kernel(self, name: str, source: str, args: Sequence[Any]) -> None:
        """Time the first run of a kernel with several configs: each is measured on copies of what it changes."""
        if source in self._tuned:
            return
        self._tuned.add(source)
        name = f"{name} (inside)"
        tried = kernel_configs(source)
        before: list[int] | None = None
        for _ in range(tried.count if tried.count > 1 else 0):
            copies = [_stored_bytes(args[index]) for index in tried.changes]
            if tried.spares:
                copies = self._that_fit(copies)
            if copies == before:
                break  # the next config reuses this one's copies
            before = copies
            self._bench(lambda sizes=copies: self._give([self._take(each, name) for each in sizes]), name)

    def _that_fit(self, changed: list[int]) -> list[int]:
        """Return bytes of copies that leave the peak as it is; others go to the host (copy_args_to_cpu_if_needed)."""
        allocator = self.memory.now()
        budget, copies = allocator.peak_allocated_bytes - allocator.allocated_bytes, []
        for nbytes in changed:
            if nbytes <= budget:
                budget -= nbytes
                copies.append(nbytes)
        return copies

    def padding(self, match: Any, mat1: Tensor, mat2: Tensor, op: Any, input: Tensor | None = None) -> bool:
        """Return whether an unaligned matmul is padded: `pads`, where Inductor measures (fx_passes/pad_mm.py,
        _should_pad). It measures all where nvidia-smi has no clocks, as here."""
        m, k, n = _hint(mat1.shape[-2]), _hint(mat1.shape[-1]), _hint(mat2.shape[-1])
        if not pad_mm.is_mm_compute_bound(m, k, n, mat1.dtype):
            return False
        key = pad_mm.should_pad_bench_key(match, mat1, mat2, op, input)
        if key not in self._padded:
            self._measure_padding(match, mat1, mat2, op, input)
            self._padded[key] = self.pads
        return self._padded[key]

    def _measure_padding(self, match: Any, mat1: Tensor, mat2: Tensor, op: Any, input: Tensor | None) -> None:
        name, item = f"{op.__name__} (padding measured)", mat1.element_size()
        batch = _hint(mat1.shape[0]) if mat1.dim() == 3 else 1
        m, k, n = _hint(mat1.shape[-2]), _hint(mat1.shape[-1]), _hint(mat2.shape[-1])
        more_m, more_k, more_n = (pad_mm.get_padded_length(x, pad_mm.get_alignment_size(mat1)) for x in (m, k, n))
        held = [self._take(_stored_bytes(mat1), name), self._take(_stored_bytes(mat2), name)]
        base = pad_mm.should_pad_bench_key(match, mat1, mat2, op, input, is_base_time_key=True)
        if base not in self._timed and input is not None:
            held.append(self._take(_stored_bytes(input), name))
        padded = [
            (batch * (m + more_m) * (k + more_k) * item if more_m or more_k else 0),
            (batch * (k + more_k) * (n + more_n) * item if more_k or more_n else 0),
        ]
        for index, arg in enumerate(("mat1", "mat2")):
            if padded[index] and pad_mm.should_exclude_padding_time(match, arg):  # a copy that the timing leaves out
                held.append(self._take(padded[index], name))
                padded[index] = 0
        if input is not None:
            held.append(self._take(input.nbytes, name))

        def multiply(rows: int, columns: int) -> None:
            out = self._take(batch * rows * columns * item, name)
            self._multiply(op.__name__)
            self._give([out])

        def with_padding() -> None:
            copies = [self._take(nbytes, name) for nbytes in padded if nbytes]
            if input is not None and more_n and input.shape[-1] != 1:
                rows = 1 if input.dim() == 1 else _hint(input.shape[0])
                zeros = self._take(rows * more_n * item, name)
                copies.append(self._take(rows * (n + more_n) * item, name))
                self._give([zeros])
            multiply(m + more_m, n + more_n)
            self._give(copies)

        if base not in self._timed:
            self._timed.add(base)
            self._bench(lambda: multiply(m, n), name)
        self._bench(with_padding, name)
        self._give(held)

    def _multiply(self, op: str) -> None:
        steps = self.tracer.in_kernel(self.tracer, op, (), None) if self.tracer.in_kernel is not None else []
        for step in steps:
            if isinstance(step, Workspace):
                self.tracer.keep(step)
            elif isinstance(step, int) and step > 0:
                self._give([self._take(step, f"{op} (inside)")])

    def _bench(self, run: Callable[[], None], name: str) -> None:
        run()
        buffer = self._take(TRITON_BUFFER_BYTES if by_triton() else self.memory.card.cache_bytes, name)
        run()
        self._give([buffer])

    def _take(self, nbytes: int, name: str) -> int:
        return self.tracer.record.alloc(nbytes, name, "", (), "uint8")

    def _give(self, ids: list[int]) -> None:
        for id in ids:
            self.tracer.record.free(id)


def by_triton() -> bool:
    own = ("use_torch_profiler_benchmarker", "use_experimental_benchmarker")
    return not any(getattr(inductor_config, name, False) for name in own)


def _hint(size: Any) -> int:
    return size if isinstance(size, int) else int(size.node.hint)


# Inductor's checks of its kernels' output, which here is none.
OLDEST_THAT_COMPILES = (2, 11)  # before, Dynamo steps aside under a mode, or wants one fake mode alone
CHECKS = ("size_asserts", "nan_asserts", "alignment_asserts")


class _Kernel:
    def __init__(self, tracer: Tracer | None, name: str, source: str = "", tuning: Autotuning | None = None) -> None:
        self.tracer, self.kernel_name = tracer, name
        self.inductor_meta: dict[str, Any] = {}
        self.launchers: list[Any] = []
        self._source, self._tuning = source, tuning

    def run(self, *args: Any, **kwargs: Any) -> None:
        if self.tracer is None:
            return
        for tensor in args:
            if isinstance(tensor, Tensor):
                self.tracer.written_by(tensor, self.kernel_name)
        if self._tuning is not None:
            self._tuning.kernel(self.kernel_name, self._source, args)
            self._tuning = None

    __call__ = run

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


def _device_patches(patches: Patches, card: Card) -> None:
    answers: dict[str, Any] = {
        "get_device_properties": lambda device=None: card.properties(),
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "is_available": lambda: True,
        "is_bf16_supported": lambda including_emulation=False: card.capability >= (8, 0),
        "get_compute_capability": lambda device=None: card.capability[0] * 10 + card.capability[1],
        "raise_if_triton_unavailable": lambda device=None: None,
        "exchange_device": lambda device: 0,
        "maybe_exchange_device": lambda device: 0,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        "get_raw_stream": lambda index=0: 0,
    }
    for name, answer in answers.items():
        patches.set(CudaInterface, name, staticmethod(answer))
    for name in ("get_device_properties", "current_device"):
        patches.set(CudaInterface.Worker, name, staticmethod(answers[name]))
    patches.set(torch._C, "_accelerator_getDefaultGenerator", lambda index: Generator("cuda:0"))
    patches.set(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)
    if not hasattr(torch._C, "_cuda_getDevice"):
        patches.set(torch._C, "_cuda_getDevice", lambda: 0)


def _triton_patches(patches: Patches) -> None:
    """Make Triton optional: it is never asked to compile."""
    patches.set(triton, "triton_hash_with_backend", lambda: "stand-in")
    for module in (scheduler, compile_fx, pad_mm):
        if hasattr(module, "has_triton"):
            patches.set(module, "has_triton", lambda *args: True)
    if triton.has_triton_package():
        return
    # Templates, such as flex_attention's, are loaded when they are written, and name parts of Triton.
    patches.set(triton_utils, "AttrsDescriptorWrapper", lambda *args, **kwargs: {})
    patches.set(triton_heuristics, "template", lambda **kwargs: lambda function: _Kernel(None, "template"))
    load = codecache.PyCodeCache.load_by_key_path.__func__

    def load_with_triton(cls: Any, *args: Any, **kwargs: Any) -> Any:
        package, language = ModuleType("triton"), ModuleType("triton.language")
        package.language = language  # type: ignore[attr-defined]
        package.jit = lambda function: function  # type: ignore[attr-defined]
        language.constexpr = object  # type: ignore[attr-defined]  # what helpers beside a template are annotated with
        sys.modules["triton"], sys.modules["triton.language"] = package, language
        try:
            return load(cls, *args, **kwargs)
        finally:
            del sys.modules["triton"], sys.modules["triton.language"]

    patches.set(codecache.PyCodeCache, "load_by_key_path", classmethod(load_with_triton))


def _folding_patch(patches: Patches) -> None:
    """Compute one-element constants on the CPU, which constant folding would do on the device."""
    deduce = Folder._deduce_value
    of_zeros: Any = getattr(Folder, "_add_peephole_patterns", None)

    def deduce_on_cpu(self: Any, node: Any) -> Any:
        device = node.kwargs.get("device")
        if node.op == "call_function" and isinstance(device, torch.device) and device.type == "cuda":
            kwargs = node.kwargs
            node.kwargs = {**kwargs, "device": torch.device("cpu")}
            try:
                return deduce(self, node)
            finally:
                node.kwargs = kwargs
        if node.target is torch.ops.prims.device_put.default:
            return self.env[node.args[0]]
        return deduce(self, node)

    def zeros_on_cpu(self: Any) -> None:
        full = torch.full
        with Patches() as inner:
            inner.set(torch, "full", lambda *size, device, **kwargs: full(*size, **kwargs))
            of_zeros(self)

    patches.set(Folder, "_deduce_value", deduce_on_cpu)
    if of_zeros is not None:
        patches.set(Folder, "_add_peephole_patterns", zeros_on_cpu)


def _optimizer_patch(patches: Patches, tracer: Tracer | None) -> None:
    """Let Dynamo make an optimizer's states within the modes of the stand-in, not outside of all."""
    call = OptimizerVariable.call_method

    def call_method(self: Any, tx: Any, name: str, *args: Any) -> Any:
        optimizer = self.value
        fakes = (p.fake_mode for group in optimizer.param_groups for p in group["params"] if hasattr(p, "fake_mode"))
        modes: Any = (next(fakes, None), tracer)
        if name != "_init_group" or None in modes:
            return call(self, tx, name, *args)
        init = optimizer._init_group

        def init_group(*args: Any, **kwargs: Any) -> Any:
            with contextlib.ExitStack() as stack:
                for mode in modes:
                    stack.enter_context(mode)
                return init(*args, **kwargs)

        optimizer._init_group = init_group
        try:
            return call(self, tx, name, *args)
        finally:
            del optimizer._init_group

    patches.set(OptimizerVariable, "call_method", call_method)


def _symbolic_patch(patches: Patches) -> None:
    """Keep Dynamo from caching fake results of symbolic shapes: torch rejects comparing two graphs' symbols."""
    validate = getattr(fake_tensor.FakeTensorMode, "_validate_cache_key", None)
    if validate is None:
        return

    def none_of_symbols(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
        for value in tree_iter((args, kwargs)):
            symbolic = isinstance(value, fake_tensor.FakeTensor) and value._has_symbolic_sizes_strides
            if symbolic or isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
                raise fake_tensor._BypassDispatchCache("symbolic shape")
        return validate(mode, func, args, kwargs)

    patches.set(fake_tensor.FakeTensorMode, "_validate_cache_key", none_of_symbols)


def _padding_patch(patches: Patches, pads: bool, tuning: Autotuning | None) -> None:
    """Let the caller choose: pad_mm would time both variants of a matmul with an unaligned side on the card."""

    def should_pad(match: Any, mat1: Tensor, mat2: Tensor, op: Any, input: Any = None) -> bool:
        m, k, n = mat1.shape[-2], mat1.shape[-1], mat2.shape[-1]
        return pads and pad_mm.is_mm_compute_bound(m, k, n, mat1.dtype)

    patches.set(pad_mm, "_should_pad", tuning.padding if tuning is not None else should_pad)


def _code_patches(patches: Patches, tracer: Tracer | None, tuning: Autotuning | None) -> None:
    def empty(device: str) -> Any:
        return lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=device)

    def reinterpret(tensor: Tensor, size: Any, stride: Any, offset: int = 0) -> Tensor:
        return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)

    patches.set(guards, "_empty_strided_cuda", empty("cuda"))
    patches.set(guards, "_empty_strided_cpu", empty("cpu"))
    patches.set(guards, "_reinterpret_tensor", reinterpret)
    kernel = lambda self, name, source, *args, **kwargs: _Kernel(tracer, name, source, tuning)  # noqa: E731
    patches.set(AsyncCompile, "triton", kernel)
    patches.set(AsyncCompile, "cpp_pybinding", lambda self, types, source, *a, **k: _Kernel(tracer, "cpp_fused"))
    patches.set(AsyncCompile, "wait", lambda self, scope: None)
    patches.set(AsyncCompile, "warm_pool", classmethod(lambda cls: None))


@contextlib.contextmanager
def compiling(
    card: Card | None, tracer: Tracer | None = None, *, pads: bool = False, memory: Memory | None = None
) -> Iterator[None]:
    """Let torch.compile work for a stand-in card, or for a CPU without its compiler (card None). `pads`: the assumed
    result of pad_mm's measurements; `memory`: the card's, to trace Inductor's measurements."""
    torch._dynamo.reset()
    if torch_version() < OLDEST_THAT_COMPILES:  # or an uncompiled step would count as a compiled one
        least = ".".join(map(str, OLDEST_THAT_COMPILES))
        raise StandInError(f"torch {torch.__version__} compiles nothing in a trace; torch {least} or newer does")
    with Patches() as patches:
        tuning = Autotuning(tracer, memory, pads) if tracer is not None and memory is not None else None
        if card is not None:
            _device_patches(patches, card)
            _triton_patches(patches)
            _folding_patch(patches)
            _padding_patch(patches, pads, tuning)
        _optimizer_patch(patches, tracer)
        _code_patches(patches, tracer, tuning)
        _symbolic_patch(patches)
        changes: dict[str, Any] = {"compile_threads": 1, "force_disable_caches": True, **dict.fromkeys(CHECKS, False)}
        patches.enter_context(inductor_config.patch(changes))
        patches.callback(torch._dynamo.reset)
        yield
