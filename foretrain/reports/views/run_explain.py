"""A run's explanation: how it ended, where memory and time went, and why; and memory that ran out, of any program."""

from foretrain.advice.record import Advice
from foretrain.analysis.forecast_check import RankPart, RanksExplained, Row
from foretrain.analysis.run import OutOfMemory, Piece, RunExplanation, TimePiece
from foretrain.analysis.run_pace import RunLimit, RunPace, Slower, much_is_lost
from foretrain.base.messages import listed
from foretrain.base.units import rounds_to_zero
from foretrain.config.sharing import STRATEGIES
from foretrain.config.words import as_word
from foretrain.reports.document import Block, Cell, Document, Message, Paragraph, Quantity, Section, Table
from foretrain.reports.views import scores
from foretrain.runs.record import MachineLoad
from foretrain.training.place import SLOW

Rows = list[tuple[Cell, ...]]
MATTERS = 0.05  # of the peak: a piece that is farther off than this is named


def document(found: RunExplanation, *, limit: bool = False) -> Document:
    """Memory that ran out first, then where memory and time went. `limit`: and the machine's limit by operation."""
    sections = [
        *endings(found), *rank_sections(found), Section(Message("run_explain.memory"), _memory(found)),
        *time_sections(found), *score_sections(found),
        *([_limit_section(found.limit)] if limit and found.limit else []),
    ]  # fmt: skip
    values = {"status": Message(f"status.{found.status}"), "steps": found.steps_done, "gpu": found.gpu_name}
    subtitle = Message("run_explain.subtitle", values | {"mode": Message(_mode(found))})
    return Document(Message("run_explain.title", {"name": found.run_id}), subtitle, sections)


def endings(found: RunExplanation) -> list[Section]:
    sections = out_of_memory(found.failures, remedy_blocks(found.remedies)) if found.failures else []
    if not found.failures and found.reason.startswith("memory."):
        blocks = (Paragraph(Message("run_explain.no_record"), "warn"), *remedy_blocks(found.remedies))
        sections.append(Section(Message("oom.section"), blocks))
    if found.status == "killed":
        killed = Paragraph(Message("run_explain.killed_text"), "warn")
        sections.append(Section(Message("run_explain.killed"), (killed,)))
    return sections


def rank_sections(found: RunExplanation) -> list[Section]:
    return sections(found.ranks, found.predicted_source)


def score_sections(found: RunExplanation) -> list[Section]:
    return scores.sections(found.scores)


def time_sections(found: RunExplanation) -> list[Section]:
    sections = [Section(Message("run_explain.time"), _time(found))]
    if found.pace is not None:
        notes = (Paragraph(Message(f"run_note.{note.id}", note.values), "warn") for note in found.notes)
        level = _level(found.step, found.time_source)
        blocks = (*load_paragraphs(found.machine), *_slower(found.pace), *level, *_limit_line(found), *notes)
        sections.append(Section(Message("run_explain.slower"), blocks))
    return sections


def _mode(found: RunExplanation) -> str:
    return "mode.compiled" if found.compiled else "mode.eager"


# -- memory ------------------------------------------------------------------------------------------------


def _memory(found: RunExplanation) -> tuple[Block, ...]:
    if found.phase is None:
        id = "memory_not_measured" if found.steps_done else "nothing_measured"
        return (Paragraph(Message(f"run_explain.{id}")),)
    values = {"phase": Message(f"phase.{found.phase}"), "predicted": found.predicted_source}
    blocks: list[Block] = [
        Paragraph(Message("run_explain.memory_of", values | {"measured": found.measured_source})),
        *([Paragraph(Message("ranks.first"))] if found.ranks and found.ranks.world > 1 else []),
        pieces_table(found.memory, "memory_piece", Message("column.component")),
        *_farthest(found.memory),
        *_process(found.process),
    ]
    if len(found.phases) > 1:
        blocks.append(pieces_table(found.phases, "phase", Message("column.component")))
    return tuple(blocks)


def pieces_table(pieces: tuple[Piece, ...], texts: str, head: Message) -> Table:
    columns = (head, *(Message(f"column.{name}") for name in ("predicted", "measured", "error")))
    rows = tuple(
        (
            Message(f"{texts}.{piece.id}"), Quantity(piece.predicted_bytes, "bytes"),
            Quantity(piece.measured_bytes, "bytes"), error_cell(piece.predicted_bytes, piece.measured_bytes),
        )
        for piece in pieces
    )  # fmt: skip
    return Table(columns, rows, frozenset({1, 2, 3}))


