"""What `foretrain eval` found, as Documents: its answer, and the section of a run that was evaluated before."""

from collections.abc import Sequence

from foretrain.comparison.compare import Score
from foretrain.reports.document import Block, Cell, Document, Message, Paragraph, Quantity, Section, Table
from foretrain.runs.record import Evaluation, Scores, TaskScore, TextScore

UNKNOWN = "–"
LARGE = 1000


def document(found: Evaluation) -> Document:
    values = {"name": found.source, "step": found.step, "device": found.device, "path": found.kept_in}
    title = Message("scores.title" if found.step is None else "scores.title_step", values)
    subtitle = Message("scores.kept" if found.kept_in else "scores.not_kept", values)
    sections = []
    if found.texts:
        sections.append(
            Section(Message("scores.texts"), (_texts([(None, s) for s in found.texts]), *_how(found.texts)))
        )
    if found.tasks:
        tasks = _tasks([(None, score) for score in found.tasks])
        sections.append(Section(Message("scores.tasks"), (tasks, *_through(found.tasks))))
    return Document(title, subtitle, sections)


def sections(scores: Sequence[Scores]) -> list[Section]:
    newest_first = sorted(scores, key=lambda each: -each.step)
    texts = [(each.step, score) for each in newest_first for score in each.texts]
    tasks = [(each.step, score) for each in newest_first for score in each.tasks]
    blocks: list[Block] = []
    if texts:
        blocks += [_texts(texts), *_how([score for _, score in texts])]
    if tasks:
        blocks += [_tasks(tasks), *_through([score for _, score in tasks])]
    return [Section(Message("scores.section"), tuple(blocks))] if blocks else []


def _columns(names: Sequence[str], steps: bool) -> tuple[Message, ...]:
    return tuple(Message(f"column.{name}") for name in ([*names, "step"] if steps else names))


def _texts(found: Sequence[tuple[int | None, TextScore]]) -> Table:
    """Names are as long as their files', so they come first; `step` only where it is not said above."""
    steps = any(step is not None for step, _ in found)
    rows: list[tuple[Cell, ...]] = []
    for step, score in found:
        bits, loss = Quantity(score.bits_per_byte, "digits4"), Quantity(score.loss, "digits4")
        size = Quantity(score.size_bytes, "bytes")
        row = (score.text, bits, plus_minus(score.standard_error), loss, f"{score.tokens:,}", size)
        rows.append(row if step is None else (*row, f"{step:,}"))
    columns = _columns(("text", "bits_per_byte", "plus_minus", "loss", "tokens", "size"), steps)
    return Table(columns, tuple(rows), frozenset(range(1, len(columns))), optional=(5,))


def _tasks(found: Sequence[tuple[int | None, TaskScore]]) -> Table:
    steps = any(step is not None for step, _ in found)
    rows: list[tuple[Cell, ...]] = []
    for step, score in found:
        shots = UNKNOWN if score.shots is None else str(score.shots)
        value, error = figure(score.value), plus_minus(score.standard_error)
        row = (score.task, metric_name(score), value, error, shots, _documents(score))
        rows.append(row if step is None else (*row, f"{step:,}"))
    columns = _columns(("task", "metric", "value", "plus_minus", "shots", "documents"), steps)
    return Table(columns, tuple(rows), frozenset(range(2, len(columns))), optional=(4,))


def metric_name(score: TaskScore) -> str:
    return score.metric if score.filter in ("", "none") else f"{score.metric} ({score.filter})"


def figure(value: float) -> Quantity:
    return Quantity(value, "digits4" if abs(value) < LARGE else "number")


def plus_minus(error: float | None) -> Cell:
    return UNKNOWN if error is None else figure(error)


def _documents(score: TaskScore) -> str:
    if score.documents is None:
        return UNKNOWN
    if score.documents_in_all in (None, score.documents):
        return f"{score.documents:,}"
    return f"{score.documents:,} / {score.documents_in_all:,}"


def _how(found: Sequence[TextScore]) -> list[Block]:
    kinds = dict.fromkeys((score.context_tokens, score.stride_tokens) for score in found)
    blocks: list[Block] = [
        Paragraph(Message("scores.windows", {"context": context, "stride": stride})) for context, stride in kinds
    ]
    parts = dict.fromkeys(score.text for score in found if not score.whole)
    return blocks + [Paragraph(Message("scores.part", {"text": text}), "warn") for text in parts]


def _through(found: Sequence[TaskScore]) -> list[Block]:
    kinds = dict.fromkeys((score.harness, score.through) for score in found)
    return [Paragraph(Message(f"scores.through.{through}", {"harness": harness})) for harness, through in kinds]


_LABEL = 18
MOST_ROWS = 20  # tasks of many parts have hundreds; --json has them all


def compared_sections(found: Sequence[Score], labels: Sequence[str]) -> list[Section]:
    if not found:
        return []
    heads = tuple(label if len(label) <= _LABEL else label[: _LABEL - 1] + "…" for label in labels)
    columns = (Message("column.quantity"), *heads, Message("column.best"))
    table = Table(columns, tuple(map(_row, found[:MOST_ROWS])), frozenset(range(1, len(labels) + 1)))
    more = [Paragraph(Message("scores.more", {"count": len(found) - MOST_ROWS}))] if len(found) > MOST_ROWS else []
    return [Section(Message("scores.section"), (table, *more, Paragraph(Message("scores.noise"))))]


def _row(score: Score) -> tuple[Cell, ...]:
    best_cell: Cell = {"difference": score.best or UNKNOWN, "within_noise": Message("scores.within_noise")}.get(
        score.outcome, score.best or UNKNOWN
    )
    return _name(score), *map(_value, score.values, score.standard_errors), best_cell


def _name(score: Score) -> Cell:
    if score.metric == "bits_per_byte" and not score.filter:
        return Message("scores.bits_of", {"text": score.name})
    filter = "" if score.filter in ("", "none") else f" ({score.filter})"
    return f"{score.name} {score.metric}{filter}"


def _value(value: float | None, error: float | None) -> Cell:
    if value is None or error is None:
        return Quantity(value, "digits4")
    return Message("scores.plus_minus", {"value": value, "error": error})
