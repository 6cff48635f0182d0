"""JSON Schemas of what `--json` prints, made from the records themselves: docs/schemas/NAME-VERSION.json and a table.

A record's schema is pydantic's; what a command adds to it stands in `OUTPUTS`. tests/repository/test_schemas.py holds real
outputs to these files.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Union

from pydantic import BaseModel, ConfigDict, Field, RootModel, create_model
from tables import ROOT

from foretrain.advice import best, cards, remedies
from foretrain.advice import record as advice
from foretrain.analysis import components as explain
from foretrain.analysis import forecast_check, log_analysis, log_checks, snapshot_analysis
from foretrain.analysis import run as run_explain
from foretrain.analysis.finetune_memory import FineTuneExplanation
from foretrain.analysis.live import Top
from foretrain.base.records import Note
from foretrain.comparison import compare
from foretrain.config.finetune.options import FineTune
from foretrain.config.options import RunConfig
from foretrain.data.inspection import DatasetSummary
from foretrain.data.prepare.estimate import PreparePlan
from foretrain.hardware.calibration import Calibration
from foretrain.hardware.catalogue import Gpu
from foretrain.measure import tune_record as tuning
from foretrain.measure import verify_record as verification
from foretrain.predict import within
from foretrain.predict.finetune.plan import FineTunePlan
from foretrain.predict.inference.plan import InferencePlan
from foretrain.predict.largest import Largest
from foretrain.predict.plan import Plan
from foretrain.predict.ranks import ClusterPlan
from foretrain.predict.smallest import SmallestCard
from foretrain.runs.record import KINDS, TrainedRun, WatchedRun
from foretrain.runs.scores import Evaluation, Scores
from foretrain.runs.state import UNSAID, Label
from foretrain.training.exports.forms import Exported

FOLDER = ROOT / "docs" / "schemas"
DIALECT = "https://json-schema.org/draft/2020-12/schema"


class _Open(BaseModel):
    """An object that is not a record, with other keys allowed."""

    model_config = ConfigDict(extra="allow")


def _object(title: str, /, **fields: Any) -> type[BaseModel]:
    """Fields as (type, ...) or (type, default)."""
    return create_model(title, __base__=_Open, **fields)


@dataclass(frozen=True)
class Output:
    """One object that `command --json` prints. `extra`: keys beside the record's. `whole`: the record's keys are always
    there; a log with only an out-of-memory error has none.
    """

    command: str
    what: str
    model: type[BaseModel]
    extra: dict[str, Any] = field(default_factory=dict)
    whole: bool = True


_PROBLEM = _object("Problem", id=(str, ...), message=(str, ...), values=(dict[str, Any], ...))
_ERROR = _object("Error", id=(str, ...), exit_code=(int, ...), message=(str, ...), problems=(list[_PROBLEM], ...))
_SCHEMA = {"schema_": (str, Field(alias="schema"))}  # a record has an attribute of that name
_WITH_PATH = {"path": (str, ...), "label": (Label, UNSAID), **_SCHEMA}
_LISTED: dict[str, Any] = {**_WITH_PATH, "scores": (list[Scores], ...)}


def _run(fields: dict[str, Any], of_watched: dict[str, Any] | None = None) -> Any:
    """Return the record of a run of any source, with these fields besides."""
    kinds = []
    for source, kind in KINDS.items():
        more = {**fields, **(of_watched or {} if source == "watched" else {}), "source": (Literal[source], ...)}
        kinds.append(create_model(kind.__name__, __base__=kind, **more))
    return Union[tuple(kinds)]  # noqa: UP007


def _any_of(*kinds: type[BaseModel], **fields: Any) -> Any:
    return Union[tuple(create_model(kind.__name__, __base__=kind, **_SCHEMA, **fields) for kind in kinds)]  # noqa: UP007


_PLANS = (Plan, ClusterPlan, FineTunePlan, InferencePlan)
_LOG_EXTRA = {
    "watch": (WatchedRun | None, None), "out_of_memory": (run_explain.OutOfMemory | None, None),
    "remedies": (list[remedies.Remedy], []), "doubts": (list[Note], []),
}  # fmt: skip
_PART = _object(
    "Part", name=(str, ...), path=(str, ...), weight=(float, ...), tokens=(int, ...), epochs=(float | None, ...)
)
_HEAD = _object(
    "Head", path=(str, ...), split=(str, ...), position=(int, ...), ids=(list[int], ...), text=(str | None, ...)
)
_VERIFIED = _object(
    "Verified", path=(str, ...), ok=(bool, ...), files=(int, ...), size_bytes=(int, ...), checked_bytes=(int, ...),
    took_s=(float, ...), problems=(list[_PROBLEM], ...),
)  # fmt: skip
_PREPARED = _object(
    "Prepared", out=(str, ...), status=(Literal["finished", "stopped"], ...), signal=(str | None, ...),
    resumed=(bool, ...), existed=(bool, ...), tokens=(int, ...), elapsed_s=(float, ...),
)  # fmt: skip

OUTPUTS: dict[str, Output] = {
    "foretrain.plan/1": Output(
        "plan", "a plan of any kind of run, on one card or several",
        RootModel[_any_of(*_PLANS, advice=(advice.Advices | None, None))],
    ),
    "foretrain.plans/1": Output(
        "plan --gpu A,B", "plans for several cards, and of training the best of them",
        _object("Plans", plans=(list[_any_of(*_PLANS)], ...), best=(cards.Choice | None, None)),
    ),
    "foretrain.explanation/1": Output(
        "plan --explain", "why so much", RootModel[_any_of(explain.Explanation, FineTuneExplanation)]
    ),
    "foretrain.smallest-card/1": Output("plan --smallest-card", "the smallest card on which it fits", SmallestCard),
    "foretrain.largest/1": Output("plan --largest OPTION", "the largest value that fits", Largest),
    "foretrain.within/1": Output(
        "plan --within LIMIT", "the steps that fit, of any kind of run", within.Within,
        {"largest": (Largest | None, None)},
    ),
    "foretrain.best/1": Output("plan --best", "the GPT of lowest estimated loss", best.Best),
    "foretrain.config/1": Output(
        "plan --show-config", "every option and where it is from",
        _object("Config", config=(RunConfig | FineTune, ...), sources=(dict[str, str], ...)),
    ),
    "foretrain.advice/1": Output("advise", "changes, ranked", advice.Advices),
    "foretrain.mfu/1": Output("mfu", "shares of the peak", log_checks.Utilization),
    "foretrain.compare/1": Output("compare A B", "runs side by side", compare.Comparison),
    "foretrain.comparison/1": Output(
        "compare RUN", "a run and its forecast", forecast_check.ForecastCheck,
        {"errors": (dict[str, float | None], ...)},
    ),
    "foretrain.explain/1": Output(
        "explain RUN", "where a run's memory and time went; of a Trainer's run beside its forecast",
        RootModel[_any_of(run_explain.RunExplanation, run_explain.TrainerRunExplanation)],
    ),
    "foretrain.log/1": Output("explain LOG", "what a log says", log_analysis.LogAnalysis, _LOG_EXTRA, whole=False),
    "foretrain.snapshot/1": Output(
        "explain SNAPSHOT", "what a memory snapshot says", snapshot_analysis.SnapshotAnalysis
    ),
    "foretrain.tune/1": Output("tune", "every trial and the winner", tuning.Tuning),
    "foretrain.run/1": Output(
        "train, watch", "the record of a run, as in run.json",
        RootModel[_run(_SCHEMA, {"path": (str | None, ...)})],
    ),
    "foretrain.runs/1": Output(
        "runs", "runs, watched programs and Trainers' runs",
        _object("Runs", runs=(list[_run(_LISTED)], ...)),
    ),
    "foretrain.top/1": Output("top", "cards and runs at one moment", Top),
    "foretrain.languages/1": Output(
        "languages", "languages, and how much of each is translated", _object("Languages", languages=(list[dict[str, Any]], ...))
    ),
    "foretrain.report/1": Output("report", "where the report was written", _object("Report", path=(str, ...))),
    "foretrain.sample/1": Output(
        "sample", "text from a checkpoint",
        _object("Sample", checkpoint=(str, ...), skipped=(list[str], ...), prompt=(str, ...), text=(str, ...)),
    ),
    "foretrain.export/1": Output("export", "what was written for others", Exported),
    "foretrain.eval/1": Output("eval", "bits per byte of texts, and metrics of lm-eval's tasks", Evaluation),
    "foretrain.prepare-plan/1": Output(
        "prepare --plan", "what preparing will take", PreparePlan, {"fits_": (bool, Field(alias="fits"))}
    ),
    "foretrain.prepare/1": Output("prepare", "what was prepared", _PREPARED),
    "foretrain.data-info/1": Output("data info", "statistics of a dataset", DatasetSummary),
    "foretrain.data-verify/1": Output("data verify", "blocks checked against their checksums", _VERIFIED),
    "foretrain.data-head/1": Output("data head", "tokens and their text", _HEAD),
    "foretrain.data-mix/1": Output(
        "data mix", "a mixture's parts", _object("Mix", out=(str | None, ...), parts=(list[_PART], ...))
    ),
    "foretrain.gpus/1": Output("gpus", "the catalogue", _object("Gpus", gpus=(list[Gpu], ...))),
    "foretrain.calibration/1": Output("calibrate", "what was measured of a device", Calibration),
    "foretrain.verify/1": Output(
        "verify", "short runs on a card, predicted and measured; also the file to contribute",
        verification.Verification, {"summary": (list[verification.Summary], ...)},
    ),
    "foretrain.serve/1": Output(
        "serve", "the page's address", _object("Served", url=(str, ...), port=(int, ...))
    ),
    "foretrain.demo/1": Output(
        "demo", "the demo's run and its comparison",
        _object(
            "Demo", run=(create_model("DemoRun", __base__=TrainedRun, **_SCHEMA), ...),  # type: ignore[call-overload]
            comparison=(forecast_check.ForecastCheck, ...), unigram_entropy=(float | None, ...), report=(str, ...),
        ),
    ),
    "foretrain.error/1": Output("every command", "an error", _ERROR),
}  # fmt: skip


def schema(name: str) -> dict[str, Any]:
    """Return the JSON Schema of an output: the record's, the keys beside it, and `schema` with its one value."""
    output = OUTPUTS[name]
    model = create_model(output.model.__name__, __base__=output.model, **output.extra)  # type: ignore[call-overload]
    made = model.model_json_schema(mode="serialization")
    made["properties"] = {"schema": {"const": name}, **made.get("properties", {})}
    optional = {key for key, (_, default) in output.extra.items() if default is None or default == []}
    required = [key for key in made.get("required", []) if key not in optional and output.whole]
    made["required"] = ["schema", *required]
    return {"$schema": DIALECT, "title": name, "description": output.what, **_bare(made)}


