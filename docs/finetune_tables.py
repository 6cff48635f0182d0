"""The generated parts of docs/fine-tuning.md: published runs, from the result of benchmarks/finetune_measured.py,
traces, from that of benchmarks/finetune_traces.py, and what compiling saves, by the estimate."""

import statistics
from typing import Any

from results import result

from foretrain.config.finetune.options import FineTune
from foretrain.config.hub.source import find_source
from foretrain.hardware.catalogue import find_gpu
from foretrain.predict.finetune.memory import estimated

KINDS = {"peak": "peak allocated", "nvidia-smi": "what nvidia-smi shows", "tokens/s": "tokens a second"}
MISSES = {"peak": 0.03, "nvidia-smi": 0.03, "tokens/s": 0.15}  # from where on a row is shown


def _errors(rows: list[dict[str, Any]], column: str) -> list[float]:
    return [row[column] / row["measured"] - 1 for row in rows]


def _summary(name: str, rows: list[dict[str, Any]], limit: float) -> str:
    cells = [name, str(len(rows))]
    for column in ("planned", "as_run"):
        errors = [abs(error) for error in _errors(rows, column)]
        within = sum(error <= limit for error in errors)
        cells += [f"{statistics.median(errors) * 100:.2f} %", f"{max(errors) * 100:.1f} %", str(within)]
    return f"| {' | '.join(cells)} |"


