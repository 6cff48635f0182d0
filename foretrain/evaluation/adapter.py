"""A run's own model for lm-eval, with the figures of its `hf` on a folder. Import this only where lm-eval is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from foretrain.data.tokenizer import Tokenizer, document_end
from foretrain.evaluation.windows import OwnModel, rows_at_once
from foretrain.model.writer import generate

_api: Any = import_module("lm_eval.api.model")
_windows: Any = import_module("lm_eval.utils")
_models: Any = import_module("lm_eval.models.utils")

Pieces = list[tuple[list[int], list[int]]]  # (context, continuation)
Tell = Callable[[int, int], None]  # how many requests of how many are answered


class OwnLM(_api.TemplateLM):
    max_gen_toks = 256  # as lm-eval's hf has it

    def __init__(
        self, model: OwnModel, words: Tokenizer, batch_size: int | None = None, tell: Tell = lambda done, total: None
    ) -> None:
        super().__init__()
        self._own, self._words, self._tell = model, words, tell
        self._device = model.device
        self.batch_size = batch_size
        self.max_length = model.context_tokens

    @property
    def eot_token_id(self) -> int:
        return self._words.separator

    @property
    def tokenizer_name(self) -> str:
        return self._words.name

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return list(self._words.encode(string.encode("utf-8", "replace")))

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        texts = [self.tok_encode(request.args[0]) for request in requests]
        answers = self._answer([self._rolling([self.prefix_token_id], ids) for ids in texts])
        return [total for total, _ in answers]

    def _loglikelihood_tokens(self, requests: list[Any], **kwargs: Any) -> list[tuple[float, bool]]:
        fits = [len(ids) <= self.max_length for _, _, ids in requests]
        return self._answer(
            [
                [(context, ids)] if whole else self._rolling(context, ids)
                for whole, (_, context, ids) in zip(fits, requests, strict=True)
            ]
        )

    def _rolling(self, context: list[int], ids: list[int]) -> Pieces:
        """Cut a text longer than the context as lm-eval does."""
        cut = _windows.get_rolling_token_windows(ids, context[-1], self.max_length, 1)
        return [_windows.make_disjoint_window(pair) for pair in cut]

    def _answer(self, requests: Sequence[Pieces]) -> list[tuple[float, bool]]:
        numbered = [(number, piece) for number, pieces in enumerate(requests) for piece in pieces]
        numbered.sort(key=lambda item: -len(item[1][0]) - len(item[1][1]))
        totals, greedy = [0.0] * len(requests), [True] * len(requests)
        done = 0
        while done < len(numbered):
            longest = sum(map(len, numbered[done][1]))
            rows = self.batch_size or rows_at_once(min(longest, self.max_length), self._own.vocab_size)
            batch = numbered[done : done + rows]
            for (number, _), (total, likeliest) in zip(batch, self._run([p for _, p in batch]), strict=True):
                totals[number] += total
                greedy[number] &= likeliest
            done += len(batch)
            self._tell(done, len(numbered))
        return list(zip(totals, greedy, strict=True))

    @torch.no_grad()
    def _run(self, pieces: Pieces) -> list[tuple[float, bool]]:
        """Run one batch, padded on the right, which a causal model does not see."""
        rows = [(context + ids)[-(self.max_length + 1) :] for context, ids in pieces]
        padded = torch.zeros(len(rows), max(map(len, rows)) - 1, dtype=torch.long)
        for row, ids in zip(padded, rows, strict=True):
            row[: len(ids) - 1] = torch.tensor(ids[:-1])
        logits = self._own.logits(padded.to(self._own.device))
        return [
            _of_row(logits[i, len(row) - 1 - len(ids) : len(row) - 1], ids)
            for i, (row, (_, ids)) in enumerate(zip(rows, pieces, strict=True))
        ]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        texts = []
        for done, request in enumerate(requests, 1):
            context, settings = request.args
            wanted = _models.normalize_gen_kwargs(settings, self.max_gen_toks)
            stops = _models.handle_stop_sequences(wanted["until"], None)
            texts.append(_models.postprocess_generated_text(self._write(context, wanted, stops), stops, None))
            self._tell(done, len(requests))
        return texts

    def _write(self, context: str, wanted: dict[str, Any], stops: list[str]) -> str:
        most = wanted["max_gen_toks"]
        if most >= self.max_length:
            raise ValueError(f"it asks for {most} new tokens of a model with a context of {self.max_length}")
        ids = self.tok_encode(context)[-(self.max_length - most) :] or [self.prefix_token_id]
        ends = document_end(self._words)
        made: list[int] = []
        following = generate(
            self._own.model, ids, most, temperature=wanted.get("temperature") or 0.0,
            top_k=int(wanted.get("top_k") or 0), seed=0, vocab_size=min(self._words.vocab_size, self._own.vocab_size),
        )  # fmt: skip
        for id in following:
            if id == ends:
                break
            made.append(id)
            if any(stop and stop in self._words.decode(made) for stop in stops):
                break
        return self._words.decode(made)


def _of_row(logits: Tensor, ids: list[int]) -> tuple[float, bool]:
    targets = torch.tensor(ids, device=logits.device)
    chosen = torch.log_softmax(logits, dim=-1).gather(1, targets[:, None])
    return float(chosen.sum()), bool((logits.argmax(-1) == targets).all())
