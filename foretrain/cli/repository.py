"""The configs of a repository: checked before a commit, and told about on a pull request.

    python -P -m foretrain.cli.repository "--gpu=RTX 4070" a.toml b.py
    python -P -m foretrain.cli.repository pull-request --base main "--gpu=RTX 4070" --configs "config/*.toml"

The first is the hook of .pre-commit-hooks.yaml, `foretrain plan --check` of each config: options come first, `--` may
follow. The second writes Markdown, which `action.yml` puts on the pull request; names and sentences in it may be
written by anybody, so none can become markup, a link or a mention. Configs are parsed and never run.
"""

import argparse
import html
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from foretrain.base import processes
from foretrain.base.errors import ExitCode, UserError
from foretrain.base.installation import installed
from foretrain.base.messages import printable, say
from foretrain.predict.memory import FAILING, VERDICTS
from foretrain.predict.plan import SCHEMA

MOST_S = 300  # a plan takes a second; a config that takes longer gets no comment


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


BAD = (ExitCode.CHECK_FAILED, ExitCode.USAGE, ExitCode.ENVIRONMENT)  # the later the worse


def pre_commit(words: Sequence[str]) -> int:
    """Print a line for each file, and for each problem its sentence; the worst exit code."""
    options = list(takewhile(lambda word: word.startswith("--") and word != "--" and not os.path.lexists(word), words))
    files = words[len(options) + (words[len(options) : len(options) + 1] == ["--"]) :]
    worst = int(ExitCode.DONE)
    for file in files:
        try:
            done = asked(Path(file), options, "--check", "--oneline", "--quiet")
            text, code = f"{done.stdout}{done.stderr}".strip(), done.returncode
        except UserError as error:
            text, code = str(error), int(error.exit_code)
        print(printable(f"{file}: {text}"))
        if code:
            worst = max(worst, code, key=lambda each: (each in BAD, BAD.index(each) if each in BAD else each))
    return worst


MARK = "<!-- foretrain -->"  # by which the comment is found and replaced
MOST_CONFIGS, LONGEST = 50, 300  # a comment has room for 65,536 characters
COLUMNS = ("verdict", "memory", "time", "cost")


class Change(NamedTuple):
    path: str
    before: Answer | None
    after: Answer | None


def git(*words: str) -> bytes:
    """What git prints. Raises UserError 'environment.git' with what it says."""
    try:
        done = subprocess.run(["git", *words], capture_output=True, check=False)
    except OSError as error:
        raise UserError("environment.git", reason=error.strerror or str(error)) from None
    if done.returncode:
        lines = os.fsdecode(done.stderr).strip().splitlines() or ["?"]
        raise UserError("environment.git", reason=lines[-1][:LONGEST])
    return done.stdout


def changed(base: str, patterns: Sequence[str]) -> list[tuple[str, str]]:
    """[(A, M or D; path)] of the configs that differ from where this branch left `base`; below the current folder."""
    words = ["--no-renames", "--name-status", "-z", "--relative", "--end-of-options", f"{base}...HEAD", "--"]
    listed = os.fsdecode(git("diff", *words)).split("\0")
    pairs = zip(listed[::2], listed[1::2], strict=False)
    return [(kind, path) for kind, path in pairs if any(PurePosixPath(path).match(each) for each in patterns)]


def changes(base: str, patterns: Sequence[str], words: Sequence[str]) -> Iterator[Change]:
    left = git("merge-base", "--end-of-options", base, "HEAD").decode().strip()
    repository = Path(os.fsdecode(git("rev-parse", "--show-toplevel")).strip("\r\n")).resolve()
    with tempfile.TemporaryDirectory() as folder:
        for kind, path in changed(base, patterns)[:MOST_CONFIGS]:
            before = None
            if kind != "A":
                old = Path(folder) / path
                old.parent.mkdir(parents=True, exist_ok=True)
                old.write_bytes(git("show", f"{left}:./{path}"))
                before = answer(old, words)
            after = None if kind == "D" else _after(Path(path), repository, words)
            yield Change(path, before, after)


