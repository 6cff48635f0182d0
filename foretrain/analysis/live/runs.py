"""Runs of all kinds as one record each: foretrain's own, Trainers' with ForetrainCallback, and watched commands."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from foretrain.analysis import trainer_run
from foretrain.analysis.forecast import highest, plan_of
from foretrain.analysis.live.observed import LOCK, ObservedRun, age_s, lock_is_held
from foretrain.analysis.live.record import LiveRun
from foretrain.analysis.live.tail import Tail, first_line, number, whole_number
from foretrain.base.errors import UserError
from foretrain.monitoring import record as watch_record
from foretrain.predict.energy import power
from foretrain.training.folder import label, now
from foretrain.training.store import RunRecord

Values = dict[str, Any]


@dataclass
class Known:
    """What is kept of a run between two looks. `alive`: whether its tail was begun for what adds up, too."""

    tail: Tail
    samples: Tail
    alive: bool
    planned: dict[tuple[str, float], tuple[int, ...]] = field(default_factory=dict)


def known_of(path: Path, *, alive: bool) -> Known:
    """Of a run that is looked at for the first time."""
    return Known(Tail(path / "metrics.jsonl", whole=alive), Tail(path / "samples.jsonl", whole=False), alive)


def of_folder(run: ObservedRun, known: Known) -> LiveRun:
    """The run in a folder as it is now; one that cannot be read says why."""
    path, said = run.path, now.read(run.path)
    values: Values = {"path": str(path), "label": label.read(path)}
    try:
        if (path / watch_record.RECORD).is_file():
            values |= {"kind": "watched", **_watched(path, run, known)}
        elif trainer_run.is_one(path):
            values |= {"kind": "trainer", **_trainer(run, known)}
        elif (path / "run.json").is_file() or said is None:
            values |= {"kind": "run", **_own(run, known)}
        else:  # it has only just begun, or never came as far as a record
            values |= {"kind": "run", "status": "running" if run.is_locked() else "killed"}
    except UserError as error:
        return LiveRun(**values, **_unreadable(path, str(error)))
    except (OSError, ValueError) as error:  # it went away between two readings
        return LiveRun(**values, **_unreadable(path, str(error)))
    values = {"name": path.resolve().name, **values, **_at(path, said, alive=values["status"] == "running")}
    if values["phase"] == "running" and values.get("loss") is not None:  # its lines tell of steps
        values["phase"] = "training"
    return LiveRun(**values)


def _unreadable(path: Path, problem: str) -> Values:
    return {"kind": "run", "name": path.name, "where": "nowhere", "phase": "unreadable", "problem": problem}


def _at(path: Path, said: now.Now | None, *, alive: bool) -> Values:
    """Who does it, and what, as the run says it; one of an older foretrain does not."""
    if not alive:
        return {"where": "nowhere", "phase": "ended"}
    if said is None:
        return {"where": "here" if lock_is_held(path / LOCK) else "elsewhere", "phase": "running"}
    here = now.is_here(said)
    return {
        "where": "here" if here else "elsewhere", "host": said.host, "phase": said.phase,
        "phase_s": max(0.0, now.seconds_since(said)), "pids": (said.pid,) if here else (),
    }  # fmt: skip


# -- foretrain's own -------------------------------------------------------------------------------------------


def _own(run: ObservedRun, known: Known) -> Values:
    record = run.read_record()
    alive = record.status == "running"
    tail = known.tail.look()
    step, evaluation = tail.step, tail.evaluation
    done = whole_number(step.get("step"))
    planned = _planned(known, run.path / "plan.json", lambda: highest(plan_of(run.path, record))[1:])
    return {
        "status": record.status, "device": record.gpu.name, "started_at": record.started_at,
        "step": record.steps_done if not alive else max(record.steps_done, done + 1 if done is not None else 0),
        "steps": record.config.max_iters, "loss": number(step.get("loss")),
        "val_loss": number(evaluation.get("val_loss")) if alive else record.val_loss,
        "tokens_per_s": number(step.get("tokens_per_s")) if alive else record.tokens_per_s,
        "mfu": number(step.get("mfu")) if alive else record.mfu,
        "memory_bytes": whole_number(step.get("memory_bytes")) if alive else None,
        "memory_peak_bytes": record.highest_bytes or tail.peak_bytes, **planned,
        "eta_s": _left(number(step.get("eta_s")), tail.path) if alive else None,
        "elapsed_s": (number(step.get("elapsed_s")) if alive else record.wall_s) or record.wall_s,
        **_energy(tail, record, number(step.get("elapsed_s")), number(step.get("mfu"))),
    }  # fmt: skip


def _planned(known: Known, file: Path, read: Callable[[], tuple[int, ...]]) -> Values:
    """What the plan beside a run expects, read again when it is another one; nothing where it says nothing."""
    key = (str(file), age_stamp(file))
    if key not in known.planned:
        try:
            known.planned = {key: read() if file.is_file() else ()}
        except (UserError, OSError, ValueError, StopIteration):
            known.planned = {key: ()}
    return dict(zip(("planned_bytes", "planned_high_bytes"), known.planned[key], strict=False))


def age_stamp(file: Path) -> float:
    """When a file was changed; 0 where there is none."""
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def _left(eta_s: float | None, metrics: Path) -> float | None:
    """What is left since the line that said it."""
    return None if eta_s is None else max(0.0, eta_s - age_s(metrics))


def _energy(tail: Tail, record: RunRecord, elapsed_s: float | None, mfu: float | None) -> Values:
    """What the card's own readings add up to; else the power that plans expect, for as long as it has run."""
    if tail.energy_j is not None and record.devices == 1:
        return {"energy_j": tail.energy_j, "energy_source": "measured"}
    drawn = power(record.gpu, mfu) if elapsed_s and tail.whole else None
    if drawn is None or elapsed_s is None:
        return {}
    return {"energy_j": drawn.expected_w * elapsed_s * record.devices, "energy_source": "estimated"}


