"""A comparison of runs as a Document: what differs, what each did, what follows, what would tell the rest."""

from collections.abc import Sequence
from typing import Any

from foretrain.analysis.forecast_check import Row, Sources
from foretrain.base.messages import listed
from foretrain.comparison.ablations import Ablation
from foretrain.comparison.compare import Comparison, Scaling, Side
from foretrain.comparison.loss_axes import LossCurves
from foretrain.comparison.questions import LEARNING, Pair, Verdict
from foretrain.comparison.repeats import Scatter
from foretrain.comparison.settings import GROUPS, Setting
from foretrain.reports.document import (
    Axis,
    Block,
    Cell,
    Document,
    Message,
    Paragraph,
    Quantity,
    Rank,
    Ranks,
    Section,
    Table,
)
from foretrain.reports.views import agreement as agreement_view
from foretrain.reports.views import curves as curves_view
from foretrain.reports.views import scores

WIDE = 4  # subjects that stand side by side; more of them stand one below the other
_LABEL = 18
_TONES = {"difference": "good", "forecast": "plain", "within_noise": "plain", "within_forecast": "plain"}
_EQUAL = {"within_noise": "within_noise_same", "within_forecast": "within_forecast_same"}
Rows = list[tuple[Cell, ...]]


def document(found: Comparison) -> Document:
    labels = [side.label for side in found.sides]
    sections = [
        Section(Message("side.verdicts"), tuple(_verdicts(found))),
        Section(Message("side.settings"), _settings(found, labels)),
        Section(Message("side.figures"), _figures(found.sides)),
        *scores.compared_sections(found.scores, labels),
        *_settle(found),
    ]
    title = Message("side.title_many", {"count": len(labels)})
    if len(labels) <= WIDE - 1:
        title = Message("side.title", {"labels": [_short(label, 13) for label in labels]})
    return Document(title, Message("side.subtitle"), sections)


def _short(text: str, most: int = _LABEL) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def shown(value: Any) -> str:
    if value is None:
        return "?"
    if isinstance(value, tuple | list):
        first, second = value
        if second is None or (first == second and isinstance(first, float)):
            return shown(first)
        return f"{first} × {second}" if isinstance(first, int) else f"{first:g} → {second:g}"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return f"{value:,}" if value >= 10_000 else str(value)
    return f"{value:g}" if isinstance(value, float) else _short(str(value), 28)


# -- settings ----------------------------------------------------------------------------------------------


def _settings(found: Comparison, labels: list[str]) -> tuple[Block, ...]:
    able = [setting for setting in found.differing if setting.matters]
    blocks: list[Block] = [_headline(able, bool(found.unknown) or not all(side.has_settings for side in found.sides))]
    if able:
        blocks.append(_table_of(able, labels) if len(labels) <= WIDE else _lists_of(able, labels))
    idle = [setting for setting in found.differing if not setting.matters]
    if idle:
        values = "; ".join(f"{s.name} {' | '.join(shown(v) for v in s.values)}" for s in idle)
        blocks.append(Paragraph(Message("side.idle", {"settings": values})))
    if found.unknown:
        able = [s.name for s in found.unknown if s.matters]
        values = {"count": len(found.unknown), "names": listed([*able[:6], *(["…"] if len(able) > 6 else [])])}
        blocks.append(Paragraph(Message("side.unknown" if able else "side.unknown_idle", values), "warn"))
    if {*found.losses_apart} - {"unit"}:
        blocks.append(Paragraph(Message("side.losses_apart", {"what": list(found.losses_apart)}), "warn"))
    return tuple(blocks)


def _headline(able: list[Setting], unknown: bool) -> Paragraph:
    if not able:
        return Paragraph(Message("side.same" if not unknown else "side.same_so_far"))
    present = [group for group in GROUPS if any(setting.group == group for setting in able)]
    groups = [Message(f"side_group.{group}").text() for group in present]
    values = {"count": len(able), "groups": _and(groups), "names": _and([setting.name for setting in able])}
    if len(able) == 1:
        return Paragraph(Message("side.one_differs", values))
    return Paragraph(Message("side.confounded", values), "warn")


def _and(words: list[Any]) -> str:
    if len(words) < 2:
        return "".join(words)
    return Message("side.and", {"first": listed(words[:-1]), "last": words[-1]}).text()


