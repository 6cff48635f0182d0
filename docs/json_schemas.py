"""JSON Schemas of what `--json` prints, made from the records themselves: docs/schemas/NAME-VERSION.json and a table.

A record's schema is pydantic's; what a command adds to it stands in `OUTPUTS`. Commands about one thing share a file:
foretrain.plan/1#within is the anchor `within` of foretrain.plan-1.json. tests/repository/test_schemas.py holds real outputs
to these files.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Union

from pydantic import BaseModel, ConfigDict, Field, RootModel, create_model
from pydantic.json_schema import models_json_schema
from tables import ROOT

from foretrain.advice import best, cards
from foretrain.advice import record as advice
from foretrain.analysis import explanation, forecast_check, log_analysis, log_checks, snapshot_analysis
from foretrain.analysis import run as run_explain
from foretrain.analysis.live import Top
from foretrain.app.doctor import Check
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
from foretrain.predict.inference.plan import InferencePlan, RunnableModels
from foretrain.predict.largest import Largest, SmallestCard
from foretrain.predict.plan import Plan
from foretrain.predict.ranks import ClusterPlan
from foretrain.runs.record import KINDS, Evaluation, Scores, TrainedRun, WatchedRun
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
    "remedies": (list[advice.Advice], []), "doubts": (list[Note], []),
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
    "foretrain.plan/1#plans": Output(
        "plan --gpu A,B", "plans for several cards, and of training the best of them",
        _object("Plans", plans=(list[_any_of(*_PLANS)], ...), best=(cards.Choice | None, None)),
    ),
    "foretrain.plan/1#explanation": Output("plan --explain", "why so much", explanation.Explanation),
    "foretrain.plan/1#models": Output("plan --inference", "the models that run on a card", RunnableModels),
    "foretrain.plan/1#smallest-card": Output("plan --smallest-card", "the smallest card on which it fits", SmallestCard),
    "foretrain.plan/1#largest": Output("plan --largest OPTION", "the largest value that fits", Largest),
    "foretrain.plan/1#within": Output(
        "plan --within LIMIT", "the steps that fit, of any kind of run", within.Within,
        {"largest": (Largest | None, None)},
    ),
    "foretrain.plan/1#best": Output("plan --best", "the GPT of lowest estimated loss", best.Best),
    "foretrain.plan/1#config": Output(
        "plan --show-config", "every option and where it is from",
        _object("Config", config=(RunConfig | FineTune, ...), sources=(dict[str, str], ...)),
    ),
    "foretrain.advice/1": Output("advise", "changes, ranked", advice.Advices),
    "foretrain.mfu/1": Output("mfu", "shares of the peak", log_checks.Utilization),
    "foretrain.compare/1": Output("compare A B", "runs side by side", compare.Comparison),
    "foretrain.compare/1#forecast": Output(
        "compare RUN", "a run and its forecast", forecast_check.ForecastCheck,
        {"errors": (dict[str, float | None], ...)},
    ),
    "foretrain.explain/1": Output(
        "explain RUN", "where a run's memory and time went; of a Trainer's run beside its forecast",
        RootModel[_any_of(run_explain.RunExplanation, run_explain.TrainerRunExplanation)],
    ),
    "foretrain.explain/1#log": Output("explain LOG", "what a log says", log_analysis.LogAnalysis, _LOG_EXTRA, whole=False),
    "foretrain.explain/1#snapshot": Output(
        "explain SNAPSHOT", "what a memory snapshot says", snapshot_analysis.SnapshotAnalysis
    ),
    "foretrain.tune/1": Output("tune", "every trial and the winner", tuning.Tuning),
    "foretrain.run/1": Output(
        "train, watch", "the record of a run, as in run.json",
        RootModel[_run(_SCHEMA, {"path": (str | None, ...)})],
    ),
    "foretrain.run/1#runs": Output(
        "runs", "runs, watched programs and Trainers' runs",
        _object("Runs", runs=(list[_run(_LISTED)], ...)),
    ),
    "foretrain.run/1#top": Output("top", "cards and runs at one moment", Top),
    "foretrain.languages/1": Output(
        "languages", "languages, and how much of each is translated", _object("Languages", languages=(list[dict[str, Any]], ...))
    ),
    "foretrain.report/1": Output("report", "where the report was written", _object("Report", path=(str, ...))),
    "foretrain.model/1#sample": Output(
        "sample", "text from a checkpoint",
        _object("Sample", checkpoint=(str, ...), skipped=(list[str], ...), prompt=(str, ...), text=(str, ...)),
    ),
    "foretrain.model/1#export": Output("export", "what was written for others", Exported),
    "foretrain.model/1#eval": Output("eval", "bits per byte of texts, and metrics of lm-eval's tasks", Evaluation),
    "foretrain.data/1#plan": Output(
        "prepare --plan", "what preparing will take", PreparePlan, {"fits_": (bool, Field(alias="fits"))}
    ),
    "foretrain.data/1#prepared": Output("prepare", "what was prepared", _PREPARED),
    "foretrain.data/1#info": Output("data info", "statistics of a dataset", DatasetSummary),
    "foretrain.data/1#verify": Output("data verify", "blocks checked against their checksums", _VERIFIED),
    "foretrain.data/1#head": Output("data head", "tokens and their text", _HEAD),
    "foretrain.data/1#mix": Output(
        "data mix", "a mixture's parts", _object("Mix", out=(str | None, ...), parts=(list[_PART], ...))
    ),
    "foretrain.gpus/1": Output("gpus", "the catalogue", _object("Gpus", gpus=(list[Gpu], ...))),
    "foretrain.gpus/1#doctor": Output(
        "doctor", "what this machine has, and what is missing",
        _object("Doctor", checks=(list[create_model("Checked", __base__=Check, message=(str, ...))], ...)),  # type: ignore[call-overload]
    ),
    "foretrain.calibration/1": Output("calibrate", "what was measured of a device", Calibration),
    "foretrain.verify/1": Output(
        "verify", "short runs on a card, predicted and measured; also the file to contribute",
        verification.Verification, {"summary": (list[verification.Summary], ...)},
    ),
    "foretrain.report/1#serve": Output(
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


def schema(family: str) -> dict[str, Any]:
    """Return the JSON Schema of a family: of its answer, or one of several definitions, each with its anchor."""
    names = [name for name in OUTPUTS if _family(name) == family]
    models = [_model(name) for name in names]
    refs, made = models_json_schema([(model, "serialization") for model in models])
    places = [refs[model, "serialization"]["$ref"].rpartition("/")[2] for model in models]
    made = _bare(made)
    for name, place in zip(names, places, strict=True):
        made["$defs"][place] = _answer(name, made["$defs"][place])
    head = {"$schema": DIALECT, "title": family}
    if len(names) > 1:
        return {**head, "oneOf": [{"$ref": f"#/$defs/{place}"} for place in places], **made}
    answer = made["$defs"].pop(places[0])
    return {**head, **(made if made["$defs"] else {}), **answer}


def _family(name: str) -> str:
    return name.partition("#")[0]


def _model(name: str) -> type[BaseModel]:
    """Return the record of an answer with the keys beside it, under the name that its definition gets."""
    title = name.partition("#")[2] or name.partition("/")[0].removeprefix("foretrain.")
    return create_model(title, __base__=OUTPUTS[name].model, **OUTPUTS[name].extra)


def _answer(name: str, made: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a record with `schema`, which has one value."""
    output, anchor = OUTPUTS[name], name.partition("#")[2]
    optional = {key for key, (_, default) in output.extra.items() if default is None or default == []}
    required = [key for key in made.get("required", []) if key not in optional and output.whole]
    properties = {"schema": {"const": name}, **made.get("properties", {})}
    named = {"$anchor": anchor} if anchor else {}
    return {**named, "description": output.what, **made, "properties": properties, "required": ["schema", *required]}


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
    """docs/schemas/foretrain.plan-1.json for foretrain.plan/1 and foretrain.plan/1#within."""
    return FOLDER / f"{_family(name).replace('/', '-')}.json"


def files() -> dict[Path, str]:
    families = dict.fromkeys(map(_family, OUTPUTS))
    return {path_of(name): json.dumps(schema(name), indent=1, ensure_ascii=False) + "\n" for name in families}


def table() -> str:
    lines = ["| schema | printed by | what |", "| --- | --- | --- |"]
    for name, output in OUTPUTS.items():
        commands = ", ".join(f"`foretrain {each} --json`" for each in output.command.split(", "))
        command = output.command if output.command == "every command" else commands
        lines.append(f"| [{name}](schemas/{path_of(name).name}) | {command} | {output.what} |")
    return "\n".join(lines)
