"""`foretrain demo`: plan, train a small GPT on the built-in corpus, sample, compare, report: about three minutes."""

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from foretrain.cli.common import ERR, OUT, Json, Quiet, print_json
from foretrain.config import RunConfig
from foretrain.messages import printable, say
from foretrain.units import format_duration

EPILOG = """Examples:

foretrain demo

foretrain demo --steps 200        (a shorter look)"""

PLAIN = ("--dtype=float32", "--attention=sdpa")  # the same on every machine, and what a quick calibration knows


def add_to(app: typer.Typer) -> None:
    app.command("demo", epilog=EPILOG)(demo_command)


def demo_command(
    steps: Annotated[int, typer.Option(help="Optimizer steps.", min=20, max=1_000_000)] = 1500,
    out: Annotated[str, typer.Option(help="Directory of the run.")] = "out-demo",
    resume: Annotated[
        str, typer.Option(metavar="auto", help="auto: resume a stopped demo with the same number of steps.")
    ] = "no",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run everything in about three minutes on two CPU cores: forecast, training, sample, comparison, report."""
    from foretrain.app.plan import make_plan, targets
    from foretrain.cli import report_parts
    from foretrain.cli.runs import load
    from foretrain.cli.sample import sample
    from foretrain.cli.train import need_torch, prepare_data, train
    from foretrain.configfile import resolve
    from foretrain.lm.statistics import unigram_entropy
    from foretrain.report import plan_view, run_view, text
    from foretrain.run.files import replace_text

    if resume not in ("auto", "no"):
        raise typer.BadParameter("must be auto or no", param_hint="--resume")
    need_torch()
    started = time.monotonic()
    quiet = quiet or as_json
    interval = max(10, steps // 5)
    words = ["baby", "--device=cpu", f"--max_iters={steps}", f"--lr_decay_iters={steps}", f"--out_dir={out}",
             f"--eval_interval={interval}", f"--warmup_iters={min(50, steps // 4)}", *PLAIN]  # fmt: skip
    resolved = resolve(words)
    resolved, _ = prepare_data(resolved)
    _calibrate_once(resolved.config, quiet=quiet)
    if not quiet:
        _heading("demo.plan")
        text.render(plan_view.document(make_plan(resolved, targets("cpu", "", resolved.config)[0])), OUT)
        _heading("demo.train")
    record = train(resolved, resume=resume == "auto", quiet=quiet)
    run = _path_of(out, record.id)
    if record.status != "finished":
        raise typer.Exit(75)
    written, *_ = sample(run, "def ", 300)
    replace_text(run / "sample.txt", printable("def " + written))
    _, comparison = load(run)
    report = report_parts.write(report_parts.run(run, printable("def " + written)), run / "report.html")
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
    from foretrain.run.store import SCHEMA, RunDirectory

    final = RunDirectory(run).read_record().to_json(schema=SCHEMA)
    print_json({"schema": "foretrain.demo/1", "run": final, "comparison": comparison, "unigram_entropy": unigram,
                "report": str(report)})  # fmt: skip


def _show_sample(written: str) -> None:
    _heading("demo.sample")
    OUT.print(Text(printable("def " + written)), soft_wrap=True)


def _calibrate_once(config: RunConfig, *, quiet: bool) -> None:
    """A quarter of a minute, the first time on a machine: the forecast then stands on its own speeds."""
    from foretrain.cli.calibrate import measure
    from foretrain.run.device import place

    placement = place(config)
    if placement.gpu.calibration is None:
        if not quiet:
            _heading("demo.calibrate")
        measure(placement, quick=True, quiet=quiet)


def _path_of(out: str, id: str) -> Path:
    """The run's directory: `out`, or its numbered sibling."""
    return Path(out).with_name(id)


def _heading(id: str) -> None:
    ERR.print()
    ERR.rule(say(id), align="left", style="dim")
