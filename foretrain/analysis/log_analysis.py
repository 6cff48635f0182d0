"""`analyse`: the steady step of a training log, what took longer and why, the config checked against the log."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import Any, Literal

from pydantic import ValidationError

from foretrain.analysis.log_checks import (
    Finding,
    Utilization,
    findings,
    has_constant_rate,
    rate_fits,
    rate_tokens,
    utilization,
)
from foretrain.analysis.measured_step import Disturbance, Pace, disturbances, has_only_first_steps, spans, steady
from foretrain.base.records import Record
from foretrain.config import weights_file
from foretrain.config.options import OPTIONS, RunConfig, named
from foretrain.config.presets import GPT2_SHAPES
from foretrain.config.resolve import ResolvedConfig
from foretrain.data.corpus import data_of_config
from foretrain.data.dataset import DatasetInfo
from foretrain.hardware.catalogue import Gpu
from foretrain.predict.plan import plan
from foretrain.predict.speed.time import Range
from foretrain.predict.timing import Spending, spending
from foretrain.runs.formats.log_format import LossUnit, TimeSource
from foretrain.runs.trackers.tracker import Tracked
from foretrain.runs.training_log import EVALUATED, LogHeader, TrainingLog

SCHEMA = "foretrain.explain/1#log"
# nanochat divided by this on every card until it looked the card up: promised_flops_per_sec_h100 in base_train.py.
NANOCHAT_H100_FLOP_PER_S = 989e12
TokensSource = Literal["config", "log", "rate", "unknown"]


class Losses(Record):
    first_loss: float | None
    last_loss: float | None
    last_val_loss: float | None
    best_val_loss: float | None
    best_val_step: int | None
    evaluations: int
    val_unit: LossUnit


class LoggedMemory(Record):
    """The peaks in the log: held by tensors, in use (active), held by the allocator, on the card (device)."""

    allocated_bytes: int | None
    active_bytes: int | None
    reserved_bytes: int | None
    device_bytes: int | None


class Remaining(Spending):
    steps: int
    total_steps: int
    evaluations: int
    time_s: Range
    currency: str = ""


class LogAnalysis(Record):
    """`steady_low_s` to `steady_high_s` hold nine of ten steady steps; None where the log has no times.

    `tokens_source`: of `tokens_per_step`: config, log, or rate (printed tokens/s times printed time). `tokens_per_s` is
    by these, else as printed; `tokens_per_gpu_s`, where one card's are printed.
    """

    name: str
    format: str
    first_step: int
    last_step: int
    steps: int
    segments: int
    log_interval: int
    steady_s: float | None
    steady_low_s: float | None
    steady_high_s: float | None
    steady_steps: int
    step_time: TimeSource
    mean_step_s: float | None
    tokens_per_step: int | None
    tokens_source: TokensSource
    tokens_per_s: float | None
    tokens_per_gpu_s: float | None
    learning_rate: float | None
    memory: LoggedMemory | None
    logged_mfu: float | None
    utilization: Utilization | None
    nanochat_mfu: float | None
    gpu_name: str | None
    config_used: bool
    predicted_step_s: Range | None
    disturbances: tuple[Disturbance, ...]
    logged_s: float
    lost_s: float
    losses: Losses
    remaining: Remaining | None
    whole_run_s: Range | None
    whole_run_energy_j: float | None
    whole_run_cost: float | None
    findings: tuple[Finding, ...]


def analyse(
    log: TrainingLog, *, name: str = "log", config: RunConfig | None = None, gpu: Gpu | None = None
) -> LogAnalysis:
    """Analyse a log; a config adds MFU, checks and forecast; a card adds shares of its peak."""
    steps = log.steps
    interval = log_interval(log)
    own = config if log.program.has_config else None
    pace = pace_of(log, own)
    slower = disturbances(log, pace, own, interval) if pace else ()
    tokens, source = tokens_of_step(log, own)
    used = utilization(own, gpu, pace.median_s, tokens_per_step=tokens) if own and gpu and pace else None
    left = _remaining(log, pace, slower, own, gpu, used.mfu if used else None) if pace else None
    mfu = next((m for m in reversed(steps.logged_mfu) if math.isfinite(m)), None)
    return LogAnalysis(
        name=name, format=log.format, first_step=min(steps.number), last_step=log.last_step, steps=len(steps),
        segments=len(steps.starts), log_interval=interval, **_pace(pace), mean_step_s=mean_step_s(log),
        step_time=log.program.step_time if pace else "none", tokens_per_step=tokens, tokens_source=source,
        tokens_per_s=_tokens_per_s(log, tokens, pace),
        tokens_per_gpu_s=_rate(log) if log.program.rate_per_gpu else None,
        learning_rate=next((rate for rate in reversed(steps.learning_rate) if math.isfinite(rate)), None),
        memory=memory_of(log.header), logged_mfu=mfu, utilization=used,
        nanochat_mfu=_nanochat_mfu(log, mfu, gpu), gpu_name=gpu.name if gpu else None, config_used=own is not None,
        predicted_step_s=_predicted(own, gpu), disturbances=slower,
        logged_s=sum(t * n for t, n in zip(steps.time_s, spans(log, interval), strict=True) if math.isfinite(t)),
        lost_s=sum(d.lost_s for d in slower),
        losses=_losses(log),
        remaining=left, findings=findings(log, own, config, used, pace.median_s if pace else None, interval),
        **_whole_run(log, pace, slower, left, own, gpu, used.mfu if used else None),
    )  # fmt: skip


def pace_of(log: TrainingLog, config: RunConfig | None) -> Pace | None:
    """Find the steady step; None where the log has no times. Raises UserError for impossible times."""
    return steady(log, config) if log.times and not has_only_first_steps(log) else None


def _pace(pace: Pace | None) -> dict[str, Any]:
    if pace is None:
        return {"steady_s": None, "steady_low_s": None, "steady_high_s": None, "steady_steps": 0}
    return {
        "steady_s": pace.median_s, "steady_low_s": pace.low_s, "steady_high_s": pace.high_s,
        "steady_steps": len(pace.indices),
    }  # fmt: skip


def mean_step_s(log: TrainingLog) -> float | None:
    header = log.header
    return header.run_s / header.run_steps if header.run_s and header.run_steps else None


def _rate(log: TrainingLog) -> float | None:
    rates = [rate for rate in log.steps.tokens_per_s if math.isfinite(rate)]
    return median(rates) if rates and not has_constant_rate(log) and not has_only_first_steps(log) else None


def _tokens_per_s(log: TrainingLog, tokens: int | None, pace: Pace | None) -> float | None:
    step_s = pace.median_s if pace else mean_step_s(log)
    if tokens and step_s:
        return tokens / step_s
    return None if log.program.rate_per_gpu else _rate(log)


def memory_of(header: LogHeader) -> LoggedMemory | None:
    found = LoggedMemory(
        allocated_bytes=header.allocated_peak_bytes, active_bytes=header.active_peak_bytes,
        reserved_bytes=header.reserved_peak_bytes, device_bytes=header.device_peak_bytes,
    )  # fmt: skip
    return found if any(value is not None for value in found.model_dump().values()) else None


def log_interval(log: TrainingLog) -> int:
    counts: dict[int, int] = {}
    for segment in log.steps.segments():
        for i in segment[1:]:
            distance = log.steps.number[i] - log.steps.number[i - 1]
            counts[distance] = counts.get(distance, 0) + 1
    return max(counts, key=lambda distance: counts[distance]) if counts else 1


def tokens_of_step(log: TrainingLog, config: RunConfig | None) -> tuple[int | None, TokensSource]:
    """Prefer the log's own figure: it is what ran. A printed rate is rounded, or a running mean; the config is not."""
    if log.header.tokens_per_step:
        return log.header.tokens_per_step, "log"
    printed = rate_tokens(log)
    if config is not None and (printed is None or rate_fits(printed, config)):
        return config.tokens_per_step, "config"
    return (max(1, round(printed)), "rate") if printed else (None, "unknown")


