"""The generated parts about memory: on other people's GPUs, on an H100, on the CUDA build, of fine-tuning, of calculators."""

from collections import Counter
from collections.abc import Iterable
from statistics import median
from typing import Any

from tables import GIB, declare, fill, mode, part, result, table

from foretrain.config.finetune.options import FineTune
from foretrain.config.hub.source import find_source
from foretrain.hardware.catalogue import find_gpu
from foretrain.predict.finetune.memory import estimated


def largest_error(errors: Iterable[float]) -> float:
    return max(errors, key=abs)


SHOWN = {
    "all memory figures": "all", "… of whole programs": "whole programs", "…… eager": "… eager", "…… compiled": "… compiled",
    "… of single operations": "single operations",
}  # fmt: skip


@part("gpu-summary")
def summary() -> str:
    found = result("accuracy")
    rows = [{**row, "name": SHOWN[row["group"]]} for row in found["summary"] if row["group"] in SHOWN]
    fits = found["fits"]
    versions = {case["with"]["torch"] for case in found["cases"] if "with" in case}
    missed = [
        figure["named"] for case in found["cases"] for figure in case["figures"] if abs(figure.get("error") or 0) > 0.03
    ]
    cause, count = Counter(missed).most_common(1)[0]
    return table(
        "memory that others measured | figures > | all digits equal > | median error > | largest > | within 3% >",
        rows,
        "{name} | {figures} | {same} | {median_abs_error:.3p} | {worst_abs_error:.1p} | {within_3_percent}",
        f"{count} of the {len(missed)} misses have one cause: {cause}. Runs that ended out of memory: {fits['right']} of "
        f"{fits['figures']} predicted. Traced with torch {', '.join(sorted(versions))}; {found['date']}; `python -m benchmarks.accuracy`.",
    )


@part("gpu-calculators")
def formulas() -> str:
    template = "{calculator} | {figures} | {shown}% | {lowest_error:+.0%} | {highest_error:+.0%} | {counts}"
    summary = result("accuracy_calculators")["summary"]
    shown = [{**one, "shown": f"{one['median_abs_error'] * 100:.3g}"} for one in summary]
    return table("| runs > | median error > | from > | to > | counts", shown, template)


@part("truth")
def truth() -> str:
    return fill(
        "Of {summary.configs} configs, eager and compiled, {summary.exact_to_64_bytes} traces meet PyTorch's real CPU "
        "allocator to 64 bytes, the worst is off by {summary.worst_error:.3p} (torch {versions.torch}, {date}; "
        "`python benchmarks/trace_against_allocator.py`). The logged RTX 4070 run of case A held 4,464 MiB: "
        "{a.reserved_bytes:,.0MiB} reserved are predicted, {a.error:+.1p} with a context of 300 MiB (`python benchmarks/real_cases.py`).",
        result("trace_against_allocator"), a=result("real_cases")["a"],
    )  # fmt: skip


declare(
    "reserved", "reserved.summary",
    "what | configs > | reserved / allocated > | median error > | errors > | within 2% >",
    "{mode}, {step}'s step | {configs} | {reserved_over_allocated.0:.2f} to {reserved_over_allocated.2:.2f} | "
    "{median_abs_error:.2%} | {lowest_error:+.1%} to {highest_error:+.1%} | {within_2_percent}",
    "(`python benchmarks/reserved.py`, random configs on five cards, torch {versions.torch}, {date})",
)  # fmt: skip
declare(
    "small-memory", "small_memory.cases",
    "config | batch > | peak > | card needs > | nanoGPT eager > | nanoGPT compiled > | of eager > | of compiled > | estimated time >",
    "[{config}](../examples/small-memory/{config}.toml) | {batch} | {peak_bytes:.2GiB} | {needed_bytes:.2GiB} | "
    "{nanogpt.eager.peak_bytes:.2GiB} | {nanogpt.compiled.peak_bytes:.2GiB} | {of_eager:.2f} | {of_compiled:.2f} | {time_ratio:.2f} ×",
    of_eager=lambda row: row["peak_bytes"] / row["nanogpt"]["eager"]["peak_bytes"],
    of_compiled=lambda row: row["peak_bytes"] / row["nanogpt"]["compiled"]["peak_bytes"],
)  # fmt: skip


