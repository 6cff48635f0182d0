"""docs/contributed.md: every file of `foretrain verify` in benchmarks/contributed, a section a card."""

import re
from itertools import groupby
from pathlib import Path

from results import ROOT

from foretrain.base.messages import say
from foretrain.base.units import format_bytes, format_small_percent, format_small_signed_percent
from foretrain.measure.verify_record import CONTRIBUTED, Verification, read

FOLDER = ROOT / CONTRIBUTED
NONE = "Nobody has contributed a card yet. Be the first; it takes about ten minutes."


def files(folder: Path = FOLDER) -> list[tuple[str, Verification]]:
    """(file's name, what is in it), the newest first within a card. Raises UserError for a file that is damaged."""
    found = [(path.name, read(path)) for path in sorted(folder.glob("*.json"))]
    found.sort(key=lambda pair: pair[1].date, reverse=True)
    return sorted(found, key=lambda pair: pair[1].machine.device)


def obstacle(found: Verification) -> str:
    """Why a file cannot be shown as a real machine's; '' where it can."""
    if found.machine.kind == "cuda" and not re.fullmatch(r"\d+(\.\d+)+", found.machine.driver):
        return f"the driver {found.machine.driver!r} is not NVIDIA's"
    if not found.of("measured"):
        return "no case was measured"
    return ""


def contributed(folder: Path = FOLDER) -> str:
    """The sections, or the sentence that there is nothing yet."""
    parts = []
    for device, group in groupby(files(folder), key=lambda pair: pair[1].machine.device):
        parts.append(f"## {escaped(device)}")
        parts += [_table(name, found) for name, found in group]
    return "\n\n".join(parts) or NONE


def _table(name: str, found: Verification) -> str:
    if reason := obstacle(found):
        raise SystemExit(f"{CONTRIBUTED}/{name}: {reason}")
    machine, versions = found.machine, found.versions
    who = (
        f"contributed by [{found.name}](https://github.com/{found.name})" if found.name else ""
    )  # its letters are checked
    facts = [
        found.date,
        who,
        f"torch {escaped(versions.torch)}",
        machine.driver and f"driver {escaped(machine.driver)}",
    ]
    facts += [machine.memory_bytes and format_bytes(machine.memory_bytes), escaped(machine.system)]
    facts += [f"foretrain {escaped(versions.foretrain)} ({escaped(versions.code)})"]
    counts = [f"{len(found.of('measured'))} of {len(found.outcomes)} cases measured"]
    if ran_out := len(found.of("out_of_memory")):
        counts.append(f"{ran_out} ran out of memory although predicted to fit")
    lines = [
        f"{' · '.join(str(fact) for fact in facts if fact)}. {'; '.join(counts)} ([file](../{CONTRIBUTED}/{name})).",
        "",
        "| quantity | cases | median error | worst error | in the stated range | worst in |",
        "| --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for each in found.by_quantity:
        inside = "" if each.inside is None else f"{each.inside} of {each.cases}"
        lines.append(
            f"| {say(f'verify.quantity.{each.quantity}')} | {each.cases} | {format_small_percent(each.median)} | "
            f"{format_small_signed_percent(each.worst)} | {inside} | {escaped(each.worst_case)} |"
        )
    return "\n".join(lines)


def escaped(text: str) -> str:
    """A stranger's text as Markdown shows it, and nothing else."""
    return re.sub(r"([\\`*_{}\[\]<>#|!~])", r"\\\1", text)
