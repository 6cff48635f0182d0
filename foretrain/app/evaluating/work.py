"""An evaluation carried out: texts first, then the tasks, each result kept as soon as it is there."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from foretrain.app.evaluating import subjects, texts
from foretrain.app.evaluating.asked import Asked
from foretrain.app.evaluating.of_run import OfRun, of_run
from foretrain.app.evaluating.subjects import Subject
from foretrain.app.export import export
from foretrain.base.errors import UserError
from foretrain.base.later import Later
from foretrain.base.records import Note
from foretrain.evaluation import harness, libraries
from foretrain.evaluation.record import Evaluation, Scores, TaskScore, TextScore
from foretrain.training.store import now

_adapter: Any = Later("foretrain.evaluation.adapter")  # which imports lm-eval
ROWS = 4  # of a batch of lm-eval's hf, whose logits are of whole sequences


@dataclass
class _Found:
    """What was found so far, and where it is kept."""

    run: OfRun | None
    texts: list[TextScore] = field(default_factory=list)
    tasks: list[TaskScore] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    kept_in: str | None = None

    def add(self, *found: TextScore | TaskScore) -> None:
        """Results, kept beside the run at once. A disk that does not take them is a note."""
        of_texts = [score for score in found if isinstance(score, TextScore)]
        of_tasks = [score for score in found if isinstance(score, TaskScore)]
        self.texts += of_texts
        self.tasks += of_tasks
        if self.run is None or self.notes:
            return
        scores = Scores(
            checkpoint=self.run.path.name, step=self.run.step, weights_sha256=self.run.weights_sha256,
            texts=tuple(of_texts), tasks=tuple(of_tasks),
        )  # fmt: skip
        try:
            self.kept_in = str(self.run.directory.keep_scores(scores))
        except OSError as error:
            values = {"path": str(self.run.directory.path), "reason": error.strerror or str(error)}
            self.notes.append(Note(id="scores_not_kept", values=values))


def carry_out(asked: Asked) -> Evaluation:
    """What was found. Raises UserError."""
    run = None
    if not subjects.is_hugging_face(asked.source):
        run = of_run(asked.source, best=asked.best)
    elif asked.best:
        raise UserError("usage.best_of_folder", path=str(asked.source))
    elif not asked.texts and not asked.tasks:
        raise UserError("usage.nothing_to_evaluate", path=str(asked.source))
    documents = [texts.read(path) for path in asked.texts]
    tasks = harness.find(asked.tasks, asked.include_path) if asked.tasks else None
    found, device = _Found(run), str(subjects.device_of(asked.device))
    subject = None
    if documents or tasks is None:
        subject = _loaded(asked, run)
        if run is not None and not documents:
            documents = texts.validation(run.record, subject, asked.tokens)
        for document in documents:
            found.add(texts.scored(subject, document, asked.stride, asked.tokens, asked.listen))
    if tasks is not None:
        _run_tasks(asked, tasks, run, subject, found, device)
    return Evaluation(
        source=str(asked.source), checkpoint=run.path.name if run else None, step=run.step if run else None,
        device=device, texts=tuple(found.texts), tasks=tuple(found.tasks), kept_in=found.kept_in,
        skipped=run.skipped if run else (), notes=tuple(found.notes),
    )  # fmt: skip


def _loaded(asked: Asked, run: OfRun | None) -> Subject:
    asked.listen("loading", {"path": str(asked.source)})
    if run is None:
        with libraries.quiet(bars=asked.bars):
            return subjects.loaded_folder(asked.source, asked.device)
    return subjects.loaded(run, asked.device)


def _run_tasks(
    asked: Asked, tasks: harness.Harness, run: OfRun | None, subject: Subject | None, found: _Found, device: str
) -> None:
    with contextlib.ExitStack() as stack:
        stack.enter_context(libraries.quiet(bars=asked.bars))
        if not tasks.own:
            asked.listen("task_data", {})
            stack.enter_context(libraries.offline_without_network())
        # All data before the model: what a task lacks is told at once.
        loaded = {name: _task_data(asked, tasks, name) for name in asked.tasks}
        model, through = stack.enter_context(_task_model(asked, run, subject, device))
        for name, data in loaded.items():
            asked.listen("task", {"name": name})
            shared = {"through": through, "device": device, "dtype": "float32", "at": now()}
            try:
                scores = tasks.run(model, name, data, documents=asked.documents, shared=shared)
                found.add(*scores)
            except torch.OutOfMemoryError:
                raise UserError("memory.task", task=name, batch_size=asked.batch_size or ROWS) from None


def _task_data(asked: Asked, tasks: harness.Harness, name: str) -> Any:
    asked.listen("loading_task", {"name": name})
    return tasks.load(name, asked.shots)


@contextlib.contextmanager
def _task_model(asked: Asked, run: OfRun | None, subject: Subject | None, device: str) -> Iterator[tuple[Any, str]]:
    """(what lm-eval runs, how): its own model over a Hugging Face folder, of a run its export to a temporary one; else
    the run's model as it is."""
    rows = asked.batch_size or ROWS
    if run is None:
        yield harness.hugging_face(asked.source, device, rows), "folder"
        return
    if subjects.has_layout(run):
        with tempfile.TemporaryDirectory(prefix="foretrain-eval-") as folder:
            exported = export(run.path, "hf", Path(folder) / "hf")
            yield harness.hugging_face(Path(exported.path), device, rows), "export"
        return
    own = subject or subjects.loaded(run, asked.device)
    yield _adapter.OwnLM(own.model, own.words, asked.batch_size, _progress(asked)), "model"


def _progress(asked: Asked) -> Any:
    return lambda done, total: asked.listen("task_progress", {"done": done, "total": total})