def error_cell(predicted: float | None, measured: float | None) -> Cell:
    return Quantity(predicted / measured - 1, "signed_percent") if predicted and measured else ""


def _farthest(pieces: tuple[Piece, ...]) -> tuple[Paragraph, ...]:
    peak = next((p for p in pieces if p.id == "peak"), None)
    known = [
        (p.measured_bytes - p.predicted_bytes, p)
        for p in pieces
        if not p.sum and p.measured_bytes is not None and p.predicted_bytes is not None
    ]
    if peak is None or not peak.measured_bytes or not peak.predicted_bytes or not known:
        return ()
    by, piece = max(known, key=lambda pair: abs(pair[0]))
    error = peak.predicted_bytes / peak.measured_bytes - 1
    values = {"error": error, "piece": Message(f"memory_piece.{piece.id}")}
    if abs(by) < MATTERS * peak.measured_bytes:
        id, tone = "memory_as_predicted", "good"
    else:
        id, tone = "memory_more" if by > 0 else "memory_less", "warn"
    table = "run_explain.right" if rounds_to_zero(error) else "run_explain"
    return (Paragraph(Message(f"{table}.{id}", values | {"size": abs(by)}), tone),)


def _process(row: Row | None) -> tuple[Paragraph, ...]:
    if row is None:
        return ()
    values = {"measured": row.measured, "predicted": row.predicted, "low": row.low, "high": row.high}
    values["size"] = abs(row.measured - row.predicted)
    id, tone = ("process_in_range", "plain") if row.in_range else ("process_out_of_range", "warn")
    return (Paragraph(Message(f"run_explain.{id}", values), tone),)


# -- time --------------------------------------------------------------------------------------------------


def _time(found: RunExplanation) -> tuple[Block, ...]:
    if not found.time:
        return (Paragraph(Message("run_explain.no_steps", {"wall": found.wall_s})),)
    there, expected = found.steps_logged, found.steps_to_log
    lost: tuple[Block, ...] = ()
    if much_is_lost(there, expected):
        lost = (Paragraph(Message("run_explain.steps_lost", {"there": there, "expected": expected}), "warn"),)
    names = ("column.component", "column.count", "column.predicted", "column.measured", "column.error")
    columns = tuple(Message(name) for name in (*names, "snapshot.share"))
    rows: Rows = [_time_row(piece, found.wall_s) for piece in found.time if not piece.inside]
    rows.append((Message("time_piece.wall"), "", "", Quantity(found.wall_s, "duration"), "", Quantity(1.0, "percent")))
    rows += [_time_row(piece, found.wall_s) for piece in found.time if piece.inside]
    blocks: list[Block] = [*lost, Table(columns, tuple(rows), frozenset({1, 2, 3, 4, 5}), optional=(1, 5))]
    besides = [p for p in found.time if p.id not in ("steps", "other_ranks", "other") and not p.inside]
    largest = max(besides, default=None, key=_measured)
    if largest is not None and _measured(largest) >= MATTERS * found.wall_s:
        values = {"piece": _time_name(largest), "took": _measured(largest), "share": _measured(largest) / found.wall_s}
        blocks.append(Paragraph(Message("run_explain.largest", values)))
    if found.time_source:
        blocks.append(Paragraph(Message("run_explain.time_source", {"source": found.time_source})))
    return tuple(blocks)


def _measured(piece: TimePiece) -> float:
    return piece.measured_s or 0.0


def _time_name(piece: TimePiece) -> Message:
    known = ("steps", "other_ranks", "evaluation", "saving", "other", "data_in_steps")
    return Message(f"time_piece.{piece.id}" if piece.id in known else f"slow_cause.{piece.id}")


def _time_row(piece: TimePiece, wall_s: float) -> tuple[Cell, ...]:
    return (
        _time_name(piece), f"{piece.count:,}" if piece.count else "", Quantity(piece.predicted_s, "duration"),
        Quantity(piece.measured_s, "duration"), error_cell(piece.predicted_s, piece.measured_s),
        Quantity(_measured(piece) / wall_s if wall_s else None, "percent"),
    )  # fmt: skip


