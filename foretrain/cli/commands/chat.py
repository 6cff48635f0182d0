"""`foretrain chat`: a conversation with a run's newest checkpoint, which continues what is typed."""

from typing import Annotated

import typer

from foretrain.app.sample import opened
from foretrain.cli.commands.runs import RunPath
from foretrain.cli.commands.sample import warn_of_skipped
from foretrain.cli.common import Quiet
from foretrain.cli.generation.chat import MOST_TOKENS, talk
from foretrain.cli.generation.needs import Temperature, TopK, TopP, say_needs
from foretrain.model.generation.options import Sampling

EPILOG = """Examples:

foretrain chat out-baby

foretrain chat out-baby --temperature 0.7 --top-p 0.9 --tokens 100

echo "def area(r):" | foretrain chat out-baby --quiet   (also from a pipe)

Within: /help, /reset, /temperature 0.7, /top_k 40, /top_p 0.9, /tokens 100. Ctrl-C stops a reply, Ctrl-D ends."""


def add_to(app: typer.Typer) -> None:
    app.command("chat", epilog=EPILOG)(chat_command)


def chat_command(
    run: RunPath,
    tokens: Annotated[int, typer.Option(help="Most tokens of a reply.", min=1, max=MOST_TOKENS)] = 200,
    temperature: Temperature = 0.8,
    top_k: TopK = 50,
    top_p: TopP = 1.0,
    seed: Annotated[int, typer.Option(help="Random seed.", min=0, max=2**63 - 1)] = 1337,
    quiet: Quiet = False,
) -> None:
    """Talk to a run's newest checkpoint: it continues each line, and remembers the conversation."""
    found = opened(run)
    warn_of_skipped(found.checkpoint, list(found.skipped))
    say_needs(found, quiet=quiet)
    talk(found.load(seed), Sampling(temperature, top_k, top_p), tokens, quiet=quiet)
