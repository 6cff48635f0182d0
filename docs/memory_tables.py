"""The generated parts about memory: on other people's GPUs, on an H100, on the CUDA build, of fine-tuning, of calculators."""

import re
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

from tables import GIB, MIB, declare, fill, mode, part, result, table

from foretrain.config.finetune.options import FineTune
from foretrain.config.hub.source import find_source
from foretrain.hardware.catalogue import find_gpu
from foretrain.predict.finetune.memory import estimated


def largest_error(errors: Iterable[float]) -> float:
    return max(errors, key=abs)


def without_sign_of_zero(error: float, digits: int) -> str:
    shown = f"{error * 100:+.{digits}f}%"
    return shown if float(shown[:-1]) else f"{0:.{digits}f}%"


def size(nbytes: float) -> str:
    if nbytes >= GIB:
        return f"{nbytes / GIB:,.3f} GiB"
    return f"{nbytes / MIB:,.2f} MiB" if nbytes >= MIB else f"{nbytes:,.0f} B"


def source(text: str) -> str:
    """Return owner/name@commit:path as a link, any other text as it is."""
    repository, colon, path = text.partition(":")
    name, at, commit = repository.partition("@")
    linked = colon and at and " " not in repository
    return f"[{name}](https://github.com/{name}/blob/{commit}/{path})" if linked else text


@part("gpu-sentence")
def sentence() -> str:
    found, groups = result("accuracy"), {group["group"]: group for group in result("time_against_logs")["groups"]}
    (every, programs, *_), fits, whole, judged = found["summary"], found["fits"], groups["all"], groups["only judged"]
    ways = {(c["with"]["torch"], c["with"]["foretrain"], c["with"]["commit"]) for c in found["cases"] if "with" in c}
    text = (
        f"{every['figures']} memory figures that others measured on single GPUs: median error {every['median_abs_error'] * 100:.3f}%, "
        f"{every['within_3_percent'] / every['figures']:.0%} within 3%. Of whole programs alone {programs['figures']}: "
        f"median {programs['median_abs_error'] * 100:.3f}%, {programs['within_3_percent'] / programs['figures']:.0%} within 3%."
    )
    if fits["figures"]:
        text += f" Runs that ended out of memory: {fits['right']} of {fits['figures']} foretold."
    text += (
        f" Step times from the catalogue: {whole['runs']}, median error {whole['median_abs_error'] * 100:.1f}%, {whole['inside']} in the "
        f"stated range; of the {judged['runs']} that are only judged {judged['median_abs_error'] * 100:.1f}% and {judged['inside']}."
    )
    made = ", ".join(
        f"foretrain {v} ({c}), torch {t}" if c else f"foretrain {v}, torch {t}" for t, v, c in sorted(ways)
    )
    text += f" Predicted with {made}; {found['date']}; `python -m benchmarks.accuracy`."
    if waiting := [case["id"] for case in found["cases"] if case["state"] != "predicted"]:
        text += f" Not predicted yet: {len(waiting)} of {len(found['cases'])} cases ({', '.join(waiting)})."
    return text


@part("gpu-summary")
def summary() -> str:
    return table(
        "memory figures | figures > | same > | median error > | 90% within > | largest > | within 0.5% > | within 3% >",
        (
            fill(
                "{group} | {figures} | {same} | {median_abs_error:.3p} | {p90_abs_error:.2p} | {worst_abs_error:.1p} | "
                "{within_half_percent} ({half:.0%}) | {within_3_percent} ({three:.0%})",
                group, half=group["within_half_percent"] / group["figures"], three=group["within_3_percent"] / group["figures"],
            )
            for group in result("accuracy")["summary"]
        ),
        "", sentence(),
    )  # fmt: skip


