"""The memory of Inductor's measurements: kernel configs, and matmuls with padded sides.

Both run on the card while a step compiles or first runs. Between timed runs a measurement writes a buffer as large as
the card's cache (torch/_inductor/runtime/benchmarking.py, benchmark_gpu), or Triton's of 256 MiB with do_bench.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any

from torch import Tensor
from torch._inductor import config as inductor_config
from torch._inductor.fx_passes import pad_mm
from torch._inductor.runtime import hints, triton_heuristics

from foretrain.base.units import MIB
from foretrain.predict.trace.card.patches import Patches
from foretrain.predict.trace.card.torch_cuda import Memory
from foretrain.predict.trace.kernels.temporaries import Workspace
from foretrain.predict.trace.tracer import Tracer

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
    """The configs of a kernel that Inductor tries, and the positions of the arguments it changes.

    `spares`: whether copies of those may go to the host; only in backward passes and without gradients.
    """

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
        """Return bytes of the copies on the card: those that leave the run's peak as it is. Others go to the host.

        The buffer of a first config can be that peak: a second then has room (copy_args_to_cpu_if_needed).
        """
        allocator = self.memory.now()
        budget, copies = allocator.peak_allocated_bytes - allocator.allocated_bytes, []
        for nbytes in changed:
            if nbytes <= budget:
                budget -= nbytes
                copies.append(nbytes)
        return copies

    def padding(self, match: Any, mat1: Tensor, mat2: Tensor, op: Any, input: Tensor | None = None) -> bool:
        """Return whether a matmul with an unaligned side is padded: `pads`, where Inductor measures it.

        It measures both on its own matrices, and caches the result by shape (fx_passes/pad_mm.py, _should_pad). Which
        matmuls it measures depends on the card's clocks from nvidia-smi; where it cannot ask, it measures all, as here.
        """
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