def _nanochat_mfu(log: TrainingLog, mfu: float | None, gpu: Gpu | None) -> float | None:
    peak = gpu.peak_flop_per_s("bfloat16") if gpu else None
    if not log.program.h100_mfu or mfu is None or peak is None:
        return None
    return mfu * (log.header.peak_flop_per_s or NANOCHAT_H100_FLOP_PER_S) / peak


def _predicted(config: RunConfig | None, gpu: Gpu | None) -> Range | None:
    timing = plan(config, gpu).nanogpt_timing if config and gpu else None
    return timing.step_s if timing else None


def _losses(log: TrainingLog) -> Losses:
    finite = [loss for loss in log.steps.loss if math.isfinite(loss)]
    values = [(e.val_loss, e.step) for e in log.evaluations if e.val_loss is not None]
    best = min(values, key=lambda value: value[0], default=(None, None))
    return Losses(
        first_loss=finite[0] if finite else None, last_loss=finite[-1] if finite else None,
        last_val_loss=values[-1][0] if values else None, best_val_loss=best[0], best_val_step=best[1],
        evaluations=len(log.evaluations), val_unit=log.program.val_unit,
    )  # fmt: skip


def _remaining(
    log: TrainingLog, pace: Pace, slower: tuple[Disturbance, ...], config: RunConfig | None, gpu: Gpu | None,
    mfu: float | None,
) -> Remaining | None:  # fmt: skip
    recent_s, steady_s = pace.recent_s, pace.median_s
    total = log.header.total_steps or (config.max_iters if config else None)
    if total is None:
        return None
    last = total if log.program.counts_to_total else total - 1
    left = max(0, last - log.last_step)
    each = next((d.each_s for d in slower if d.kind.startswith("evaluation")), 0.0)
    interval = _evaluation_interval(log, config)
    evaluations = last // interval - log.last_step // interval if each and interval and left else 0
    odd_s = sum(d.lost_s for d in slower if d.kind in ("spike", "slow_down"))
    worst_s = max(recent_s, steady_s + odd_s / max(1, len(log.steps)))
    add_s = evaluations * each
    times = Range(
        low_s=left * min(recent_s, steady_s) + add_s, expected_s=left * recent_s + add_s, high_s=left * worst_s + add_s
    )
    spent = spending(config, gpu, mfu, times) if gpu and config else Spending()
    return Remaining(
        steps=left, total_steps=total, evaluations=evaluations, time_s=times,
        currency=config.currency if config else "", **dict(spent),
    )  # fmt: skip


