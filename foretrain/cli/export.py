"""`foretrain export`: leave with your model, for Hugging Face, nanoGPT, or as plain safetensors."""

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from foretrain.cli.common import ERR, OUT, Json, Quiet, noted, print_json
from foretrain.messages import printable, say

EPILOG = """Examples:

foretrain export out-baby --to hf --out my-gpt

foretrain export out-baby --to nanogpt --out nanoGPT/out --best

foretrain export out-baby/checkpoints/step-0000001200 --to safetensors"""


def add_to(app: typer.Typer) -> None:
    app.command("export", epilog=EPILOG)(export_command)


def export_command(
    run: Annotated[Path, typer.Argument(help="A run, or one of its checkpoints.", metavar="RUN|CHECKPOINT")],
    to: Annotated[
        str,
        typer.Option(
            help="hf: a folder that transformers loads, with the tokenizer; nanogpt: ckpt.pt, to go on there; "
            "safetensors: the weights by nanoGPT's names."
        ),
    ] = "hf",
    out: Annotated[Path | None, typer.Option(help="The folder to write; RUN/export-… without it.")] = None,
    best: Annotated[
        bool, typer.Option("--best", help="The checkpoint of lowest validation loss, not the newest.")
    ] = False,
    force: Annotated[
        bool,
        typer.Option("--force", help="Write into a folder that is not empty; replaces files of the same names only."),
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a trained model for Hugging Face, for nanoGPT, or as safetensors."""
    from foretrain.cli.train import need_torch

    if to not in ("hf", "nanogpt", "safetensors"):
        raise typer.BadParameter("must be hf, nanogpt or safetensors", param_hint="--to")
    need_torch()
    from foretrain.run.export import SCHEMA, export

    made = export(run, to, out, best=best, force=force)
    if as_json:
        print_json(made.to_json(schema=SCHEMA))
    elif not quiet:
        for note in made.notes:
            ERR.print(noted(say(f"export.{note}")), soft_wrap=True)
        listed = ", ".join(made.files)
        line = say("export.done", checkpoint=made.checkpoint, step=made.step, path=made.path, files=listed)
        OUT.print(Text(printable(line)), soft_wrap=True)
