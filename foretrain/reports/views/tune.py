"""What `foretrain tune` found, as a document: the pick, every trial beside its forecast, and how far that was off."""

import math
from collections.abc import Mapping

from foretrain.base.messages import listed, say
from foretrain.base.units import rounds_to_zero
from foretrain.measure.tune_record import NEAR, TRIALS, ForecastError, TuneTrial, Tuning, rounded_up
from foretrain.reports.document import Block, Cell, Document, Message, Paragraph, Quantity, Section, Table
from foretrain.reports.views.shared import uneven

BUSY = 0.25  # share of the machine that others used; a larger one is reported


def difference(options: Mapping[str, object], accumulation: int, given: Mapping[str, object]) -> str:
    parts = [f"{options['batch_size']} × {accumulation}"]
    for option, value in options.items():
        if option == "batch_size" or value == given[option]:
            continue
        words = {
            "compile": "compiled" if value else "eager", "attention": value, "dtype": value,
            "activation_checkpointing": say("tune.blocks", count=value),
            "recompute_norm_gelu": "recompute" if value else "no recompute",
            "loss_chunk_size": say("tune.chunks", size=value) if value else say("tune.no_chunks"),
            "cpu_threads": say("tune.threads", count=value or say("tune.usual")),
            "strategy": say(f"cluster.strategy.{value}") if option == "strategy" else "",
            "hold_gradients": say("tune.held" if value else "tune.not_held"),
        }  # fmt: skip
        parts.append(str(words[option]))
    return listed(parts)


def document(found: Tuning) -> Document:
    sections = [
        Section(Message("tune.answer"), _answer(found)),
        Section(Message("tune.trials"), (_trials(found), *_frontier(found))),
        Section(Message("tune.forecast"), _forecast(found)),
        Section(Message("tune.how"), _how(found)),
    ]
    device = found.device if found.world == 1 else f"{found.world} x {found.device}"
    subtitle = Message("tune.subtitle", {"device": device, "tokens": found.tokens_per_step})
    return Document(Message("tune.title", {"name": found.name}), subtitle, sections)


def _named(trial: TuneTrial, found: Tuning) -> str:
    return difference(trial.options, trial.gradient_accumulation_steps, found.given_options)


def _answer(found: Tuning) -> tuple[Block, ...]:
    best = found.best
    values = {
        "what": _named(best, found), "rate": best.tokens_per_s, "peak": best.peak_bytes or 0, "gain": found.gain or 0.0,
        "low": found.gain_low or 0.0, "high": found.gain_high or 0.0, "near": NEAR,
    }  # fmt: skip
    if best.given:
        alone = found.least_budget_s is not None and sum(trial.step_s is not None for trial in found.trials) == 1
        id = "tune.nothing_else" if alone else "tune.as_it_is"
    elif found.gain is None and found.least_budget_s is not None:
        id = "tune.given_untried"
    elif found.gain is None:
        id = "tune.only_this"
    elif rounds_to_zero(found.gain):
        id = "tune.no_faster"
    else:
        id = "tune.faster"
    blocks: list[Block] = [Paragraph(Message(id, values), "good")]
    if not best.given:
        blocks.append(Paragraph(Message(f"tune.learning.{best.learning}")))
    if found.stop != "decided":
        values = {"took": found.took_s, "near": NEAR, "count": TRIALS, "least": rounded_up(found.least_budget_s or 0.0)}
        id = f"tune.stop.{found.stop}" if found.least_budget_s is None else "tune.stop.budget_least"
        blocks.append(Paragraph(Message(id, values), "plain" if found.stop == "alike" else "warn"))
    return tuple(blocks)


def _trials(found: Tuning) -> Table:
    rows, tones = [], []
    for trial in found.trials:
        half = math.sqrt(trial.high_s / trial.low_s) - 1 if trial.high_s and trial.low_s else None
        verdict: Cell = Message(f"tune.is.{trial.verdict}")
        rows.append(
            (
                _named(trial, found) + (" " + say("tune.given") if trial.given else ""),
                f"{trial.tokens_per_s:,.0f}" if trial.tokens_per_s else "–",
                f"{half * 100:.1f}%" if half is not None else "–",
                Quantity(trial.step_s, "duration"),
                Quantity(trial.predicted_s, "duration"),
                Quantity(trial.peak_bytes, "bytes"),
                Quantity(trial.predicted_bytes, "bytes"),
                verdict,
            )
        )
        tones.append({"best": "good", "memory": "bad", "failed": "bad", "changed": "bad"}.get(trial.verdict, "plain"))
    names = ("setting", "rate", "plus_minus", "step", "predicted", "peak", "predicted", "verdict")
    heads = tuple(Message(f"column.{name}") for name in names)
    return Table(heads, tuple(rows), frozenset({1, 2, 3, 4, 5, 6}), tuple(tones), optional=(6, 4, 3, 2))


def _frontier(found: Tuning) -> tuple[Block, ...]:
    blocks: list[Block] = []
    front = [trial for trial in found.trials if trial.pareto]
    if len(front) > 1:
        front.sort(key=lambda trial: trial.peak_bytes or 0)
        least = front[0]
        values = {
            "what": _named(least, found), "peak": least.peak_bytes, "rate": least.tokens_per_s, "count": len(front)
        }  # fmt: skip
        blocks.append(Paragraph(Message("tune.frontier", values)))
    groups: dict[object, list[tuple[int, int | None]]] = {}
    for trial in found.trials:
        others = tuple(sorted((name, str(value)) for name, value in trial.options.items() if name != "batch_size"))
        groups.setdefault(others, []).append((int(trial.options["batch_size"]), trial.predicted_bytes))
    blocks += next((uneven_blocks for group in groups.values() if (uneven_blocks := uneven(group))), ())
    failed = [trial for trial in found.trials if trial.problem]
    blocks += [Paragraph(Message("tune.problem", {"what": _named(t, found), "problem": t.problem})) for t in failed]
    return tuple(blocks)


def _forecast(found: Tuning) -> tuple[Block, ...]:
    blocks: list[Block] = []
    for id, error in (("time", found.time_error), ("memory", found.memory_error)):
        blocks.append(Paragraph(_off(id, error)))
    if found.first_choice is not None:
        first = "tune.first_right" if found.first_choice <= NEAR else "tune.first_choice"
        blocks.append(Paragraph(Message(first, {"share": found.first_choice})))
    if found.known:
        return tuple(blocks)
    fed = "tune.fed" if found.fed and found.calibrated else "tune.fed_later" if found.fed else "tune.not_fed"
    blocks.append(Paragraph(Message(fed, {"count": found.fed})))
    return tuple(blocks)


def _off(id: str, error: ForecastError | None) -> Message:
    if error is None:
        return Message("tune.no_forecast")
    values = {"trials": error.trials, "middle": error.middle, "spread": error.spread, "worst": error.worst}
    return Message(f"tune.off.{id}" if error.trials > 1 else f"tune.off_once.{id}", values)


def _how(found: Tuning) -> tuple[Block, ...]:
    values = {
        "trials": len(found.trials), "settings": found.settings, "fitting": found.fitting, "rounds": found.rounds,
        "took": found.took_s, "date": found.date[:16].replace("T", " "),
    }  # fmt: skip
    blocks: list[Block] = [Paragraph(Message("tune.tried_so_many", values))]
    if found.known:
        blocks.append(Paragraph(Message("tune.known", values)))
    blocks.append(Paragraph(Message(f"tune.clock.{found.clock}")))
    if found.elsewhere > BUSY:
        blocks.append(Paragraph(Message("tune.busy", {"share": found.elsewhere}), "warn"))
    return tuple(blocks)
