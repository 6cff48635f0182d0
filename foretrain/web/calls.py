"""What the page asks, of every kind of run: JSON in, JSON out. No HTTP: the server and the static site both call it."""

import json
import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import Field, StrictStr

from foretrain.advice.advisor import advise as advise_plan
from foretrain.app.plan import card_here
from foretrain.app.request import Request
from foretrain.base import messages
from foretrain.base.errors import UserError
from foretrain.base.installation import Later
from foretrain.base.messages import format_value, isolated, option_help, option_unit, printable, say
from foretrain.base.records import Record
from foretrain.config.finetune.options import ASKED, FINETUNE_OPTIONS
from foretrain.config.finetune.read import read_pasted, shortened
from foretrain.config.hub.source import facts_of
from foretrain.config.inference import WORDS
from foretrain.config.option import GROUPS, Option
from foretrain.config.options import OPTIONS
from foretrain.config.presets import PRESETS, ModelPreset, models
from foretrain.config.resolve import from_text, resolve, to_toml
from foretrain.hardware.catalogue import Gpu, catalogue
from foretrain.hardware.cpu import cpu_device
from foretrain.hardware.devices import CPU, HERE
from foretrain.predict.forecast import Forecast
from foretrain.reports.document import Message
from foretrain.web import form
from foretrain.web.answers import SCHEMA, Made, advice_json, answered, cards_json, plan_json
from foretrain.web.form import Form, Kind, Text, compared, line_of

exact: Any = Later("foretrain.app.exact")  # the page plans without what traces need

_STEPS = {"each": 1, "by64": 64, "cents": 0.02, "dimes": 0.1, "fifties": 50}
_GROWTH = {"doubling": (1.0,), "halves": (1.0, 1.5)}


def form_json(kind: str) -> dict[str, Any]:
    """Return what the form of a kind of run needs once: its options, its presets or models, its devices."""
    known = [_model(model) for name, model in models().items() if facts_of(model.config, name)]
    if kind == "pretraining":
        first = {"id": "", "text": say("page.no_preset"), "source": ""}
        known = [first, *({"id": name, "text": name, "source": ""} for name in PRESETS)]
    return {"fields": fields(kind), "models": known, "devices": devices(kind)}


def _model(model: ModelPreset) -> dict[str, str]:
    text = f"{isolated(model.name)} · {format_value(model.parameters, 'count')}"
    return {"id": model.name, "text": text, "source": say("page.finetune.source", repository=model.repository)}


def fields(kind: str = "pretraining") -> list[dict[str, Any]]:
    """Return every option that has an effect, as JSON: the basic ones first, then by group, prices last."""
    if kind == "pretraining":
        return _fields(OPTIONS, {})
    if kind == "generation":
        return _fields(WORDS.options, {})
    prices = [{**field, "basic": False} for field in _fields(OPTIONS, {}) if field["group"] == "cost"]
    return [*_fields(FINETUNE_OPTIONS, ASKED), *prices]


def _fields(options: Mapping[str, Option], defaults: Mapping[str, Any]) -> list[dict[str, Any]]:
    shown = [option for option in options.values() if not option.inert]
    shown.sort(key=lambda option: (not option.basic, option.basic, GROUPS.index(option.group)))
    return [_field(option, defaults.get(option.name, option.default)) for option in shown]


def _field(option: Option, default: Any) -> dict[str, Any]:
    ends = {"least": option.least, "most": option.most}  # both allowed; an open end is left to the server
    return {
        "name": option.name, "group": option.group, "help": option_help(option.name, option.help, option.texts),
        "unit": option_unit(option.unit), "type": option.type,
        "default": default, "limits": option.limits if option.limits != option.help else "",
        "choices": list(option.choices), "basic": option.basic > 0, "stops": stops(option),
        **{end: value for end, value in ends.items() if value is not None},
    }  # fmt: skip


def stops(option: Option) -> list[float]:
    """Return the values that a slider of this option stops at."""
    if option.slider is None:
        return []
    (low, high, kind), whole = option.slider, option.type == "int"
    if kind in _STEPS:
        step = _STEPS[kind]
        return [round(low + i * step, 6) for i in range(round((high - low) / step) + 1)]
    first = [0.0] if low == 0 else []
    least = max(low, 1) if low >= 1 or low == 0 else low
    grown = _decades(least, high) if kind == "decades" else _powers(least, high, _GROWTH[kind])
    values = first + [value for value in grown if least <= value <= high]
    return sorted({int(value) if whole else value for value in values if not whole or value == int(value)})


def _powers(low: float, high: float, factors: tuple[float, ...]) -> list[float]:
    powers = range(math.floor(math.log2(low)), math.ceil(math.log2(high)) + 1)
    return [2.0**power * factor for power in powers for factor in factors]


