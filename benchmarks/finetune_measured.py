"""Fine-tuning plans against what others measured on one GPU: peak memory, what nvidia-smi shows, and tokens a second.

`planned`: what a plan says, which is for transformers 5, with --unsloth where the run had kernels of unsloth's. `as run`:
the same estimate of the code that ran: the loss of transformers 4, fused kernels of unsloth and Liger as they were
(finetune_code.py). `python benchmarks/finetune_measured.py`
"""

import json
import statistics
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from common import arguments, report

from foretrain.config.finetune.options import FineTune
from foretrain.config.hub.facts import ModelFacts
from foretrain.config.hub.source import facts_of, find_source
from foretrain.hardware.catalogue import find_gpu
from foretrain.predict.abstract import programs
from foretrain.predict.abstract.tensors import bfloat16
from foretrain.predict.finetune.memory import FineTuneEstimate
from foretrain.predict.finetune.program import Program
from foretrain.predict.finetune.time import StepWork, step_s

PUBLISHED = json.loads(Path(__file__).with_name("finetune_published.json").read_text("utf-8"))
sys.path.insert(0, str(Path(__file__).parent))
CODE = programs.load("finetune_code")
DECODER = programs.load("foretrain.model.hub.decoder")
KINDS = {"peak_allocated_bytes": "peak", "nvidia_smi_bytes": "nvidia-smi", "tokens_per_s": "tokens/s"}


def facts_for(name: str) -> ModelFacts:
    own = PUBLISHED["configs"].get(name)
    found = facts_of(own["config"]) if own else find_source(name).facts
    assert found is not None
    return found


def predicted(row: dict[str, Any]) -> float:
    """Return allocated bytes at the peak, bytes on the card, or tokens per second, whichever the row measured."""
    facts, tune, gpu = facts_for(row["model"]), FineTune.model_validate(row["options"]), find_gpu(row["gpu"])
    if row["kind"] == "tokens_per_s":
        found = step_s(StepWork(facts, tune, gpu))
        assert found is not None
        return tune.tokens_per_step / found[0].expected_s
    memory = FineTuneEstimate(facts, tune, gpu).memory
    if row["kind"] == "peak_allocated_bytes":
        return memory.worst.allocated_bytes
    assert gpu.memory_bytes is not None
    return min(memory.needed_bytes, gpu.memory_bytes)  # at the card's end the allocator releases its cache