def of_group(group: str) -> Callable[[], str]:
    """Return the maker of a group's table: a row per figure, with a note on known errors."""

    def make() -> str:
        rows: list[str] = []
        notes: dict[str, int] = {}
        for case in result("accuracy")["cases"]:
            head = f"{case['what']} | {source(case['source'])} | {case['measured_on']}; torch {case['measured_torch']} | {case['grade']}"
            for figure in case["figures"] if case["group"] == group else ():
                if figure["kind"] not in ("allocated", "requested", "reserved", "at rest") or "predicted" not in figure:
                    continue
                note, error = figure["named"], figure["error"]
                mark = f" ({notes.setdefault(note, len(notes) + 1)})" if note else ""
                phase = figure["id"].partition("/")[2]
                kind = figure["kind"] + (f", {phase}" if phase not in ("", "peak", "rest") else "")
                far = (
                    "same"
                    if figure["same"]
                    else without_sign_of_zero(error, 3)
                    if abs(error) < 0.01
                    else f"{error * 100:+.1f}%"
                )
                rows.append(f"{head} | {kind} | {size(figure['measured'])} | {size(figure['predicted'])} | {far}{mark}")
                head = " |  |  | "
        if not rows:
            return "Not predicted yet: `python -m benchmarks.accuracy --checkouts DIR`."
        columns = "what | source | measured on | grade | figure | measured > | predicted > | error >"
        return table(columns, rows, "", *(f"({n}) {note}." for note, n in notes.items()))

    return make


for _name, _group in (
    ("eager", "programs, eager"),
    ("compiled", "programs, compiled"),
    ("single", "single operations"),
):
    part(f"gpu-{_name}")(of_group(_group))


@part("gpu-limits")
def limits() -> str:
    """Return the runs that ended out of memory."""
    return table(
        "run | source | measured on | its memory > | predicted",
        (
            f"{case['what']} | {source(case['source'])} | {case['measured_on']} | out of memory | "
            f"{'fits' if figure['predicted'] else 'does not fit'}: {'right' if figure['right'] else 'wrong'}"
            for case in result("accuracy")["cases"]
            for figure in case["figures"]
            if figure["kind"] == "out of memory" and "predicted" in figure
        ),
    )


@part("gpu-left-out")
def left_out() -> str:
    found = result("accuracy")
    rows = [f"{row['count']} | {row['world']} | {row['rows']} | {row['why']}" for row in found["left_out"]]
    total = sum(row["count"] for row in found["left_out"])
    rows.append(f"**{total}** | | | of {found['collected']:,} collected")
    return table("figures > | GPUs | from | why not", rows)


@part("gpu-recordings")
def recordings() -> str:
    rows = result("recordings")["rows"]
    every, same, freed = (sum(row[key] for row in rows) for key in ("recorded", "in_order", "freed_alike"))
    return table(
        "recorded program | recorded with | traced with | allocations > | same size in the same order > | freed before the same one > | the rest",
        rows,
        "{what} | torch {measured_torch} | {torch} | {recorded:,} | {in_order:,} | {freed_alike:,} | {named}",
        f"Together {same:,} of {every:,} allocations in order; {freed:,} are also freed at the same place.",
    )


@part("gpu-calculators")
def formulas() -> str:
    found = result("accuracy_calculators")
    names = [one["calculator"] for one in found["summary"]]
    rows = []
    for row in found["rows"]:
        says = [row["foretrain"], *(row["says"][name] for name in names[1:])]
        reserved = " reserved" if row["kind"] == "reserved" else ""
        rows.append(
            f"{row['what']} | {row['measured'] / GIB:.2f}{reserved} | {' | '.join(f'{s / GIB:.2f}' for s in says)}"
        )
    each = table(f"run | measured > | {' > | '.join(names)} >", rows)
    template = "{calculator} | {figures} | {shown}% | {lowest_error:+.0%} | {highest_error:+.0%} | {counts}"
    shown = [{**one, "shown": f"{one['median_abs_error'] * 100:.3g}"} for one in found["summary"]]
    return table("| runs > | median error > | from > | to > | counts", shown, template, each)


@part("accuracy")
def ledger() -> str:
    found, rows = result("ledger_against_allocator"), []
    for case in found["cases"]:
        phase = max(case["measured_bytes"], key=case["measured_bytes"].get)
        predicted, measured = case["predicted_bytes"][phase], case["measured_bytes"][phase]
        rows.append(
            f"{case['name']} | {measured / MIB:,.1f} MiB | {predicted / MIB:,.1f} MiB | {without_sign_of_zero(predicted / measured - 1, 2)}"
        )
    end = (
        "Median error {median_abs_error_of_peak:.3p}, worst {worst_abs_error_of_peak:.2p} (measured on a {machine.cpu}, "
        "torch {versions.torch}, {date}; `python benchmarks/ledger_against_allocator.py`)."
    )
    return table("config | measured peak > | predicted > | error >", rows, "", fill(end, found))


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
        for who, told in (("estimate", "estimated"), ("trace", "traced")):
            kinds[f"fine-tuning: {what}, {told}"] = tuning_errors(f"{what}_bytes", who)

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


