"""The process that traces: a job as JSON on standard input, the trace as JSON into the file that it names.

It is a process of its own because standing in for a card changes torch for good (guard.py), and so that `plan` stays
free of torch. Exit 0: traced. Exit 4: this torch or system cannot be traced; the file then holds {"reason": ...}.
"""

import json
import logging
import os
import resource
import sys
import warnings
from pathlib import Path
from typing import Any

from foretrain.config import RunConfig
from foretrain.hardware import Dtype, Gpu
from foretrain.lm.shape import ModelShape
from foretrain.predict.attention import attention_kind
from foretrain.predict.exact.record import Trace

CANNOT = 4
# Of these, traces were compared with the real CPU allocator (2.13) or run on CUDA builds without a card (2.11, 2.15).
CHECKED_TORCH = {(2, 11), (2, 13), (2, 15)}


class TraceError(RuntimeError):
    """The trace is not that of the card: something degraded in silence. The sentence says what."""


def prove_this_torch() -> None:
    """A torch that nobody has checked first traces a small run that is also done for real. Raises TraceError."""
    from foretrain.predict.exact.kernels import torch_version

    if torch_version() in CHECKED_TORCH:
        return
    import torch

    from foretrain.predict.exact.self_test import compare

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

    from foretrain.predict.exact import drive
    from foretrain.predict.exact.session import tracing

    config, gpu = RunConfig.model_validate(job["config"]), Gpu.model_validate(job["gpu"])
    with tracing(gpu, compiled=job["compiled"], pads=job["pads"]) as session:
        there, tracer, names = session.there, session.tracer, session.names
        assert there is not None
        run = drive.Job(config, torch.device("cuda"), job["dtype"], job["compiled"], tracer, names)
        scaler_on = drive.RUNS[job["step"]](run)
        shapes = frozenset(names.weight_shapes)
    record = tracer.record.finish(logits=run.logits(), weight_shapes=shapes)
    record.facts = {
        "torch": torch.__version__, "gpu": gpu.name, "dtype": job["dtype"], "compiled": job["compiled"],
        "pads": job["pads"], "step": job["step"], "attention": sorted(there.attention), "scaler": scaler_on,
        "matmul_dtypes": dict(tracer.matmul_dtypes),
        "eight_bits": [op for op in ("_scaled_mm", "_int_mm") if tracer.ops[op]], "sums_in_place": tracer.in_place_sums,
    }  # fmt: skip
    _assert_not_degraded(record, config, gpu)
    return record


def _assert_not_degraded(record: Trace, config: RunConfig, gpu: Gpu) -> None:
    """What PyTorch does without a card it does in silence, so each trace proves that it did otherwise."""
    facts = record.facts
    dtype: Dtype = facts["dtype"]
    if facts["scaler"] != (dtype == "float16"):
        raise TraceError(f"GradScaler was {'on' if facts['scaler'] else 'off'} for {dtype}")
    width = ModelShape.of(config).head_dim
    dropouts = {0.0} if config.eval_only else {0.0, config.dropout}
    kinds = {attention_kind(gpu, dtype, width, dropout) for dropout in dropouts}
    if set(facts["attention"]) != kinds:
        raise TraceError(f"attention took {facts['attention']} in {dtype}, where the card takes {sorted(kinds)}")
    # The math path reckons in fp32 whatever the dtype, and nothing else does.
    allowed = {dtype, "float32"} if "math" in kinds else {dtype}
    if dtype not in facts["matmul_dtypes"] or not set(facts["matmul_dtypes"]) <= allowed:
        raise TraceError(f"matrix products ran in {facts['matmul_dtypes']}, not in {dtype}")
    wanted = {"fp8": ["_scaled_mm"], "int8": ["_int_mm"]}.get(config.matmul, []) if facts["step"] == "foretrain" else []
    if facts["eight_bits"] != wanted:
        raise TraceError(f"products in 8 bits were {facts['eight_bits']}, not {wanted}")


def main() -> int:
    """Read the job, trace, write."""
    job = json.load(sys.stdin)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a real card is neither needed nor touched
    out = Path(job["out"])
    import torch

    from foretrain.predict.exact.guard import StandInError

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


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # torch's static destructors meet the stand-in's patches otherwise; nothing is left to flush