def as_planned(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row with a plan's options: the current unsloth's functions where the run had kernels from it."""
    return {**row, "options": {**row["options"], "unsloth": "unsloth" in row["kernels"]}}


def why_planned(row: dict[str, Any]) -> str:
    """Return the main difference between a row's code and its plan's."""
    facts, unsloth = facts_for(row["model"]), "unsloth" in row["kernels"]
    if row["code"] == "torchtune":
        return "torchtune's own model"
    if "liger" in row["kernels"]:
        return "its layers with adapters were peft's; unsloth's keep less"
    if unsloth:
        return "its loss had whole logits; unsloth's today has a few at a time"
    if facts.model_type == "gpt_bigcode":
        return "transformers 4 left its logits in 16 bits, 5 makes them fp32"
    return "transformers 4 copied the logits once more"


def in_range(row: dict[str, Any]) -> bool:
    """Return whether the measured time, or nvidia-smi's figure, is in the plan's range."""
    facts, tune, gpu = facts_for(row["model"]), FineTune.model_validate(row["options"]), find_gpu(row["gpu"])
    if row["kind"] == "nvidia_smi_bytes":
        low, _, high = (
            FineTuneEstimate(facts, tune, gpu).judged(gpu.memory_bytes, gpu.memory_bytes).neediest.needed_span
        )
        return low <= row["measured"] <= high
    found = step_s(StepWork(facts, tune, gpu))
    return found is not None and found[0].low_s <= tune.tokens_per_step / row["measured"] <= found[0].high_s


def refused(row: dict[str, Any]) -> bool:
    """Return whether a plan does not fit, although the run did."""
    gpu = find_gpu(row["gpu"])
    estimate = FineTuneEstimate(facts_for(row["model"]), FineTune.model_validate(row["options"]), gpu)
    return estimate.judged(gpu.memory_bytes, gpu.memory_bytes).verdict == "does_not_fit"


def replaced(row: dict[str, Any]) -> Iterator[tuple[Any, str, Any]]:
    """Yield (owner, name, replacement in the code that ran)."""
    if not row["code"].startswith("transformers 4"):
        return
    model_type, fast = facts_for(row["model"]).model_type, row["kernels"] != "none"
    block = DECODER.Attention
    if model_type == "gpt_bigcode":
        loss = CODE.fast_half_loss if fast else CODE.half_loss
        yield block, "split", CODE.holding_split
        yield DECODER.Decoder, "forward", lambda *args: CODE.holding_forward(*args, loss)
        return
    yield DECODER, "causal_loss", CODE.fast_loss if fast else CODE.shifted_loss
    if row["code"] == "transformers 4.45.2":
        yield DECODER.Decoder, "head", CODE.wide_head
        if model_type == "mistral":
            yield block, "attend", CODE.repeating_attend
    if fast:
        yield DECODER.RMSNorm, "forward", CODE.fast_norm
        yield DECODER, "apply_rotary", CODE.fast_rotary
    if "liger" in row["kernels"]:
        yield DECODER.Decoder, "forward", CODE.fused_forward
    if row["options"]["method"] == "qlora":
        yield Program, "_prepare", prepared_by_trl(Program._prepare)


def prepared_by_trl(own: Any) -> Any:
    """Prepare as TRL 0.13 does: what peft makes fp32 is bf16, but for norms and adapters
    (peft_module_casting_to_bf16).
    """

    def prepare(program: Program, model: Any) -> None:
        own(program, model)
        for name, parameter in model.named_parameters():
            if "norm" not in name and ".lora_" not in name:
                parameter.dtype = bfloat16

    return prepare


@contextmanager
def as_run(row: dict[str, Any]) -> Iterator[None]:
    """Let the estimate run the code of the row."""
    with ExitStack() as stack:
        for whose, name, what in replaced(row):
            stack.enter_context(patch.object(whose, name, what))
        yield


def main() -> None:
    args = arguments("finetune_measured", "fine-tuning plans against measurements on a GPU")
    answers = []
    errors: dict[str, list[tuple[float, float]]] = {}
    for row in PUBLISHED["rows"]:
        plan = as_planned(row)
        planned = predicted(plan)
        with as_run(row):
            ran = predicted(row)
            is_refused = row["kind"] != "tokens_per_s" and refused(row)
        both = planned / row["measured"] - 1, ran / row["measured"] - 1
        kind, t = KINDS[row["kind"]], row["options"]
        for group in (kind, f"{kind}, {'no' if row['kernels'] == 'none' else 'other'} kernels"):
            errors.setdefault(group, []).append((abs(both[0]), abs(both[1])))
        batch = f"{t['batch_size']} x {t['seq_len']}"
        answers.append({
            "id": row["id"], "model": row["model"], "method": t["method"], "batch": batch, "code": row["code"],
            "kernels": row["kernels"], "kind": kind, "measured": row["measured"], "planned": planned, "as_run": ran,
            "why_planned": why_planned(row), "refused": is_refused, "in_range": row["kind"] == "peak_allocated_bytes" or in_range(plan), "why": row.get("why", ""),
        })  # fmt: skip
    medians = {
        group: {
            "rows": len(found),
            "planned": statistics.median(a for a, _ in found),
            "as_run": statistics.median(b for _, b in found),
        }
        for group, found in errors.items()
    }
    report(args.out, {"rows": answers, "median_absolute_error": medians, "left_out": PUBLISHED["left_out"]})


if __name__ == "__main__":
    main()
