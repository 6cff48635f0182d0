"""Configs that are wrong: put through the real command line by thousands, and judged by an oracle of its own."""

import contextlib
import itertools
import json
import os
import sys
import unicodedata
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

from foretrain.base.errors import ExitCode, UserError
from tests.faults import grammar, oracle
from tests.faults.grammar import Case
from tests.faults.limits import trials
from tests.kit.command import foretrain

REACHED = "reached-the-folder"  # what `train` is stopped with where it would make the run's folder
DOCUMENTED = {int(code) for code in ExitCode} - {int(ExitCode.INTERNAL)}
FATES = ("accepted", "refused")


def _enough(*_: Any) -> Any:
    """Stands in for the place where `train` makes its folder: the config was accepted."""
    raise UserError("environment.no_rank", count=REACHED)


def _strict(text: str) -> Any:
    def refuse(word: str) -> Any:
        raise ValueError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


def run(words: tuple[str, ...]) -> tuple[int, str, str]:
    stop = (
        mock.patch("foretrain.app.training_session.directory_of", _enough)
        if words[0] == "train"
        else contextlib.nullcontext()
    )
    with stop:
        done = foretrain(*words)
    return done.returncode, done.stdout, done.stderr


def fate_of(case: Case) -> dict[str, Any]:
    for name, data in case.files.items():
        Path(name).write_bytes(data)
    try:
        code, out, err = run(case.words)
    finally:
        for name in case.files:
            Path(name).unlink()
    fate, why = judged(case, code, out, err)
    return {"verb": case.verb, "fate": fate, "why": why, "code": code}


def judged(case: Case, code: int, out: str, err: str) -> tuple[str, str]:
    """(fate, why) of the three things that can be seen."""
    if "Traceback" in err or code not in DOCUMENTED:
        return "traceback", f"exit code {code}: {err.strip().splitlines()[-1] if err.strip() else ''}"[:400]
    if bad := next((c for c in out + err if unicodedata.category(c) == "Cc" and c not in "\n\t"), None):
        return "control character", repr(bad)
    reached = case.verb == "train" and REACHED in err
    accepted = code in (0, int(ExitCode.CHECK_FAILED)) or reached
    if code and not err.strip():
        return "no sentence", f"exit code {code}"
    if "--json" in itertools.takewhile(lambda word: word != "--", case.words):  # behind a -- nothing is an option
        try:
            value = _strict(out)
        except ValueError as error:
            return "no JSON", f"{error}: {out[:200]}"
        if accepted and not reached and (wrong := in_json(case, value)):
            return wrong
    if not accepted:
        return "refused", ""
    if case.parts and (reason := oracle.unreachable(case)):
        return "silent acceptance", reason
    return "accepted", ""


def in_json(case: Case, value: dict[str, Any]) -> tuple[str, str] | None:
    """What is wrong with an accepted config's object."""
    config = value.get("config")
    if case.parts and isinstance(config, dict) and case.verb in ("show", "plan_json"):
        own = dict.fromkeys(()) if case.verb == "show" else {"vocab_size": None}
        if wrong := oracle.changed(case, {key: now for key, now in config.items() if key not in own}):
            return "silent change", wrong
    # What a comparison or an advice says is a difference, which may be less than nothing.
    if case.verb in ("plan_json", "options") and (wrong := oracle.not_a_quantity(value)):
        return "no quantity", wrong
    return None


def fuzzed_configs(count: int, seed: int) -> dict[str, Any]:
    """Random configs and overrides through `plan`, `train`, `advise` and `compare`."""
    found = trials(count, lambda number: fate_of(grammar.case(number, seed)), alone)
    fates = Counter(each["fate"] for each in found)
    for each in found:
        if each["fate"] not in FATES:
            print(json.dumps({**each, "words": shown(grammar.case(each["number"], seed))}), file=sys.stderr)
    bad = {fate: n for fate, n in fates.items() if fate not in FATES}
    counts = {
        "configs": len(found), "accepted": fates["accepted"], "refused": fates["refused"], "tracebacks": fates["traceback"],
        "hangs": fates["hang"], "silent": fates["silent acceptance"] + fates["silent change"],
        "not_quantities": fates["no quantity"] + fates["no JSON"],
    }  # fmt: skip
    return {**counts, **({"bad": bad} if bad else {}), "ok": not bad and len(found) == count}


def shown(case: Case) -> list[str]:
    files = [f"{name}: {data[:300]!r}" for name, data in case.files.items()]
    return [ascii(word)[:200] for word in case.words] + files


def alone() -> None:
    """A fork's start: no network, no cache of the user's, a folder of its own for what a case may name."""
    os.environ["FORETRAIN_CACHE"] = str(Path("cache").absolute())
    os.environ["COLUMNS"], os.environ["NO_COLOR"] = "80", "1"
    for name in ("data", "cache"):
        Path(name).mkdir(exist_ok=True)