@part("hopper-sentence")
def hopper_sentence() -> str:
    blind, times = result("gpu_h100_blind"), result("gpu_h100_forecasts")["rows"]
    runs, memory = blind["pretraining"], result("gpu_h100_memory")["rows"]

    def of(rows: list[dict[str, Any]], key: str) -> list[float]:
        return [row[f"{key}_error"] for row in rows]

    def told(errors: list[float]) -> str:
        return f"{median(map(abs, errors)) * 100:.1f}%, {largest_error(errors) * 100:+.1f}%"

    pairs = {
        "what nvidia-smi shows, pretraining": (of(runs, "process"), of(memory, "process")),
        "peak of PyTorch, estimated, pretraining": (of(runs, "ledger"), of(memory, "ledger")),
        "peak of PyTorch, traced, pretraining": (of(runs, "allocated"), of(memory, "allocated")),
        "reserved memory of fine-tuning, estimated": tuning_errors("reserved_bytes", "estimate"),
        "time of a step, from the data sheet": (of(blind["times"], "catalogue"), of(times, "catalogue")),
    }
    return table(
        "on an H100: median error, largest | blind > | corrected with these runs >",
        [
            *(f"{name} | {' | '.join(map(told, pair))}" for name, pair in pairs.items()),
            f"energy of a step, and so its price | {told(of(blind['times'], 'energy'))} | –",
        ],
        "",
        f"*Blind*: {len(runs)} pretraining runs, {len(blind['finetuning'])} of fine-tuning and {len(blind['times'])} timed steps, predicted before the model "
        "had seen an H100. The right column is not a prediction: the model learned from these runs. On another kind of card expect the left one "
        "([all runs](docs/measured.md)).",
    )


declare(
    "hopper-memory", "gpu_h100_memory.rows",
    "run | step | mode | dtype | allocated GiB > | traced > | estimated > | reserved GiB > | traced > | process GiB > | traced >",
    "{name} | {step} | {mode} | {dtype} | {allocated:.2f} | {allocated_error:+.2p} | {ledger_error:+.2p} | {reserved:.2f} | "
    "{reserved_error:+.2p} | {process:.2f} | {process_error:+.1p}",
    mode=mode,
    allocated=lambda row: row["measured"]["allocated_bytes"] / GIB,
    reserved=lambda row: row["measured"]["reserved_bytes"] / GIB,
    process=lambda row: row["measured"]["process_bytes"] / GIB,
)  # fmt: skip


@part("hopper-finetuning")
def hopper_finetuning() -> str:
    """Return the runs of full size, and the six largest errors of the others."""
    kinds = ("allocated_bytes", "reserved_bytes")
    rows = [row for row in result("gpu_h100_finetune")["rows"] if "error" not in row]
    rows.sort(key=lambda row: -max(abs(row[kind]["trace_error"]) for kind in kinds))
    large = [row for row in result("gpu_h100_finetune")["rows"] if row["name"].startswith("full size") and row in rows]
    template = "{real:.3f} | {trace_error:+.3p} | {estimate_error:+.3p}"
    return table(
        "run | allocated GiB > | traced > | estimated > | reserved GiB > | traced > | estimated >",
        (
            f"{row['name'].removeprefix('full size: ')} | "
            + " | ".join(fill(template, row[kind], real=row[kind]["real"] / GIB) for kind in kinds)
            for row in [*large, *[row for row in rows if row not in large][:6]]
        ),
    )


