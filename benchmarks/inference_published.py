"""Published speeds of generating text against `foretrain plan --inference`: benchmarks/published_inference.csv.

Rows `tune` chose the constants of foretrain/predict/inference/speed.py, rows `held out` chose nothing, rows `older` are of
builds of llama.cpp from before CUDA graphs (2023 to May 2024), which the constants do not describe. A row with `gib`
is the size of a file. Rows `host` chose how fast the computer's memory is read. Each row held out that is off by more than 15% is printed as a miss.

    python benchmarks/inference_published.py [--out FILE]
"""

import csv
import statistics
from pathlib import Path
from typing import Any

from common import arguments, report

from foretrain.base.units import GIB
from foretrain.config.hub.facts import ModelFacts
from foretrain.config.hub.parameters import counts_of
from foretrain.config.hub.source import facts_of, preset_source
from foretrain.config.inference import CACHES, Inference, resolved
from foretrain.hardware.catalogue import find
from foretrain.predict.inference.shares import waits_s
from foretrain.predict.inference.speed import (
    cache_bytes,
    decode_parts,
    host_bytes_per_s,
    host_read_bytes,
    prompt_s,
    read_bytes,
    share_at_once,
)
from foretrain.predict.inference.stored import bits_of

ROWS = Path(__file__).with_name("published_inference.csv")
NEAR = 0.15
USES = ("tune", "held out", "host", "older")
# Sizes of a model that foretrain has no preset of: https://huggingface.co/meta-llama/Llama-2-70b-hf, config.json.
LLAMA_2_70B: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 32_000, "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}  # fmt: skip


def model_named(name: str) -> ModelFacts:
    source = preset_source(name)
    facts = source.facts if source else facts_of(LLAMA_2_70B)
    assert facts is not None, name
    return facts


def predicted(row: dict[str, str]) -> float:
    """Return tokens per second of a row's question, at the context in the middle of the generated text."""
    model, gpu = model_named(row["model"]), find(row["gpu"])
    prompt, generated = int(row["prompt"]), int(row["generated"])
    asked, engine = resolved(row["model"], model, asked_in(row, prompt + generated, max(1, prompt)), gpu)
    share = share_at_once(model, asked, engine)
    read = read_bytes(model, asked, share, head=row["head"] == "yes")
    tokens = model.cached_tokens(prompt + generated // 2)
    texts = asked.batch if row["head"] == "yes" else 1  # else one text, so many of its tokens at a time
    cache = round(texts * tokens * share.kv_numbers * CACHES[asked.kv] / 8)
    if asked.on_host:
        cache = cache_bytes(model, asked.model_copy(update={"context": prompt + generated // 2}), share)
    host = host_read_bytes(model, asked, prompt + generated // 2) / host_bytes_per_s(asked)[1]
    waits = waits_s(model, asked, gpu, asked.batch)[1]
    return asked.batch / (sum(decode_parts(model, asked, engine, gpu, read, cache).values()) + waits + host)


def asked_in(row: dict[str, str], context: int, prompt: int, batch: int | None = None) -> Inference:
    """What a row asks."""
    return Inference.model_validate({
        "context": context, "prompt": prompt, "batch": batch or int(row["batch"]), "weights": row["weights"],
        "engine": row["engine"], "world": int(row["cards"] or 1), "split": row["split"] or "",
        "n_gpu_layers": int(row["ngl"] or -1), "n_cpu_moe": int(row["ncmoe"] or 0),
        "host_bandwidth": float(row["host"] or 0),
    })  # fmt: skip


def predicted_prompt(row: dict[str, str]) -> float:
    model, gpu, tokens = model_named(row["model"]), find(row["gpu"]), int(row["read"])
    asked, engine = resolved(row["model"], model, asked_in(row, tokens, tokens, 1), gpu)
    return tokens / prompt_s(model, asked, engine, gpu)


def file_gib(row: dict[str, str]) -> float:
    facts = model_named(row["model"])
    counts = zip(counts_of(facts), bits_of(facts, row["weights"]), strict=True)
    return sum(count * bits for count, bits in counts) / 8 / GIB


def compared(rows: list[dict[str, str]]) -> list[dict[str, Any]]:
    found = []
    for row in rows:
        entry: dict[str, Any] = dict(row)
        if row["gib"]:
            made, published = file_gib(row), float(row["gib"])
            entry |= {"gib": published, "predicted_gib": round(made, 3), "gib_off": round(made / published - 1, 4)}
        if row["tokens_per_s"]:
            made, published = predicted(row), float(row["tokens_per_s"])
            entry |= {"tokens_per_s": published, "predicted_tokens_per_s": round(made, 2),
                      "off": round(made / published - 1, 4)}  # fmt: skip
        if row["read"]:
            made, published = predicted_prompt(row), float(row["read_per_s"])
            entry |= {"read_per_s": published, "predicted_read_per_s": round(made, 1),
                      "read_off": round(made / published - 1, 4)}  # fmt: skip
        found.append(entry)
    return found


def summary(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return {generated, read or file, use, engine: how many rows, how many within 15%, mean and largest distance}."""
    found = {}
    for use in USES:
        for engine in ("llama.cpp", "pytorch"):
            for what, key in (("generated", "off"), ("read", "read_off"), ("file", "gib_off")):
                off = [abs(row[key]) for row in rows if row["use"] == use and row["engine"] == engine and key in row]
                if off:
                    found[f"{what}, {use}, {engine}"] = {
                        "rows": len(off), "within_15_percent": sum(each <= NEAR for each in off),
                        "mean_off": round(statistics.mean(off), 4), "largest_off": max(off),
                    }  # fmt: skip
    return found


def main() -> None:
    out = arguments("inference_published", str(__doc__)).out
    with ROWS.open(encoding="utf-8", newline="") as file:
        rows = compared(list(csv.DictReader(file)))
    rows.sort(key=lambda row: USES.index(row["use"]))
    for row in rows:
        for what, key in (("tokens/s", "off"), ("tokens/s of a prompt", "read_off"), ("GiB", "gib_off")):
            if row["use"] == "held out" and abs(row.get(key, 0.0)) > NEAR:
                print(f"miss: {row['id']}: {row[key]:+.1%} {what}")
    report(out, {"rows": rows, "summary": summary(rows)})


if __name__ == "__main__":
    main()