# -- a Trainer's -----------------------------------------------------------------------------------------------


def _trainer(run: ObservedRun, known: Known) -> Values:
    record = trainer_run.read_record(run)
    alive = record.status == "running"
    tail = known.tail.look()
    done = whole_number(tail.step.get("step"))
    step = max(record.steps_done, done or 0) if alive else record.steps_done
    step_s = median(tail.recent_s) if tail.recent_s else record.step_s
    tokens, last_s = number(tail.step.get("tokens")), number(tail.step.get("step_s"))
    left = (record.max_steps - step) * step_s if alive and record.max_steps and step_s and step else None

    def planned() -> tuple[int, ...]:
        found = trainer_run.forecast_in(run.path)
        return (found.memory.worst.allocated_bytes,) if found else ()

    return {
        "status": record.status, "device": record.device, "started_at": record.started_at,
        "step": step, "steps": record.max_steps, "loss": number(tail.step.get("loss")) or record.last_loss,
        "val_loss": number(tail.evaluation.get("val_loss")) if alive else record.last_val_loss,
        "tokens_per_s": tokens / last_s if alive and tokens and last_s else record.tokens_per_s,
        "memory_bytes": whole_number(tail.step.get("memory_bytes")) if alive else None,
        "memory_peak_bytes": tail.peak_bytes,
        **_planned(known, run.path / trainer_run.PLAN, planned),
        "eta_s": _left(left, tail.path), "elapsed_s": number(tail.step.get("elapsed_s")) or record.wall_s,
    }  # fmt: skip


# -- a watched command -----------------------------------------------------------------------------------------


def _watched(path: Path, run: ObservedRun, known: Known) -> Values:
    record = watch_record.read(path, run)
    alive = record.status == "running"
    tail = known.tail.look()
    sample = known.samples.look().line
    step = whole_number(tail.step.get("step")) if alive else record.last_step
    steps = record.config.max_iters if record.config else None
    step_s = median(tail.recent_s) if tail.recent_s else None
    cards = [card for card in sample.get("cards") or () if isinstance(card, dict)]
    held = sum(whole_number(card.get("ours_bytes")) or 0 for card in cards)
    drawn_j = _drawn_j(path / "samples.jsonl", cards) if alive else sum(card.energy_j or 0.0 for card in record.cards)
    return {
        "name": " ".join(record.command)[:80] or record.id, "status": record.status, "started_at": record.started_at,
        "step": step, "steps": steps, "loss": number(tail.step.get("loss")) if alive else record.last_loss,
        "val_loss": number(tail.evaluation.get("val_loss")) if alive else record.last_val_loss,
        "tokens_per_s": number(tail.step.get("tokens_per_s")) if alive else None,
        "memory_bytes": (held or whole_number(sample.get("rss_bytes"))) if alive else None,
        "memory_peak_bytes": max((card.ours_peak_bytes or 0 for card in record.cards), default=0) or None,
        "eta_s": _left((steps - step) * step_s if alive and steps and step and step_s else None, tail.path),
        "elapsed_s": number(sample.get("elapsed_s")) if alive else record.wall_s,
        **({"energy_j": drawn_j, "energy_source": "measured"} if drawn_j else {}),
    }  # fmt: skip


def _drawn_j(samples: Path, cards: list[Values]) -> float:
    """What the counters of the cards that it uses have gone up by since its first sample."""
    first = {card.get("index"): card for card in first_line(samples).get("cards") or () if isinstance(card, dict)}
    ends = [(first.get(card.get("index"), {}), card) for card in cards if whole_number(card.get("ours_bytes"))]
    pairs = [(number(begin.get("energy_j")), number(end.get("energy_j"))) for begin, end in ends]
    return sum(end - begin for begin, end in pairs if begin is not None and end is not None)