@part("cuda-truth")
def cuda_truth() -> str:
    found, rows = result("cuda_build_large"), []
    kinds = {
        "allocated": ("traced, allocated", "{allocated_within_0.1_percent:.1%} within 0.1%"),
        "reserved": (
            "traced, reserved",
            "{reserved_to_the_byte:.1%} to the byte, {reserved_within_1_percent:.1%} within 1%",
        ),
        "estimate_allocated": ("estimated, allocated", "{estimate_allocated_within_1_percent:.1%} within 1%"),
    }
    for how, s in found["summary"].items():
        for what, (told, near) in kinds.items():
            close = near.replace("0.1_percent", "tenth")
            rows.append(
                fill("{how}: {told} | {runs} | {median:.3%} | {p99:.2%} | {worst:+.2%} | {low:+.2%} | ", s[what], how=how, told=told,
                     runs=s["cases"] - s["failed"], low=min(0.0, s[what]["lowest"]))
                + fill(close, s, allocated_within_tenth=s["allocated_within_0.1_percent"])
            )  # fmt: skip
    failed = sum(s["failed"] for s in found["summary"].values())
    end = "{date}, torch {versions.torch}, {tier} tier. Failed: {failed}; not run: {not_done}."
    columns = "| cases > | median > | 99% within > | largest error > | largest too low > | exact or close"
    return table(columns, rows, "", fill(end, found, failed=failed))


@part("cuda-truth-large-models")
def large_models() -> str:
    """Return the same of runs of a GiB and more, where a buffer of some MiB counts as little as on a real run."""
    shown = []
    for how in ("eager", "compiled"):
        rows = [r for r in result("cuda_build_large")["rows"] if mode(r) == how and "error" not in r]
        rows = [r for r in rows if r["allocated_bytes"]["real"] >= GIB]
        cells = [how, str(len(rows))]
        for what in ("allocated_bytes", "reserved_bytes", "estimate_allocated"):
            errors = sorted((r[what]["error"] for r in rows), key=abs)
            cells.append(f"{abs(errors[len(errors) // 2]):.3%}, {errors[-1]:+.2%}" if errors else "")
        shown.append(" | ".join(cells))
    kinds = ("traced, allocated", "traced, reserved", "estimated, allocated")
    return table(
        f"runs of 1 GiB and more | cases > | {' | '.join(f'{kind}: median, largest error' for kind in kinds)}", shown
    )


@part("cuda-truth-edge")
def edge() -> str:
    found = result("cuda_build_edge")
    s = found["summary"]
    far = max(abs(row["from_edge"]) for row in found["rows"])
    return table(
        "who decides | runs at the limit > | decided wrongly > | … said to fit, and ran out of memory >",
        (
            f"{told} | {s['pairs']} | {s[who]['wrong']} | {s[who]['said_fits_and_did_not']}"
            for who, told in (("traced", "the trace"), ("estimated", "the estimate, without its range"))
        ),
        "",
        f"{found['made']}: {s['survived']} survived. No limit lies further than {far:.1%} from the edge.",
    )


KINDS = {
    "grid": "Llama and Qwen3, small: full and LoRA, bf16 and fp32 with autocast, with and without checkpointing, AdamW fused "
    "and not, accumulation 1 and 2",
    "other": "the same: padding, fp16, other optimizers, collected logits, eager attention, …",
    "qlora": "the same: QLoRA",
    "family": "other families, small",
    "full size": "Qwen3 0.6B and Llama 3.2 1B, 1 x 2048",
}


@part("cuda-truth-finetuning")
def cuda_finetuning() -> str:
    found, rows = result("cuda_build_finetuning"), []
    for kind, s in found["summary"].items():
        if runs := s["cases"] - s["failed"]:
            traced, phases, guessed = (
                [s[f"{what}_bytes {error}"] for what in ("allocated", "reserved")]
                for error in ("trace_error", "trace_worst_phase", "estimate_error")
            )
            phase = largest_error([max(each["worst"] for each in phases), min(each["lowest"] for each in phases)])
            errors = [*(each["worst"] for each in traced), phase, *(each["worst"] for each in guessed)]
            rows.append(f"{KINDS[kind]} | {runs} | {' | '.join(f'{each:+.2%}' for each in errors)}")
    failed = sum(s["failed"] for s in found["summary"].values())
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items() if name != "python")
    return table(
        "fine-tuning | runs > | traced, allocated > | traced, reserved > | … of any phase > | estimated, allocated > | estimated, reserved >",
        rows, "", f"{found['date']}, {versions}. Each figure is the largest error. Failed: {failed}; not run: {found['not_done']}.",
    )  # fmt: skip