def _decades(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [float(f"{digit}e{power}") for power in powers for digit in (1, 1.5, 2, 3, 4, 5, 6, 8)]


def devices(kind: str = "pretraining") -> list[dict[str, str]]:
    """Return the devices that a kind of run is planned for, this machine's first, as a chooser shows them."""
    only_cuda = kind == "fine-tuning"
    rows = [_device(gpu.name, gpu) for gpu in catalogue().values() if gpu.kind == "cuda" or not only_cuda]
    if form.NO_MACHINE:
        return rows
    return [*_here(), *rows, *([] if only_cuda else [_device(CPU, cpu_device(), here=True)])]


def _here() -> list[dict[str, str]]:
    try:
        found = card_here()
    except UserError:  # the catalogue lacks it
        return []
    return [_device(HERE, found.gpu, here=True)] if found else []


def _device(id: str, gpu: Gpu, *, here: bool = False) -> dict[str, str]:
    memory = [format_value(gpu.memory_bytes, "bytes")] if gpu.memory_bytes else []
    return {"id": id, "text": " · ".join([isolated(gpu.name), *memory, *([say("page.here")] if here else [])])}


MOST_CHANGES = 8


class Asked(Record):
    kind: Kind = "pretraining"


class Pasted(Asked):
    name: Text = ""
    text: Annotated[StrictStr, Field(max_length=200_000)]


_ANSWERED = ("page.now.", "page.picture.")  # texts of the page that only come inside answers


def spoken() -> dict[str, Any]:
    """What the page needs to speak: its texts as {id: text}, the language that they are in, and those there are."""
    language = messages.current()
    every = messages.texts(language.id).items()
    summary = {id: text for id, text in every if id.startswith("page.") and not id.startswith(_ANSWERED)}
    return {
        "texts": {id: messages.isolated(text) for id, text in summary.items()}, "language": language.id,
        "direction": language.direction,
        "languages": [{"id": one.id, "name": one.name} for one in messages.languages().values()],
    }  # fmt: skip


def start(no_exact: str, no_runs: str = "") -> dict[str, Any]:
    """What the page needs once: texts and languages. `no_…`: why one has no such thing here, else ""."""
    return {"schema": SCHEMA, **spoken(), "no_exact": no_exact, "no_runs": no_runs}


def plan(form: Form) -> Made:
    line = line_of(form)
    request = line.request()
    (found,) = request.forecasts()
    return 200, {**plan_json(request, found.plan), "command": line.command()}


def to_trace(form: Form) -> tuple[Request, Forecast]:
    """Return the request of a form with its forecast, where such a run is traced. Raises UserError."""
    request = line_of(form).request()
    if form.kind == "generation":
        raise UserError("usage.inference_without", option="--exact")
    (found,) = request.forecasts()
    return request, found


def traced(form: dict[str, Any], listen: Callable[[str], None]) -> dict[str, Any]:
    """The plan of a form with traced memory; `listen` hears how far the traces are. Raises UserError."""
    request, found = to_trace(Form.model_validate(form))
    return plan_json(request, exact.traced(found, listen).plan)


def advise(form: dict[str, Any]) -> dict[str, Any]:
    asked = Form.model_validate(form)
    (found,) = line_of(asked).request().forecasts()
    return advice_json(found.plan, advise_plan(found.plan, goal=asked.goal).top(MOST_CHANGES))


def cards(form: Form) -> Made:
    """The same run on several devices, one card each. Raises UserError."""
    return 200, cards_json([found.plan for found in compared(form).request().forecasts()])


def read(found: Pasted) -> Made:
    """Read what a pasted text sets: options, `model`, `config`, `summary` and `notes`. Raises UserError."""
    name = printable(found.name).replace("\n", " ").strip() or "pasted"
    read_as = _read_config if found.kind == "pretraining" else _read_model
    return 200, {"schema": SCHEMA, **read_as(found, name)}


def _read_config(found: Pasted, name: str) -> dict[str, Any]:
    read = from_text(found.text, name)
    values = {key: getattr(read.config, key) for key in read.sources if key != "device"}  # which the form chooses
    summary = say("page.was_read", count=len(values), name=read.name)
    notes = [printable(str(note)) for note in read.notes]
    return {"name": read.name, "model": "", "values": values, "summary": printable(summary), "notes": notes}


def _read_model(found: Pasted, name: str) -> dict[str, Any]:
    read = read_pasted(found.text, name)
    values = read.values if found.kind == "fine-tuning" else {}
    notes = [Message(f"note.{note.id}", note.values).text() for note in read.reading.notes] if values else []
    summary, model = say("page.was_read", count=len(values), name=name), {}
    if read.model is not None:
        model = {"model": read.model.name, "config": shortened(read.model) if read.is_model else ""}
        summary = say("page.finetune.model_read", model=read.model.name, name=name) if read.is_model else summary
    elif read.named:
        notes.insert(0, say("page.finetune.not_here", model=read.named[:100]))
    else:
        notes.insert(0, say("page.finetune.no_model"))
    summary, notes = printable(summary), [printable(note) for note in notes]
    return {"name": name, **model, "values": values, "summary": summary, "notes": notes}


def toml(form: Form) -> Made:
    text = to_toml(resolve(line_of(form).words).config)
    return 200, {"schema": SCHEMA, "name": f"{form.model or 'config'}.toml", "text": text}


# What answers a body that is posted to a path.
POSTED: dict[str, Callable[[bytes | str], Made]] = {
    "/api/form": lambda body: answered(body, Asked, lambda asked: (200, {"schema": SCHEMA, **form_json(asked.kind)})),
    "/api/plan": lambda body: answered(body, Form, plan),
    "/api/advice": lambda body: answered(body, Form, lambda form: (200, advise(form.model_dump(mode="json")))),
    "/api/cards": lambda body: answered(body, Form, cards),
    "/api/read": lambda body: answered(body, Pasted, read),
    "/api/toml": lambda body: answered(body, Form, toml),
}


# The page without a server: what the worker of the static site calls, in Python that runs in the browser (Pyodide).


def begin(language: str) -> str:
    """What the page needs once, as JSON. What needs the user's own machine is listed as missing."""
    with messages.speaking(language):
        return _as_json(start(say("page.site.no_exact"), say("page.site.no_runs")))


def post(path: str, body: str, language: str) -> str:
    """JSON [status, answer] to a question that a server would have been posted."""
    with messages.speaking(language):
        return _as_json(POSTED[path](body))


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
