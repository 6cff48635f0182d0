"""`foretrain sample`: text from a run's checkpoint."""

from typing import Annotated

import typer
from rich.text import Text

from foretrain.app.sample import SCHEMA, sample
from foretrain.base.messages import printable, say
from foretrain.cli.commands.runs import RunPath
from foretrain.cli.common import ERR, Json, print_json

EPILOG = """Examples:

foretrain sample out-baby

foretrain sample out-baby --prompt "class " --tokens 500 --temperature 0.7"""


def add_to(app: typer.Typer) -> None:
    app.command("sample", epilog=EPILOG)(sample_command)


def sample_command(
    run: RunPath,
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "\n",
    tokens: Annotated[int, typer.Option(help="Tokens to generate.", min=1, max=100_000)] = 400,
    temperature: Annotated[
        float, typer.Option(help="Sampling temperature; 0 always picks the most likely token.", min=0, max=10)
    ] = 0.8,
    top_k: Annotated[int, typer.Option(help="Sample from this many most likely tokens; 0: all.", min=0)] = 50,
    seed: Annotated[
        int, typer.Option(help="Random seed; the same seed gives the same text.", min=0, max=2**63 - 1)
    ] = 1337,
    as_json: Json = False,
) -> None:
    """Generate text with the newest intact checkpoint of a run."""
    made = sample(run, prompt, tokens, temperature=temperature, top_k=top_k, seed=seed)
    warn_of_skipped(made.checkpoint, list(made.skipped))
    if as_json:
        print_json(made.to_json(schema=SCHEMA))
    else:
        typer.echo(printable(prompt + made.text))


def warn_of_skipped(used: str, skipped: list[str]) -> None:
    """Say on stderr that newer checkpoints are damaged, also where the answer is JSON."""
    if skipped:
        ERR.print(Text(printable(say("save.older_used", used=used, problems=skipped)), "yellow"), soft_wrap=True)