@part("small-memory-cpu")
def executed() -> str:
    return fill(
        "Executed on a CPU (eager, bfloat16), {config} took {real_bytes:.3GiB} of the allocator's memory; its trace there says "
        "{traced_bytes:.3GiB}.",
        result("small_memory")["cpu"],
    )


def tuning_errors(what: str, who: str) -> tuple[list[float], list[float]]:
    """Return (blind, corrected)."""
    blind = [row[what][who] for row in result("gpu_h100_blind")["finetuning"]]
    return blind, [row[what][f"{who}_error"] for row in result("gpu_h100_finetune")["rows"] if "error" not in row]


@part("hopper-summary")
def hopper() -> str:
    known, blind = result("gpu_h100_memory"), result("gpu_h100_blind")
    kinds: dict[str, tuple[list[float], ...]] = {}
    for kind in ("eager", "compiled"):
        for key, name in (
            ("process", "what nvidia-smi shows, traced"), ("ledger", "allocated, estimated"), ("allocated", "allocated, traced"),
            ("reserved", "reserved, traced"),
        ):  # fmt: skip
            pair = (
                [r[f"{key}_error"] for r in rows if mode(r) == kind] for rows in (blind["pretraining"], known["rows"])
            )
            kinds[f"pretraining, {kind}: {name}"] = tuple(pair)
    for what in ("allocated", "reserved"):
        for who, label in (("estimate", "estimated"), ("trace", "traced")):
            kinds[f"fine-tuning: {what}, {label}"] = tuning_errors(f"{what}_bytes", who)

    def cells(errors: list[float]) -> str:
        near = sum(abs(error) <= 0.03 for error in errors)
        return f"{len(errors)} | {median(map(abs, errors)) * 100:.2f}% | {largest_error(errors) * 100:+.2f}% | {near}"

    under, was_under = (sum(row["under"] for row in rows) for rows in (known["rows"], blind["pretraining"]))
    return table(
        "what | blind: runs > | median error > | largest > | within 3% > | corrected: runs > | median error > | largest > | within 3% >",
        (f"{kind} | {' | '.join(map(cells, pair))}" for kind, pair in kinds.items()),
        "",
        f"*Blind* is what was predicted before the model had seen an H100 (commit {blind['commit']}, {blind['date']}). *Corrected* is what the model "
        "predicts for the same runs, and a few more, after it learned from them: it does not show how far a prediction for another card is right. "
        f"Blind, the process took more than the high end of the plan's range in {was_under} of {len(blind['pretraining'])} pretraining runs; corrected, in "
        f"{under} of {len(known['rows'])}. NVIDIA H100 80GB, torch {known['measured']['torch']}, measured on {known['date']}.",
    )


@part("claim")
def claim() -> str:
    """Return what README claims: the blind forecasts of memory, and the published times."""
    blind, times = result("gpu_h100_blind"), {group["group"]: group for group in result("time_against_logs")["groups"]}
    runs = blind["pretraining"]
    near = sum(abs(row["allocated_error"]) <= 0.03 for row in runs)
    shown = median(abs(row["process_error"]) for row in runs)
    high = sum(row["under"] for row in runs)
    every, judged = times["all"], times["only judged"]
    return (
        f"**Memory**: in its first test on an H100, before the model had seen one, PyTorch's peak, traced with `--exact`, was within 3% in {near} of "
        f"{len(runs)} pretraining runs. nvidia-smi showed {shown:.0%} more than predicted (median), and more than the upper end of our range in {high} of the "
        f"{len(runs)}; we corrected that, and no other card has tested the correction yet. **Time**: {every['inside']} of {every['runs']} published runs finished within the predicted range; the median error is "
        f"{every['median_abs_error']:.0%}, {judged['median_abs_error']:.0%} in the {judged['runs']} that were never used to choose a rule. We have not measured a GeForce card: "
        "`foretrain verify` tests yours in ten minutes. [All numbers](docs/trust.md)."
    )


