"""Everything that a report of a run shows, gathered from its directory: the run's own records, its forecast, and both
beside each other."""

from dataclasses import dataclass
from pathlib import Path

from foretrain.advice.outlook import Outlook, outlook
from foretrain.analysis import forecast_check
from foretrain.analysis import telemetry as vital_signs
from foretrain.analysis.run import RunExplanation
from foretrain.analysis.telemetry import VitalSigns
from foretrain.app.explain import run_of
from foretrain.comparison.loss_axes import LossCurves, loss_curves, meter_of
from foretrain.comparison.sources import runs
from foretrain.comparison.sources.given import Given
from foretrain.data.inspection import unigram_entropy
from foretrain.predict.plan import Plan
from foretrain.runs import state as label
from foretrain.runs.folder import RunDirectory
from foretrain.runs.record import TrainedRun
from foretrain.runs.state import UNSAID, Label

MAX_SAMPLE_CHARACTERS = 20_000


@dataclass(frozen=True)
class RunFacts:
    """One run, what its folder is called, and what its user says of it.

    `unigram`: nats a token that knowing the frequencies of tokens alone gives. `energy_j`: measured.
    """

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
    """Of a run directory, or one that is only looked at. Raises UserError where there is none, or its records are
    damaged."""
    directory = run if isinstance(run, RunDirectory) else RunDirectory(run)
    found = run_of(directory)
    record, metrics, path = found.record, found.metrics, directory.path
    meter = meter_of(metrics) if record.devices == 1 else None  # readings are of the first rank's card
    subject = runs.of(Given(path=str(path)), directory, metrics)
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
    """The text that was sampled from a run and kept in its folder; None where there is none."""
    try:
        with (path / "sample.txt").open("rb") as file:
            return file.read(MAX_SAMPLE_CHARACTERS).decode("utf-8", "replace")
    except OSError:
        return None