def _slower(pace: RunPace) -> tuple[Block, ...]:
    values = {"median": pace.steady_s, "low": pace.low_s, "high": pace.high_s, "lost": pace.lost_s}
    if not pace.slower:
        return (Paragraph(Message("run_explain.steady", values)),)
    return Paragraph(Message("run_explain.unsteady", values)), *(_why(one) for one in pace.slower)


def _level(step: Row | None, source: str | None) -> tuple[Block, ...]:
    if step is None or step.in_range is not False:
        return ()
    ids = ("above_calibrated", "below_calibrated") if source == "calibrated" else ("above_forecast", "below_forecast")
    id = ids[0] if step.measured > step.predicted else ids[1]
    values = {"predicted": step.predicted, "low": step.low, "high": step.high, "measured": step.measured}
    values["factor"] = step.measured / step.predicted
    return (Paragraph(Message(f"run_explain.{id}", values), "warn"),)


def _why(one: Slower) -> Paragraph:
    values = {
        "cause": Message(f"slow_cause.{one.cause}"), "steps": one.steps, "first": one.first_step,
        "last": one.last_step, "lost": one.lost_s, "factor": one.factor,
    }  # fmt: skip
    several, shown = one.steps != 1, None
    for key in ("clock_ghz", "used_by_others_bytes", "cores", "data_wait_s"):
        if key in one.values and key in _SHOWN.get(one.cause, ()):
            shown = Message(f"slow_shown.{key}", {"there": one.values[key], "usual": one.values[f"usual_{key}"]})
    if shown is not None:
        id = "run_explain.slow_shown" if several else "run_explain.slow_one_shown"
        return Paragraph(Message(id, values | {"shown": shown}), "warn")
    id = "run_explain.slow" if several else "run_explain.slow_one"
    return Paragraph(Message(id, values), "plain" if one.cause in _EXPECTED else "warn")


_CLOCKED = ("hardware_thermal", "thermal", "hardware_slowdown", "power_brake", "power_cap", "clock")
_SHOWN = {
    **dict.fromkeys(_CLOCKED, ("clock_ghz",)), "others_card": ("used_by_others_bytes",), "others_cpu": ("cores",),
    "other_ranks": ("cores",),
    "data_wait": ("data_wait_s",),
}  # fmt: skip
_EXPECTED = ("compilation", "first_steps")


def load_paragraphs(machine: MachineLoad | None) -> tuple[Paragraph, ...]:
    if machine is None or not machine.busy:
        return ()
    found = [Message("compare.machine_busy", {"others": machine.others_share, "own": machine.own_share})]
    if machine.stalls:
        found.append(Message("compare.machine_stalled", {"stalls": machine.stalls, "lost": machine.stalled_s}))
    return tuple(Paragraph(message, "warn") for message in found)


# -- the machine's limit -------------------------------------------------------------------------------------


def _limit_line(found: RunExplanation) -> tuple[Block, ...]:
    if found.limit is not None:
        values = {"share": found.limit.share, "limit": found.limit.step.limit_s, "step": found.limit.step_s}
        if found.limit.share > 1:
            return (Paragraph(Message("run_limit.beyond", values), "warn"),)
        return (Paragraph(Message("run_limit.share", values)),)
    if found.calibrate_first:
        return (Paragraph(Message("run_limit.calibrate", {"gpu": found.gpu_name})),)
    return ()


def _limit_section(found: RunLimit) -> Section:
    rows: list[tuple[Cell, ...]] = [
        (Message(f"run_limit.{each.group}"), _duration(each.limit_s), _duration(each.kernels_s))
        for each in found.step.groups
    ]
    kernels = None if found.rest_s is None else found.step_s - found.rest_s
    rows.append((Message("run_limit.together"), _duration(found.step.limit_s), _duration(kernels)))
    if found.rest_s is not None and found.rest_s > 0:
        rows.append((Message("run_limit.rest"), "", _duration(found.rest_s)))
    rows.append((Message("run_limit.step"), "", _duration(found.step_s)))
    columns = tuple(Message(f"run_limit.{name}") for name in ("operations", "limit", "kernels"))
    values = {"date": found.calibrated[:10], "dtype": found.step.dtype}
    blocks = (Paragraph(Message("run_limit.intro", values)), Table(columns, tuple(rows), frozenset({1, 2})))
    return Section(Message("run_limit.section"), blocks)


