"""`foretrain tune`: the setting that trains fastest on this machine, measured; tokens per step stay."""

import json
import os
import shlex
from pathlib import Path
from typing import Any

from click.exceptions import Exit
from rich.text import Text

from foretrain.app.train import need_torch
from foretrain.app.tune import check_tunable, job_of
from foretrain.base.errors import ExitCode, UserError
from foretrain.base.messages import printable, say
from foretrain.base.quantities import parse_duration, read
from foretrain.base.units import format_bytes
from foretrain.cli.command import OF_CONFIG, command, flag, json_option, option, quiet_option, words_argument
from foretrain.cli.common import ERR, Status, print_answer, print_notes
from foretrain.config import writer
from foretrain.config.options import RunConfig
from foretrain.config.resolve import resolve, to_toml
from foretrain.measure.space import TUNABLE, Setting, levels_of
from foretrain.measure.tune_record import SCHEMA, Tuning
from foretrain.reports.views import tune as tune_view
from foretrain.reports.views.tune import difference

LEAST_BUDGET_S = 10.0

EPILOG = """Examples:
foretrain tune config/train_shakespeare_char.py --write tuned.toml   (then: foretrain train tuned.toml)
foretrain tune my.toml --budget 10min --trials 40
foretrain tune my.toml --options batch_size,compile,loss_chunk_size
foretrain tune my.toml --gpus 2   (the strategy too: DDP, ZeRO-1, FSDP2)
foretrain tune my.toml --memory_limit=10GiB --json   (every trial, and speed against memory)"""


@command("tune", EPILOG, **OF_CONFIG)
@words_argument
@option("--budget", "How long to search, such as 90s, 3min or 1h.", default="3min")
@option("--trials", "Most settings to try. Default: a quarter of them, 4 to 24.", type=int, low=1, high=1000)
@option(
    "--options",
    "Options to change, such as batch_size,compile. Default: all that keep the learning unchanged.",
    default="",
)
@option("--write FILE.toml", "Write the best config, and every trial next to it as JSON.", type=Path)
@option("--gpus N", "How many cards share each step; how they do is searched too.", default=1, low=1, high=1024)
@flag("--no-cache", "Ignore earlier measurements.")
@json_option
@quiet_option
def tune_command(
    words: list[str],
    budget: str,
    trials: int | None,
    options: str,
    write: Path | None,
    gpus: int,
    no_cache: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Measure which settings are fastest here, without changing tokens per step or the result."""

    need_torch()
    budget_s, wanted = _budget_s(budget), _wanted(options)
    _check_write(write)
    resolved = resolve(words)
    print_notes(resolved.notes, quiet=quiet)
    job = job_of(resolved, wanted, gpus)
    progress = Progress(job.base, quiet=quiet or as_json)
    try:
        found = job.run(budget_s, trials, recall=not no_cache, listen=progress)
    finally:
        progress.close()
    if write is not None and found.stop != "interrupted":
        _write(found, write, quiet=quiet or as_json)
    print_answer(found, SCHEMA, lambda: tune_view.document(found), as_json=as_json)
    if found.stop == "interrupted":
        raise Exit(int(ExitCode.INTERRUPTED))


def _budget_s(text: str) -> float:
    wrong = UserError("usage.tune_budget", text=text[:40])
    seconds = read(parse_duration, text, wrong)
    if seconds < LEAST_BUDGET_S:
        raise wrong
    return seconds


def _check_write(path: Path | None) -> None:
    """Before minutes are spent: a name that cannot be written, or is taken. Raises UserError."""
    if path is None:
        return
    if path.suffix != ".toml":  # nor is '' a name, which is the current folder to Path
        raise UserError("usage.cannot_write_file", path=str(path), reason="its name must end in .toml")
    for each in (path, path.with_suffix(".json")):
        if each.exists():
            raise UserError("usage.cannot_write_file", path=str(each), reason="it is there already")
    if not os.access(path.parent, os.W_OK):
        raise UserError("environment.cannot_write", path=str(path), reason="the folder cannot be written to")


def _wanted(text: str) -> tuple[str, ...]:
    names = tuple(name.strip().replace("-", "_") for name in text.split(",") if name.strip())
    check_tunable(names or (text,) * bool(text), "--options")
    return names


def _write(found: Tuning, path: Path, *, quiet: bool) -> None:
    for each, config in ((path, to_toml(found.config)), (path.with_suffix(".json"), "")):
        writer.write_text(config or json.dumps(found.to_json(schema=SCHEMA), indent=1) + "\n", each)
    if not quiet:
        several = f" --gpus {found.world}" if found.world > 1 else ""
        command = f"foretrain train {shlex.quote(str(path))}{several}"
        line = say("tune.written", path=str(path), trials=str(path.with_suffix(".json")), command=command)
        ERR.print(Text(printable(line)), soft_wrap=True)


class Progress(Status):
    """Each trial a line on stderr; rounds of the race in one line that changes, on a terminal."""

    def __init__(self, base: RunConfig, *, quiet: bool) -> None:
        super().__init__()
        self.base, self.quiet = base, quiet

    def __call__(self, id: str, values: dict[str, Any]) -> None:
        if self.quiet:
            return
        self.close()
        if id == "trying":
            self.show(say("tune.trying", number=values["number"], most=values["most"], what=self._what(values)))
        elif id == "tried":
            self._tell(self._tried(values))
        elif id == "round":
            self.show(say("tune.round", **values))
        else:
            self._tell(say(f"tune.{id}", **values))

    def _what(self, values: dict[str, Any]) -> str:

        setting: Setting = values["setting"]
        given: dict[str, object] = dict(zip(TUNABLE, levels_of(self.base), strict=True))
        return difference(setting.named, setting.config.gradient_accumulation_steps, given)

    def _tried(self, values: dict[str, Any]) -> str:
        what = self._what(values)
        if (failure := values["failure"]) is not None:
            return say(f"tune.died.{failure.reason}", what=what, peak=failure.peak_bytes, problem=failure.problem)
        if values["changed"]:
            return say("tune.changed", what=what)
        rate = values["setting"].config.tokens_per_step / values["step_s"]
        id = "tune.tried_first" if values["first"] else "tune.tried"
        peak = format_bytes(values["peak_bytes"])
        return say(id, what=what, rate=rate, peak=peak, speed=values["speed"])

    def _tell(self, line: str) -> None:
        ERR.print(Text(printable(line), style="dim"), soft_wrap=True)
