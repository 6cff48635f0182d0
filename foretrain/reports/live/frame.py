"""`foretrain top` as lines of a given width, as many as fit: the machine, its cards, its runs, and what is left out."""

from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.text import Text

from foretrain.analysis.live.record import LiveCard, LiveMachine, LiveRun, Top
from foretrain.base.messages import listed, printable, say
from foretrain.base.units import format_bytes, format_bytes_like, format_energy, format_left, format_percent
from foretrain.hardware.card import SLOWING
from foretrain.reports.live.parts import Part, bar, columns, joined
from foretrain.reports.rtl import facing

INDENT = 2
WIDE = 170  # columns from which on a run stands on one line
FOR_RUNS = 8  # lines that cards leave to runs
MOST_NAME = 24
LEAST_BAR, MOST_BAR = 6, 40
_LONG_S = 3.0  # a phase that lasts longer says how long; training says its steps
_SORTS = {
    "newest": lambda run: 0,
    "memory": lambda run: -(run.memory_bytes or 0),
    "left": lambda run: run.eta_s if run.eta_s is not None else float("inf"),
}
SORTS = tuple(_SORTS)


@dataclass(frozen=True)
class Shape:
    """How large a frame is, how its runs are sorted, and whether keys are read."""

    width: int = 80
    height: int = 24
    sort: str = "newest"
    keys: bool = False


def frame(top: Top, shape: Shape) -> RenderableType:
    """At most `height` lines of `width` columns."""
    head = [_title(top, shape), *_machine(top.machine, shape.width)]
    cards = _cards(top, shape, shape.height - len(head) - FOR_RUNS)
    height = shape.height - (1 if shape.keys else 0)
    lines = [*head, *cards]
    lines = [*lines, *_runs(top, shape, height - len(lines))][:height]
    if shape.keys:
        lines += [*[Text()] * (height - len(lines)), _foot(shape)]
    return Group(*(facing(line) for line in lines))


def _line(text: str, shape: Shape, style: str) -> Text:
    return joined([Part(text, style)], shape.width)


def _title(top: Top, shape: Shape) -> Text:
    alive = [run for run in top.runs if run.where != "nowhere"]
    here = sum(run.where == "here" for run in alive)
    counts = say("top.counts", here=here, elsewhere=len(alive) - here)
    parts = [
        Part("foretrain top", "bold"),
        Part(printable(top.machine.host), "bold"),
        Part(top.at[11:19]),
        Part(counts),
    ]
    return joined(parts, shape.width)


def _machine(machine: LiveMachine, width: int) -> list[Text]:
    """The processor, and the memory with who holds it."""
    busy = "–" if machine.busy is None else format_percent(machine.busy)
    load = "" if machine.load is None else say("top.load", load=machine.load)
    name = printable(machine.cpu.removeprefix("CPU ").strip("()"))
    lines = [joined([Part("CPU", "bold"), Part(busy), Part(load), Part(name, "dim", 1)], width)]
    if machine.used_bytes is not None:
        runs = min(machine.runs_bytes or 0, machine.used_bytes)
        lines.append(_held("RAM", machine.total_bytes, machine.used_bytes, runs, machine.used_bytes - runs, (), width))
    return lines


def _held(
    name: str, total: int | None, used: int, runs: int | None, others: int | None, names: tuple[str, ...], width: int
) -> Text:
    """How full a memory is, and by whom."""
    of = total or used
    told = [Part(_used_of("top.used_of", used, of) if total else format_bytes(used))]
    if runs is not None and others is not None:
        values = {"runs": format_bytes_like(runs, of), "others": _like(others, of)}
        told.append(Part(say("top.by_whom", **values)))
        told.append(Part(f"({printable(listed(names))})" if names else "", "dim", 1))
    elif used:
        told.append(Part(say("top.not_told_apart"), "dim", 1))
    begin = Text().append(name.ljust(INDENT), style="bold").append(" " * INDENT if name else "")
    room = width - begin.cell_len
    shares = [(used if runs is None else runs, "cyan"), (others or 0, "yellow")]
    text = joined(told, room - LEAST_BAR - 2)
    if not total or (most := room - text.cell_len - 2) < LEAST_BAR:
        return begin.append_text(joined(told, room))
    return begin.append_text(bar(shares, of, min(MOST_BAR, most))).append("  ").append_text(text)


