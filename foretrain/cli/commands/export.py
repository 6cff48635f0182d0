"""`foretrain export`: leave with your model, for Hugging Face, llama.cpp, nanoGPT, or as plain safetensors."""

from pathlib import Path
from typing import Any, cast

from rich.text import Text

from foretrain.app.export import SCHEMA, export
from foretrain.base.messages import printable, say
from foretrain.cli.command import argument, command, flag, json_option, option, quiet_option
from foretrain.cli.commands.sample import warn_of_skipped
from foretrain.cli.common import ERR, OUT, need_one_of, noted, print_json
from foretrain.training.exports.forms import FORMS, GGUF_TYPES, Exported, Form, GgufType

EPILOG = """Examples:
foretrain export out-baby --to hf --out my-gpt
foretrain export out-baby --to hf --push my-name/my-gpt
foretrain export out-baby --to gguf --gguf-type q8_0
foretrain export out-baby --to nanogpt --out nanoGPT/out --best
foretrain export out-baby/checkpoints/step-0000001200 --to safetensors"""


@command("export", EPILOG)
@argument("run RUN|CHECKPOINT", "A run, or one of its checkpoints.", type=Path)
@option(
    "--to",
    "hf: a folder for transformers, with the tokenizer and a model card; gguf: one file for llama.cpp; "
    "onnx: a graph for ONNX Runtime; nanogpt: a ckpt.pt that nanoGPT resumes; safetensors: the weights "
    "under nanoGPT's names.",
    default="hf",
)
@option("--out", "Folder to write. Default: RUN/export-….", type=Path)
@flag("--best", "Export the checkpoint with the lowest validation loss instead of the newest.")
@option("--gguf-type TYPE", "How --to gguf stores matrices: f32, f16, bf16 or q8_0. Default: f16.")
@option(
    "--push OWNER/NAME",
    "Upload the folder of --to hf to this repository on the Hugging Face Hub. A new one is private.",
)
@flag("--force", "Write into a folder that is not empty; only files of the same name are replaced.")
@json_option
@quiet_option
def export_command(
    run: Path, to: Form, out: Path | None, gguf_type: str | None, as_json: bool, quiet: bool, **options: Any
) -> None:
    """Export a trained model for Hugging Face, llama.cpp or nanoGPT, or as safetensors."""
    need_one_of("--to", to, tuple(FORMS))
    if gguf_type is not None:
        need_one_of("--gguf-type", gguf_type, tuple(GGUF_TYPES))
    made = export(run, to, out, gguf_type=cast("GgufType | None", gguf_type), **options)
    warn_of_skipped(made.checkpoint, list(made.skipped))
    if as_json:
        print_json(made.to_json(schema=SCHEMA))
    elif not quiet:
        _show(made)


def _show(made: Exported) -> None:
    for note in made.notes:
        ERR.print(noted(say(f"export.{note}")), soft_wrap=True)
    listed = ", ".join(made.files)
    lines = [say("export.done", checkpoint=made.checkpoint, step=made.step, path=made.path, files=listed)]
    if made.quantize:
        lines.append(say("export.quantize", command=made.quantize))
    if made.pushed:
        lines.append(say("export.pushed", address=made.pushed))
    for line in lines:
        OUT.print(Text(printable(line)), soft_wrap=True)