def _table_of(able: list[Setting], labels: list[str]) -> Table:
    rows: Rows = []
    last = ""
    for setting in able:
        group = Message(f"side_group.{setting.group}") if setting.group != last else ""
        last = setting.group
        effects = listed(Message(f"side_effect.{effect}").text() for effect in setting.affects)
        rows.append((group, setting.name, *(shown(value) for value in setting.values), effects))
    columns = ("", Message("column.key"), *(_short(label) for label in labels), Message("column.can_change"))
    count = len(columns)
    return Table(columns, tuple(rows), frozenset(range(2, count - 1)), optional=(count - 1, 0))


def _lists_of(able: list[Setting], labels: list[str]) -> Table:
    rows: Rows = []
    for setting in able:
        groups: dict[str, list[str]] = {}
        for label, value in zip(labels, setting.values, strict=True):
            groups.setdefault(shown(value), []).append(_short(label))
        text = " · ".join(f"{value} ({', '.join(names)})" for value, names in groups.items())
        rows.append((setting.name, text))
    return Table((Message("column.key"), Message("column.value")), tuple(rows))


# -- figures -----------------------------------------------------------------------------------------------


def _figures(sides: tuple[Side, ...]) -> tuple[Block, ...]:
    rows = [(name, [cell(side) for side in sides]) for name, cell in _CELLS.items()]
    rows = [(name, cells) for name, cells in rows if any(_text(cell) != "–" for cell in cells)]
    has_row = {"ranks": any((s.ranks or 1) > 1 for s in sides), "per_card": len({s.cards for s in sides}) > 1}
    rows = [(name, cells) for name, cells in rows if has_row.get(name, True)]
    if len(sides) > 2:  # what is between the lines goes first, and every word that can be done without
        rows = [(name, [_text(cell).partition(" (")[0] for cell in cells]) for name, cells in rows if name not in _FINE]
    if len(sides) <= WIDE:
        table = Table(
            ("", *(_short(side.label) for side in sides)),
            tuple((Message(f"side_row.{name}"), *cells) for name, cells in rows),
            frozenset(range(1, len(sides) + 1)),
        )
    else:
        kept = [(name, cells) for name, cells in rows if name in _COMPACT]
        columns = ("", *(Message(f"side_row.{name}") for name, _ in kept))
        lines = tuple((_short(side.label), *(cells[i] for _, cells in kept)) for i, side in enumerate(sides))
        table = Table(columns, lines, frozenset(range(1, len(columns))), optional=tuple(range(len(columns) - 1, 4, -1)))
    notes = [
        Paragraph(Message(f"side_note.{note.id}", {**note.values, "label": side.label}), "warn")
        for side in sides for note in side.notes
    ]  # fmt: skip
    return (table, *notes)


def _text(cell: Cell) -> str:
    return cell if isinstance(cell, str) else cell.text()


def _ms(seconds: float) -> str:
    ms = seconds * 1e3
    return f"{ms:,.{0 if ms >= 1000 else 1 if ms >= 10 else 3}f}"


def _milliseconds(seconds: float | None) -> Cell:
    return "–" if seconds is None else _ms(seconds)


def _spread(side: Side) -> Cell:
    if side.step_low_s is None or side.step_high_s is None:
        return "–"
    return f"{_ms(side.step_low_s)} – {_ms(side.step_high_s)}"


def _memory_range(side: Side) -> Cell:
    if side.memory_low_bytes is None or side.memory_high_bytes is None or side.memory_low_bytes == side.memory_bytes:
        return "–"
    return Quantity((side.memory_low_bytes, side.memory_high_bytes), "bytes_range")


def _source(source: str | None, what: str | None = None) -> Cell:
    if source is None:
        return "–"
    return source if what is None else Message(f"side_memory.{what}", {"source": source})


def _money(side: Side) -> Cell:
    if side.cost_per_hour is None:
        return "–"
    return Message("value.amount", {"amount": side.cost_per_hour, "currency": side.currency})


def _loss(value: float | None) -> Cell:
    return "–" if value is None else Quantity(value, "digits4")