@part("cuda-truth-ranks")
def ranks() -> str:
    """Return, for each strategy, the errors of trace and estimate on a rank's card."""
    found = result("cuda_build_ranks")
    ways: dict[str, list[Any]] = {}
    for row in found["rows"]:
        if "error" not in row:
            ways.setdefault(re.split(r", (?=GPT-2|Llama)", row["name"])[0], []).append(row)
    shown = []
    for way, rows in ways.items():
        kinds = [[row[f"{what}_bytes"] for row in rows] for what in ("allocated", "reserved")]
        errors = [[each["error"] for each in kind] for kind in kinds]
        errors += [
            [each["worst_phase"] for kind in kinds for each in kind],
            [each["estimate_error"] for each in kinds[0]],
        ]
        shown.append(f"{way} | {len(rows)} | {' | '.join(f'{largest_error(each):+.3%}' for each in errors)}")
    columns = "way | ranks > | traced, allocated > | traced, reserved > | … of any phase > | estimated, allocated >"
    end = "{date}, torch {versions.torch}. Each figure is the largest error. Failed: {failed}."
    return table(columns, shown, "", fill(end, found))


FIGURES = {"peak": "peak allocated", "nvidia-smi": "what nvidia-smi shows", "tokens/s": "tokens a second"}
MISSES = {"peak": 0.03, "nvidia-smi": 0.03, "tokens/s": 0.15}  # from where on a row is shown


def off(row: dict[str, Any], column: str) -> float:
    return row[column] / row["measured"] - 1


def run_of(row: dict[str, Any], *keys: str) -> str:
    fused = [row["kernels"]] if row["kernels"] != "none" else []
    return ", ".join([*(row[key] for key in keys), *fused])


def figure(row: dict[str, Any]) -> str:
    return f"{row['measured']:,.0f}" if row["kind"] == "tokens/s" else f"{row['measured'] / GIB:.2f} GiB"


@part("finetune-measured")
def measured() -> str:
    """Return medians of each figure, of all rows and of those without fused kernels."""
    found = result("finetune_measured")["rows"]
    shown = []
    for kind, name in FIGURES.items():
        rows = [row for row in found if row["kind"] == kind]
        for told, some in (
            (name, rows),
            ("… without fused kernels", [row for row in rows if row["kernels"] == "none"]),
        ):
            cells = [told, str(len(some))]
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
        f"*Within*: 3% of memory, 15% of tokens a second. {inside[0]} times lie in the range that the plan gives, and "
        f"{inside[1]} figures of nvidia-smi ({inside[2]} without fused kernels). All {len(ran)} rows of memory are of runs that "
        f"went through; {sum(row['refused'] for row in ran)} of them are said not to fit. "
        f"(`python benchmarks/finetune_measured.py`, {result('finetune_measured')['date']})",
    )


declare(
    "finetune-misses", "finetune_measured.rows",
    "row | run | figure | measured > | plan > | code that ran > | cause",
    "{id} | {run} | {kind} | {size} | {plan:+.1p} | {ran:+.1p} | {why}",
    only=lambda row: abs(off(row, "as_run")) > MISSES[row["kind"]],
    run=lambda row: run_of(row, "model", "method", "batch", "code"),
    size=figure, plan=lambda row: off(row, "planned"), ran=lambda row: off(row, "as_run"),
)  # fmt: skip
declare(
    "finetune-plan-misses", "finetune_measured.rows",
    "row | run | measured > | plan > | what the run had otherwise",
    "{id} | {run} | {size} | {plan:+.1p} | {why_planned}",
    only=lambda row: row["kind"] == "peak" and abs(off(row, "planned")) > MISSES["peak"],
    run=lambda row: run_of(row, "model", "method", "batch"), size=figure, plan=lambda row: off(row, "planned"),
)  # fmt: skip
declare(
    "finetune-rows", "finetune_measured.rows",
    "row | model | method | batch | code | kernels | figure | measured > | plan > | code that ran >",
    "{id} | {model} | {method} | {batch} | {code} | {kernels} | {kind} | {size} | {plan:+.1p} | {ran:+.2p}",
    size=figure, plan=lambda row: off(row, "planned"), ran=lambda row: off(row, "as_run"),
)  # fmt: skip
declare("finetune-left-out", "finetune_measured.left_out", "rows | why", "{rows} | {why}")

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
