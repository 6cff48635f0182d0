"""`foretrain runs`: foretrain's own runs, watched commands, Trainers' runs, a row each with what users call it."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from foretrain.analysis.live import LiveCard, LiveRun, Top
from foretrain.base.messages import listed, printable, say
from foretrain.base.units import format_bytes, format_bytes_like, format_left
from foretrain.hardware.card import SLOWING
from foretrain.reports.document import Cell, Document, Message, Paragraph, Quantity, Section, Table
from foretrain.runs.folder import RunDirectory
from foretrain.runs.record import RunRecord, TrainedRun, WatchedRun
from foretrain.runs.state import UNSAID, Label

STATUS_TONES = {
    "finished": "good",
    "interrupted": "warn",
    "killed": "warn",
    "stopped": "warn",
    "diverged": "bad",
    "failed": "bad",
}
_UNSAVED = {"interrupted": "status.interrupted_unsaved", "killed": "status.killed_unsaved"}


def status_text(directory: RunDirectory, record: RunRecord) -> Message:
    """How a run ended; one that saved nothing is not said to be resumable."""
    if isinstance(record, WatchedRun):
        return Message(f"watch_status.{record.status}", {"code": record.exit_code})
    if record.source == "trainer":
        return Message(f"callback.status.{record.status}")
    unsaved = None if directory.has_checkpoint else _UNSAVED.get(record.status)
    return Message(unsaved or f"status.{record.status}")


Labels = Mapping[Path, Label]  # by folder
_START = Message("top.start_one")
OTHERS = ("run", "status", "steps", "val_loss", "step", "took", "started")


def document(found: Sequence[tuple[Path, RunRecord]], labels: Labels, tags: Sequence[str] = ()) -> Document:
    """One section per kind; without runs, a sentence. `tags`: those that were asked for."""
    trained = [(path, record) for path, record in found if isinstance(record, TrainedRun)]
    others = [
        _others(kind, [(path, _cells_of(path, record)) for path, record in found if record.source == source], labels)
        for kind, source in (("watch", "watched"), ("callback", "trainer"))
        if any(record.source == source for _, record in found)
    ]
    if not found:
        sentences = [Message("runs.none_tagged", {"tags": listed(tags)})] if tags else [Message("top.no_runs"), _START]
        return Document(Message("runs.title", {"count": 0}), Message("runs.subtitle"),
                        [Section(Message("runs.section"), tuple(map(Paragraph, sentences)))])  # fmt: skip
    sections = [_own(trained, labels), *others] if trained else others
    return Document(Message("runs.title", {"count": len(trained)}), Message("runs.subtitle"), sections)


def _own(found: Sequence[tuple[Path, TrainedRun]], labels: Labels) -> Section:
    labelled = _Labels([path for path, _ in found], labels)
    several = any(record.world > 1 for _, record in found)
    bits = [RunDirectory(path).bits_per_byte for path, _ in found]
    evaluated = any(each is not None for each in bits)
    rows: list[tuple[Cell, ...]] = []
    tones = []
    for (path, record), of_bytes in zip(found, bits, strict=True):
        rows.append(
            (
                str(path),
                *labelled.cells(path),
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
    columns = labelled.heads("run", "status", "steps", "val_loss", *of_eval, "speed", "mfu", *ranks, "started")
    numeric = frozenset(range(2 + len(labelled.columns), len(columns) - 1))
    narrow = (len(columns) - 1, len(labelled.columns) + 5)  # when it began, and its MFU
    return Section(Message("runs.section"), (Table(columns, tuple(rows), numeric, tuple(tones), narrow),))


def _others(kind: str, found: list[tuple[Path, tuple[Cell, ...]]], labels: Labels) -> Section:
    labelled = _Labels([path for path, _ in found], labels)
    rows = tuple((str(path), *labelled.cells(path), *cells) for path, cells in found)
    more = len(labelled.columns)
    table = Table(labelled.heads(*OTHERS), rows, frozenset(range(2 + more, 6 + more)), optional=(6 + more, 3 + more))
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


class _Labels:
    """What users wrote of some runs, as columns behind the first one: none where they wrote nothing."""

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


_LONG_S = 3.0  # a phase that lasts longer says how long; training says its steps
_NAME = 24
_COLUMNS = ("run", "phase", "steps", "hours", "loss", "speed", "mfu", "memory")
_ENDINGS = ("finished", "diverged", "failed", "killed", "stopped")


def top_document(top: Top, most: int = 60) -> Document:
    """Show the cards, then at most so many runs; count those left out."""
    alive = [run for run in top.runs if run.where != "nowhere"]
    here = sum(run.where == "here" for run in alive)
    title = Message("first.said", {"text": f"foretrain top · {printable(top.host)} · {top.at[11:19]}"})
    counts = Message("top.counts", {"here": here, "elsewhere": len(alive) - here})
    sections = [Section(Message("top.cards"), _cards(top)), Section(Message("runs.section"), _runs(top, most))]
    return Document(title, counts, sections)


def _cards(top: Top) -> tuple[Table | Paragraph, ...]:
    if not top.cards:
        return (Paragraph(Message("top.no_cards", {"reason": printable(top.no_cards)})),)
    rows = [(f"{card.index} {printable(card.name)}", _memory(card), _state(card)) for card in top.cards]
    return (Table(tuple(Message(f"column.{name}") for name in ("gpu", "memory", "status")), tuple(rows)),)


def _memory(card: LiveCard) -> str:
    if card.used_bytes is None:
        return "–"
    used = _of("top.used_of", card.used_bytes, card.total_bytes) if card.total_bytes else format_bytes(card.used_bytes)
    return f"{used} ({say('top.by_runs', runs=card.ours_bytes)})" if card.ours_bytes else used


def _state(card: LiveCard) -> str:
    slowed = [say(f"throttle.{reason}") for reason in card.reasons if reason in SLOWING]
    parts = [
        "" if card.busy is None else say("top.busy", share=card.busy),
        "" if card.clock_ghz is None else f"{card.clock_ghz:.2f} GHz",
        say("top.slowed", reasons=slowed) if slowed else "",
        "" if card.temperature_c is None else f"{card.temperature_c} °C",
        "" if card.power_w is None else f"{card.power_w:.0f} W",
    ]  # fmt: skip
    return " · ".join(filter(None, parts)) or "–"


def _runs(top: Top, most: int) -> tuple[Table | Paragraph, ...]:
    if not top.runs:
        return tuple(Paragraph(Message(f"top.{id}")) for id in ("no_runs", "start_one", "elsewhere"))
    shown = [run for run in top.runs if run.phase != "unreadable"][:most]
    broken = [run for run in top.runs if run.phase == "unreadable"][: max(0, most - len(shown))]
    blocks: list[Table | Paragraph] = []
    if shown:
        columns = tuple(Message(f"column.{name}") for name in _COLUMNS)
        rows, tones = tuple(map(_row, shown)), tuple(map(_tone, shown))
        blocks.append(Table(columns, rows, frozenset({2, 4, 5, 6}), tones, optional=(6, 5, 4)))
    for run in broken:
        text = f"{_name(run)}: {printable(run.problem)}"
        blocks.append(Paragraph(Message("first.said", {"text": text.splitlines()[0]}), "warn"))
    if left := len(top.runs) - len(shown) - len(broken) + top.more_runs:
        blocks.append(Paragraph(Message("top.more_runs", {"count": left})))
    return tuple(blocks)


def _name(run: LiveRun) -> str:
    name = printable(run.label.title or " ".join(run.name.split()))
    return name if len(name) <= _NAME else name[: _NAME - 1] + "…"


def _tone(run: LiveRun) -> str:
    """Mark a run above the upper end of its plan's range."""
    planned = run.planned_high_bytes or run.planned_bytes
    return "warn" if planned and run.where != "nowhere" and (run.memory_bytes or 0) > planned else "plain"


