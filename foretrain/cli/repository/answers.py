"""What `foretrain plan` says of one config file, asked of a process of its own: a bad one does not end the others."""

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from foretrain.base import processes
from foretrain.base.errors import UserError
from foretrain.predict.memory import VERDICTS
from foretrain.predict.plan import SCHEMA

MOST_S = 300  # a plan takes a second; of what is too large to be planned in this time nothing is said


class Answer(NamedTuple):
    """A plan in short. None: it is not known. `problem`: the sentence, where the config cannot be planned."""

    verdict: str | None = None
    needed_bytes: int | None = None
    available_bytes: int | None = None
    total_s: float | None = None
    cost: float | None = None
    currency: str = ""
    problem: str = ""


def asked(path: Path, words: Sequence[str], *more: str) -> subprocess.CompletedProcess[str]:
    """Run `foretrain plan` with a file (after ./) and options. Raises UserError where it takes too long."""
    named = str(path) if path.is_absolute() else os.path.join(".", path)  # noqa: PTH118 - Path drops the ./
    command = processes.command("foretrain", "plan", named, *words, *more)
    try:
        return subprocess.run(
            command, env=processes.variables(), stdin=subprocess.DEVNULL, capture_output=True, text=True,
            encoding="utf-8", timeout=MOST_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise UserError("environment.plan_too_long", path=str(path), seconds=MOST_S) from None


def answer(path: Path, words: Sequence[str]) -> Answer:
    done = asked(path, words, "--json", "--quiet")
    try:
        value = json.loads(done.stdout)
    except ValueError:
        return Answer(problem=(done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    if value.get("schema") != SCHEMA:
        return Answer(problem=str(value.get("message", value.get("schema"))))
    return in_short(value)


def in_short(value: dict[str, Any]) -> Answer:
    """The figures of the step that the answer is about: of a plan there are two, of fine-tuning one."""
    step, memory, timing = value.get("step"), value["memory"], value.get("timing")
    if isinstance(memory, list):
        memory = next(each for each in memory if each["step"] == step)
    known, timing = [phase.get("verdict") for phase in memory["phases"]], timing or {}
    prices, total = value.get("config") or timing.get("prices") or {}, timing.get("total_s")
    return Answer(
        verdict=next(verdict for verdict in VERDICTS if verdict in known),
        needed_bytes=max(phase["needed_expected_bytes"] for phase in memory["phases"]),
        available_bytes=value.get("available_bytes"),
        total_s=total["expected_s"] if total else None,
        cost=timing["cost_expected"] if total else None,
        currency=prices.get("currency", ""),
    )
