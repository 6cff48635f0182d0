"""`foretrain runs`: foretrain's own runs, watched commands, Trainers' runs, a row each with what users call it."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from foretrain.base.messages import listed
from foretrain.reports.document import Cell, Document, Message, Paragraph, Quantity, Section, Table
from foretrain.reports.views.run import STATUS_TONES, status_text
from foretrain.runs.folder import RunDirectory
from foretrain.runs.record import RunRecord, TrainedRun
from foretrain.runs.state import UNSAID, Label

Labels = Mapping[Path, Label]  # by folder
_START = Message("top.start_one")
OTHERS = ("run", "status", "steps", "val_loss", "step", "took", "started")


def document(found: Sequence[tuple[Path, RunRecord]], labels: Labels, tags: Sequence[str] = ()) -> Document:
    """One section a kind; where there is none of any, a sentence. `tags`: those that were asked for."""
    trained = [(path, record) for path, record in found if isinstance(record, TrainedRun)]
    others = [
        _others(kind, [(path, _cells_of(path, record)) for path, record in found if record.source == source], labels)
        for kind, source in (("watch", "watched"), ("callback", "trainer"))
        if any(record.source == source for _, record in found)
    ]
    if not found:
        said = [Message("runs.none_tagged", {"tags": listed(tags)})] if tags else [Message("top.no_runs"), _START]
        return Document(Message("runs.title", {"count": 0}), Message("runs.subtitle"),
                        [Section(Message("runs.section"), tuple(map(Paragraph, said)))])  # fmt: skip
    sections = [_own(trained, labels), *others] if trained else others
    return Document(Message("runs.title", {"count": len(trained)}), Message("runs.subtitle"), sections)


def _own(found: Sequence[tuple[Path, TrainedRun]], labels: Labels) -> Section:
    said = _Said([path for path, _ in found], labels)
    several = any(record.world > 1 for _, record in found)
    bits = [RunDirectory(path).bits_per_byte for path, _ in found]
    evaluated = any(each is not None for each in bits)
    rows: list[tuple[Cell, ...]] = []
    tones = []
    for (path, record), of_bytes in zip(found, bits, strict=True):
        rows.append(
            (
                str(path),
                *said.cells(path),
                status_text(RunDirectory(path), record),
                f"{record.steps_done:,} / {record.config.max_iters:,}",
                _loss(record.val_loss),
                *([Quantity(of_bytes, "digits4")] if evaluated else []),
                Message("value.throughput", {"tokens_per_s": record.tokens_per_s}) if record.tokens_per_s else "–",
                Quantity(record.mfu, "percent"),
                *([str(record.world)] if several else []),
                _minute(record.started_at),
            )
        )
        tones.append(STATUS_TONES.get(record.status, "plain"))
    of_eval, ranks = ["bits_per_byte"] if evaluated else [], ["ranks"] if several else []
    columns = said.heads("run", "status", "steps", "val_loss", *of_eval, "speed", "mfu", *ranks, "started")
    numeric = frozenset(range(2 + len(said.columns), len(columns) - 1))
    narrow = (len(columns) - 1, len(said.columns) + 5)  # when it began, and its MFU
    return Section(Message("runs.section"), (Table(columns, tuple(rows), numeric, tuple(tones), narrow),))


def _others(kind: str, found: list[tuple[Path, tuple[Cell, ...]]], labels: Labels) -> Section:
    said = _Said([path for path, _ in found], labels)
    rows = tuple((str(path), *said.cells(path), *cells) for path, cells in found)
    more = len(said.columns)
    table = Table(said.heads(*OTHERS), rows, frozenset(range(2 + more, 6 + more)), optional=(6 + more, 3 + more))
    return Section(Message(f"{kind}.section"), (table,))


def _cells_of(path: Path, record: RunRecord) -> tuple[Cell, ...]:
    return (
        status_text(RunDirectory(path), record),
        f"{record.steps_done:,}",
        _loss(record.val_loss),
        Quantity(record.step_s, "duration"),
        Quantity(record.wall_s, "duration"),
        _minute(record.started_at),
    )


class _Said:
    """What users say of some runs, as columns behind the first one: none where nobody says anything."""

    def __init__(self, paths: Sequence[Path], labels: Labels) -> None:
        self._labels = {path: labels.get(path, UNSAID) for path in paths}
        wanted = {
            "name": any(label.title for label in self._labels.values()),
            "tags": any(label.tags for label in self._labels.values()),
        }
        self.columns = tuple(name for name, some in wanted.items() if some)

    def cells(self, path: Path) -> tuple[Cell, ...]:
        label = self._labels[path]
        cells = {"name": label.title, "tags": ", ".join(" ".join(tag.split()) for tag in label.tags)}
        return tuple(cells[column] for column in self.columns)

    def heads(self, first: str, *others: str) -> tuple[Cell, ...]:
        return tuple(Message(f"column.{name}") for name in (first, *self.columns, *others))


def _loss(loss: float | None) -> str:
    return "–" if loss is None else f"{loss:.4f}"


def _minute(moment: str) -> str:
    return moment.replace("T", " ")[:16]
