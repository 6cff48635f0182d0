"""What Inductor's measurements take, against PyTorch's CUDA build (tests/cuda_build): bytes that it allocated there."""

from collections.abc import Callable

import pytest
import torch

from foretrain.config.checks import launched
from foretrain.hardware.catalogue import find
from foretrain.predict.allocator.replay import replay
from foretrain.predict.spec import StepSpec
from foretrain.predict.trace import self_test
from foretrain.predict.trace.card.torch_cuda import Card, Memory
from foretrain.predict.trace.compiled import Autotuning, KernelConfigs, by_triton, kernel_configs
from foretrain.predict.trace.service import SHAPING_VARIABLES, Request, key_of
from foretrain.predict.trace.tracer import Tracer

CARD = Card.of(find("RTX 4070"))

# Of each phase: (allocated, reserved). A vocabulary of 1,013 has its matmuls measured with padded sides; the second way
# to run a kernel has room for copies that the first one had not.
PADDED = {"n_layer": 1, "n_head": 6, "block_size": 1024, "batch_size": 4, "gradient_accumulation_steps": 2,
          "vocab_size": 1013, "n_embd": 192, "dropout": 0.2}  # fmt: skip
TUNED = {"n_layer": 1, "n_head": 1, "block_size": 97, "batch_size": 2, "gradient_accumulation_steps": 1,
         "vocab_size": 4096, "n_embd": 64, "dropout": 0.1, "bias": True}  # fmt: skip
ON_THE_CUDA_BUILD = {
    "padded": (PADDED, "float32", {
        "build": (3_337_216, 4_194_304), "evaluate_first": (77_983_232, 98_566_144),
        "first_step": (149_469_184, 182_452_224), "steady_step": (115_632_640, 188_743_680),
        "evaluate_steady": (46_864_384, 188_743_680), "save": (27_055_616, 188_743_680),
    }),
    "tuned": (TUNED, "bfloat16", {
        "build": (1_276_416, 2_097_152), "evaluate_first": (49_762_816, 60_817_408),
        "first_step": (59_083_776, 65_011_712), "steady_step": (24_186_368, 67_108_864),
        "evaluate_steady": (23_020_032, 67_108_864), "save": (20_876_800, 67_108_864),
    }),
}  # fmt: skip


@pytest.mark.parametrize("case", ON_THE_CUDA_BUILD)
def test_a_compiled_run_takes_what_it_took_on_the_cuda_build(case: str) -> None:
    knobs, dtype, measured = ON_THE_CUDA_BUILD[case]
    request = Request(StepSpec.of(launched(knobs), find("RTX 4070"), dtype=dtype, compiled=True), False)  # type: ignore[arg-type]
    found = {p.phase: (p.allocated_bytes, p.reserved_bytes) for p in replay(self_test.trace(request.job())).phases}
    assert {phase: found[phase] for phase in measured} == measured


KERNEL = """
@triton_heuristics.{heuristic}(
    size_hints={sizes},
    {hint}filename=__file__,
    triton_meta={{'signature': {{'in_out_ptr0': '*fp32', 'in_ptr0': '*fp32', 'xnumel': 'i32'}}, 'device': DeviceProperties(
        type='cuda', index=0, multi_processor_count=46, cc=89, major=8, regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=1536, max_threads_per_block=1024, warp_size=32), 'constants': {{}},
        'native_matmul': False}},
    inductor_meta={{'mutated_arg_names': ['in_out_ptr0'], 'optimize_mem': {spares}, 'autotune_hints': set(),
                   'autotune_pointwise': True, 'num_load': 2, 'num_store': 1, 'num_reduction': 1}},
)
@triton.jit
def triton_fused(in_out_ptr0, in_ptr0, xnumel, XBLOCK : tl.constexpr):
    pass
"""


