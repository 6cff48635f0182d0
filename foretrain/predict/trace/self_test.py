"""Traces that prove themselves: on the CPU the same run is traced on fake tensors and run on real ones, by a benchmark
over many configs, and by a worker once for an unknown torch. `trace` is a job of a worker."""

import gc
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile

from foretrain.config.options import RunConfig
from foretrain.config.shape import ModelShape
from foretrain.hardware.catalogue import Dtype, Gpu
from foretrain.model.allocated import peaks_of
from foretrain.predict.estimate.sdpa import attention_kind
from foretrain.predict.trace import drive
from foretrain.predict.trace.kernels.attention import cudnn_is_new_enough
from foretrain.predict.trace.kernels.temporaries import torch_version
from foretrain.predict.trace.record import Head, Trace
from foretrain.predict.trace.session import tracing
from foretrain.predict.trace.tracer import Tracer

if TYPE_CHECKING:
    from foretrain.model.parallel import Share

CPU = torch.device("cpu")
# Traces were compared with the real CPU allocator (2.13) or run on CUDA builds without a card (2.11, 2.15).
CHECKED_TORCH = {(2, 11), (2, 13), (2, 15)}
# On a CPU it pads a rank's uneven shares in copies; a card's kernel needs none.
SHARING_SCRATCH = frozenset({"aten::_chunk_cat"})


@dataclass(frozen=True)
class Truth:
    """Peak of the sum of tensors in bytes; `real_bytes` is without oneDNN's and MKL's scratch, which no card has."""

    traced_bytes: int
    real_bytes: int
    real_with_scratch_bytes: int

    @property
    def error(self) -> float:
        return self.traced_bytes / self.real_bytes - 1


def traced_on_cpu(config: RunConfig, dtype: Dtype, step: str, *, compiled: bool, share: "Share | None" = None) -> Trace:
    """Trace a run on fake CPU tensors; of one rank of many where `share` shares its model (ranks.py)."""
    with tracing(None, compiled=compiled) as session:
        tracer, names = session.tracer, session.names
        run = drive.Job(config, CPU, dtype, compiled, tracer, names, share)
        drive.RUNS[step](run)
        shapes = frozenset(names.weight_shapes)
    return tracer.record.finish(logits=Head.of(run.config), weight_shapes=shapes)


def real_peaks(
    config: RunConfig,
    dtype: Dtype,
    step: str,
    *,
    compiled: bool,
    share: "Share | None" = None,
    scratch: frozenset[str] = frozenset(),
) -> tuple[int, int]:
    """Run it for real: the highest sum of the CPU allocator's blocks, with and without kernels' scratch (`scratch`:
    more operations of this kind). A compiled run is measured the second time, as compiling allocates too."""
    torch._dynamo.reset()
    gc.collect()  # cycles of an earlier run would be freed while this one is measured
    tracer = Tracer("cpu")  # never entered: it only takes the calls that mark phases
    for _ in range(1 if compiled else 0):
        with drive.naming_allocations(tracer, compiled=compiled) as names:
            drive.RUNS[step](drive.Job(config, CPU, dtype, compiled, tracer, names, share))
    with (
        drive.naming_allocations(tracer, compiled=compiled) as names,
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run,
    ):
        drive.RUNS[step](drive.Job(config, CPU, dtype, compiled, tracer, names, share))
    return peaks_of(run, scratch)


def compare(config: RunConfig, dtype: Dtype, step: str, *, compiled: bool, share: "Share | None" = None) -> Truth:
    trace = traced_on_cpu(config, dtype, step, compiled=compiled, share=share)
    traced = max(peak for peak, _ in trace.peaks().values())
    scratch = SHARING_SCRATCH if share else frozenset()
    everything, tensors = real_peaks(config, dtype, step, compiled=compiled, share=share, scratch=scratch)
    return Truth(traced, tensors, everything)


class TraceError(RuntimeError):
    """The trace is not that of the card: something degraded in silence. The sentence says what."""


def prove_this_torch(share: "Share | None" = None) -> None:
    """Trace a small run that is also done for real, for an unchecked torch. Raises TraceError."""
    if torch_version() in CHECKED_TORCH:
        return
    small = RunConfig(n_layer=2, n_head=2, n_embd=64, block_size=32, vocab_size=256, batch_size=2)
    truth = compare(small, "float32", "foretrain", compiled=False, share=share)
    if abs(truth.error) > 0.001:
        raise TraceError(
            f"with torch {torch.__version__} a small run is traced as {truth.traced_bytes} bytes and takes "
            f"{truth.real_bytes}, so its traces cannot be trusted"
        )


def trace(job: dict[str, Any], share: "Share | None" = None) -> Trace:
    """Trace a job: {"config", "gpu", "dtype", "step", "compiled", "pads"}. Raises TraceError or StandInError."""
    config, gpu = RunConfig.model_validate(job["config"]), Gpu.model_validate(job["gpu"])
    with tracing(gpu, compiled=job["compiled"], pads=job["pads"]) as session:
        there, tracer, names = session.there, session.tracer, session.names
        assert there is not None
        tracer.entered = there.memory.reset_peak  # as the trainer's meter does; Inductor asks for the peak
        run = drive.Job(config, torch.device("cuda"), job["dtype"], job["compiled"], tracer, names, share)
        scaler_on = drive.RUNS[job["step"]](run)
        shapes = frozenset(names.weight_shapes)
    record = tracer.record.finish(logits=Head.of(run.config), weight_shapes=shapes)
    record.facts = {
        "torch": torch.__version__, "gpu": gpu.name, "dtype": job["dtype"], "compiled": job["compiled"],
        "pads": job["pads"], "step": job["step"], "attention": sorted(there.attention.seen), "scaler": scaler_on,
        "matmul_dtypes": dict(tracer.matmul_dtypes),
        "eight_bits": [op for op in ("_scaled_mm", "_int_mm") if tracer.ops[op]], "sums_in_place": tracer.in_place_sums,
        **session.marks.facts(),
    }  # fmt: skip
    assert_not_degraded(record, config, gpu)
    return record


def assert_not_degraded(record: Trace, config: RunConfig, gpu: Gpu) -> None:
    facts = record.facts
    dtype: Dtype = facts["dtype"]
    if facts["scaler"] != (dtype == "float16"):
        raise TraceError(f"GradScaler was {'on' if facts['scaler'] else 'off'} for {dtype}")
    width = ModelShape.of(config).head_dim
    kinds = {attention_kind(gpu, dtype, width, 0.0, learns=False)}
    if not config.eval_only:
        kinds.add(attention_kind(gpu, dtype, width, config.dropout))
    if not cudnn_is_new_enough():  # the estimate does not know torch's wheel
        kinds = {"flash" if kind == "cudnn" else kind for kind in kinds}
    if set(facts["attention"]) != kinds:
        raise TraceError(f"attention took {facts['attention']} in {dtype}, where the card takes {sorted(kinds)}")
    # Only the math path computes in fp32 whatever the dtype.
    allowed = {dtype, "float32"} if "math" in kinds else {dtype}
    if dtype not in facts["matmul_dtypes"] or not set(facts["matmul_dtypes"]) <= allowed:
        raise TraceError(f"matrix products ran in {facts['matmul_dtypes']}, not in {dtype}")
    wanted = {"fp8": ["_scaled_mm"], "int8": ["_int_mm"]}.get(config.matmul, []) if facts["step"] == "foretrain" else []
    if facts["eight_bits"] != wanted:
        raise TraceError(f"products in 8 bits were {facts['eight_bits']}, not {wanted}")
