"""`foretrain sample` and `foretrain chat`: text from a run's checkpoint as it is made, and a conversation with it."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from foretrain.app.sample import SCHEMA, Sample, opened
from foretrain.base.errors import UserError
from foretrain.base.messages import printable, say
from foretrain.cli.command import command, flag, json_option, option, quiet_option
from foretrain.cli.commands import conversation as chat
from foretrain.cli.commands.runs import run_argument
from foretrain.cli.common import ERR, noted, print_json, print_said
from foretrain.model.sampling import Sampling

if TYPE_CHECKING:
    from foretrain.app.opened import Opened

EPILOG = """Examples:

foretrain sample out-baby

foretrain sample out-baby --prompt "class " --tokens 500 --temperature 0.7 --top-p 0.9

foretrain sample out-baby --interactive   (as `foretrain chat out-baby`)"""


CHAT_EPILOG = """Examples:

foretrain chat out-baby

foretrain chat out-baby --temperature 0.7 --top-p 0.9 --tokens 100

echo "def area(r):" | foretrain chat out-baby --quiet   (also from a pipe)

Within: /help, /reset, /temperature 0.7, /top_k 40, /top_p 0.9, /tokens 100. Ctrl-C stops a reply, Ctrl-D ends."""

temperature_option = option(
    "--temperature", "Sampling temperature; 0 always picks the most likely token.", default=0.8, low=0, high=10
)
top_k_option = option("--top-k", "Sample from this many most likely tokens; 0: all.", default=50, low=0)
top_p_option = option(
    "--top-p",
    "Sample from the fewest most likely tokens with this probability together; 1: all.",
    default=1.0,
    low=0,
    high=1,
)


@command("sample", EPILOG)
@run_argument
@option("--prompt", "Text to continue.", default="\n")
@option("--tokens", "Tokens to generate.", default=400, low=1, high=100_000)
@temperature_option
@top_k_option
@top_p_option
@option("--seed", "Random seed; the same seed gives the same text.", default=1337, low=0, high=2**63 - 1)
@flag("--interactive", "Read lines and continue each, as `foretrain chat` does.")
@json_option
@quiet_option
def sample_command(
    run: Path,
    prompt: str,
    tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    interactive: bool,
    as_json: bool,
    quiet: bool,
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


@command("chat", CHAT_EPILOG)
@run_argument
@option("--tokens", "Most tokens of a reply.", default=200, low=1, high=chat.MOST_TOKENS)
@temperature_option
@top_k_option
@top_p_option
@option("--seed", "Random seed.", default=1337, low=0, high=2**63 - 1)
@quiet_option
def chat_command(run: Path, tokens: int, temperature: float, top_k: int, top_p: float, seed: int, quiet: bool) -> None:
    """Talk to a run's newest checkpoint: it continues each line, and remembers the conversation."""
    found = opened(run)
    warn_of_skipped(found.checkpoint, list(found.skipped))
    say_needs(found, quiet=quiet)
    chat.talk(found.load(seed), Sampling(temperature, top_k, top_p), tokens, quiet=quiet)


def say_needs(found: "Opened", *, quiet: bool) -> None:
    """What it needs, before its weights are loaded, and what gave way to the memory that is free, on stderr."""
    if quiet:
        return
    fitted = found.fitted
    values = {
        "checkpoint": found.checkpoint, "params": found.n_params, "context": fitted.context,
        "weights": fitted.memory.bytes_of("weights"), "cache": fitted.memory.bytes_of("kv_cache"),
        "needed": fitted.memory.needed_expected_bytes, "device": found.device.type,
    }  # fmt: skip
    ERR.print(noted(say("sample.needs", **values)), soft_wrap=True)
    print_said(fitted.notes, quiet=quiet)
