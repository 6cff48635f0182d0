"""`foretrain demo`: plan, train a small GPT on the built-in corpus, sample, compare, report: about three minutes."""

import time
from pathlib import Path
from typing import Any

from click.exceptions import Exit
from rich.text import Text

from foretrain.advice.asked import Asked
from foretrain.advice.first_answer import first_answer
from foretrain.app.plan import Cards, make_plan
from foretrain.app.sample import sample
from foretrain.app.train import need_torch
from foretrain.base.files import replace_text
from foretrain.base.messages import printable, say
from foretrain.base.units import format_duration
from foretrain.cli.command import command, json_option, option, quiet_option
from foretrain.cli.commands.runs import load
from foretrain.cli.commands.train import train
from foretrain.cli.common import ERR, OUT, need_one_of, print_json
from foretrain.config.resolve import ResolvedConfig
from foretrain.data.inspection import unigram_entropy
from foretrain.hardware.cpu import usable_cores
from foretrain.reports import making, text
from foretrain.reports.views import first as first_view
from foretrain.reports.views import run as run_view
from foretrain.runs.folder import RunDirectory
from foretrain.runs.record import SCHEMA
from foretrain.training.contention import Clock, Contention

EPILOG = """Examples:
foretrain demo
foretrain demo --steps 200        (a shorter look)"""


@command("demo", EPILOG)
@option("--steps", "Optimizer steps.", default=1500, low=20, high=1_000_000)
@option("--out", "Directory of the run.", default="out-demo")
@option("--resume auto", "auto: resume a stopped demo with the same number of steps.", default="no")
@json_option
@quiet_option
def demo_command(steps: int, out: str, resume: str, as_json: bool, quiet: bool) -> None:
    """Run everything in about three minutes on two CPU cores: forecast, training, sample, comparison, report."""
    need_one_of("--resume", resume, ("auto", "no"))
    need_torch()
    started, since = time.monotonic(), Clock().read()
    quiet = quiet or as_json
    from foretrain.app.demo import demo_config

    resolved, chosen = demo_config(steps, out)
    calibrate_once(chosen, busy=Contention(usable_cores(), since=since).begin(), quiet=quiet)
    if not quiet:
        _show_plan(chosen)
        _heading("demo.train")
    record = train(resolved, resume=resume == "auto", quiet=quiet)
    run = Path(out).with_name(record.id)  # `out`, or its numbered sibling
    if record.status != "finished":
        raise Exit(75)
    written = sample(run, "def ", 300).text
    replace_text(run / "sample.txt", printable("def " + written))
    _, comparison = load(run)
    report = making.write(making.run(run, printable("def " + written)), run / "report.html")
    if as_json:
        _print_json(run, comparison.to_json(), unigram_entropy(record.dataset), report)
        return
    if not quiet:
        _show_sample(written)
        _heading("demo.compare")
        text.render(run_view.comparison_document(comparison), OUT)
    ending = say(
        "demo.end", first=record.first_val_loss, last=record.val_loss, unigram=unigram_entropy(record.dataset),
        took=format_duration(time.monotonic() - started), report=str(report),
    )  # fmt: skip
    OUT.print()
    OUT.print(Text(ending, style="bold"), soft_wrap=True)


def _print_json(run: Path, comparison: dict[str, Any], unigram: float | None, report: Path) -> None:

    final = RunDirectory(run).read_record().to_json(schema=SCHEMA)
    print_json({"schema": "foretrain.demo/1", "run": final, "comparison": comparison, "unigram_entropy": unigram,
                "report": str(report)})  # fmt: skip


def _show_plan(resolved: ResolvedConfig) -> None:
    _heading("demo.plan")
    made, asked = make_plan(resolved, Cards(gpu="cpu").targets(resolved.config)[0]), Asked(words=("baby",), quiet=True)
    text.render_screen(first_view.screen(made, asked, first_answer(made, asked)), OUT)
    OUT.print(Text(say("demo.more"), style="dim"), soft_wrap=True)


def _show_sample(written: str) -> None:
    _heading("demo.sample")
    OUT.print(Text(printable("def " + written)), soft_wrap=True)


def calibrate_once(resolved: ResolvedConfig, *, busy: list[Any], quiet: bool) -> None:
    """Measure the machine, if nothing else uses it, in under a minute before its first forecast."""
    from foretrain.app.demo import measure, to_calibrate

    if not (dtypes := to_calibrate(resolved)):
        return
    if busy:
        if not quiet:
            ERR.print(Text(say("demo.busy", **busy[0][1]), style="yellow"), soft_wrap=True)
        return
    if not quiet:
        _heading("demo.calibrate")
    if code := measure(dtypes, quiet=quiet):
        raise Exit(code)  # it has said why


def _heading(id: str) -> None:
    ERR.print()
    ERR.rule(say(id), align="left", style="dim")
