"""`foretrain sample`: text from a run's checkpoint, as it is made; with --interactive a conversation."""

import sys
from typing import Annotated

import typer
from rich.text import Text

from foretrain.app.sample import SCHEMA, Sample, opened
from foretrain.base.errors import UserError
from foretrain.base.messages import printable, say
from foretrain.cli.commands.runs import RunPath
from foretrain.cli.common import ERR, Json, Quiet, print_json
from foretrain.cli.generation import chat
from foretrain.cli.generation.needs import Temperature, TopK, TopP, say_needs
from foretrain.model.generation.options import Sampling

EPILOG = """Examples:

foretrain sample out-baby

foretrain sample out-baby --prompt "class " --tokens 500 --temperature 0.7 --top-p 0.9

foretrain sample out-baby --interactive   (as `foretrain chat out-baby`)"""


def add_to(app: typer.Typer) -> None:
    app.command("sample", epilog=EPILOG)(sample_command)


def sample_command(
    run: RunPath,
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "\n",
    tokens: Annotated[int, typer.Option(help="Tokens to generate.", min=1, max=100_000)] = 400,
    temperature: Temperature = 0.8,
    top_k: TopK = 50,
    top_p: TopP = 1.0,
    seed: Annotated[
        int, typer.Option(help="Random seed; the same seed gives the same text.", min=0, max=2**63 - 1)
    ] = 1337,
    interactive: Annotated[
        bool, typer.Option("--interactive", help="Read lines and continue each, as `foretrain chat` does.")
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Generate text with the newest intact checkpoint of a run."""
    sampling = Sampling(temperature, top_k, top_p)
    if interactive and as_json:
        raise UserError("usage.two_forms", options=["--interactive", "--json"])
    found = opened(run)
    warn_of_skipped(found.checkpoint, list(found.skipped))
    say_needs(found, quiet=quiet or as_json)
    writer = found.load(seed)
    if interactive:
        chat.talk(writer, sampling, tokens, quiet=quiet)
        return
    writer.read(prompt)
    pieces = writer.write(sampling, tokens)
    if as_json:
        text = "".join(pieces)
        made = Sample(checkpoint=found.checkpoint, skipped=found.skipped, prompt=prompt, text=text)
        print_json(made.to_json(schema=SCHEMA))
        return
    sys.stdout.write(printable(prompt))
    for piece in pieces:
        sys.stdout.write(printable(piece))
        sys.stdout.flush()
    sys.stdout.write("\n")


def warn_of_skipped(used: str, skipped: list[str]) -> None:
    """Say on stderr that newer checkpoints are damaged, also where the answer is JSON."""
    if skipped:
        ERR.print(Text(printable(say("save.older_used", used=used, problems=skipped)), "yellow"), soft_wrap=True)
