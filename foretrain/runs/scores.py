"""Results of an evaluation: bits per byte of texts, and lm-eval's tasks. No torch."""

from __future__ import annotations

from typing import Any

from foretrain.base.records import Note, Record

SCHEMA = "foretrain.scores/1"


class TextScore(Record):
    """How well a text was predicted. `loss`: nats per token over `tokens`; `bits_per_byte`: over `size_bytes` of UTF-8.

    `standard_error`: of bits_per_byte, from the differences of windows. `whole`: all of it was scored.
    """

    text: str
    sha256: str
    size_bytes: int
    tokens: int
    loss: float
    bits_per_byte: float
    standard_error: float | None
    windows: int
    context_tokens: int
    stride_tokens: int
    whole: bool
    device: str
    dtype: str
    at: str

    @property
    def key(self) -> tuple[Any, ...]:
        """Return what identifies the measurement; another checkpoint's has another result."""
        return self.sha256, self.tokens, self.context_tokens, self.stride_tokens


class TaskScore(Record):
    """One metric of an lm-eval task. `shots`: examples before each question. `through`: a "model" or a "folder"."""

    task: str
    metric: str
    filter: str
    value: float
    standard_error: float | None
    higher_is_better: bool | None
    shots: int | None
    documents: int | None
    documents_in_all: int | None
    version: str
    harness: str
    through: str
    device: str
    dtype: str
    at: str

    @property
    def key(self) -> tuple[Any, ...]:
        return self.task, self.metric, self.filter, self.shots, self.documents, self.version


class Scores(Record):
    """All measurements of one checkpoint. `weights_sha256`: over the checksums of its weights."""

    checkpoint: str
    step: int
    weights_sha256: str
    texts: tuple[TextScore, ...] = ()
    tasks: tuple[TaskScore, ...] = ()

    def with_more(self, more: Scores) -> Scores:
        """Add more of the same checkpoint; repeated measurements are replaced, and all where the weights are others."""
        if more.weights_sha256 != self.weights_sha256:
            return more
        texts = {score.key: score for score in (*self.texts, *more.texts)}
        tasks = {score.key: score for score in (*self.tasks, *more.tasks)}
        return more.model_copy(update={"texts": tuple(texts.values()), "tasks": tuple(tasks.values())})


class Evaluation(Record):
    """Result of one `foretrain eval`. `skipped`: newer damaged checkpoints, and why. `kept_in`: the file beside the
    run.
    """

    source: str
    checkpoint: str | None
    step: int | None
    device: str
    texts: tuple[TextScore, ...] = ()
    tasks: tuple[TaskScore, ...] = ()
    kept_in: str | None = None
    skipped: tuple[str, ...] = ()
    notes: tuple[Note, ...] = ()
