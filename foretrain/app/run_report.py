"""Everything that a report of a run shows, gathered from its directory."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretrain.advice.outlook import Outlook, outlook
from foretrain.analysis import forecast_check
from foretrain.analysis import run_pace as vital_signs
from foretrain.analysis.log_analysis import LogAnalysis
from foretrain.analysis.log_checks import utilization
from foretrain.analysis.run import RunExplanation
from foretrain.analysis.run_pace import VitalSigns, of_lines, of_samples
from foretrain.app.explain import ExplainedLog, run_of
from foretrain.comparison.loss_axes import LossCurves, loss_curves, meter_of
from foretrain.comparison.sources import runs
from foretrain.comparison.sources.logs import of_log
from foretrain.comparison.sources.request import SourceRequest
from foretrain.config.options import RunConfig
from foretrain.data.inspection import unigram_entropy
from foretrain.hardware.catalogue import Gpu
from foretrain.predict.plan import Plan, plan
from foretrain.runs import state as label
from foretrain.runs.folder import RunDirectory
from foretrain.runs.record import TrainedRun
from foretrain.runs.state import UNSAID, Label
from foretrain.runs.training_log import TrainingLog

MAX_SAMPLE_CHARACTERS = 20_000


@dataclass(frozen=True)
class RunFacts:
    """One run. `unigram`: nats per token by the frequencies of tokens alone. `energy_j`: measured."""

    record: TrainedRun
    folder: str
    plan: Plan
    check: forecast_check.ForecastCheck
    explanation: RunExplanation
    losses: LossCurves
    evaluations: tuple[tuple[int, float, float, float | None], ...]  # step, training loss, validation loss, seconds
    signs: VitalSigns
    outlook: Outlook
    unigram: float | None
    sample: str | None
    energy_j: float | None
    label: Label = UNSAID


def gather(run: Path | RunDirectory, sample: str | None = None) -> RunFacts:
    directory = run if isinstance(run, RunDirectory) else RunDirectory(run)
    found = run_of(directory)
    record, metrics, path = found.record, found.metrics, directory.path
    meter = meter_of(metrics) if record.devices == 1 else None  # readings are of the first rank's card
    subject = runs.of(SourceRequest(path=str(path)), directory, metrics)
    return RunFacts(
        record=record, folder=path.resolve().name, plan=found.plan, check=found.check, explanation=found.explanation,
        losses=loss_curves([subject], [meter]),
        evaluations=tuple(
            (line["step"], line["train_loss"], line["val_loss"], line.get("evaluation_s"))
            for line in metrics
            if line["kind"] == "evaluation"
        ),
        signs=vital_signs.of_lines(metrics, on_card=record.gpu.kind == "cuda"),
        outlook=outlook(found.current, "foretrain"), unigram=unigram_entropy(record.dataset),
        sample=sample if sample is not None else sample_in(path), energy_j=meter.energy_j[-1] if meter else None,
        label=label.read_label(path),
    )  # fmt: skip


def sample_in(path: Path) -> str | None:
    try:
        with (path / "sample.txt").open("rb") as file:
            return file.read(MAX_SAMPLE_CHARACTERS).decode("utf-8", "replace")
    except OSError:
        return None


@dataclass(frozen=True)
class LogFacts:
    """The plan is nanoGPT's own for the config on the card; None where one of them is not known."""

    losses: LossCurves | None
    signs: VitalSigns | None
    plan: Plan | None
    outlook: Outlook | None


def gather_log(path: Path, explained: ExplainedLog) -> LogFacts:
    log, config, gpu = explained.read, explained.config, explained.gpu
    found, watched = explained.explanation.log, explained.explanation.watched
    samples = RunDirectory(path).read_lines("samples") if watched else []
    lines = of_samples(samples, watched.busiest.index) if watched and watched.busiest else []
    losses = None
    if log is not None:
        subject = of_log(SourceRequest(path=str(path)), log, config if log.program.has_config else None, gpu)
        losses = loss_curves([subject], [meter_of(lines)])
        lines += _step_lines(subject.train.seconds_s, subject.train.steps, log, found, config, gpu)
        lines.sort(key=lambda line: line.get("elapsed_s") or 0.0)
    own = config if log is None or log.program.has_config else None
    made = plan(own, gpu, name=found.name if found else path.name) if own and gpu else None
    on_card = bool(watched and watched.cards) or (gpu is not None and gpu.kind == "cuda")
    return LogFacts(
        losses=losses, signs=of_lines(lines, on_card=on_card) if lines else None, plan=made,
        outlook=outlook(made, "nanogpt") if made else None,
    )  # fmt: skip


def _step_lines(
    seconds_s: tuple[float, ...], steps: tuple[int, ...], log: TrainingLog, found: LogAnalysis | None,
    config: RunConfig | None, gpu: Gpu | None,
) -> list[dict[str, Any]]:  # fmt: skip
    if not found or not found.tokens_per_step or found.steady_s is None or len(seconds_s) != len(steps):
        return []
    at_s, lines, tokens = dict(zip(steps, seconds_s, strict=True)), [], found.tokens_per_step
    share = None
    if config is not None and gpu is not None and log.program.has_config:
        share = utilization(config, gpu, found.steady_s, tokens_per_step=tokens).mfu
    for number, time_s in zip(log.steps.number, log.steps.time_s, strict=True):
        if time_s > 0 and number in at_s:  # NaN fails this too
            rate = tokens / time_s
            line = {"elapsed_s": at_s[number], "tokens_per_s": rate}
            lines.append(line | ({"mfu": share * found.steady_s / time_s} if share else {}))
    return lines
