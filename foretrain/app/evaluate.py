"""How good a model is: bits per byte of texts, and lm-eval's tasks. `foretrain.evaluate` for Python, without torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretrain.app.train import need_torch
from foretrain.base.errors import UserError
from foretrain.base.installation import Later
from foretrain.evaluation.harness import need_harness

if TYPE_CHECKING:
    from foretrain.runs.record import Evaluation


VALIDATION_TOKENS = 1_000_000  # of validation data, unless more are asked for

Listen = Callable[[str, dict[str, Any]], None]  # hears what begins, and how far it is, by the id of a text


@dataclass(frozen=True)
class Asked:
    """The arguments of `foretrain.evaluate`."""

    source: Path
    tasks: tuple[str, ...]
    texts: tuple[Path, ...]
    best: bool
    include_path: Path | None
    stride: int | None
    tokens: int | None
    shots: int | None
    documents: int | None
    batch_size: int | None
    device: str
    bars: bool
    listen: Listen


SCHEMA = "foretrain.model/1#eval"
_work: Any = Later("foretrain.app.evaluation")


def evaluate(
    source: str | Path,
    *,
    tasks: str | Sequence[str] = (),
    text: str | Path | Sequence[str | Path] = (),
    best: bool = False,
    include_path: str | Path | None = None,
    stride: int | None = None,
    tokens: int | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
    batch_size: int | None = None,
    device: str = "auto",
    bars: bool = False,
    listen: Listen = lambda id, values: None,
) -> Evaluation:
    """How well a model does: `foretrain.evaluate("out", text="notes.txt").texts[0].bits_per_byte`.

    `source`: a run, one of its checkpoints, or a Hugging Face folder. `text`: files of UTF-8 text. `tasks`: names of
    lm-eval's tasks; it downloads their data unless they are in its cache. Without both, the validation data of the run.
    `best`: the checkpoint with the lowest validation loss. `include_path`: a folder with tasks of your own; Python
    files that they name are run. `stride`: tokens from one window to the next, by default half the context. `tokens`:
    the most tokens to score of each text; by default all, and a million of validation data. `num_fewshot`, `limit`
    (documents of each task) and `batch_size` are lm-eval's. Losses are in nats per token. Each result is kept in the
    run's folder as soon as it is there, so Ctrl-C loses only the one in progress. `bars`: lm-eval draws its own on
    stderr. `listen` hears the progress.
    Raises UserError: bad names 2, no torch, no lm-eval or no network 4, out of memory 5, no run, no tokenizer or
    damaged files 7.
    """
    need_torch()
    names = tuple(dict.fromkeys([tasks] if isinstance(tasks, str) else tasks))
    if names:
        need_harness()
    files = [text] if isinstance(text, str | Path) else text
    for name, value in (("stride", stride), ("tokens", tokens), ("limit", limit), ("batch_size", batch_size)):
        if value is not None and value < 1:
            raise UserError("usage.not_positive", name=name, value=value)
    asked = Asked(
        source=Path(source), tasks=names, texts=tuple(dict.fromkeys(map(Path, files))), best=best,
        include_path=None if include_path is None else Path(include_path), stride=stride, tokens=tokens,
        shots=num_fewshot, documents=limit, batch_size=batch_size, device=device, bars=bars, listen=listen,
    )  # fmt: skip
    return _work.carry_out(asked)