def measured() -> str:
    """Medians of each figure, of all rows and of those without fused kernels."""
    found = result("finetune_measured")
    lines = [
        "| figure | rows | plan: median error | largest | within | code that ran: median error | largest | within |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for kind, name in KINDS.items():
        rows = [row for row in found["rows"] if row["kind"] == kind]
        plain = [row for row in rows if row["kernels"] == "none"]
        lines += [_summary(name, rows, MISSES[kind]), _summary("… without fused kernels", plain, MISSES[kind])]
    rows = found["rows"]
    times, shown = ([row for row in rows if row["kind"] == kind] for kind in ("tokens/s", "nvidia-smi"))
    plain = [row for row in shown if row["kernels"] == "none"]
    ran = [row for row in rows if row["kind"] != "tokens/s"]
    inside = sum(row["in_range"] for row in times)
    lines += [
        "",
        f"*Within*: 3 % of memory, 15 % of tokens a second. {inside} of {len(times)} times lie in the range that the plan "
        f"gives, and {sum(row['in_range'] for row in shown)} of {len(shown)} figures of nvidia-smi "
        f"({sum(row['in_range'] for row in plain)} of {len(plain)} without fused kernels). All {len(ran)} rows of memory are of runs that went through; {sum(row['refused'] for row in ran)} of them are said "
        "not to fit. "
        f"(`python benchmarks/finetune_measured.py`, {found['date']})",
    ]
    return "\n".join(lines)


def misses() -> str:
    """Rows where even the code that ran is estimated further away than that, with what is known of the cause."""
    lines = [
        "| row | run | figure | measured | plan | code that ran | cause |",
        "| --- | --- | --- | ---: | ---: | ---: | --- |",
    ]
    for row in result("finetune_measured")["rows"]:
        planned, ran = (_errors([row], column)[0] for column in ("planned", "as_run"))
        if abs(ran) <= MISSES[row["kind"]]:
            continue
        run = f"{row['model']}, {row['method']}, {row['batch']}, {row['code']}"
        run += f", {row['kernels']}" if row["kernels"] != "none" else ""
        size = f"{row['measured'] / 2**30:.2f} GiB" if row["kind"] != "tokens/s" else f"{row['measured']:,.0f}"
        lines.append(
            f"| {row['id']} | {run} | {row['kind']} | {size} | {planned * 100:+.1f} % | {ran * 100:+.1f} % | {row['why']} |"
        )
    return "\n".join(lines)


def plan_misses() -> str:
    """Peaks that a plan misses by more than that, with what its code has otherwise than the run's."""
    lines = ["| row | run | measured | plan | what the run had otherwise |", "| --- | --- | ---: | ---: | --- |"]
    for row in result("finetune_measured")["rows"]:
        (planned,) = _errors([row], "planned")
        if row["kind"] == "peak" and abs(planned) > MISSES["peak"]:
            run = f"{row['model']}, {row['method']}, {row['batch']}"
            run += f", {row['kernels']}" if row["kernels"] != "none" else ""
            size = f"{row['measured'] / 2**30:.2f} GiB"
            lines.append(f"| {row['id']} | {run} | {size} | {planned * 100:+.1f} % | {row['why_planned']} |")
    return "\n".join(lines)


def rows() -> str:
    """Every row."""
    lines = [
        "| row | model | method | batch | code | kernels | figure | measured | plan | code that ran |",
        "| --- | --- | --- | --- | --- | --- | --- | ---: | ---: | ---: |",
    ]
    for row in result("finetune_measured")["rows"]:
        planned, ran = (_errors([row], column)[0] for column in ("planned", "as_run"))
        size = f"{row['measured'] / 2**30:.2f} GiB" if row["kind"] != "tokens/s" else f"{row['measured']:,.0f}"
        lines.append(
            f"| {row['id']} | {row['model']} | {row['method']} | {row['batch']} | {row['code']} | {row['kernels']} | "
            f"{row['kind']} | {size} | {planned * 100:+.1f} % | {ran * 100:+.2f} % |"
        )
    return "\n".join(lines)


def left_out() -> str:
    """What was not compared, and why."""
    lines = ["| rows | why |", "| --- | --- |"]
    lines += [f"| {each['rows']} | {each['why']} |" for each in result("finetune_measured")["left_out"]]
    return "\n".join(lines)


METHODS = ("full", "lora", "qlora")
QUICK_S = 20  # of processor time, that a trace at full size should take


def traces() -> str:
    """How right traces of small models are, and how long those of published ones take."""
    found = result("finetune_traces")
    small, large = found["small"], found["full_size"]
    off = max(abs(row["traced_bytes"] - row["real_bytes"]) for row in small)
    slow = [f"{row['model']} {row['method']}" for row in large if row["cpu_seconds"] > QUICK_S]
    missed = f" More than {QUICK_S} s: {', '.join(slow)}." if slow else ""
    lines = [
        f"{len(small)} small runs ({len({row['model'] for row in small})} models, full, LoRA, DoRA and QLoRA, with and "
        f"without checkpointing) were traced and then done on a CPU: the peaks differ by at most {off} bytes, "
        f"{max(abs(row['error']) for row in small) * 100:.3f} %.",
        "",
        f"How long published models take on a {found['machine']['cpu']}, in seconds of processor time of all processes, with "
        f"nothing kept (2 × 1024 tokens, bf16 autocast, checkpointing; RTX 4090).{missed}",
        "",
        "| model | full: seconds | reserved | LoRA: seconds | reserved | QLoRA: seconds | reserved |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for model in dict.fromkeys(row["model"] for row in large):
        rows = {row["method"]: row for row in large if row["model"] == model}
        cells = [f"{rows[m]['cpu_seconds']:.1f} | {rows[m]['reserved_bytes'] / 2**30:.2f} GiB" for m in METHODS]
        lines.append(f"| {model} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"(`python benchmarks/finetune_traces.py`, {found['date']})"])


COMPILED = ("llama-3.2-1b", "qwen3-0.6b", "qwen3-1.7b", "qwen2.5-0.5b", "smollm2-360m", "pythia-410m", "gpt2")


def compiled() -> str:
    """How much less the steady step of published models needs where it is compiled."""
    saved: dict[str, list[float]] = {"full": [], "lora": []}
    for method, shares in saved.items():
        for name in COMPILED:
            facts = find_source(name).facts
            assert facts is not None
            tune = FineTune(method=method, dtype="bfloat16", amp="bf16", batch_size=2, seq_len=1024)
            runs = (tune, tune.model_copy(update={"compile": True}))
            eager, fused = (
                estimated(facts, run, find_gpu("RTX 4090")).memory.phase("steady_step").allocated_bytes for run in runs
            )
            shares.append(1 - fused / eager)
    full, lora = (f"{min(shares) * 100:.0f} to {max(shares) * 100:.0f} %" for shares in saved.values())
    return (
        f"Without checkpointing the steady step's estimated peak is {full} lower in full fine-tuning and {lora} lower with LoRA "
        f"({', '.join(COMPILED)}; 2 × 1024 tokens, bf16 autocast)."
    )


PARTS = {
    "finetune-compiled": compiled, "finetune-traces": traces, "finetune-measured": measured, "finetune-misses": misses, "finetune-plan-misses": plan_misses, "finetune-rows": rows, "finetune-left-out": left_out,
}  # fmt: skip