_CELLS = {
    "source": lambda s: Message(f"side_kind.{s.kind}"),
    "card": lambda s: _short(s.gpu_name or "–", 20),
    "ranks": lambda s: f"{s.ranks:,}" if s.ranks else "–",
    "tokens_per_s": lambda s: f"{s.tokens_per_s:,.0f}" if s.tokens_per_s else "–",
    "per_card": lambda s: f"{s.card_tokens_per_s:,.0f}" if s.card_tokens_per_s else "–",
    "iteration": lambda s: _milliseconds(s.step_s),
    "spread": _spread,
    "micro_batch": lambda s: _milliseconds(s.micro_batch_s),
    "speed_from": lambda s: _source(s.speed_source),
    "mfu": lambda s: Quantity(s.mfu, "percent"),
    "nanogpt_mfu": lambda s: Quantity(s.nanogpt_mfu, "percent"),
    "memory": lambda s: Quantity(s.memory_bytes, "bytes"),
    "memory_range": _memory_range,
    "memory_from": lambda s: _source(s.memory_source, s.memory_what),
    "steps": lambda s: f"{s.last_step:,}" if s.last_step else "–",
    "tokens": lambda s: Quantity(s.tokens, "count"),
    "train_loss": lambda s: _loss(s.train_loss),
    "val_loss": lambda s: _loss(s.val_loss),
    "cost_per_hour": _money,
}  # fmt: skip
_FINE = ("source", "spread", "micro_batch", "memory_range", "memory_from", "nanogpt_mfu", "cost_per_hour")
_COMPACT = ("tokens_per_s", "iteration", "mfu", "memory", "val_loss", "tokens", "speed_from", "memory_from")


# -- verdicts ----------------------------------------------------------------------------------------------


def _verdicts(found: Comparison) -> list[Block]:
    rows: Rows = []
    tones: list[str] = []
    learning = [verdict for verdict in found.verdicts if verdict.question in LEARNING]
    silent = len({(verdict.reason, str(verdict.reason_values)) for verdict in learning}) == 1 and not learning[0].pair
    for verdict in found.verdicts:
        if silent and verdict in learning[1:]:
            continue
        question = "learning" if silent and verdict is learning[0] else verdict.question
        if question == "tokens" and verdict.pair and verdict.pair.axis == "steps":
            question = "steps"
        rows.append((Message(f"side_question.{question}"), answer(verdict)))
        tones.append("plain" if verdict.unlike_models else _TONES.get(verdict.outcome, "plain"))
    blocks: list[Block] = [Table((), tuple(rows), tones=tuple(tones))]
    if len(found.sides) > 2:
        blocks += [_against_first(verdict) for verdict in found.verdicts if verdict.others]
    blocks += [_scaled(scaling) for scaling in found.scalings]
    blocks.append(Paragraph(Message("side.noise")))
    blocks += [_learned(scatter) for scatter in found.scatters]
    return blocks


def answer(verdict: Verdict) -> Message:
    if verdict.pair is None:
        values = {name: _and(value) if isinstance(value, list) else value
                  for name, value in verdict.reason_values.items()}  # fmt: skip
        return Message(f"side_reason.{verdict.reason}", values)
    pair = verdict.pair
    values: dict[str, Any] = {
        "one": pair.one, "other": pair.other, "share": pair.share, "low": pair.low or 0.0, "high": pair.high or 0.0,
        "first": _value(verdict, pair.one_value), "second": _value(verdict, pair.other_value),
        "where": _where(verdict, pair),
        "because": _times(pair) + _text(_because(verdict)) + _unlike(verdict),
    }  # fmt: skip
    id = _EQUAL.get(verdict.outcome, verdict.outcome) if pair.share == 0 else verdict.outcome
    return Message(f"side_answer.{id}", values)


def brief(verdict: Verdict, pair: Pair) -> Message:
    """The winner of a question with both figures, without its cause."""
    values = {
        "question": Message(f"side_short.{verdict.question}"), "one": pair.one, "other": pair.other,
        "first": _value(verdict, pair.one_value), "second": _value(verdict, pair.other_value), "share": pair.share,
    }  # fmt: skip
    return Message("brief.models" if verdict.unlike_models else f"brief.{verdict.outcome}", values)


def _value(verdict: Verdict, value: float) -> Cell:
    match verdict.question:
        case "speed":
            return Message("value.throughput", {"tokens_per_s": value})
        case "mfu":
            return Quantity(value, "percent").text()
        case "memory":
            return Quantity(value, "bytes").text()
        case _:
            return Quantity(value, "digits4").text()


