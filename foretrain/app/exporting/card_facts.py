"""What a model card says of a run: figures, each with how it was measured."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from foretrain.base.records import Record
from foretrain.base.units import (
    JOULES_PER_KWH,
    format_duration,
    format_energy,
    format_mass,
    format_money,
    format_percent,
)
from foretrain.comparison.loss_axes import meter_of
from foretrain.config.options import OPTIONS, RunConfig
from foretrain.config.presets import GPT2_SHAPES
from foretrain.config.resolve import toml_value
from foretrain.config.shape import ModelShape
from foretrain.predict.energy import Prices, spending
from foretrain.predict.speed.time import Range
from foretrain.runs.record import TrainedRun
from foretrain.runs.scores import Scores

if TYPE_CHECKING:
    from foretrain.training.checkpoint import Progress

_ON_THE_HUB = re.compile(r"hf://datasets/([\w.-]{1,96}/[\w.-]{1,96})(?:[@/].*)?")


class Figure(Record):
    """A line of a card: what it is, its value as a text, and how that was found."""

    name: str
    value: str
    how: str


class Loss(Record):
    """Mean losses in nats a token, after so many steps."""

    step: int
    train: float
    val: float

    @property
    def perplexity(self) -> float:
        """e to the validation loss; infinite beyond what a float holds."""
        return math.exp(self.val) if self.val < 700 else math.inf


class CardFacts(Record):
    """A run, as a card tells it. Texts are as the run has them: names are not ours."""

    name: str
    model_type: str
    dataset: str
    hub_datasets: tuple[str, ...]
    base_model: str
    hardware: str
    loss: Loss | None
    figures: tuple[Figure, ...]
    co2_g: float | None
    co2_how: str
    config: str
    has_tokenizer: bool
    evaluated: bool = False


def facts_of(
    record: TrainedRun,
    progress: Progress,
    lines: Sequence[dict[str, Any]],
    tokenizer: bool,
    scores: Scores | None = None,
) -> CardFacts:
    """Of the checkpoint that `progress` tells of. `lines`: the run's metrics; later ones count for nothing.

    `tokenizer`: whether its files are in the export. `scores`: what `foretrain eval` found of this checkpoint.
    """
    config = record.config
    shape = ModelShape.of(config)
    loss = _loss(lines, progress.step)
    on_card = record.gpu.kind == "cuda"
    hardware = f"{record.devices} x {record.gpu.name}" if on_card else record.gpu.name
    spent, co2_g, co2_how = _spent(record, progress, lines)
    figures = [
        Figure(name="Parameters", value=f"{shape.n_params:,}", how="counted, a tied embedding once"),
        Figure(
            name="Shape", how="the run's config",
            value=f"{config.n_layer} layers, {config.n_head} heads, width {config.n_embd:,}, "
            f"context {config.block_size:,}, vocabulary {config.vocab_size:,}",
        ),
        *_data(record, progress),
        *_loss_figures(config, loss),
        *(_score_figures(record, scores) if scores else []),
        Figure(name="Hardware", value=hardware, how="as the driver names it" if on_card else "as the system names it"),
        Figure(
            name="Precision", how="the run's record",
            value=record.dtype + (", compiled by torch.compile" if record.compiled else ""),
        ),
        Figure(name="Time", value=format_duration(progress.elapsed_s), how="wall clock up to this checkpoint"),
        *_speed(record),
        *spent,
    ]  # fmt: skip
    remotes = [record.dataset.remote, *(part.dataset.remote for part in record.dataset.parts)]
    matches = [_ON_THE_HUB.fullmatch(remote) for remote in remotes if remote]
    return CardFacts(
        name=record.name, model_type=shape.family.write_config(config, None)["model_type"],
        dataset=record.dataset.name, hardware=hardware, loss=loss, figures=tuple(figures), co2_g=co2_g,
        hub_datasets=tuple(dict.fromkeys(match[1] for match in matches if match)),
        base_model=f"openai-community/{config.init_from}" if config.init_from in GPT2_SHAPES else "",
        co2_how=co2_how, config=_learning(config), has_tokenizer=tokenizer,
        evaluated=bool(scores and (scores.texts or scores.tasks)),
    )  # fmt: skip


def _data(record: TrainedRun, progress: Progress) -> list[Figure]:
    data, config = record.dataset, record.config
    seen = progress.step * config.tokens_per_step
    tokenizer = f", tokenizer {data.tokenizer}" if data.tokenizer else ""
    return [
        Figure(
            name="Data", value=f"{data.name}: {data.train_tokens:,} training tokens, {data.val_tokens:,} for validation"
            f"{tokenizer}", how="the dataset's files",
        ),
        Figure(
            name="Tokens seen", how=f"{progress.step:,} steps of {config.tokens_per_step:,} tokens",
            value=f"{seen:,} ({seen / max(1, data.train_tokens):.3g} epochs)",
        ),
    ]  # fmt: skip


def _loss(lines: Sequence[dict[str, Any]], step: int) -> Loss | None:
    told = [line for line in lines if line["kind"] == "evaluation" and line["step"] <= step]
    last = max(told, key=lambda line: line["step"], default=None)
    return Loss(step=last["step"], train=last["train_loss"], val=last["val_loss"]) if last else None


def _loss_figures(config: RunConfig, loss: Loss | None) -> list[Figure]:
    if loss is None:
        return [Figure(name="Validation loss", value="not measured", how="the run was not evaluated")]
    batch = f"{config.batch_size:,} x {config.block_size:,}"
    how = f"mean of {config.eval_iters:,} batches of {batch} after {loss.step:,} steps"
    val = f"{loss.val:.4f} nats a token (perplexity {loss.perplexity:.4g})"
    return [
        Figure(name="Validation loss", value=val, how=how),
        Figure(name="Training loss", value=f"{loss.train:.4f} nats a token", how=how),
    ]


def _score_figures(record: TrainedRun, scores: Scores) -> list[Figure]:
    """Bits per byte of texts, by their file's name alone, and what lm-eval's tasks measured."""
    figures = []
    for text in scores.texts:
        own = text.text == f"{record.dataset.name}/val"
        of = "the validation data" if own else PurePath(text.text).name
        part = "" if text.whole else f", its first {text.tokens:,} tokens"
        figures.append(
            Figure(
                name="Bits per byte", value=f"{_with_error(text.bits_per_byte, text.standard_error)} of {of}{part}",
                how=f"foretrain eval: windows of {text.context_tokens:,} tokens, one every {text.stride_tokens:,}, "
                f"{text.dtype}",
            )
        )  # fmt: skip
    for task in scores.tasks:
        shots = "" if task.shots is None else f", {task.shots}-shot"
        asked, of = task.documents, task.documents_in_all
        part = "" if asked == of else f", {asked} of {of} documents"
        value = f"{task.task}, {task.metric}: {_with_error(task.value, task.standard_error)}"
        figures.append(Figure(name="Task", value=value, how=f"{task.harness}{shots}{part}, {task.dtype}"))
    return figures


def _with_error(value: float, error: float | None) -> str:
    return f"{value:.4f}" if error is None else f"{value:.4f} ± {error:.4f}"


def _speed(record: TrainedRun) -> list[Figure]:
    if record.tokens_per_s is None:
        return []
    mfu = f", {format_percent(record.mfu)} MFU" if record.mfu is not None else ""
    return [Figure(name="Speed", value=f"{record.tokens_per_s:,.0f} tokens/s{mfu}", how="mean of the run's steps")]


def _spent(
    record: TrainedRun, progress: Progress, lines: Sequence[dict[str, Any]]
) -> tuple[list[Figure], float | None, str]:
    """(energy, CO2 and cost up to the checkpoint; grams of CO2 and how they were found)."""
    config, elapsed_s = record.config, progress.elapsed_s
    meter = meter_of(lines) if record.devices == 1 else None  # readings are of the first rank's card
    guessed = spending(
        Prices.of(config), record.gpu, record.mfu, Range(low_s=elapsed_s, expected_s=elapsed_s, high_s=elapsed_s),
        record.devices,
    )  # fmt: skip
    if meter is not None:
        joules, low, high = meter.until_j(elapsed_s), None, None
        how = "measured: the card's power readings over time (NVML); the rest of the machine is not in it"
    else:
        joules, low, high = guessed.energy_expected_j, guessed.energy_low_j, guessed.energy_high_j
        drawn = "what a busy core draws" if record.gpu.kind == "cpu" else "the card's board power and the run's MFU"
        how = f"estimated from {drawn}, over time; the rest of the machine is not in it"
    figures, co2_g, co2_how = [], None, ""
    if joules is not None:
        span = f" ({format_energy(low)} to {format_energy(high)})" if low is not None and high is not None else ""
        figures.append(Figure(name="Energy", value=f"{format_energy(joules)}{span}", how=how))
    if joules is not None and config.co2_per_kwh:
        co2_g = joules / JOULES_PER_KWH * config.co2_per_kwh
        source = "measured" if meter else "estimated"
        co2_how = f"{source} energy times {config.co2_per_kwh:g} g/kWh, as the run's config says"
        figures.append(Figure(name="CO2", value=format_mass(co2_g), how=co2_how))
    if config.price_per_hour:
        rent = record.devices * elapsed_s / 3600 * config.price_per_hour
        per = f"hours times {config.price_per_hour:g} {config.currency} an hour of a card, as the run's config says"
        figures.append(Figure(name="Cost", value=f"{format_money(rent)} {config.currency}", how=per))
    elif joules is not None:
        cost = joules / JOULES_PER_KWH * config.price_per_kwh
        per = f"energy times {config.price_per_kwh:g} {config.currency}/kWh, as the run's config says"
        figures.append(Figure(name="Cost", value=f"{format_money(cost)} {config.currency} of electricity", how=per))
    return figures, co2_g, co2_how


def _learning(config: RunConfig) -> str:
    """The options that decide what is learned, as TOML. Paths of the machine are not among them."""
    kept = [name for name, each in OPTIONS.items() if each.group != "run" and "learning" in each.affects]
    published = config.init_from in ("scratch", *GPT2_SHAPES)
    return "\n".join(
        f"{name} = {toml_value(getattr(config, name))}"
        for name in kept
        if name != "dataset" and (name != "init_from" or published)
    )