def _used_of(id: str, used: int, total: int) -> str:
    """'9.80 of 12.00 GiB', with the number in the unit of the whole."""
    return say(id, used=format_bytes_like(used, total), total=total)


def _like(size: int, other: int) -> str:
    """A size with its unit, which is that of another."""
    return f"{format_bytes_like(size, other)} {format_bytes(other).split()[1]}"


# -- cards -----------------------------------------------------------------------------------------------------


def _cards(top: Top, shape: Shape, room: int) -> list[Text]:
    """Three lines each where there is room, one where there is not, and how many are left out."""
    if not top.cards:
        why = f"({printable(top.no_cards)})" if top.no_cards else ""
        return [Text(), joined([Part(say("top.no_cards"), "dim"), Part(why, "dim", 1)], shape.width)]
    if len(top.cards) * 3 + 1 <= max(4, room):
        return [Text(), *(line for card in top.cards for line in _card(card, shape.width))]
    busiest = sorted(top.cards, key=lambda card: (-(card.runs_bytes or 0), -(card.busy or 0), card.index))
    shown = sorted(busiest[: max(1, room - 2)], key=lambda card: card.index)
    lines = [Text(), *(_short_card(card, shape.width) for card in shown)]
    left = len(top.cards) - len(shown)
    return [*lines, _line(say("top.more_cards", count=left), shape, "dim")] if left else lines


def _card(card: LiveCard, width: int) -> list[Text]:
    title = [Part(f"GPU {card.index}", "bold"), Part(printable(card.name), "bold"), *_load(card)]
    if card.driver:
        title.append(Part(say("top.driver", version=printable(card.driver)), "dim", 1))
    lines = [joined(title, width)]
    if card.used_bytes is not None:
        by = (card.runs_bytes, card.others_bytes, card.others)
        lines.append(_held("", card.total_bytes, card.used_bytes, *by, width))
    if figures := _figures(card):
        lines.append(Text(" " * INDENT).append_text(joined(figures, width - INDENT)))
    return lines


def _load(card: LiveCard) -> list[Part]:
    return [] if card.busy is None else [Part(say("top.busy", share=card.busy))]


def _figures(card: LiveCard) -> list[Part]:
    """Clock with what lowers it, heat, power, energy since the first look."""
    found = []
    if card.clock_ghz is not None:
        found.append(Part(f"{card.clock_ghz:.2f} GHz", order=3))
    slowed = [say(f"throttle.{reason}") for reason in card.reasons if reason in SLOWING]
    if slowed:
        hot = any(reason not in ("power_cap", "applications_clocks") for reason in card.reasons if reason in SLOWING)
        found.append(Part(say("top.slowed", reasons=slowed), "yellow" if hot else "", 2))
    if card.temperature_c is not None:
        found.append(Part(f"{card.temperature_c} °C"))
    if card.power_w is not None:
        found.append(Part(f"{card.power_w:.0f} W"))
    if card.energy_seen_j:
        found.append(Part(say("top.energy_seen", energy=card.energy_seen_j), order=1))
    return found


def _short_card(card: LiveCard, width: int) -> Text:
    known = card.used_bytes is not None and card.total_bytes
    used = _used_of("top.used_of", card.used_bytes or 0, card.total_bytes or 1) if known else ""
    parts = [Part(f"GPU {card.index}", "bold"), *_load(card), Part(used), *_figures(card)]
    return joined([*parts, Part(printable(card.name), "dim", 4)], width)


# -- runs ------------------------------------------------------------------------------------------------------


