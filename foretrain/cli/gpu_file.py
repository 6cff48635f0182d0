"""`--gpu-file`: cards of the user's own, for every command that takes a card."""

import os
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer

from foretrain.cli.common import option_of
from foretrain.hardware.catalogue import GPU_FILE_VARIABLE, catalogue

COMMANDS = ("gpus", "serve", "train", "demo", "calibrate")  # beside those with --gpu


@cache
def option() -> Any:
    return option_of(_only_this, "gpu_file")


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