@pytest.mark.parametrize(
    ("heuristic", "sizes", "hint", "count"),
    [  # counts: of launchers that benchmark_all_configs had on the CUDA build, for kernels of these sizes and hints
        ("pointwise", {"x": 4194304}, "", 2),
        ("pointwise", {"x": 1024}, "", 2),
        ("reduction", {"x": 4096, "r0_": 256}, "ReductionHint.INNER", 1),
        ("persistent_reduction", {"x": 4096, "r0_": 256}, "ReductionHint.INNER", 1),
        ("persistent_reduction", {"x": 512, "r0_": 128}, "ReductionHint.INNER", 3),
    ],
    ids=str,
)
@pytest.mark.parametrize("spares", [True, False])
def test_ways_to_run_a_kernel(heuristic: str, sizes: dict[str, int], hint: str, count: int, spares: bool) -> None:
    hint = f"reduction_hint={hint}, " if hint else ""
    source = KERNEL.format(heuristic=heuristic, sizes=sizes, hint=hint, spares=spares)
    assert kernel_configs(source) == KernelConfigs(count, (0,), spares)


def test_a_kernel_of_unknown_make_is_not_measured() -> None:
    assert kernel_configs("def kernel(): ...") == KernelConfigs(1, ())


def tuning(*, earlier: int = 0) -> tuple[Autotuning, Callable[[], list[int]]]:
    """One on an RTX 4070 whose peak is `earlier` bytes, and what is allocated (or, negative, freed) from then on."""
    tracer, memory = Tracer("cpu"), Memory(CARD)
    record = memory.record = tracer.record
    if earlier:
        record.free(record.alloc(earlier, "earlier", "", (), "uint8"))
    start = len(record.events)
    return Autotuning(tracer, memory), lambda: [
        record.sizes[event] if event >= 0 else -record.sizes[~event] for event in record.events[start:]
    ]


POINTWISE = KERNEL.format(heuristic="pointwise", sizes={"x": 1024}, hint="", spares=True)


def test_a_kernel_is_measured_once_on_a_copy_of_what_it_changes() -> None:
    """Only in several ways: a reduction with one is not."""
    it, happened = tuning(earlier=4096)
    changed, read = torch.empty(50), torch.empty(100)
    for _ in range(2):
        it.kernel("triton_poi_fused_gelu_5", POINTWISE, (changed, read, 50))
    cache = 36 * 2**20
    assert happened() == [200, -200, cache, 200, -200, -cache]
    single = KERNEL.format(
        heuristic="reduction", sizes={"x": 4096, "r0_": 256}, hint="reduction_hint=ReductionHint.INNER, ", spares=True
    )
    it.kernel("triton_red_fused_norm_0", single, (changed, read, 50))
    assert len(happened()) == 6


def test_a_copy_that_would_raise_the_peak_goes_to_the_host() -> None:
    """For the first way; the buffer that clears the cache is the peak then, and the second way's copies fit below it."""
    it, happened = tuning()
    it.kernel("triton_poi_fused_gelu_5", POINTWISE, (torch.empty(50_000), torch.empty(100), 50_000))
    cache, copy = CARD.cache_bytes, 200_000
    assert happened() == [cache, -cache, copy, -copy, cache, copy, -copy, -cache]


def test_triton_clears_a_buffer_of_its_own_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Inductor is told to measure by Triton's do_bench; its other benchmarker, newer than 2.12, comes first."""
    it, happened = tuning(earlier=4096)
    monkeypatch.setattr(torch._inductor.config, "use_experimental_benchmarker", False)
    it.kernel("triton_poi_fused_gelu_5", POINTWISE, (torch.empty(50), torch.empty(100), 50))
    assert happened() == [200, -200, 256 * 2**20, 200, -200, -256 * 2**20]
    if hasattr(torch._inductor.config, "use_torch_profiler_benchmarker"):
        monkeypatch.setattr(torch._inductor.config, "use_torch_profiler_benchmarker", True)
        assert not by_triton()


@pytest.mark.parametrize("name", SHAPING_VARIABLES)
def test_a_trace_is_kept_with_what_its_measurements_go_by(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = set()
    for value in (None, "0", "1"):
        monkeypatch.delenv(name, raising=False)
        if value:
            monkeypatch.setenv(name, value)
        keys.add(key_of({}))
    assert len(keys) == 3


def test_a_forward_pass_copies_even_where_that_is_the_peak() -> None:
    it, happened = tuning()
    source = KERNEL.format(heuristic="pointwise", sizes={"x": 1024}, hint="", spares=False)
    it.kernel("triton_poi_fused_gelu_5", source, (torch.empty(50_000), torch.empty(100), 50_000))
    assert happened()[0] == 200_000
