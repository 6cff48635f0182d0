"""Traces on fake tensors against PyTorch's real CPU allocator, eager and compiled.

    python benchmarks/trace_against_allocator.py

Every config is traced on fake CPU tensors and then done for real under the profiler. The peak of the sum of tensors is
compared; `scratch` is what oneDNN and MKL take inside a matrix product for themselves on top, which a card has not.
Compiled, a checkpointed model keeps random states of 5,056 bytes that the trace leaves out; for a card they are on the host.
"""

import sys

from common import arguments, report

from foretrain.config.options import RunConfig
from foretrain.predict.trace.self_test import compare

BASE = {"n_layer": 2, "n_head": 2, "n_embd": 128, "block_size": 64, "vocab_size": 512, "batch_size": 4,
        "gradient_accumulation_steps": 1}  # fmt: skip
WIDER = {**BASE, "n_head": 4, "n_embd": 256, "block_size": 256, "gradient_accumulation_steps": 3}
CASES = [
    ("2 × 128", BASE, "float32"),
    ("2 × 128", BASE, "bfloat16"),
    ("4 × 256, accumulation 3", {**WIDER, "n_layer": 4, "vocab_size": 2048}, "bfloat16"),
    ("2 × 256, dropout", {**WIDER, "dropout": 0.1}, "bfloat16"),
    ("2 × 192, bias", {**BASE, "n_head": 3, "n_embd": 192, "bias": True}, "float32"),
    ("vocabulary 50304", {**BASE, "vocab_size": 50304}, "float32"),
    ("vocabulary 50257", {**BASE, "vocab_size": 50257}, "bfloat16"),
    ("2 × 768, accumulation 2", {**BASE, "n_head": 12, "n_embd": 768, "gradient_accumulation_steps": 2}, "bfloat16"),
]
OURS = [
    ("6 × 256, checkpointing", {**WIDER, "n_layer": 6, "activation_checkpointing": True}, "bfloat16"),
    ("4 × 256, chunked loss", {**WIDER, "n_layer": 4, "loss_chunk_size": 512}, "bfloat16"),
    ("2 × 256, chunked, 16384 tokens", {**WIDER, "vocab_size": 16384, "loss_chunk_size": 300}, "float32"),
    ("4 × 256, checkpointing", {**WIDER, "n_layer": 4, "activation_checkpointing": True}, "float32"),
    ("own evaluation", {**BASE, "eval_batch_size": 40, "eval_block_size": 32}, "float32"),
]


def main() -> None:
    options = arguments("trace_against_allocator", __doc__ or "")
    rows = []
    for compiled in (False, True):
        for case in [*CASES, *OURS]:
            name, settings, dtype = case
            for step in ("foretrain",) if case in OURS else ("foretrain", "nanogpt"):
                truth = compare(RunConfig(**settings), dtype, step, compiled=compiled)
                row = {
                    "config": name, "knobs": settings, "dtype": dtype, "step": step, "mode": "compiled" if compiled else "eager",
                    "traced_bytes": truth.traced_bytes, "real_bytes": truth.real_bytes,
                    "scratch_bytes": truth.real_with_scratch_bytes - truth.real_bytes,
                    "difference_bytes": truth.traced_bytes - truth.real_bytes, "error": truth.error,
                }  # fmt: skip
                rows.append(row)
                print(
                    name, dtype, step, row["mode"], f"{row['difference_bytes']:+,} bytes", file=sys.stderr, flush=True
                )
    exact = sum(abs(row["difference_bytes"]) <= 64 for row in rows)
    summary = {"configs": len(rows), "exact_to_64_bytes": exact, "worst_error": max(abs(row["error"]) for row in rows)}
    report(options.out, {"what": (__doc__ or "").splitlines()[0], "summary": summary, "rows": rows})


if __name__ == "__main__":
    main()
