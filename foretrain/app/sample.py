"""Text from a run's checkpoint. `foretrain.sample` for Python."""

from pathlib import Path

from foretrain.app.train import need_torch
from foretrain.base.errors import UserError
from foretrain.base.records import Record
from foretrain.data.tokenizer_check import tokenizer_of
from foretrain.training.store import RunDirectory

SCHEMA = "foretrain.sample/1"


class Sample(Record):
    """`text` follows the prompt; `skipped`: newer checkpoints that are damaged, and why."""

    checkpoint: str
    skipped: tuple[str, ...]
    prompt: str
    text: str


def sample(
    run: str | Path,
    prompt: str = "\n",
    tokens: int = 400,
    *,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 1337,
) -> Sample:
    """Text that a run's newest intact checkpoint writes: `foretrain.sample("out", "def ", 300).text`.

    `tokens`: how many to generate. `temperature`: 0 always picks the most likely token. `top_k`: sample from so many
    most likely tokens, 0: all. The same `seed` gives the same text.
    Raises UserError: no checkpoint 2, no torch 4, no run, no tokenizer or damaged files 7.
    """
    need_torch()
    import torch

    from foretrain.model.generation.writer import generate
    from foretrain.model.language_model import make_model
    from foretrain.training import checkpoint

    directory = RunDirectory(Path(run))
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
    problems = tuple(f"{name}: {problem}" for name, problem in skipped)
    return Sample(checkpoint=path.name, skipped=problems, prompt=prompt, text=words.decode(list(made)))
