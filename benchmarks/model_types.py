"""The model types of the installed transformers: which are planned, and how near a trace is to the real allocator.

    PYTHONPATH=. python benchmarks/model_types.py [--only llama,gpt2 | --heads MaskedLM] [--processes 2]

Each has the default config of its type with two layers, of its parts too, and else its own sizes; where that is none,
the default itself. It is traced on a card, of a vision-language model with a picture too, and where that fails the row
says why. Then it is made narrow, traced on a CPU and trained there for real, and the peaks of the sum of tensors are
compared. Each type is a process of its own that takes at most `LONGEST_S`. A row is written as soon as it is known: a
run that was stopped goes on, and `--only` traces its types again.
"""

import argparse
import atexit
import contextlib
import fcntl
import importlib
import inspect
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers
from common import RESULTS, commit, report
from transformers import CONFIG_MAPPING, AutoConfig
from transformers.initialization import no_init_weights

from foretrain.config.finetune.options import FineTune
from foretrain.hardware.catalogue import find
from foretrain.predict.trace import interpreter
from foretrain.predict.trace.finetune import drive, standins
from foretrain.predict.trace.finetune.request import FineTuneRequest
from foretrain.predict.trace.forked import in_child
from tests.kit.finetune import source_of
from tests.kit.finetune_proof import compare

