"""The processes that trace: jobs as JSON on standard input, each trace as JSON into the file that its job names.

They are processes of their own because standing in for a card changes torch for good (card/guard.py), and so that
`plan` stays free of torch. One imports torch and forks a worker for each job. A worker's exit code is in a file beside
its answer. 0: traced. 4: this torch or system cannot be traced; the answer is then {"reason": ...}.
"""

import gc
import json
import logging
import os
import resource
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

from foretrain.config.options import RunConfig
from foretrain.hardware.catalogue import Dtype, Gpu
from foretrain.model.shape import ModelShape
from foretrain.predict.estimate.sdpa import attention_kind
from foretrain.predict.trace.record import Trace

CANNOT = 4
# Of these, traces were compared with the real CPU allocator (2.13) or run on CUDA builds without a card (2.11, 2.15).
CHECKED_TORCH = {(2, 11), (2, 13), (2, 15)}


class TraceError(RuntimeError):
    """The trace is not that of the card: something degraded in silence. The sentence says what."""


def prove_this_torch() -> None:
    """A torch that nobody has checked first traces a small run that is also done for real. Raises TraceError."""
    from foretrain.predict.trace.kernels.temporaries import torch_version

    if torch_version() in CHECKED_TORCH:
        return
    import torch

    from foretrain.predict.trace.self_test import compare

    small = RunConfig(n_layer=2, n_head=2, n_embd=64, block_size=32, vocab_size=256, batch_size=2)
    truth = compare(small, "float32", "foretrain", compiled=False)
    if abs(truth.error) > 0.001:
        raise TraceError(
            f"with torch {torch.__version__} a small run is traced as {truth.traced_bytes} bytes and takes "
            f"{truth.real_bytes}, so its traces cannot be trusted"
        )


def trace(job: dict[str, Any]) -> Trace:
    """Trace a job: {"config", "gpu", "dtype", "step", "compiled", "pads"}. Raises TraceError or StandInError."""
    import torch

    from foretrain.predict.trace import drive
    from foretrain.predict.trace.session import tracing

    config, gpu = RunConfig.model_validate(job["config"]), Gpu.model_validate(job["gpu"])
    with tracing(gpu, compiled=job["compiled"], pads=job["pads"]) as session:
        there, tracer, names = session.there, session.tracer, session.names
        assert there is not None
        tracer.entered = there.memory.reset_peak  # as the trainer's meter does; Inductor asks for the peak
        run = drive.Job(config, torch.device("cuda"), job["dtype"], job["compiled"], tracer, names)
        scaler_on = drive.RUNS[job["step"]](run)
        shapes = frozenset(names.weight_shapes)
    record = tracer.record.finish(logits=run.logits(), weight_shapes=shapes)
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
    """What PyTorch does without a card it does in silence, so each trace proves that it did otherwise."""
    from foretrain.predict.trace.kernels.attention import cudnn_is_new_enough

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
    # The math path reckons in fp32 whatever the dtype, and nothing else does.
    allowed = {dtype, "float32"} if "math" in kinds else {dtype}
    if dtype not in facts["matmul_dtypes"] or not set(facts["matmul_dtypes"]) <= allowed:
        raise TraceError(f"matrix products ran in {facts['matmul_dtypes']}, not in {dtype}")
    wanted = {"fp8": ["_scaled_mm"], "int8": ["_int_mm"]}.get(config.matmul, []) if facts["step"] == "foretrain" else []
    if facts["eight_bits"] != wanted:
        raise TraceError(f"products in 8 bits were {facts['eight_bits']}, not {wanted}")


def work(job: dict[str, Any]) -> int:
    """Trace a job and write what came of it; the exit code."""
    import torch

    from foretrain.predict.trace.card.guard import StandInError

    out = Path(job["out"])
    try:
        prove_this_torch()
        record = trace(job)
    except (StandInError, TraceError) as error:
        out.write_text(json.dumps({"reason": str(error)}))
        return CANNOT
    except Exception as error:
        # Another torch may have moved anything that is patched here; the caller falls back and says this sentence.
        first = next(iter(str(error).splitlines()), "")[:200]
        out.write_text(json.dumps({"reason": f"torch {torch.__version__} raised {type(error).__name__}: {first}"}))
        return CANNOT
    record.facts["peak_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    out.write_text(json.dumps(record.to_json()))
    return 0


def _import_torch(jobs: list[dict[str, Any]]) -> None:
    """What every worker needs, once for all of them: importing takes longer than tracing."""
    from foretrain.predict.trace import session  # noqa: F401

    if any(job["compiled"] for job in jobs):
        import torch._inductor.compile_fx  # noqa: F401


def _forked(job: dict[str, Any]) -> int:
    """The process id of a worker that does one job; what it prints goes into a file beside its answer."""
    out = Path(job["out"])
    if pid := os.fork():
        return pid
    code = 1
    try:
        log = os.open(out.with_suffix(".log"), os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{out}.inductor"
        code = work(job)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # torch's static destructors meet the stand-in's patches otherwise; nothing is left to flush
        os._exit(code)


def tell(out: Path, code: int) -> None:
    """Say in a file how a worker ended; its name is there when it is whole."""
    staging = out.with_suffix(".staging")
    staging.write_text(str(code))
    staging.replace(out.with_suffix(".status"))


def main() -> int:
    """Read the jobs, import torch, and fork a worker for each."""
    gc.disable()  # a fifth of the time; a trace makes no cycles that hold tensors, or their death would be by chance
    asked = json.load(sys.stdin)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a real card is neither needed nor touched
    waiting: list[dict[str, Any]] = asked["jobs"]
    _import_torch(waiting)
    gc.freeze()
    running: dict[int, Path] = {}
    while waiting or running:
        while waiting and len(running) < asked["at_once"]:
            job = waiting.pop(0)
            running[_forked(job)] = Path(job["out"])
        pid, status = os.wait()
        tell(running.pop(pid), os.waitstatus_to_exitcode(status))
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