@part("cuda-truth")
def cuda_truth() -> str:
    found = result("cuda_build_large")
    eager, compiled = (found["summary"][how] for how in ("eager", "compiled"))
    exact, near = (
        [f"{s[key]:.0%}" for s in (eager, compiled)]
        for key in ("reserved_to_the_byte", "estimate_allocated_within_1_percent")
    )
    return (
        f"In {eager['cases'] - eager['failed']} eager and {compiled['cases'] - compiled['failed']} compiled runs the trace met the reserved peak to the byte in "
        f"{exact[0]} and {exact[1]}; the estimate met the allocated peak within 1% in {near[0]} and {near[1]} (torch {found['versions']['torch']}, {found['date']})."
    )


FIGURES = {"peak": "peak allocated", "nvidia-smi": "what nvidia-smi shows", "tokens/s": "tokens per second"}
MISSES = {"peak": 0.03, "nvidia-smi": 0.03, "tokens/s": 0.15}  # from where on a row is shown


def off(row: dict[str, Any], column: str) -> float:
    return row[column] / row["measured"] - 1


@part("finetune-measured")
def measured() -> str:
    """Return medians of each figure, of all rows and of those without fused kernels."""
    found = result("finetune_measured")["rows"]
    shown = []
    for kind, name in FIGURES.items():
        rows = [row for row in found if row["kind"] == kind]
        for label, some in (
            (name, rows),
            ("… without fused kernels", [row for row in rows if row["kernels"] == "none"]),
        ):
            cells = [label, str(len(some))]
            for column in ("planned", "as_run"):
                errors = [abs(off(row, column)) for row in some]
                within = sum(error <= MISSES[kind] for error in errors)
                cells.append(f"{median(errors) * 100:.2f}% | {max(errors) * 100:.1f}% | {within}")
            shown.append(" | ".join(cells))
    times, smi = ([row for row in found if row["kind"] == kind] for kind in ("tokens/s", "nvidia-smi"))
    plain, ran = [row for row in smi if row["kernels"] == "none"], [row for row in found if row["kind"] != "tokens/s"]
    inside = [f"{sum(row['in_range'] for row in rows)} of {len(rows)}" for rows in (times, smi, plain)]
    return table(
        "figure | rows > | plan: median error > | largest > | within > | code that ran: median error > | largest > | within >",
        shown,
        "",
        f"*Within*: 3% of memory, 15% of tokens per second. {inside[0]} times lie in the range that the plan gives, and "
        f"{inside[1]} figures of nvidia-smi ({inside[2]} without fused kernels). All {len(ran)} rows of memory are of runs that "
        f"went through; {sum(row['refused'] for row in ran)} of them are said not to fit. "
        f"(`python benchmarks/finetune_measured.py`, {result('finetune_measured')['date']})",
    )


QUICK_S = 20  # of processor time, that a trace at full size should take


@part("finetune-traces")
def traces() -> str:
    found = result("finetune_traces")
    small, large = found["small"], found["full_size"]
    worst = max(abs(row["traced_bytes"] - row["real_bytes"]) for row in small)
    slow = [f"{row['model']} {row['method']}" for row in large if row["cpu_seconds"] > QUICK_S]
    missed = f" More than {QUICK_S} s: {', '.join(slow)}." if slow else ""
    rows = {
        (row["model"], row["method"]): f"{row['cpu_seconds']:.1f} | {row['reserved_bytes'] / GIB:.2f} GiB"
        for row in large
    }
    return "\n\n".join([
        f"{len(small)} small runs ({len({row['model'] for row in small})} models, full, LoRA, DoRA and QLoRA, with and "
        f"without checkpointing) were traced and then done on a CPU: the peaks differ by at most {worst} bytes, "
        f"{max(abs(row['error']) for row in small) * 100:.3f}%.",
        f"How long published models take on a {found['machine']['cpu']}, in seconds of processor time of all processes, with "
        f"nothing kept (2 × 1024 tokens, bf16 autocast, checkpointing; RTX 4090).{missed}",
        table(
            "model | full: seconds > | reserved > | LoRA: seconds > | reserved > | QLoRA: seconds > | reserved >",
            (
                f"{model} | {' | '.join(rows[model, method] for method in ('full', 'lora', 'qlora'))}"
                for model in dict.fromkeys(model for model, _ in rows)
            ),
        ),
        f"(`python benchmarks/finetune_traces.py`, {found['date']})",
    ])  # fmt: skip


