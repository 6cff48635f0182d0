"""`foretrain export`: leave with your model, for Hugging Face, nanoGPT, or as plain safetensors."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.text import Text

from foretrain.app.export import SCHEMA, export
from foretrain.base.messages import printable, say
from foretrain.cli.commands.sample import warn_of_skipped
from foretrain.cli.common import ERR, OUT, Json, Quiet, need_one_of, noted, print_json

if TYPE_CHECKING:
    from foretrain.training.export import Form

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
            help="hf: a folder for transformers, with the tokenizer; nanogpt: a ckpt.pt that nanoGPT resumes; "
            "safetensors: the weights under nanoGPT's names."
        ),
    ] = "hf",
    out: Annotated[Path | None, typer.Option(help="Folder to write. Default: RUN/export-….")] = None,
    best: Annotated[
        bool,
        typer.Option("--best", help="Export the checkpoint with the lowest validation loss instead of the newest."),
    ] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Write into a folder that is not empty; only files of the same name are replaced."
        ),
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Export a trained model for Hugging Face or nanoGPT, or as safetensors."""

    need_one_of("--to", to, ("hf", "nanogpt", "safetensors"))
    made = export(run, cast("Form", to), out, best=best, force=force)
    warn_of_skipped(made.checkpoint, list(made.skipped))
    if as_json:
        print_json(made.to_json(schema=SCHEMA))
    elif not quiet:
        for note in made.notes:
            ERR.print(noted(say(f"export.{note}")), soft_wrap=True)
        listed = ", ".join(made.files)
        line = say("export.done", checkpoint=made.checkpoint, step=made.step, path=made.path, files=listed)
        OUT.print(Text(printable(line)), soft_wrap=True)
