"""`--gpu-file`: cards of the user's own, for every command that takes a card."""

import os
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.main

from foretrain.hardware import GPU_FILE_VARIABLE, catalogue

COMMANDS = ("gpus", "serve", "train", "demo", "calibrate")  # beside those with --gpu


@cache
def option() -> Any:
    """The option as typer itself makes it, of a command that is nothing else."""
    own = typer.Typer(add_completion=False)
    own.command()(_only_this)
    return next(parameter for parameter in typer.main.get_command(own).params if parameter.name == "gpu_file")


def _chosen(value: Path | None) -> None:
    """Child processes read the file, too. Raises UserError 'gpu.bad_file'."""
    if value is not None:
        os.environ[GPU_FILE_VARIABLE] = str(value.absolute())
        catalogue()


def _only_this(
    gpu_file: Annotated[
        Path | None,
        typer.Option(
            "--gpu-file",
            metavar="FILE",
            expose_value=False,
            is_eager=True,
            callback=_chosen,
            show_default=False,
            help=f"A TOML file with cards of your own, written like gpus.toml; else {GPU_FILE_VARIABLE}.",
        ),
    ] = None,
) -> None:
    """Nothing; see option."""
