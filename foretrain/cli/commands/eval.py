"""`foretrain eval`: how good a model is, on texts and on lm-eval's tasks."""

import time
from pathlib import Path
from typing import Any

from rich.text import Text

from foretrain.app.evaluate import SCHEMA, evaluate
from foretrain.base.messages import printable, say
from foretrain.cli.command import argument, command, flag, json_option, option, quiet_option
from foretrain.cli.commands.sample import warn_of_skipped
from foretrain.cli.common import ERR, LiveLine, noted, print_answer, print_shown, rewrites_lines
from foretrain.reports.views import scores

EPILOG = """Examples:
foretrain eval out-baby                        (bits per byte of its validation data)
foretrain eval out-baby --text notes.txt --text README.md
foretrain eval out-baby --best --tasks lambada_openai,hellaswag
foretrain eval out-baby --tasks my_task --include-path my-tasks   (a task of your own, without a network)
foretrain eval my-hugging-face-folder --text notes.txt --json"""

_LIVE_EVERY_S, _LINE_EVERY_S = 0.1, 10.0  # a log file wants fewer lines than a terminal


@command("eval", EPILOG)
@argument("source RUN|CHECKPOINT|FOLDER", "A run, one of its checkpoints, or a Hugging Face folder.", type=Path)
@option(
    "--text",
    "A UTF-8 text file, for its bits per byte; may be repeated. Default: the validation data.",
    name="texts",
    multiple=True,
    type=Path,
)
@option("--tasks", "Tasks of lm-eval, joined by commas. Their data comes from the Hugging Face Hub or its local cache.")
@option(
    "--include-path", "Folder with lm-eval tasks of your own (YAML). Python files that they name are run.", type=Path
)
@flag("--best", "Evaluate the checkpoint with the lowest validation loss instead of the newest.")
@option("--stride", "Tokens from one window to the next. Default: half the context.", type=int, low=1)
@option(
    "--tokens",
    "Most tokens to score of each text. Default: all of a file, one million of the validation data.",
    type=int,
    low=1,
)
@option("--num-fewshot", "Examples before each question of a task.", type=int, low=0)
@option("--limit", "Most documents of each task, for a quick look.", type=int, low=1)
@option("--batch-size", "Sequences that a task's model sees at a time. Default: 4.", type=int, low=1)
@option("--device", "auto, cpu, cuda, cuda:1 or mps.", default="auto")
@json_option
@quiet_option
def eval_command(
    source: Path, texts: list[Path], tasks: str | None, as_json: bool, quiet: bool, **options: Any
) -> None:
    """Measure bits per byte of any text, and run lm-eval's tasks. Results are kept beside the run."""
    line = _Line(quiet=quiet or as_json)
    names = [name.strip() for name in (tasks or "").split(",") if name.strip()]
    bars = line.live and not line.quiet
    try:
        found = evaluate(source, tasks=names, text=texts, bars=bars, listen=line, **options)
    finally:
        line.clear()
    if found.checkpoint:
        warn_of_skipped(found.checkpoint, list(found.skipped))
    print_shown(found.notes, quiet=False)
    print_answer(found, SCHEMA, lambda: scores.document(found), as_json=as_json)


class _Line:
    """Progress on stderr: one live line on a terminal, a line now and then otherwise; lm-eval has bars of its own."""

    def __init__(self, *, quiet: bool) -> None:
        self.quiet, self.live = quiet, rewrites_lines(terminal=ERR.is_terminal)
        self._begun_s = self._next_s = time.monotonic()
        self._of, self._live_line = "", LiveLine(ERR)

    def __call__(self, id: str, values: dict[str, Any]) -> None:
        if self.quiet:
            return
        name = str(values.get("name", self._of))
        line = say(f"evaluating.{id}", **{**values, "name": name})
        now_s = time.monotonic()
        if not id.endswith("_progress"):
            self._of, self._begun_s = name, now_s
            self.clear()
            ERR.print(noted(line), soft_wrap=True)
            return
        if name != self._of or values["done"] == values["total"]:
            self._of, self._begun_s, self._next_s = name, now_s, now_s if self.live else now_s + _LINE_EVERY_S
        if now_s >= self._next_s:
            self._next_s = now_s + (_LIVE_EVERY_S if self.live else _LINE_EVERY_S)
            self._show(printable(line + self._left(values)))

    def _left(self, values: dict[str, Any]) -> str:
        """The time that is left, at the speed so far; nothing in the first second."""
        took_s, done = time.monotonic() - self._begun_s, values["done"]
        return say("evaluating.left", time=took_s * (values["total"] - done) / done) if done and took_s > 1 else ""

    def _show(self, line: str) -> None:
        if self.live:
            self._live_line.show(line)
        else:
            ERR.print(Text(line), soft_wrap=True)

    def clear(self) -> None:
        self._live_line.clear()
