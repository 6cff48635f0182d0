"""Traces of fine-tuning (transformers' Trainer, peft, bitsandbytes): right at small sizes, and quick at full ones.

    PYTHONPATH=. python benchmarks/finetune_traces.py

Small versions of 12 families are traced on fake CPU tensors and then trained for real under the profiler, with
evaluation, saving and merging; the peaks of the sum of tensors are compared. `scratch` is what a CPU takes inside an op
for itself and a card does not. What differs by 8 bytes each are Python's numbers, which autograd keeps on the host.
Then published sizes are traced on a card, with checkpointing, which takes longest to trace: how long from the question
to the answer, nothing kept. `cpu_seconds` are those of all processes, which other programs change little.
"""

import os
import tempfile
import time
from typing import Any

from common import arguments, report

from foretrain.config.finetune.options import FineTune
from foretrain.config.presets import models
from foretrain.hardware.catalogue import find
from foretrain.predict.finetune.traced import exact_finetune
from foretrain.predict.trace import interpreter
from tests.kit.finetune import FAMILIES, small, source_of
from tests.kit.finetune_proof import compare

METHODS = ("full", "lora", "dora", "qlora")
SMALL = {
    "lora_r": 8, "seq_len": 64, "batch_size": 2, "optim": "adamw_torch", "evaluate": True, "keeps_logits": True,
    "eval_batch_size": 2, "eval_batches": 3,
}  # fmt: skip
PUBLISHED = (
    "llama-3.2-1b", "qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b", "gemma-3-1b", "gemma-3-4b", "smollm2-1.7b",
    "smollm3-3b", "pythia-1.4b", "phi-2", "mistral-7b-v0.1", "santacoder", "gpt2",
)  # fmt: skip
CARD = "RTX 4090"


def right(*, quick: bool) -> list[dict[str, Any]]:
    found = []
    for family in FAMILIES[:2] if quick else FAMILIES:
        for method in METHODS:
            for checkpointing in (False, True):
                tune = FineTune(**SMALL, method=method, gradient_checkpointing=checkpointing)
                truth = compare(small(family), tune)
                found.append(
                    {
                        "model": family, "method": method, "checkpointing": checkpointing,
                        "traced_bytes": truth.traced_bytes, "real_bytes": truth.real_bytes, "error": truth.error,
                        "scratch_bytes": truth.real_with_scratch_bytes - truth.real_bytes,
                    }
                )  # fmt: skip
    return found


def fast(*, quick: bool) -> list[dict[str, Any]]:
    gpu, found = find(CARD), []
    for name in PUBLISHED[:1] if quick else PUBLISHED:
        source = source_of(dict(models()[name].config), name)
        for method in ("full", "lora", "qlora"):
            tune = FineTune(method=method, seq_len=1024, batch_size=2, amp="bf16", gradient_checkpointing=True)
            with tempfile.TemporaryDirectory() as folder:
                os.environ["FORETRAIN_CACHE"] = folder
                start, before = time.monotonic(), sum(os.times()[:4])
                answer = exact_finetune(source, tune, gpu, gpu.memory_bytes)
                seconds, cpu = time.monotonic() - start, sum(os.times()[:4]) - before
            found.append(
                {
                    "model": name, "method": method, "seconds": round(seconds, 1), "cpu_seconds": round(cpu, 1),
                    "allocated_bytes": max(phase.allocated_bytes for phase in answer.memory.phases),
                    "reserved_bytes": max(phase.reserved_bytes or 0 for phase in answer.memory.phases),
                    "dies_in": answer.failure.phase if answer.failure else None,
                }
            )  # fmt: skip
    return found


def main() -> None:
    options = arguments("finetune_traces", __doc__ or "", quick="two small families and one published model")
    rows, times = right(quick=options.quick), fast(quick=options.quick)
    report(options.out, {"packages": interpreter.now().versions(), "small": rows, "full_size": times})


if __name__ == "__main__":
    main()