def _duration(seconds: float | None) -> Cell:
    return "" if seconds is None else Quantity(seconds, "duration")


# -- out of memory -----------------------------------------------------------------------------------------


_ROWS = (
    "weights", "gradients", "optimizer", "rest", "allocated", "unused", "reserved", "context", "used_by_others",
    "outside", "card",
)  # fmt: skip


def out_of_memory(
    failures: tuple[OutOfMemory, ...], saved: tuple[Block, ...], fragmented: str = "oom.fragmented"
) -> list[Section]:
    last = failures[-1]
    tone = "bad" if last.fatal else "warn"
    blocks: list[Block] = [Paragraph(_where(last), tone)]
    survived = sum(not failure.fatal for failure in failures)
    if survived:
        blocks.append(Paragraph(Message("oom.survived", {"count": survived})))
    values = last.model_dump()
    if last.asked_bytes is not None and last.over_bytes is not None:
        blocks.append(Paragraph(Message("oom.asked" if last.over_bytes else "oom.asked_within", values)))
    elif last.asked_bytes is not None:
        blocks.append(Paragraph(Message("oom.asked_only", values)))
    rows: Rows = [
        (Message(f"oom_row.{name}"), Quantity(values[f"{name}_bytes"], "bytes"))
        for name in _ROWS
        if values[f"{name}_bytes"] is not None
    ]
    if rows:
        blocks.append(Table((), tuple(rows), frozenset({1})))
    if last.unused_bytes is not None and last.asked_bytes is not None and last.free_bytes is not None:
        id = fragmented if last.expandable_segments else "oom.fragmented_before"
        id = id if last.fragmented else "oom.not_fragmented"
        blocks.append(Paragraph(Message(id, values), "warn" if last.fragmented else "plain"))
    if last.reserved_bytes is not None and last.reserved_bytes > (last.card_bytes or last.reserved_bytes):
        blocks.append(Paragraph(Message("oom.spilled"), "warn"))
    sections = [Section(Message("oom.section"), tuple(blocks))]
    if last.fatal and saved:
        sections.append(Section(Message("oom.saved"), saved))
    return sections


def _where(failure: OutOfMemory) -> Message:
    if not failure.phase and not failure.moment:
        return Message("oom.in_log")
    phase = Message(f"phase.{failure.phase}") if failure.phase else Message("oom.outside")
    values = {"phase": phase, "moment": Message(f"oom_moment.{failure.moment or 'other'}"), "step": failure.step}
    if failure.micro_step and failure.accumulation:
        return Message("oom.in_micro_step", values | {"micro": failure.micro_step, "of": failure.accumulation})
    return Message("oom.in_step", values)


def remedy_blocks(remedies: tuple[Advice, ...], exact: str = "oom.exact") -> tuple[Block, ...]:
    if not remedies:
        return (Paragraph(Message("oom.no_remedy")),)
    columns = tuple(Message(f"remedy_column.{name}") for name in ("change", "saves", "needs", "slower"))
    rows = tuple(
        (
            _change(r, of_nanogpt=exact == "oom.same_tokens"),
            Quantity(r.effect.saved_bytes, "bytes"), Quantity(r.effect.needed_bytes, "bytes"),
            Quantity(r.effect.slower, "signed_percent"),
        )
        for r in remedies
    )  # fmt: skip
    return Table(columns, rows, frozenset({1, 2, 3})), Paragraph(Message(exact))


def _change(remedy: Advice, *, of_nanogpt: bool) -> Cell:
    changes = remedy.options
    if remedy.step == "nanogpt":
        settings = changes.pop("allocator_settings", None)
        before = [f"PYTORCH_CUDA_ALLOC_CONF={settings}"] if settings else []
        return " ".join([*before, *(f"--{name}={value}" for name, value in changes.items())])
    words = [as_word(name, value) for name, value in changes.items()]
    if of_nanogpt and not words:
        return Message("oom.foretrain")
    return " ".join(["foretrain train …", *words] if of_nanogpt else words)


MOST_ROWS = 16

HIGHEST = {"reserved": "highest_reserved", "process": "highest_process"}


