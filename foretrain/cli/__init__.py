"""The command line. `main` is the only place that turns errors into exit codes."""

import io
import os
import sys
from typing import Annotated

import typer

from foretrain.cli.common import OUT, print_error
from foretrain.errors import ExitCode, UserError

app = typer.Typer(
    name="foretrain",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help=(
        "Know what a GPT training run will take before you start it; then run it in exactly that; "
        "then see where prediction and reality differ, and why."
    ),
    epilog="Start with: foretrain plan gpt2-124m --gpu 'RTX 4070'   or, to see everything: foretrain demo",
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        OUT.print(f"foretrain {version('foretrain')}", highlight=False)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    pass


def _add_commands() -> None:
    # Modules that import nothing heavy at their head; torch and numpy are imported inside the commands.
    from foretrain.cli import demo, gpus, plan, runs, sample, train

    for module in (plan, train, runs, sample, gpus, demo):
        module.add_to(app)


_add_commands()


def main() -> None:
    """Run the command line and exit with a code of `ExitCode`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal of another encoding shows ? for what it lacks
            stream.reconfigure(errors="replace")
    try:
        app()
    except UserError as error:
        print_error(error, as_json="--json" in sys.argv)
        sys.exit(int(error.exit_code))
    except KeyboardInterrupt:
        sys.exit(int(ExitCode.INTERRUPTED))
    except BrokenPipeError:  # the reader of our output went away, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(int(ExitCode.DONE))