def _row(run: LiveRun) -> tuple[Cell, ...]:
    done = "–" if run.step is None else f"{run.step:,}"
    steps = f"{run.step or 0:,} / {run.steps:,}" if run.steps else done
    held = "–" if not run.memory_bytes else format_bytes(run.memory_bytes)
    if run.memory_bytes and run.planned_bytes:
        held = _of("top.memory_of", run.memory_bytes, run.planned_bytes)
    loss = run.val_loss if run.where == "nowhere" else run.loss
    tags = "".join(f" #{' '.join(tag.split())}" for tag in run.label.tags)
    return (
        _name(run) + printable(tags), _phase(run), steps,
        "" if run.eta_s is None else say("top.left", time=format_left(run.eta_s)),
        "–" if loss is None else f"{loss:.4f}",
        Message("value.throughput", {"tokens_per_s": run.tokens_per_s}) if run.tokens_per_s else "–",
        Quantity(run.mfu, "percent"), held,
    )  # fmt: skip


def _phase(run: LiveRun) -> str:
    if run.where == "nowhere":
        how = {"interrupted": "stopped"}.get(run.status, run.status)
        return say(f"top.ended.{how if how in _ENDINGS else 'killed'}")
    phase = say(f"top.phase.{run.phase}")
    if run.phase_s is not None and run.phase_s >= _LONG_S and run.phase not in ("training", "running"):
        phase += f" {format_left(run.phase_s)}"
    if run.where == "here":
        return phase
    return f"{phase}, {say('top.on_host', host=printable(run.host)) if run.host else say('top.not_here')}"


def _of(id: str, used: int, total: int) -> str:
    """Return '9.80 of 12.00 GiB', with the number in the unit of the whole."""
    return say(id, used=format_bytes_like(used, total), total=total)