def _after(path: Path, repository: Path, words: Sequence[str]) -> Answer:
    """The plan of a file of the repository. A link may lead to any file of this machine, which is not for everybody."""
    if not path.resolve().is_relative_to(repository):
        return Answer(problem=say("pull_request.outside"))
    return answer(path, words)


def safe(text: str) -> str:
    escaped = html.escape(" ".join(printable(text).split())[:LONGEST], quote=False)
    return "".join(f"&#{ord(c)};" if c in "|`*_[]()@#\\~:!" else c for c in escaped)


def cells(row: Change) -> list[str]:
    if row.after is None:
        return [say("pull_request.removed"), *("" for _ in COLUMNS[1:])]
    if row.after.problem:
        return [f"**{safe(row.after.problem)}**", *("" for _ in COLUMNS[1:])]
    before = None if row.before is None or row.before.problem else row.before
    return [_cell(shown, before, row.after) for shown in (_verdict, _memory, _time, _cost)]


def _cell(shown: Callable[[Answer], str], before: Answer | None, after: Answer) -> str:
    now = shown(after)
    was = now if before is None else shown(before)
    return now if was == now else say("pull_request.changed", before=was, after=now)


def _verdict(found: Answer) -> str:
    word = say(f"word.{found.verdict}") if found.verdict else say("unit.unknown")
    return f"**{word}**" if found.verdict in FAILING else word


def _memory(found: Answer) -> str:
    if found.available_bytes is None:
        return say("pull_request.needs", needed=found.needed_bytes)
    return say("pull_request.needs_of", needed=found.needed_bytes, available=found.available_bytes)


def _time(found: Answer) -> str:
    return say("unit.unknown") if found.total_s is None else say("pull_request.takes", total=found.total_s)


def _cost(found: Answer) -> str:
    if found.cost is None:
        return say("unit.unknown")
    return say("pull_request.costs", cost=found.cost, currency=safe(found.currency))


def markdown(rows: Sequence[Change], words: Sequence[str]) -> str:
    head = [MARK, f"### {say('pull_request.title')}", ""]
    if not rows:
        return "\n".join([*head, say("pull_request.none"), ""])
    titles = [say("pull_request.config"), *(say(f"pull_request.{name}") for name in COLUMNS)]
    lines = [f"| {' | '.join(titles)} |", f"|{' --- |' * len(titles)}"]
    lines += [f"| {' | '.join([safe(row.path), *cells(row)])} |" for row in rows]
    command = f"<code>{safe(' '.join(['foretrain plan …', *words]))}</code>"
    return "\n".join([*head, *lines, "", say("pull_request.by", version=installed("foretrain"), command=command), ""])


def pull_request(arguments: Sequence[str]) -> int:
    """Write the comment; 3 with --check where a config does not fit, 2 where one is wrong."""
    parser = argparse.ArgumentParser(
        prog="pull-request", description="Write what a pull request changes of configs.", allow_abbrev=False
    )
    parser.add_argument("--base", required=True, help="the branch or commit to compare with")
    parser.add_argument("--configs", nargs="+", required=True, help="patterns of their paths, such as 'config/*.toml'")
    parser.add_argument("--out", type=Path, help="the file to write; otherwise stdout")
    parser.add_argument("--check", action="store_true", help="exit code 3 where one does not fit, 2 where one is wrong")
    options, words = parser.parse_known_args(arguments)
    try:
        rows = list(changes(options.base, options.configs, words))
    except UserError as error:
        print(error, file=sys.stderr)
        return int(error.exit_code)
    text = markdown(rows, words)
    if options.out:
        options.out.write_text(text, "utf-8")
    else:
        print(text, end="")
    after = [row.after for row in rows if row.after is not None]
    if options.check and any(each.problem for each in after):
        return int(ExitCode.USAGE)
    return int(ExitCode.CHECK_FAILED if options.check and any(e.verdict in FAILING for e in after) else 0)


if __name__ == "__main__":
    of_pull_request = sys.argv[1:2] == ["pull-request"]
    sys.exit(pull_request(sys.argv[2:]) if of_pull_request else pre_commit(sys.argv[1:]))
