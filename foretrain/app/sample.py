"""Text from a run's checkpoint. `foretrain.sample` for Python."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from foretrain.app.train import need_torch
from foretrain.base.records import Record
from foretrain.model.sampling import Sampling

if TYPE_CHECKING:
    from foretrain.app.opened import Opened

SCHEMA = "foretrain.model/1#sample"


class Sample(Record):
    """`text` follows the prompt; `skipped`: newer checkpoints that are damaged, and why."""

    checkpoint: str
    skipped: tuple[str, ...]
    prompt: str
    text: str


def opened(run: str | Path) -> Opened:
    """A run's newest intact checkpoint, and what it needs; its weights are not loaded yet.

    Raises UserError: no checkpoint 2, no torch 4, too little memory 5, no run, no tokenizer or damaged files 7.
    """
    need_torch()
    from foretrain.app.opened import Opened

    return Opened(run)


def sample(
    run: str | Path,
    prompt: str = "\n",
    tokens: int = 400,
    *,
    temperature: float = 0.8,
    top_k: int = 50,
    top_p: float = 1.0,
    seed: int = 1337,
) -> Sample:
    """Text that a run's newest intact checkpoint writes: `foretrain.sample("out", "def ", 300).text`.

    `tokens`: how many to generate. `temperature`: 0 always picks the most likely token. `top_k`: sample from so many
    most likely tokens, 0: all; `top_p`: of these from the fewest that have this probability together. The same `seed`
    gives the same text.
    Raises UserError: no checkpoint 2, no torch 4, too little memory 5, no run, no tokenizer or damaged files 7.
    """
    found = opened(run)
    writer = found.load(seed)
    writer.read(prompt)
    text = "".join(writer.write(Sampling(temperature, top_k, top_p), tokens))
    return Sample(checkpoint=found.checkpoint, skipped=found.skipped, prompt=prompt, text=text)
