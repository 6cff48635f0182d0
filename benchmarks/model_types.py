"""The model types of the installed transformers whose fine-tuning is traced, by the head that is trained.

    PYTHONPATH=. python benchmarks/model_types.py [--only llama,gpt2 | --heads MaskedLM] [--out FILE]

Each has the default config of its type with two layers, of its parts too, and else its own sizes; where that is none,
the default itself. One that fails has its reasons, of full fine-tuning too. A type takes at most `LONGEST_S`. The rows
of the file are kept: a run that was stopped goes on, and `--only` traces its types again.
"""

import argparse
import json
import signal
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from common import RESULTS, report
from transformers import CONFIG_MAPPING, AutoConfig
from transformers.initialization import no_init_weights

from foretrain.config.finetune.options import FineTune
from foretrain.hardware.catalogue import find
from foretrain.predict.trace.finetune import drive, standins
from foretrain.predict.trace.finetune.request import FineTuneRequest
from foretrain.predict.trace.forked import in_child
from tests.kit.finetune import source_of

LONGEST_S = 120  # of processor time
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
HEADS = [*standins.HEADS, *standins.CLASSES[1:]]
# What published configs say, of types whose default config makes no model.
PUBLISHED: dict[str, dict[str, Any]] = {
    "aya_vision": {
        "text_config": {"model_type": "cohere2", "num_hidden_layers": 2},
        "vision_config": {"model_type": "siglip_vision_model", "num_hidden_layers": 2, "vision_use_head": False},
    },
    "chameleon": {"vocabulary_map": {"<image>": 8711}},
    "dbrx": {"attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "rope_theta": 500_000}},
    "deepseek_v2": {"moe_intermediate_size": 1408, "num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6, "n_group": 1, "topk_group": 1},
    "emu3": {"vocabulary_map": {"<image>": 151_646}},
}


def types(heads: list[str]) -> list[str]:
    mappings = (getattr(transformers, f"AutoModelFor{head}")._model_mapping for head in heads)
    return sorted({config.model_type for mapping in mappings for config in mapping})


def made_small(kind: Any) -> dict[str, Any]:
    """Return what makes the default config of a type, and those of its parts, one of two layers."""
    fields = {name for base in kind.__mro__ for name in getattr(base, "__annotations__", {})}
    parts = {name: part for name, part in kind.sub_configs.items() if part is not AutoConfig}
    return dict.fromkeys(fields & LAYERS, 2) | {name: made_small(part) for name, part in parts.items()}


def traced(written: dict[str, Any], method: str) -> dict[str, Any]:
    """Trace a run of this config; return the class that is trained, or why there is none. Raises what the trace does."""
    signal.setitimer(signal.ITIMER_PROF, LONGEST_S)
    tune = FineTune.model_validate({**ROWS, "method": method, "loop": "trainer"})
    job = FineTuneRequest(source_of(written), tune, find("H200")).job()
    with drive.quiet():
        config = standins.config_of(written)
        kind = standins.kind_of(config, written, tune)
        try:
            with torch.device("meta"), no_init_weights():
                kind(config)
        except Exception as error:
            return {"makes_no_model": reason(error)}
        drive.trace_whole(job, FineTune.model_validate(job["tune"]))
    return {"method": method, "trained": kind.__name__, "processor_s": round(time.process_time(), 1)}


def reason(error: Exception) -> str:
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first.strip()}"[:240]


def row(model_type: str) -> dict[str, Any]:
    found: dict[str, Any] = {"model_type": model_type}
    small = {**made_small(CONFIG_MAPPING[model_type]), **PUBLISHED.get(model_type, {})}
    for method, config in (("lora", small), ("full", small), ("lora", PUBLISHED.get(model_type, {}))):
        name = f"{method}{'' if config is small else '_of_default'}"
        try:
            made = in_child(lambda method=method, config=config: traced({"model_type": model_type, **config}, method))
        except Exception as error:
            found[f"why_not_{name}"] = reason(error)
            continue
        if "method" in made:
            return {"model_type": model_type, **made, "layers": 2 if config is small else "default"}
        found |= made
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--heads", default=",".join(HEADS))
    parser.add_argument("--out", type=Path, default=RESULTS / "model_types.json")
    options = parser.parse_args()
    before = json.loads(options.out.read_text("utf-8"))["rows"] if options.out.exists() else []
    rows = {found["model_type"]: found for found in before}
    every = types(options.heads.split(","))
    try:
        for model_type in options.only.split(",") if options.only else sorted({*every} - {*rows}):
            rows[model_type] = row(model_type)
            print(json.dumps(rows[model_type]), flush=True)
    finally:
        listed = [rows[name] for name in sorted(rows)]
        counts = {method: sum(found.get("method") == method for found in listed) for method in ("lora", "full")}
        counts["no_model"] = sum("makes_no_model" in found for found in listed)
        report(options.out, {"types": len(every), "tried": len(rows), "traced": counts, "rows": listed})


if __name__ == "__main__":
    main()
