"""Generated parts of the quick starts and of the reference: consoles of benchmarks/quick_start.py, exit codes."""

from typing import Any

import command_pages
import question_tables
from results import result

from foretrain.base.errors import EXIT_CODE_OF, ExitCode


def console(verb: str) -> str:
    """What a command of the quick start printed when the benchmark ran it."""
    return f"```console\n{result('quick_start')['consoles'][verb]}\n```"


def baby_plan() -> str:
    """The verdict and the times, without the hour at which it would have ended then."""
    parts = result("quick_start")["consoles"]["plan"].split("\n\n")
    kept = [part for part in parts if part.splitlines()[0].startswith(("$", "Verdict", "Time"))]
    lines = [line for line in "\n\n".join(kept).splitlines() if "started now" not in line]
    return "```console\n" + "\n".join(lines) + "\n…\n```"


def baby_train() -> str:
    found = result("quick_start")
    run, seconds = found["run"], found["seconds"]["train"]
    return (
        f"{console('train')}\n\n"
        f"On {found['machine']['cpu'].removeprefix('CPU (').removesuffix(')')}, {_load(found)}, it took "
        f"{seconds:.0f} s (`python benchmarks/quick_start.py`, {found['date']}): from {run['first_val_loss']:.2f} to "
        f"{run['val_loss']:.2f} nats a byte."
    )


def _load(found: dict[str, Any]) -> str:
    """Whether the machine was its own: `load` is the kernel's average of a minute."""
    shared = (
        "shared with other programs, so the times below are longer than forecast"
        if found["load"] > 3
        else "idle otherwise"
    )
    return f"{shared} (load {found['load']:.0f})"


def exit_codes() -> str:
    lines = ["| code | meaning | ids of its errors |", "| ---: | --- | --- |"]
    for code in ExitCode:
        families = ", ".join(f"`{family}.*`" for family, own in EXIT_CODE_OF.items() if own == code)
        lines.append(f"| {int(code)} | {command_pages.MEANINGS[code.name]} | {families} |")
    return "\n".join(lines)


def reserved() -> str:
    """How near the estimate's reserved memory is to a trace's, by mode and step."""
    found = result("reserved")
    lines = [
        "| what | configs | reserved / allocated | median error | errors | within 2 % |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in found["summary"]:
        least, _, most = row["reserved_over_allocated"]
        lines.append(
            f"| {row['mode']}, {row['step']}'s step | {row['configs']} | {least:.2f} to {most:.2f} | {row['median_abs_error']:.2%} "
            f"| {row['lowest_error']:+.1%} to {row['highest_error']:+.1%} | {row['within_2_percent']} |"
        )
    source = f"(`python benchmarks/reserved.py`, random configs on five cards, torch {found['versions']['torch']}, {found['date']})"
    return "\n".join([*lines, "", source])


PARTS = {
    "reserved": reserved,
    "start-baby-plan": baby_plan,
    "start-baby-train": baby_train,
    "start-baby-compare": lambda: console("compare"),
    "start-baby-sample": lambda: console("sample"),
    "circulating-advice": question_tables.circulating,
    "exit-codes": exit_codes,
    "commands": command_pages.reference,
}
