"""The generated parts of docs/inference.md: what the command prints, and the result of benchmarks/inference_published.py."""

import io
from typing import Any

from results import result
from rich.console import Console

from foretrain.advice.asked import Asked
from foretrain.app.generation.plan import plan_inference
from foretrain.config.inference.formats import CACHES, FORMATS
from foretrain.predict.inference import speed
from foretrain.reports import text
from foretrain.reports.views import generation as view

WIDTH = 90
WHAT = {"generated": "generated", "read": "of a prompt"}
NAMES = {"tune": "chose the constants", "held out": "held out", "older": "older builds of llama.cpp (2023, 2024)"}


def _screen(command: str, name: str, gpu: str, **options: Any) -> str:
    """What a command prints."""
    console = Console(file=io.StringIO(), width=WIDTH, color_system=None, highlight=False)
    text.render_screen(view.screen(plan_inference(name, gpu, **options), Asked(quiet=True)), console)
    lines = (line.rstrip() for line in console.file.getvalue().rstrip().splitlines())  # type: ignore[attr-defined]
    return f"```console\n$ {command}\n" + "\n".join(lines) + "\n```"


def fits() -> str:
    return _screen(
        "foretrain plan llama-3.1-8b --inference --weights q4_k_m --context 16k --gpu 4070",
        "llama-3.1-8b", "4070", weights="q4_k_m", context=16_384,
    )  # fmt: skip


def does_not_fit() -> str:
    return _screen("foretrain plan llama-3.1-8b --inference --gpu 4070", "llama-3.1-8b", "4070")


def summary() -> str:
    """How many rows are met, by what they were used for and by engine."""
    lines = [
        "| tokens | rows | engine | how many | within 15 % | mean distance | largest |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, found in result("inference_published")["summary"].items():
        what, use, engine = name.split(", ")
        lines.append(
            f"| {WHAT[what]} | {NAMES[use]} | {engine} | {found['rows']} | {found['within_15_percent']} "
            f"| {100 * found['mean_off']:.1f} % | {100 * found['largest_off']:.1f} % |"
        )
    return "\n".join(lines)


def rows() -> str:
    """The rows that chose nothing."""
    lines = [
        "| model | weights | card | batch | context | engine | published tokens/s | predicted | off | prompt off |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in result("inference_published")["rows"]:
        if row["use"] == "held out":
            context = int(row["prompt"]) + int(row["generated"])
            prompt = f"{100 * row['read_off']:+.1f} %" if "read_off" in row else ""
            lines.append(
                f"| {row['model']} | {row['weights']} | {row['gpu']} | {row['batch']} | {context:,} | {row['software']} "
                f"| {row['tokens_per_s']:,.1f} | {row['predicted_tokens_per_s']:,.1f} | {100 * row['off']:+.1f} % "
                f"| {prompt} |"
            )
    return "\n".join(lines)


def formats() -> str:
    """Bits a number, by name."""
    weights = ", ".join(f"`{name}` {form.block:g}" for name, form in FORMATS.items())
    caches = ", ".join(f"`{name}` {bits:g}" for name, bits in CACHES.items())
    return f"Weights, bits a number in the blocks: {weights}. KV cache: {caches}."


def constants() -> str:
    """The constants of the estimate."""
    found = [
        ("share of the card's bandwidth for weights", f"{speed.BANDWIDTH_SHARE:.0%}"),
        ("share of it for keys and values", f"{speed.CACHE_SHARE:.0%}"),
        ("HBM against its data sheet", f"{speed.HBM_SHARE:.1%}"),
        ("time a layer", f"{1e6 * speed.LAYER_S:.0f} µs; {1e6 * speed.EXPERTS_S:.0f} µs more with experts"),
        ("weights of few bits that a multiprocessor unpacks in a clock (llama.cpp)", f"{speed.UNPACKED_PER_CLOCK}"),
        ("more of that time for each further text", f"{speed.UNPACKED_MORE:.0%}"),
        ("share of the peak of matmuls, of attention, in a prompt",
         f"{speed.PROMPT_SHARE:.0%}, {speed.ATTENTION_SHARE:.0%}"),
        ("share of the peak with several texts at once", f"{speed.BATCH_SHARE:.0%}"),
        ("torchao's int8 and int4 kernels against bf16's",
         f"{speed.KERNEL_SHARE['int8']:.0%}, {speed.KERNEL_SHARE['int4']:.0%}"),
    ]  # fmt: skip
    return "\n".join(["| constant | value |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in found)])


def cached() -> str:
    """What benchmarks/generation.py measured."""
    found = result("generation")
    (each,) = found["models"]
    assert all(each["same_tokens"].values())
    return (
        f"On one core ({found['machine']['cpu']}), {each['model']} with a prompt of {found['prompt']} tokens writes "
        f"{each['cached_tokens_per_s']:.0f} tokens in a second of processor time with the cache, "
        f"{each['uncached_tokens_per_s']:.0f} without it; transformers' `generate` with the same weights writes "
        f"{each['transformers_tokens_per_s']:.0f}, and the same tokens (`python benchmarks/generation.py`)."
    )


PARTS = {
    "inference-fits": fits, "inference-does-not-fit": does_not_fit, "inference-summary": summary,
    "inference-cached": cached, "inference-rows": rows, "inference-formats": formats, "inference-constants": constants,
}  # fmt: skip