KINDS = {  # of the class that is trained, by how its name ends; the first that fits
    "text, a decoder": ("ForCausalLM", "LMHeadModel"),
    "text, an encoder": ("ForMaskedLM",),
    "sound": ("ForCTC", "ForAudioClassification", "ForSpeechSeq2Seq"),
    "pictures": ("ForImageClassification",),
    "an encoder and a decoder": ("",),
}


def kind_of(row: dict[str, Any]) -> str:
    if row.get("takes_pictures"):
        return "pictures and text"
    return next(kind for kind, ends in KINDS.items() if row["trained"].endswith(ends))


def why_not(row: dict[str, Any]) -> str:
    """Return the reason in a cell, without what a Markdown table would read in it."""
    reason = row.get("makes_no_model") or row["why_not_lora"]
    return (
        reason.removeprefix("StandInError: ").replace("|", "/").replace("<", "‹").replace(">", "›").replace("[", "\\[")
    )


@part("model-types")
def types() -> str:
    found = result("model_types")
    traced = [row for row in found["rows"] if "method" in row]
    refused = [row for row in found["rows"] if "method" not in row]
    compared = [row for row in traced if "error" in row]
    far = [row for row in compared if abs(row["error"]) > 0.001]
    kinds: dict[str, list[dict[str, Any]]] = {}
    for row in traced:
        kinds.setdefault(kind_of(row), []).append(row)
    packages = found["packages"]
    return "\n\n".join([
        f"transformers {packages['transformers']} has {found['types']} model types with a head that is trained on labels. "
        f"Of {found['tried']} that were tried, {len(traced)} are planned ({len(traced) / found['tried']:.0%}), with their default "
        f"configs made small. Of {len(compared)}, a narrow model was then trained on a CPU: the peaks of {len(compared) - len(far)} differ "
        f"by at most {max(abs(row['error']) for row in compared if row not in far):.3%}"
        + (f", and more in {', '.join(row['model_type'] for row in far)}." if far else "."),
        table(
            "what is trained | types > | compared > | largest difference >",
            (
                f"{kind} | {len(rows)} | {len(errors := [abs(row['error']) for row in rows if 'error' in row])} | "
                f"{f'{max(errors):.4%}' if errors else ''}"
                for kind, rows in sorted(kinds.items(), key=lambda pair: -len(pair[1]))
            ),
        ),
        f"These {len(refused)} are refused, with the reason. Where it is an error of transformers' own, the default config of the "
        "type is often incomplete, and a published config.json can be planned:",
        table("type | why", (f"{row['model_type']} | {why_not(row)}" for row in refused)),
        f"(`python benchmarks/model_types.py`, {found['date']}; each row of the file has the commit that made it)",
    ])  # fmt: skip


COMPILED = ("llama-3.2-1b", "qwen3-0.6b", "qwen3-1.7b", "qwen2.5-0.5b", "smollm2-360m", "pythia-410m", "gpt2")


@part("finetune-compiled")
def compiled() -> str:
    saved: dict[str, list[float]] = {"full": [], "lora": []}
    for method, shares in saved.items():
        for name in COMPILED:
            facts = find_source(name).facts
            assert facts is not None
            tune = FineTune(method=method, dtype="bfloat16", amp="bf16", batch_size=2, seq_len=1024)
            runs = (tune, tune.model_copy(update={"compile": True}))
            memory = (estimated(facts, run, find_gpu("RTX 4090")).memory for run in runs)
            eager, fused = (each.phase("steady_step").allocated_bytes for each in memory)
            shares.append(1 - fused / eager)
    full, lora = (f"{min(shares) * 100:.0f} to {max(shares) * 100:.0f}%" for shares in saved.values())
    return (
        f"Without checkpointing the steady step's estimated peak is {full} lower in full fine-tuning and {lora} lower with LoRA "
        f"({', '.join(COMPILED)}; 2 × 1024 tokens, bf16 autocast)."
    )