def _runs(top: Top, shape: Shape, room: int) -> list[Text]:
    """Those that are alive, then as many as fit of those that have ended; or how to start one."""
    if not top.runs:
        return [Text(), *(joined([Part(say(id), "" if id == "top.no_runs" else "dim")], shape.width)
                          for id in ("top.no_runs", "top.start_one", "top.elsewhere"))]  # fmt: skip
    alive = sorted((run for run in top.runs if run.where != "nowhere"), key=_SORTS[shape.sort])
    ended = [run for run in top.runs if run.where == "nowhere"]
    each = 1 if shape.width >= WIDE else 2
    room -= 2  # a blank line before, and a line that says what is left out
    most = max(1, room // each)
    lines = [Text(), *_alive(alive[:most], shape.width)]
    room -= each * min(len(alive), most)
    shown = ended[: max(0, room - (1 if alive else 0))]
    if shown:
        lines += [*([Text()] if alive else []), *_ended(shown, shape.width)]
    left = len(alive) - min(len(alive), most) + len(ended) - len(shown) + top.more_runs
    return [*lines, _line(say("top.more_runs", count=left), shape, "dim")] if left else lines


def _alive(runs: list[LiveRun], width: int) -> list[Text]:
    first = [_progress(run) for run in runs]
    second = [_detail(run) for run in runs]
    if width >= WIDE:
        return columns([[*one, *other] for one, other in zip(first, second, strict=True)], width)
    lines = []
    for one, other in zip(columns(first, width), second, strict=True):
        lines += [one, Text(" " * INDENT).append_text(joined(other, width - INDENT))]
    return lines


def name_of(run: LiveRun) -> str:
    """What a run is called, as its user does or by its folder."""
    name = printable(run.label.title or " ".join(run.name.split()))
    return name if len(name) <= MOST_NAME else name[: MOST_NAME - 1] + "…"


def _progress(run: LiveRun) -> list[Part]:
    """Name, phase, steps, how far it is, what is left."""
    phase = say(f"top.phase.{run.phase}")
    if run.phase_s is not None and run.phase_s >= _LONG_S and run.phase not in ("training", "running"):
        phase += f" {format_left(run.phase_s)}"
    done = f"{run.step:,}" if run.step is not None else ""
    steps = f"{done or 0} / {run.steps:,}" if run.steps else done
    share = min(1.0, (run.step or 0) / run.steps) if run.steps else None
    left = say("top.left", time=format_left(run.eta_s)) if run.eta_s is not None else ""
    return [
        Part(name_of(run), "bold"), Part(phase, "green" if run.phase == "training" else "yellow"),
        Part(steps, right=True), Part("", "green", share=share),
        Part("" if share is None else format_percent(share), order=2, right=True), Part(left, right=True),
    ]  # fmt: skip


def _detail(run: LiveRun) -> list[Part]:
    """Where it is, if not here; loss, speed, MFU, memory against its plan, energy, tags."""
    where = say("top.on_host", host=printable(run.host)) if run.host else say("top.not_here")
    where = "" if run.where == "here" else where
    speed = say("value.throughput", tokens_per_s=run.tokens_per_s) if run.tokens_per_s else ""
    planned = run.planned_bytes or 0
    beyond = planned and (run.memory_bytes or 0) > (run.planned_high_bytes or planned)
    held = "" if not run.memory_bytes else format_bytes(run.memory_bytes)
    if held and planned:
        held = _used_of("top.memory_of", run.memory_bytes or 0, planned)
    energy = ("~" if run.energy_source == "estimated" else "") + format_energy(run.energy_j) if run.energy_j else ""
    return [
        Part(where, "yellow"), Part("" if run.loss is None else say("top.loss", loss=run.loss)),
        Part(speed, right=True), Part(f"MFU {format_percent(run.mfu)}" if run.mfu else "", order=1),
        Part(held, "yellow" if beyond else ""), Part(energy, order=2),
        Part(printable(" ".join(f"#{tag}" for tag in run.label.tags)), "dim", 3),
    ]  # fmt: skip


def _ended(runs: list[LiveRun], width: int) -> list[Text]:
    return columns([_ending(run) for run in runs if run.phase != "unreadable"], width) + [
        joined([Part(name_of(run), "dim"), Part(printable(run.problem).split("\n")[0], "yellow")], width)
        for run in runs
        if run.phase == "unreadable"
    ]


def _ending(run: LiveRun) -> list[Part]:
    """Name, how it ended, how far it came, what it learned, when it began."""
    how = {"interrupted": "stopped"}.get(run.status, run.status)
    step = f"{run.step:,}" if run.step is not None else ""
    loss = "" if run.val_loss is None else say("top.val_loss", loss=run.val_loss)
    return [
        Part(name_of(run), "dim"), Part(say(f"top.ended.{how if how in _ENDINGS else 'killed'}"), "dim"),
        Part(f"{step} / {run.steps:,}" if run.steps and step else step, "dim", right=True), Part(loss, "dim"),
        Part(printable(run.started_at).replace("T", " ")[:16], "dim", 1),
    ]  # fmt: skip


_ENDINGS = ("finished", "diverged", "failed", "killed", "stopped")


def _foot(shape: Shape) -> Text:
    sort = say(f"top.sort.{shape.sort}")
    return _line(say("top.keys", sort=sort), shape, "reverse")
