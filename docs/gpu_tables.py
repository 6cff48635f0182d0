"""Tables of docs/measured.md: what an H100 measured (benchmarks/gpu) beside what was predicted for it."""

from statistics import median
from typing import Any

from results import result

GIB = 2**30


def _card(found: dict[str, Any]) -> str:
    torch = found.get("measured", {}).get("torch") or found.get("versions", {}).get("torch", "?")
    return f"NVIDIA H100 80GB, torch {torch}, measured on {found.get('measured_on') or found['date']}"


def _share(errors: list[float], limit: float) -> int:
    return sum(abs(error) <= limit for error in errors)


def _cells(errors: list[float]) -> str:
    sizes = [abs(error) for error in errors]
    return f"{len(errors)} | {median(sizes) * 100:.2f}% | {max(errors, key=abs) * 100:+.2f}% | {_share(errors, 0.03)}"


_PRETRAINING = (
    ("process", "what nvidia-smi shows, traced"), ("ledger", "allocated, estimated"), ("allocated", "allocated, traced"),
    ("reserved", "reserved, traced"),
)  # fmt: skip


def _memory_errors(name: str, compiled: bool, key: str) -> list[float]:
    found = result(name)
    rows = found["pretraining"] if "pretraining" in found else found["rows"]
    return [row[f"{key}_error"] for row in rows if row["compiled"] == compiled]


def _tuning_errors(what: str, who: str) -> tuple[list[float], list[float]]:
    """(blind, corrected)"""
    rows = [row for row in result("gpu_h100_finetune")["rows"] if "error" not in row]
    blind = [row[what][who] for row in result("gpu_h100_blind")["finetuning"]]
    return blind, [row[what][f"{who}_error"] for row in rows]


