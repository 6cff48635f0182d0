"""The generated parts of docs/fine-tuning.md about published runs, from the result of benchmarks/finetune_measured.py."""

import statistics
from typing import Any

from results import result

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
    times = [row for row in rows if row["kind"] == "tokens/s"]
    ran = [row for row in rows if row["kind"] != "tokens/s"]
    inside = sum(row["in_range"] for row in times)
    lines += [
        "",
        f"*Within*: 3 % of memory, 15 % of tokens a second. {inside} of {len(times)} times lie in the range that the plan "
        f"gives. All {len(ran)} rows of memory are of runs that went through; {sum(row['refused'] for row in ran)} of them are said "
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


PARTS = {
    "finetune-measured": measured, "finetune-misses": misses, "finetune-rows": rows, "finetune-left-out": left_out,
}  # fmt: skip