def _where(verdict: Verdict, pair: Pair) -> Cell:
    if pair.stretch_s is not None:
        return Message("side_at.stretch", {"seconds": pair.stretch_s})
    if pair.at is None:
        return ""
    values = {
        "split": Message(f"side_split.{pair.split}"), "at": pair.at, "unit": curves_view.loss_unit(pair.unit),
        "seconds": pair.at * 3600 if pair.axis == "hours" else 0.0,
    }  # fmt: skip
    return Message(f"side_at.{pair.axis}", values)


def _times(pair: Pair) -> str:
    names = _and(list(pair.predicted_times))
    return Message("side.predicted_times", {"names": names}).text() if names else ""


def _because(verdict: Verdict) -> Cell:
    if not verdict.attribution:
        return ""
    pair = verdict.pair
    sides = {"one": pair.one, "other": pair.other} if pair else {}
    values = {"names": _and(list(verdict.settings)), "count": verdict.unknown, **sides}
    return Message(f"side_because.{verdict.attribution}", values)


def _unlike(verdict: Verdict) -> str:
    names = _and(list(verdict.unlike_models))
    return _text(Message("side_because.models", {"names": names})) if names else ""


def _against_first(verdict: Verdict) -> Table:
    rows: Rows = []
    for pair in verdict.others:
        known = pair.low is not None and pair.high is not None and pair.low != pair.high
        spread = Message("value.share_range", {"low": pair.low, "high": pair.high}) if known else "–"
        value = _text(_value(verdict, pair.one_value))
        outcome = Message(f"side_outcome.{pair.outcome}")
        rows.append((_short(pair.one), value, Quantity(pair.share, "signed_percent"), spread, outcome))
    question = Message(f"side_short.{verdict.question}")
    head = Message("side.against", {"question": question, "one": _short(verdict.others[0].other)})
    columns = (head, "", Message("column.better"), Message("column.range"), "")
    return Table(columns, tuple(rows), frozenset({1, 2, 3}), optional=(3,))


# -- ablations -----------------------------------------------------------------------------


def _settle(found: Comparison) -> list[Section]:
    runs: tuple[Ablation, ...] = found.ablations
    if not runs:
        return []
    rows: Rows = []
    notes: list[Block] = []
    for run in runs:
        change = Message("side.change", {"setting": run.setting, "value": shown(run.value)})
        effects = listed(Message(f"side_effect.{effect}").text() for effect in run.answers)
        if run.impossible:
            known = run.impossible in ("program", "tokens", "shape", "contents", "ranks")
            why = Message(f"side_impossible.{run.impossible}") if known else run.impossible
            notes.append(Paragraph(Message("side.impossible", {"setting": run.setting, "why": why})))
            continue
        rows.append(
            (
                change, effects, f"{run.steps:,}", Quantity(run.time_s, "duration"), Quantity(run.energy_j, "energy"),
                "–" if run.cost is None else Message("value.amount", {"amount": run.cost, "currency": run.currency}),
                Message(f"word.{run.verdict}") if run.verdict else "–",
            )
        )  # fmt: skip
    able = sum(setting.matters for setting in found.differing)
    if len(found.sides) == 2 and able > len(runs):
        values = {"count": able - len(runs), "base": runs[0].base, "other": runs[0].other}
        notes.append(Paragraph(Message("side.settle_more", values)))
    columns = tuple(
        Message(f"column.{name}")
        for name in ("one_change", "settles", "steps", "hours", "energy", "sum_cost", "memory")
    )
    table = [Table(columns, tuple(rows), frozenset({2, 3, 4, 5}), optional=(4, 1))] if rows else []
    first = Paragraph(Message("side.settle_how", {"base": runs[0].base}))
    source = Paragraph(Message("side.settle_scaled" if any(r.scaled for r in runs) else "side.settle_planned",
                              {"base": runs[0].base}))  # fmt: skip
    return [Section(Message("side.settle"), (first, *table, *notes, *([source] if rows else [])))]


NAMED = ("speed", "tokens", "hours", "memory")  # questions whose answers stand at the top
Checks = Sequence[tuple[str, Sequence[Row]]]