def _bare(made: dict[str, Any]) -> dict[str, Any]:
    """Remove titles, which repeat the names, and docstrings of records, which name their code."""

    def walk(value: Any, *, names: bool = False) -> Any:
        if isinstance(value, dict):
            kept = value if names else {k: v for k, v in value.items() if not (k == "title" and isinstance(v, str))}
            if not names and kept.get("type") == "object":
                kept = {k: v for k, v in kept.items() if k != "description"}
            return {k: walk(v, names=not names and k in ("properties", "$defs")) for k, v in kept.items()}
        return [walk(item) for item in value] if isinstance(value, list) else value

    found = walk(made)
    found.pop("description", None)
    return found


def path_of(name: str) -> Path:
    """docs/schemas/foretrain.plan-1.json for foretrain.plan/1."""
    return FOLDER / f"{name.replace('/', '-')}.json"


def files() -> dict[Path, str]:
    return {path_of(name): json.dumps(schema(name), indent=1, ensure_ascii=False) + "\n" for name in OUTPUTS}


def table() -> str:
    lines = ["| schema | printed by | what |", "| --- | --- | --- |"]
    for name, output in OUTPUTS.items():
        commands = ", ".join(f"`foretrain {each} --json`" for each in output.command.split(", "))
        command = output.command if output.command == "every command" else commands
        lines.append(f"| [{name}](schemas/{path_of(name).name}) | {command} | {output.what} |")
    return "\n".join(lines)
