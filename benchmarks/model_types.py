"""The model types of the installed transformers whose fine-tuning is traced: those that write text, also from pictures.

    PYTHONPATH=. python benchmarks/model_types.py [--only llama,gpt2] [--out FILE]

Each has the default config of its type with two layers, of its parts too, and else its own sizes; where that is none,
the default itself. One that fails has its reasons, of full fine-tuning too. A type takes at most `LONGEST_S`. The rows
of the file are kept: a run that was stopped goes on, and `--only` traces its types again.
"""

import argparse
import json
import signal
from pathlib import Path
from typing import Any

from common import RESULTS, report
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
)

from foretrain.config.finetune.options import FineTune
from foretrain.hardware.catalogue import find
from foretrain.predict.trace.finetune import drive
from foretrain.predict.trace.finetune.request import FineTuneRequest
from foretrain.predict.trace.forked import in_child
from tests.kit.finetune import source_of

LONGEST_S = 240
LAYERS = {
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "depth",
    "encoder_layers",
    "decoder_layers",
    "num_decoder_layers",
    "vision_layers",
    "num_blocks",
}
ROWS = {"seq_len": 64, "batch_size": 2}


def types() -> list[str]:
    heads = (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)
    return sorted({config.model_type for head in heads for config in head})


def made_small(kind: Any) -> dict[str, Any]:
    """Return what makes the default config of a type, and those of its parts, one of two layers."""
    fields = {name for base in kind.__mro__ for name in getattr(base, "__annotations__", {})}
    parts = {name: part for name, part in kind.sub_configs.items() if part is not AutoConfig}
    return dict.fromkeys(fields & LAYERS, 2) | {name: made_small(part) for name, part in parts.items()}


def traced(written: dict[str, Any], method: str) -> None:
    """Trace a run of this config. Raises what the trace raises."""
    signal.alarm(LONGEST_S)
    tune = FineTune.model_validate({**ROWS, "method": method, "loop": "trainer"})
    job = FineTuneRequest(source_of(written), tune, find("H200")).job()
    with drive.quiet():
        drive.trace_whole(job, FineTune.model_validate(job["tune"]))


def row(model_type: str) -> dict[str, Any]:
    found: dict[str, Any] = {"model_type": model_type}
    small = made_small(CONFIG_MAPPING[model_type])
    for method, config in (("lora", small), ("full", small), ("lora", {}), ("full", {})):
        try:
            in_child(lambda method=method, config=config: traced({"model_type": model_type, **config}, method))
            return {"model_type": model_type, "method": method, "layers": 2 if config else "default"}
        except Exception as error:
            first = next(iter(str(error).strip().splitlines()), "")
            found[f"why_not_{method}{'' if config else '_of_default'}"] = f"{type(error).__name__}: {first}"[:240]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path, default=RESULTS / "model_types.json")
    options = parser.parse_args()
    before = json.loads(options.out.read_text("utf-8"))["rows"] if options.out.exists() else []
    rows = {found["model_type"]: found for found in before}
    try:
        for model_type in options.only.split(",") if options.only else sorted({*types()} - {*rows}):
            rows[model_type] = row(model_type)
            print(json.dumps(rows[model_type]), flush=True)
    finally:
        listed = [rows[name] for name in sorted(rows)]
        counts = {method: sum(found.get("method") == method for found in listed) for method in ("lora", "full")}
        report(options.out, {"types": len(types()), "tried": len(rows), "traced": counts, "rows": listed})


if __name__ == "__main__":
    main()