LONGEST_S = 30  # of processor time
WITHIN = 0.001  # of the real peak
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
PICTURES = {"images": 1, "image_size": 224, "seq_len": 4096, "batch_size": 1}
# Factors that widths and numbers of heads are divided by, and whether the vocabulary is cut, from the smallest model on.
NARROW = ((8, True), (8, False), (4, True), (2, True), (1, True), (1, False))
MOST_TRIED, LARGEST = 3, 60_000_000  # of these, and parameters of a model that is trained for real
WORDS = 1024  # of a cut vocabulary
WIDTH = re.compile(r"(size|sizes|dim|dims|width|rank)$|heads?$|^(d_model|d_ff|n_embd|n_inner)$|experts$")
KEPT = re.compile(
    r"head_dim|d_kv|vocab|image|patch|kernel|pool|window|chunk|group|max_|position|crop|num_mel|stride|conv"
)
HEADS = [*standins.HEADS, *standins.CLASSES[1:]]
# What published configs say, of types whose default config makes no model, or none whose parts go together.
GLM_TEXT = {
    "num_hidden_layers": 2,
    "head_dim": 128,
    "rope_parameters": {"rope_theta": 10_000, "partial_rotary_factor": 0.5, "mrope_section": [8, 12, 12]},
}
TEXT_ENCODER = {"model_type": "bert", "num_hidden_layers": 2}
TEXT_DECODER = {**TEXT_ENCODER, "is_decoder": True, "add_cross_attention": True}
STARTS = {"decoder_start_token_id": 101, "pad_token_id": 0}
PUBLISHED: dict[str, dict[str, Any]] = {
    "aya_vision": {
        "text_config": {"model_type": "cohere2", "num_hidden_layers": 2},
        "vision_config": {"model_type": "siglip_vision_model", "num_hidden_layers": 2, "vision_use_head": False},
    },
    "blip-2": {"image_token_index": 50_265},
    "chameleon": {"vocabulary_map": {"<image>": 8711}},
    "cohere_asr": {"decoder_start_token_id": 1, "pad_token_id": 2},  # of any word
    "dbrx": {"attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "rope_theta": 500_000}},
    "deepseek_v2": {"moe_intermediate_size": 1408, "num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6, "n_group": 1, "topk_group": 1},
    "emu3": {"vocabulary_map": {"<image>": 151_646}},
    "encoder-decoder": {"encoder": TEXT_ENCODER, "decoder": TEXT_DECODER, **STARTS},
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    **{name: {"text_config": GLM_TEXT} for name in ("glm46v", "glm4v", "glm4v_moe", "glmga")},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "hunyuan_vl": {"text_config": {"num_hidden_layers": 2, "head_dim": 128}},
    "instructblip": {"image_token_index": 32_000},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "ministral": {"head_dim": 128},
    "moonshine": {"decoder_start_token_id": 1, "pad_token_id": 2},
    "nemotron": {"num_key_value_heads": 8},
    "qwen2_5_vl": {"vision_config": {"depth": 2, "out_hidden_size": 8192}},
    "qwen2_vl": {"vision_config": {"depth": 2, "hidden_size": 8192}},
    "speech-encoder-decoder": {
        "encoder": {"model_type": "wav2vec2", "num_hidden_layers": 2},
        "decoder": TEXT_DECODER,
        **STARTS,
    },
    "vision-encoder-decoder": {
        "encoder": {"model_type": "vit", "num_hidden_layers": 2},
        "decoder": TEXT_DECODER,
        **STARTS,
    },
    "wav2vec2-bert": {"vocab_size": 32},  # of the language that it is trained for
}


def types(heads: list[str]) -> list[str]:
    mappings = (getattr(transformers, f"AutoModelFor{head}")._model_mapping for head in heads)
    return sorted({config.model_type for mapping in mappings for config in mapping})


def made_small(kind: Any) -> dict[str, Any]:
    """Return what makes the default config of a type, and those of its parts, one of two layers."""
    fields = {name for base in kind.__mro__ for name in getattr(base, "__annotations__", {})}
    parts = {name: part for name, part in kind.sub_configs.items() if part is not AutoConfig}
    return dict.fromkeys(fields & LAYERS, 2) | {name: made_small(part) for name, part in parts.items()}


def traced(written: dict[str, Any], method: str, rows: dict[str, int] = ROWS) -> dict[str, Any]:
    """Trace a run of this config; return the class that is trained, or why there is none. Raises what the trace does."""
    signal.setitimer(signal.ITIMER_PROF, LONGEST_S)
    tune = FineTune.model_validate({**rows, "method": method, "loop": "trainer"})
    job = FineTuneRequest(source_of(written), tune, find("H200")).job()
    with drive.quiet():
        config = standins.config_of(written)
        kind = standins.kind_of(config, written, tune)
        try:
            with torch.device("meta"), no_init_weights():
                kind(config)
        except Exception as error:
            return {"makes_no_model": reason(error)}
        record = drive.trace_whole(job, FineTune.model_validate(job["tune"]))
    takes = {"input_ids", "pixel_values"} <= {*inspect.signature(kind.forward).parameters}
    found = {"method": method, "trained": kind.__name__, "takes_pictures": takes}
    return {**found, "facts": record.facts, "processor_s": round(time.process_time(), 1)}


def narrowed(values: dict[str, Any], factor: int, ids: list[int]) -> dict[str, Any]:
    """Return a config with widths and heads divided by a factor; `ids`: of a cut vocabulary, for its special tokens."""

    def divided(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [divided(each) for each in value]
        return value // factor if type(value) is int and value % factor == 0 and value else value

    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            found[name] = narrowed(value, factor, ids) if all(isinstance(each, str) for each in value) else value
        elif ids and name == "vocab_size" and type(value) is int:
            found[name] = min(value, WORDS)
        elif ids and re.search(r"_(id|index|idx)$", name) and type(value) is int and value >= WORDS - len(values):
            found[name] = ids.pop()
        elif ids and name.endswith("token_id") and isinstance(value, list):
            found[name] = value[0] % (WORDS // 2)
        else:
            found[name] = divided(value) if WIDTH.search(name) and not KEPT.search(name) else value
    return found


def compared(written: dict[str, Any], method: str) -> dict[str, Any]:
    """Trace a narrow model of this config on a CPU and train it there; return the peaks, or why there are none."""
    signal.setitimer(signal.ITIMER_PROF, LONGEST_S)
    tune = FineTune.model_validate({**ROWS, "method": method, "loop": "trainer", "optim": "adamw_torch", "lora_r": 8})
    given = {"model_type": written["model_type"], **standins.config_of(written).to_dict()}
    tried, why = 0, "every narrow model is too large, or cannot be made"
    for factor, cut in NARROW:
        config = narrowed(given, factor, list(range(WORDS // 2, WORDS)) if cut else [])
        try:
            made = standins.config_of(config)
            kind = standins.kind_of(made, config, tune)
            with torch.device("meta"), no_init_weights():
                size = sum(p.numel() for p in kind(made).parameters())
            if size > LARGEST:
                continue
            tried += 1
            truth = compare(config, tune)
        except Exception as error:
            why = reason(error)
            if tried == MOST_TRIED:
                break
            continue
        sizes = {"traced_bytes": truth.traced_bytes, "real_bytes": truth.real_bytes, "error": round(truth.error, 6)}
        return {**sizes, "n_params": size, "divided_by": factor}
    return {"not_compared": why}


def reason(error: Exception) -> str:
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first.strip()}"[:240]


def tried(work: Callable[[], dict[str, Any]], why: str) -> dict[str, Any]:
    """Return what a process of its own finds, or under `why` the reason why it finds nothing."""
    try:
        return in_child(work)
    except Exception as error:
        return {why: reason(error)}


def config_of(model_type: str, layers: int | str = 2) -> dict[str, Any]:
    small = made_small(CONFIG_MAPPING[model_type]) if layers == 2 else {}
    return {"model_type": model_type, **small, **PUBLISHED.get(model_type, {})}


WAYS = (("lora", 2, ROWS), ("full", 2, ROWS), ("lora", "default", ROWS), ("lora", 2, {**PICTURES, "seq_len": 512}))


def trace_of(found: dict[str, Any]) -> dict[str, Any]:
    """Return what a trace of the type finds, with pictures where it is none without, or why there is none."""
    why: dict[str, Any] = {}
    for method, layers, rows in WAYS:
        if "makes_no_model" in why and layers == 2 and method != "lora":
            continue
        written = config_of(found["model_type"], layers)
        seen = "_with_pictures" if "images" in rows else ""
        name = f"why_not_{method}{'' if layers == 2 else '_of_default'}{seen}"
        made = tried(lambda written=written, method=method, rows=rows: traced(written, method, rows), name)
        made.pop("facts", None)
        if "method" in made:
            return {**why, **made, "layers": layers, **({"with": "pictures"} if seen else {})}
        why |= made
    return why


def pictures_of(found: dict[str, Any]) -> dict[str, Any]:
    """Return how many tokens a picture is where the model takes some with text, or why it is not traced."""
    if not found.get("takes_pictures"):
        return {}
    written = config_of(found["model_type"], found["layers"])
    made = tried(lambda: traced(written, found["method"], PICTURES), "why_not_pictures")
    return {"picture_tokens": (made["facts"].get("pictures") or {}).get("tokens", 0)} if "facts" in made else made


def comparison_of(found: dict[str, Any]) -> dict[str, Any]:
    """Return the peaks of a narrow model, traced and real, or why there are none."""
    if "method" not in found:
        return {}
    written = config_of(found["model_type"], found["layers"])
    return tried(lambda: compared(written, found["method"]), "not_compared")


# What is found of a type, in turn.
PARTS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "trace": trace_of,
    "pictures": pictures_of,
    "comparison": comparison_of,
}


def kept(out: Path, found: dict[str, Any] | None, every: list[str]) -> dict[str, dict[str, Any]]:
    """Write a row into the file, which other processes write too; return all rows."""
    with out.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        rows = {each["model_type"]: each for each in _rows(out)}
        if found:
            rows[found["model_type"]] = found
            listed, packages = [rows[name] for name in sorted(rows)], interpreter.now().versions()
            with contextlib.redirect_stdout(None):
                report(
                    out,
                    {"packages": packages, "types": len(every), "tried": len(rows), **counted(listed), "rows": listed},
                )
    return rows


def _rows(out: Path) -> list[dict[str, Any]]:
    return json.loads(out.read_text("utf-8") or '{"rows": []}')["rows"]


def counted(rows: list[dict[str, Any]]) -> dict[str, Any]:
    counts: dict[str, Any] = {method: sum(each.get("method") == method for each in rows) for method in ("lora", "full")}
    counts["no_model"] = sum("makes_no_model" in each for each in rows)
    errors = [abs(each["error"]) for each in rows if "error" in each]
    within = sum(error <= WITHIN for error in errors)
    return {"traced": counts, "compared": {"types": len(errors), "within": within, "most": max(errors, default=None)}}


def import_all() -> None:
    """Import what any trace imports, so that each process of a type need not."""

    def names() -> list[str]:
        traced(config_of("llama"), "lora")
        return [*sys.modules]

    for name in in_child(names):
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def shared(processes: int) -> int:
    """Fork so many processes; return the number of this one. The first waits for the others."""
    for number in range(1, processes):
        if (child := os.fork()) == 0:
            return number
        atexit.register(os.waitpid, child, 0)
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--heads", default=",".join(HEADS))
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--processes", type=int, default=1, help="how many work side by side")
    parser.add_argument("--out", type=Path, default=RESULTS / "model_types.json")
    options = parser.parse_args()
    every = types(options.heads.split(","))
    import_all()
    first, count = shared(options.processes), options.processes
    for part in options.parts.split(","):
        rows = kept(options.out, None, every)
        own = (options.only.split(",") if options.only else every)[first::count]
        left = [name for name in own if options.only or part not in rows.get(name, {}).get("done", {})]
        for model_type in left:
            new = {"model_type": model_type, "done": {}}
            found = new if part == "trace" else kept(options.out, None, every).get(model_type, new)
            found |= PARTS[part](found)
            found["done"] |= {part: f"{date.today().isoformat()} {commit()}"}
            print(json.dumps(found), flush=True)
            kept(options.out, found, every)


if __name__ == "__main__":
    main()