def sections(found: RanksExplained | None, source: str) -> list[Section]:
    """`source`: of the forecast. None of a run that one rank has always trained."""
    if found is None:
        return []
    blocks: list[Block] = list(headline(found))
    if found.world > 1:
        blocks += _forecast(found, source)
        blocks += _table(found)
        blocks += _slow(found)
    return [Section(Message("ranks.section"), tuple(blocks))]


def headline(found: RanksExplained) -> tuple[Paragraph, ...]:
    paragraphs: list[Paragraph] = []
    if found.world > 1:
        values = {
            "world": found.world, "strategy": Message(f"cluster.strategy.{found.strategy}"),
            "tokens_per_s": found.tokens_per_s, "per_card": found.card_tokens_per_s, "machines": found.machines,
        }  # fmt: skip
        id = "untimed" if found.tokens_per_s is None else "on_cards" if found.card_tokens_per_s else "on_cpu"
        paragraphs.append(Paragraph(Message(f"ranks.{id}", values)))
    if found.stretches:
        each = [Message("ranks.stretch", {"world": s.world, "step": s.first_step}).text() for s in found.stretches]
        paragraphs.append(Paragraph(Message("ranks.history", {"stretches": listed(each)})))
    return tuple(paragraphs)


def _forecast(found: RanksExplained, source: str) -> list[Block]:
    values = {
        "source": source, "allocated": found.predicted_allocated_bytes, "expected": found.predicted_bytes,
        "low": found.low_bytes, "high": found.high_bytes, "what": Message(f"ranks.what.{found.what}"),
    }  # fmt: skip
    blocks: list[Block] = [Paragraph(Message("ranks.forecast", values))]
    most = next((part for part in found.parts if part.rank == found.most), None)
    if most is not None and most.highest_bytes:
        inside = found.low_bytes <= most.highest_bytes <= found.high_bytes
        error = found.predicted_bytes / most.highest_bytes - 1
        values |= {"rank": most.rank, "measured": most.highest_bytes, "error": error}
        id, tone = ("ranks.most_inside", "plain") if inside else ("ranks.most_outside", "warn")
        blocks.append(Paragraph(Message(id, values), tone))
    if found.predicted_tokens_per_s is not None:
        blocks.append(Paragraph(Message("ranks.predicted_speed", {"predicted": found.predicted_tokens_per_s})))
    elif found.card_tokens_per_s is None:
        blocks.append(Paragraph(Message("ranks.no_predicted_speed")))
    return blocks


def _table(found: RanksExplained) -> list[Block]:
    if not found.parts:
        return [Paragraph(Message("ranks.no_figures"))]
    first = sorted(found.parts, key=lambda part: (part.rank != found.most, part.rank not in found.slow, part.rank))
    shown = sorted(first[:MOST_ROWS], key=lambda part: part.rank)
    rows = tuple(_row(part) for part in shown)
    names = ("rank", "where", "allocated", HIGHEST[found.what], "step", "waits", "evaluates")
    columns = tuple(Message(f"ranks.column.{name}") for name in names)
    tones = tuple("warn" if part.rank in found.slow else "plain" for part in shown)
    table = Table(columns, rows, frozenset({0, 2, 3, 4, 5, 6}), tones, optional=(5, 1))
    hidden = len(found.parts) - len(shown)
    return [table, *([Paragraph(Message("ranks.more", {"count": hidden}))] if hidden else [])]


def _row(part: RankPart) -> tuple[Cell, ...]:
    rate = part.evaluates_tokens_per_s
    return (
        str(part.rank), f"{part.host} · {part.card}", Quantity(part.allocated_bytes, "bytes"),
        Quantity(part.highest_bytes, "bytes"), Quantity(part.step_s, "duration"),
        Quantity(part.data_wait_s, "duration"), f"{rate:,.0f}" if rate else "–",
    )  # fmt: skip


def _slow(found: RanksExplained) -> list[Block]:
    if not found.parts:
        return []
    if STRATEGIES[found.strategy].shards_weights:
        return [Paragraph(Message("ranks.all_wait", {"strategy": Message(f"cluster.strategy.{found.strategy}")}))]
    if not found.reported:
        return [Paragraph(Message("ranks.too_short"))]
    slow = [part for part in found.parts if part.behind is not None]
    if not slow:
        return [Paragraph(Message("ranks.even", {"share": SLOW}))]
    return [Paragraph(Message("ranks.slow", part.model_dump()), "warn") for part in slow]