def summary() -> str:
    """Memory of all runs, by kind of run and of prediction: before these runs corrected the model, and after."""
    pretraining, blind = result("gpu_h100_memory"), result("gpu_h100_blind")
    lines = [
        "| what | blind: runs | median error | largest | within 3% | corrected: runs | median error | largest | within 3% |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for kind, compiled in (("eager", False), ("compiled", True)):
        for key, name in _PRETRAINING:
            cells = [_cells(_memory_errors(f"gpu_h100_{when}", compiled, key)) for when in ("blind", "memory")]
            lines.append(f"| pretraining, {kind}: {name} | {' | '.join(cells)} |")
    for what, word in (("allocated_bytes", "allocated"), ("reserved_bytes", "reserved")):
        for who, told in (("estimate", "estimated"), ("trace", "traced")):
            cells = [_cells(errors) for errors in _tuning_errors(what, who)]
            lines.append(f"| fine-tuning: {word}, {told} | {' | '.join(cells)} |")
    under, was_under = (sum(row["under"] for row in rows) for rows in (pretraining["rows"], blind["pretraining"]))
    lines += [
        "",
        f"*Blind* is what was predicted before the model had seen an H100 (commit {blind['commit']}, {blind['date']}). *Corrected* is what the model "
        f"predicts for the same runs, and a few more, after it learned from them: it does not show how far a prediction for another card is right. "
        f"Blind, the process took more than the high end of the plan's range in {was_under} of {len(blind['pretraining'])} pretraining runs; corrected, in "
        f"{under} of {len(pretraining['rows'])}. {_card(pretraining)}.",
    ]  # fmt: skip
    return "\n".join(lines)


def _told(errors: list[float]) -> str:
    return f"{median(map(abs, errors)) * 100:.1f}%, {max(errors, key=abs) * 100:+.1f}%"


def sentence() -> str:
    """For README.md: how far blind predictions were off, beside those that these runs corrected."""
    blind, known = result("gpu_h100_blind"), result("gpu_h100_forecasts")
    memory, times = result("gpu_h100_memory")["rows"], blind["times"]
    lines = [
        "| on an H100: median error, largest | blind | corrected with these runs |", "| --- | ---: | ---: |",
        *(
            f"| {name}, pretraining | {_told([row[f'{key}_error'] for row in blind['pretraining']])} | "
            f"{_told([row[f'{key}_error'] for row in memory])} |"
            for key, name in (("process", "what nvidia-smi shows"), ("ledger", "peak of PyTorch, estimated"), ("allocated", "peak of PyTorch, traced"))
        ),
        f"| reserved memory of fine-tuning, estimated | {' | '.join(map(_told, _tuning_errors('reserved_bytes', 'estimate')))} |",
        f"| time of a step, from the data sheet | {_told([row['catalogue_error'] for row in times])} | "
        f"{_told([row['catalogue_error'] for row in known['rows']])} |",
        f"| energy of a step, and so its price | {_told([row['energy_error'] for row in times])} | – |",
        "",
        f"*Blind*: {len(blind['pretraining'])} pretraining runs, {len(blind['finetuning'])} of fine-tuning and {len(times)} timed steps, predicted before the model "
        "had seen an H100. The right column is not a prediction: the model learned from these runs. On another kind of card expect the left one "
        "([all runs](docs/measured.md)).",
    ]  # fmt: skip
    return "\n".join(lines)


def memory() -> str:
    """Every pretraining run."""
    lines = [
        "| run | step | mode | dtype | allocated GiB | traced | estimated | reserved GiB | traced | process GiB | traced |",
        "| --- | --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in result("gpu_h100_memory")["rows"]:
        real = row["measured"]
        lines.append(
            f"| {row['name']} | {row['step']} | {'compiled' if row['compiled'] else 'eager'} | {row['dtype']} | "
            f"{real['allocated_bytes'] / GIB:.2f} | {row['allocated_error'] * 100:+.2f} % | {row['ledger_error'] * 100:+.2f} % | "
            f"{real['reserved_bytes'] / GIB:.2f} | {row['reserved_error'] * 100:+.2f} % | "
            f"{real['process_bytes'] / GIB:.2f} | {row['process_error'] * 100:+.1f} % |"
        )
    return "\n".join(lines)


def finetuning() -> str:
    """The runs of full size, and the furthest of the others."""
    rows = [row for row in result("gpu_h100_finetune")["rows"] if "error" not in row]
    large = [row for row in rows if row["name"].startswith("full size")]
    others = sorted(
        (row for row in rows if row not in large), key=lambda row: -max(abs(row[w]["trace_error"]) for w in ("allocated_bytes", "reserved_bytes"))
    )  # fmt: skip
    lines = [
        "| run | allocated GiB | traced | estimated | reserved GiB | traced | estimated |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in [*large, *others[:6]]:
        cells = []
        for what in ("allocated_bytes", "reserved_bytes"):
            one = row[what]
            cells.append(
                f"{one['real'] / GIB:.3f} | {one['trace_error'] * 100:+.3f} % | {one['estimate_error'] * 100:+.3f} %"
            )
        lines.append(f"| {row['name'].removeprefix('full size: ')} | {' | '.join(cells)} |")
    return "\n".join(lines)


def ways() -> str:
    """Steps of each way to run a model, beside nanoGPT's compiled one."""
    found = result("gpu_h100_ways")
    shares = {row["title"]: row["share"] for card in result("limit")["cards"] for row in card["rows"] if "share" in row}
    lines = [
        "| model and way | ms a step | tokens/s | times nanoGPT (range) | share of the limit | kernels ran | allocated GiB | reserved GiB |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in found["rows"]:
        if not row.get("blocks"):
            continue
        profile = row.get("profile") or {}
        busy = f"{profile['busy_s'] / row['step_s']:.0%}" if profile.get("busy_s") else "–"
        times = (
            f"{row['ratio']:.2f} ({row['ratio_range'][0]:.2f} to {row['ratio_range'][1]:.2f})"
            if "ratio" in row
            else "–"
        )
        share = f"{shares[row['title']] * 100:.0f} %" if row["title"] in shares else "not measured"
        lines.append(
            f"| {row['title']} | {row['step_s'] * 1e3:,.1f} | {row['tokens_per_s']:,.0f} | {times} | {share} "
            f"| {busy} | {row['allocated_bytes'] / GIB:.2f} | {row['reserved_bytes'] / GIB:.2f} |"
        )
    return "\n".join(lines)


SIDES = {
    "nanogpt": "nanoGPT's train.py",
    "foretrain": "foretrain, `cuda_graph`",
    "no graph": "foretrain",
    "masters": "foretrain, `master_weights`",
}


def whole_runs() -> str:
    """nanoGPT's own train.py and foretrain train, whole processes whose kernels were compiled before."""
    lines = [
        "| run | program | wall s | ms a step | times nanoGPT (step) | resident MB | reserved GiB |", "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]  # fmt: skip
    for run in result("gpu_h100_real")["runs"]:
        rival = run["nanogpt"][0]["step_s"]
        for side in run["ways"]:
            for row in run[side]:
                held = f"{max(p['reserved_bytes'] for p in row['phases']) / GIB:.2f}" if row.get("phases") else "–"
                lines.append(
                    f"| {run['run']}, {run['steps']} steps | {SIDES[side]} | {row['wall_s']:.1f} | {row['step_s'] * 1e3:.1f} | "
                    f"{rival / row['step_s']:.2f} | {row['resident_bytes'] / 1e6:,.0f} | {held} |"
                )
    return "\n".join(lines)


def _errors(row: dict[str, Any], *kinds: str) -> str:
    """Cells of signed errors; a dash where there is none."""
    return " | ".join(f"{row[f'{kind}_error'] * 100:+.1f} %" if f"{kind}_error" in row else "–" for kind in kinds)


def forecasts() -> str:
    """How far forecasts were off, for all steps that were timed on the card, and the furthest of them."""
    found = result("gpu_h100_forecasts")
    lines = ["| step | measured ms | catalogue | calibrated |", "| --- | ---: | ---: | ---: |"]
    for row in sorted(found["rows"], key=lambda row: -abs(row["calibrated_error"])):
        errors = _errors(row, "catalogue", "calibrated")
        lines.append(f"| {row['title']} | {row['measured_s'] * 1e3:,.1f} | {errors} |")
    words = [
        f"{by}, the median error is {told['median_error'] * 100:.0f}%, and {told['within_range']} steps lie within the range"
        for by, told in (("by the catalogue", found["summary"]["catalogue"]), ("by the calibration", found["summary"]["calibrated"]))
    ]  # fmt: skip
    return "\n".join([*lines, "", f"{'; '.join(words).capitalize()}."])


def times() -> str:
    """Forecasts of a step's time, by the catalogue and by a calibration, for every step that was timed."""
    found = result("gpu_h100_speed")
    lines = [
        "| run | mode | dtype | measured ms | catalogue | calibrated | energy |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for row in found["rows"]:
        if "step_s" not in row["measured"]:
            continue
        errors = _errors(row, "catalogue", "calibrated", "energy")
        mode = "compiled" if row["compiled"] else "eager"
        lines.append(f"| {row['name']} | {mode} | {row['dtype']} | {row['measured']['step_s'] * 1e3:,.1f} | {errors} |")
    return "\n".join(lines)


def kernels() -> str:
    """Where the card's time goes in a compiled step of GPT-2 124M: ours with half-precision weights and nanoGPT's."""
    rows = {row["name"]: row for row in result("gpu_h100_ways")["rows"] if row["model"] == "124M" and row["compiled"]}
    sides = [rows["nanoGPT"], rows["master weights"]]
    groups: dict[str, list[float]] = {}
    for i, side in enumerate(sides):
        for name, _, seconds in side["profile"]["kernels"]:
            groups.setdefault(_group(name), [0.0, 0.0])[i] += seconds * 1e3
    lines = ["| kernels | nanoGPT, ms a step | foretrain, master weights |", "| --- | ---: | ---: |"]
    lines += [
        f"| {name} | {a:.1f} | {b:.1f} |" for name, (a, b) in sorted(groups.items(), key=lambda item: -item[1][0])
    ]
    steps = [side["step_s"] * 1e3 for side in sides]
    busy = [side["profile"]["busy_s"] * 1e3 for side in sides]
    lines.append(f"| no kernel ran | {steps[0] - busy[0]:.1f} | {steps[1] - busy[1]:.1f} |")
    lines.append(f"| the step | {steps[0]:.1f} | {steps[1]:.1f} |")
    return "\n".join(lines)


def _group(kernel: str) -> str:
    if kernel.startswith("nvjet") or "splitKreduce" in kernel:
        return "matmuls (cuBLAS)"
    if "cudnn" in kernel or "flash" in kernel:
        return "attention (cuDNN)"
    if "softmax" in kernel or "nll" in kernel:
        return "softmax and loss"
    if "norm" in kernel:
        return "norms, with what is fused into them"
    if "gelu" in kernel:
        return "GELU"
    if "multi_tensor" in kernel or "adam" in kernel.lower():
        return "AdamW and clipping"
    return "casts, sums of gradients, copies"
