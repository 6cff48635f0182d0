"""The model types of the installed transformers whose fine-tuning is traced: those that write text, also from pictures.

    PYTHONPATH=. python benchmarks/model_types.py [--only llama,gpt2] [--out FILE]

Each has the default config of its type with its own widths. Its first few layers are traced where it can be cut so,
else all. One that fails has its reason, and is tried again with full fine-tuning. A type takes at most `LONGEST_S`.
"""

import argparse
import json
import signal
from pathlib import Path
from typing import Any

from common import RESULTS, report
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from foretrain.config.finetune.options import FineTune
from foretrain.hardware.catalogue import find
from foretrain.predict.trace.finetune import drive, layers, standins
from foretrain.predict.trace.finetune.request import FineTuneRequest
from foretrain.predict.trace.forked import in_child
from tests.kit.finetune import source_of

LONGEST_S = 240
ROWS = {"seq_len": 64, "batch_size": 2}


def types() -> list[str]:
    heads = (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)
    return sorted({config.model_type for head in heads for config in head})


def traced(model_type: str, method: str) -> str:
    """Return "few layers" or "all layers", whichever was traced. Raises what the trace raises."""
    signal.alarm(LONGEST_S)
    written = {"model_type": model_type}
    tune = FineTune.model_validate({**ROWS, "method": method, "loop": "trainer"})
    job = FineTuneRequest(source_of(written), tune, find("H200")).job()
    tune = FineTune.model_validate(job["tune"])
    config = standins.config_of(written)
    kind = standins.kind_of(config, written, tune)
    with drive.quiet():
        for cut, count in layers.cuts(kind, config, worth=2):
            try:
                with layers.shortened(kind, cut.lists, count):
                    drive.trace_whole(job, tune)
                return "few layers"
            except Exception:
                break
        drive.trace_whole(job, tune)
    return "all layers"


def row(model_type: str) -> dict[str, Any]:
    found: dict[str, Any] = {"model_type": model_type}
    for method in ("lora", "full"):
        try:
            return {**found, "traced": in_child(lambda method=method: traced(model_type, method)), "method": method}
        except Exception as error:
            first = next(iter(str(error).splitlines()), "")
            found[f"why_not_{method}"] = f"{type(error).__name__}: {first}"[:240]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path, default=RESULTS / "model_types.json")
    options = parser.parse_args()
    rows = []
    for model_type in options.only.split(",") if options.only else types():
        rows.append(row(model_type))
        print(json.dumps(rows[-1]), flush=True)
    counts = {method: sum(found.get("method") == method for found in rows) for method in ("lora", "full")}
    report(options.out, {"types": len(rows), "traced": counts, "rows": rows})


if __name__ == "__main__":
    main()
