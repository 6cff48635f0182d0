"""`foretrain sample`: text from a run's checkpoint."""

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from foretrain.app.train import need_torch
from foretrain.base.errors import UserError
from foretrain.base.messages import printable, say
from foretrain.cli.commands.runs import RunPath
from foretrain.cli.common import ERR, Json, print_json
from foretrain.data.tokenizer_check import tokenizer_of
from foretrain.training.store import RunDirectory

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
    text, checkpoint, skipped = sample(run, prompt, tokens, temperature=temperature, top_k=top_k, seed=seed)
    warn_of_skipped(checkpoint, skipped)
    if as_json:
        print_json({
            "schema": "foretrain.sample/1", "checkpoint": checkpoint, "skipped": skipped, "prompt": prompt,
            "text": text,
        })  # fmt: skip
    else:
        typer.echo(printable(prompt + text))


def warn_of_skipped(used: str, skipped: list[str]) -> None:
    """Say on stderr that newer checkpoints are damaged, also where the answer is JSON."""
    if skipped:
        ERR.print(Text(printable(say("save.older_used", used=used, problems=skipped)), "yellow"), soft_wrap=True)


def sample(
    run: Path, prompt: str, tokens: int, *, temperature: float = 0.8, top_k: int = 50, seed: int = 1337
) -> tuple[str, str, list[str]]:
    """(text after the prompt, name of the checkpoint, newer ones that are damaged and why). Raises UserError."""

    need_torch()
    import torch

    from foretrain.model.generate import generate
    from foretrain.model.language_model import make_model
    from foretrain.training import checkpoint

    directory = RunDirectory(run)
    record = directory.read_record()
    path, skipped = checkpoint.newest_valid(directory.checkpoints)
    if path is None:
        raise UserError("usage.no_checkpoint", path=str(run))
    words = tokenizer_of(record.dataset)
    if words is None:
        raise UserError("data.no_tokenizer", path=record.dataset.path)
    model = make_model(record.config)
    checkpoint.load_model(path, model)
    if torch.cuda.is_available():
        model.cuda()
    ids = list(words.encode(prompt.encode(errors="replace"))) or [words.separator]
    made = generate(
        model, ids, tokens, temperature=temperature, top_k=top_k, seed=seed,
        vocab_size=min(words.vocab_size, record.config.vocab_size),
    )  # fmt: skip
    return words.decode(list(made)), path.name, [f"{name}: {problem}" for name, problem in skipped]