def _evaluation_interval(log: TrainingLog, config: RunConfig | None) -> int | None:
    distances = sorted(b - a for a, b in pairwise(sorted({e.step for e in log.evaluations})))
    if distances:
        return distances[len(distances) // 2]
    return config.eval_interval if config else None


def _whole_run(
    log: TrainingLog, pace: Pace | None, slower: tuple[Disturbance, ...], remaining: Remaining | None,
    config: RunConfig | None, gpu: Gpu | None, mfu: float | None,
) -> dict[str, Any]:  # fmt: skip
    if remaining is None or pace is None:
        return {"whole_run_s": None, "whole_run_energy_j": None, "whole_run_cost": None}
    so_far_s, left = _so_far_s(log, pace.median_s, slower), remaining.time_s
    times = Range(low_s=so_far_s + left.low_s, expected_s=so_far_s + left.expected_s, high_s=so_far_s + left.high_s)
    spent = spending(config, gpu, mfu, times) if gpu and config else Spending()
    money = spent.money()
    cost = money[1] if money else None
    return {"whole_run_s": times, "whole_run_energy_j": spent.energy_expected_j, "whole_run_cost": cost}


def _so_far_s(log: TrainingLog, steady_s: float, slower: tuple[Disturbance, ...]) -> float:
    """Add up the printed times, also of repeated steps, the steady time for each other step, and the evaluations."""
    printed, unprinted, stands_for = 0.0, 0, spans(log, log_interval(log))
    for segment in log.steps.segments():
        numbers = [log.steps.number[i] for i in segment]
        unprinted += numbers[-1] - numbers[0] + 1 - len(numbers)
        printed += sum(time_s * stands_for[i] for i in segment if math.isfinite(time_s := log.steps.time_s[i]))
    unprinted = 0 if log.program.mean_times else unprinted
    each = next((d.each_s for d in slower if d.kind.startswith("evaluation")), 0.0)
    seen = sum(bool(happened & EVALUATED) for happened in log.steps.happened)
    return printed + unprinted * steady_s + max(0, len(log.evaluations) - seen) * each


SOURCE = "the log"
# These options mark a config as nanoGPT's.
_SHAPE = set(named(lambda each: each.from_weights and each.nanogpt == "has"))


def config_of(
    resolved: ResolvedConfig | None, log: TrainingLog | None, find: Callable[[str], DatasetInfo | None] | None = None
) -> RunConfig | None:
    """Return the config with the log's values over it; a vocabulary in neither is the dataset's (`find`)."""
    if resolved is None:
        return None
    resolved = as_printed(resolved, log) if log is not None else resolved
    logged = log.header.vocab_size if log is not None else None
    return data_of_config(resolved, logged_vocab_size=logged, find=find).config


def as_printed(resolved: ResolvedConfig, log: TrainingLog) -> ResolvedConfig:
    typed = {key for key, source in resolved.sources.items() if source.startswith("--")}
    found = {key: value for key, value in printed(log).items() if key not in typed}
    model = found.get("init_from")
    if model in GPT2_SHAPES and model != resolved.config.init_from:  # it brings its shape
        own = {key: getattr(resolved.config, key) for key in ("block_size", "vocab_size") if key in resolved.sources}
        found = own | found
        weights_file.apply(found, dict.fromkeys(found, SOURCE))
    config = laid_over(resolved.config, found)
    changed = {key for key in found if getattr(config, key) == found[key]}
    return replace(resolved, config=config, sources={**resolved.sources, **dict.fromkeys(changed, SOURCE)})


def of_watched(config: RunConfig | None, log: TrainingLog | None) -> RunConfig | None:
    """Return a watched command's config by its log: nanoGPT takes the vocabulary of its data alone."""
    if config is None or log is None:
        return config
    logged = {"vocab_size": log.header.vocab_size} if log.header.vocab_size else {}
    return laid_over(config, printed(log) | logged)


def of_tracked(tracked: Tracked) -> RunConfig | None:
    """Return the config of a tracked run: ours, or nanoGPT's own; None of any other program's."""
    known = {key: value for key, value in tracked.config.items() if key in OPTIONS}
    if not tracked.is_ours and _SHAPE - known.keys():
        return None
    return laid_over(RunConfig(), known)


def printed(log: TrainingLog) -> dict[str, Any]:
    return {key: value for key, value in log.header.settings.items() if key in OPTIONS and not OPTIONS[key].inert}


def laid_over(config: RunConfig, values: dict[str, Any]) -> RunConfig:
    try:
        return RunConfig.model_validate({**config.model_dump(), **values})
    except ValidationError as error:
        bad = {str(detail["loc"][0]) for detail in error.errors() if detail["loc"]}
        kept = {key: value for key, value in values.items() if key not in bad}
        return laid_over(config, kept) if len(kept) < len(values) else config