def report(
    found: Comparison,
    losses: LossCurves,
    verdicts: dict[str, str | None],
    checks: Checks = (),
    sources: Sources | None = None,
) -> Document:
    """Return the comparison with pictures. `verdicts`: by label. `checks`: predicted against measured."""
    order = tuple(side.label for side in found.sides)
    sections = [
        Section(Message("side.verdicts"), (*_answers(found), *_verdicts(found))),
        Section(Message("side.settings"), _settings(found, list(order))),
    ]
    curves = curves_view.losses(losses, source="report.source_losses_many", order=order)
    if curves:
        sections.append(Section(Message("report.learning"), curves))
    pictures = (*_speed(found.sides), *_memory(found.sides, verdicts))
    sections.append(Section(Message("side.figures"), (*pictures, *_figures(found.sides))))
    agreement = agreement_view.pictures(checks, sources) if checks and sources else ()
    if agreement:
        sections.append(Section(Message("report.check"), agreement))
    sections += scores.compared_sections(found.scores, list(order))
    sections += _settle(found)
    return Document(Message("report.compare_title", {"labels": ", ".join(order)}), Message("side.subtitle"), sections)


def _answers(found: Comparison) -> tuple[Block, ...]:
    paragraphs = [
        Paragraph(
            brief(verdict, verdict.pair),
            "good" if verdict.outcome == "difference" and not verdict.unlike_models else "plain",
        )
        for verdict in found.verdicts
        if verdict.pair and verdict.outcome in ("difference", "forecast") and verdict.question in NAMED
    ]  # fmt: skip
    return tuple(paragraphs) or (Paragraph(Message("report.no_difference")),)


def _speed(sides: tuple[Side, ...]) -> tuple[Block, ...]:
    ranks = tuple(
        Rank(
            side.label, side.tokens_per_s, *_rates(side), remark=side.speed_source or "", strong=_measured(side),
            colour=number,
        )
        for number, side in enumerate(sides)
        if side.tokens_per_s
    )  # fmt: skip
    if len(ranks) < 2:
        return ()
    axis = Axis(Message("axis.speed"), "number")
    return (Ranks(Message("picture.compared_speed"), axis, ranks, Message("column.source"), source=_ranges()),)


def _ranges() -> Message:
    return Message("report.source_ranges")


def _measured(side: Side) -> bool:
    return bool(side.speed_source and side.speed_source.startswith("measured"))


def _rates(side: Side) -> tuple[float | None, float | None]:
    if not (side.step_s and side.tokens_per_s and side.step_low_s and side.step_high_s):
        return None, None
    return side.tokens_per_s * side.step_s / side.step_high_s, side.tokens_per_s * side.step_s / side.step_low_s


def _memory(sides: tuple[Side, ...], verdicts: dict[str, str | None]) -> tuple[Block, ...]:
    ranks = []
    for number, side in enumerate(sides):
        if side.memory_bytes is None:
            continue
        verdict = verdicts.get(side.label)
        remark = " · ".join(
            part
            for part in (side.memory_source or "", Message(f"word.{verdict}").text() if verdict else "")
            if part
        )  # fmt: skip
        ranged = side.memory_low_bytes != side.memory_high_bytes
        low, high = (side.memory_low_bytes, side.memory_high_bytes) if ranged else (None, None)
        strong = side.memory_source == "measured"
        ranks.append(Rank(side.label, side.memory_bytes, low, high, remark, strong=strong, colour=number))
    if len(ranks) < 2:
        return ()
    axis = Axis(Message("axis.memory_bytes"), "bytes")
    title = Message("picture.compared_memory")
    return (Ranks(title, axis, tuple(ranks), Message("column.source"), source=_ranges()),)


def _scaled(found: Scaling) -> Paragraph:
    id = found.why or ("forecast" if found.predicted else "measured")
    scaled_text = Message(f"scaling.{id}", found.model_dump()).text()
    tokens = Message("scaling.same_tokens" if found.same_tokens else "scaling.other_tokens")
    return Paragraph(Message("first.two", {"one": scaled_text, "other": tokens}), "warn" if found.why else "plain")


def _learned(scatter: Scatter) -> Paragraph:
    values = {
        "runs": "; ".join(listed(labels) for labels in scatter.runs),
        "device": scatter.device,
        **{name: getattr(scatter, name) * 100 for name in ("seen", "assumed", "counted")},
    }
    return Paragraph(Message("side.learned", values))
