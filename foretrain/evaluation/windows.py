"""Bits per byte of a text in overlapping windows, each token predicted once: the recipe of "Perplexity of fixed-length
models" in the documentation of transformers."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from foretrain.base.errors import UserError
from foretrain.base.installation import Later
from foretrain.base.units import MIB
from foretrain.evaluation.harness import first_line
from foretrain.hardware import accelerator
from foretrain.model.language_model import LanguageModel

LOGITS_BYTES = 256 * MIB  # of a batch of windows, unless one window alone has more
MOST_ROWS = 64

Tell = Callable[[int, int], None]  # how many tokens of how many are scored


class Predictor(Protocol):
    context_tokens: int
    vocab_size: int
    device: torch.device

    def logits(self, idx: Tensor) -> Tensor:
        """Return B x T x V, fp32."""
        ...


@dataclass(frozen=True)
class Summed:
    nats: np.ndarray
    byte_counts: np.ndarray
    tokens: int

    @property
    def loss(self) -> float:
        return float(self.nats.sum()) / self.tokens

    def bits_per_byte(self, size_bytes: int) -> float:
        return float(self.nats.sum()) / math.log(2) / size_bytes

    def standard_error(self, size_bytes: int) -> float | None:
        """Return that of a ratio of two sums, with the windows as independent draws; None of one window."""
        count, known = len(self.nats), int(self.byte_counts.sum())
        if count < 2 or not known:
            return None
        share = self.byte_counts * (size_bytes / known)
        off = self.nats / math.log(2) - self.bits_per_byte(size_bytes) * share
        return math.sqrt(count / (count - 1) * float((off**2).sum())) / size_bytes


def windows(count: int, context: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Yield (begin, end, scored): ids[begin:end] predict the ids one further on, the last `scored` of them count."""
    done = begin = 0
    while done < count - 1:
        end = min(begin + context, count - 1)
        yield begin, end, end - done
        done, begin = end, begin + stride


def rows_at_once(context: int, vocab_size: int) -> int:
    return max(1, min(MOST_ROWS, LOGITS_BYTES // (4 * context * vocab_size)))


def score(
    model: Predictor,
    ids: np.ndarray,
    byte_counts: Sequence[int],
    *,
    stride: int,
    skip: int | None = None,
    context: int | None = None,
    tell: Tell = lambda done, total: None,
) -> Summed:
    """Sum over `ids`, whose first one is context only. `byte_counts`: the bytes of each id's text; `skip`: an id that
    is never scored. Raises UserError 'memory.evaluation' where one window does not fit on the card."""
    context = min(context or model.context_tokens, model.context_tokens)
    sizes = np.asarray(byte_counts, dtype=np.int64)
    nats: list[float] = []
    counts: list[int] = []
    scored, total = 0, len(ids) - 1
    rows, left, done = rows_at_once(context, model.vocab_size), windows(len(ids), context, stride), 0
    while batch := list(islice(left, rows)):
        *full, last = batch
        parts = [batch] if last[1] - last[0] == batch[0][1] - batch[0][0] else [full, [last]]
        for part in filter(None, parts):
            losses = _losses(model, ids, part)
            for (begin, end, new), row in zip(part, losses, strict=True):
                targets = ids[end + 1 - new : end + 1]
                counted = np.ones(new, dtype=bool) if skip is None else targets != skip
                nats.append(float(row[end - begin - new : end - begin][counted].sum()))
                counts.append(int(sizes[targets[counted]].sum()))
                scored += int(counted.sum())
            done = part[-1][1]
        tell(done, total)
    return Summed(np.array(nats), np.array(counts), scored)


def _losses(model: Predictor, ids: np.ndarray, batch: list[tuple[int, int, int]]) -> np.ndarray:
    """Return nats of every prediction of windows of one length; where a GPU has no room, by halves."""
    try:
        return _nats(model, ids, batch)
    except RuntimeError as error:
        if not accelerator.ran_out(error):
            raise
        if len(batch) == 1:
            raise UserError("memory.evaluation", tokens=batch[0][1] - batch[0][0]) from None
    accelerator.accelerator_of(model.device).empty_cache()
    middle = len(batch) // 2
    return np.concatenate([_losses(model, ids, batch[:middle]), _losses(model, ids, batch[middle:])])


@torch.no_grad()
def _nats(model: Predictor, ids: np.ndarray, batch: list[tuple[int, int, int]]) -> np.ndarray:
    rows = torch.from_numpy(np.stack([ids[begin : end + 1] for begin, end, _ in batch]).astype(np.int64))
    rows = rows.to(model.device)
    logits = model.logits(rows[:, :-1])
    found = [F.cross_entropy(row, targets, reduction="none") for row, targets in zip(logits, rows[:, 1:], strict=True)]
    return torch.stack(found).cpu().double().numpy()


_transformers: Any = Later("transformers")


class OwnModel:
    def __init__(self, model: LanguageModel, vocab_size: int) -> None:
        self.model = model.eval()
        self.context_tokens = model.block_size
        self.vocab_size = vocab_size
        self.device = next(model.parameters()).device

    def logits(self, idx: Tensor) -> Tensor:
        return self.model.lm_head(self.model.hidden(idx)).float()


class HubModel:
    def __init__(self, folder: Path, device: torch.device) -> None:
        load = _transformers.AutoModelForCausalLM.from_pretrained
        try:
            model = load(str(folder), dtype=torch.float32, use_safetensors=True, local_files_only=True)
        except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
            raise UserError("data.bad_hf_folder", path=str(folder), reason=first_line(error)) from None
        self.model: Any = model.to(device).eval()
        self.context_tokens = int(getattr(model.config, "max_position_embeddings", None) or 2048)
        self.vocab_size = int(model.config.vocab_size)
        self.device = device

    def logits(self, idx: Tensor) -> Tensor:
        return self.model(input_ids=idx, use_cache=False).logits.float()
