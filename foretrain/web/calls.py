"""What the page asks, of every kind of run: JSON in, JSON out. No HTTP: the server and the static site both call it."""

import json
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import Field, StrictStr

from foretrain.app.limits import Limits
from foretrain.app.plan import Look
from foretrain.base import messages
from foretrain.base.errors import UserError
from foretrain.base.messages import printable, say
from foretrain.base.records import Record
from foretrain.config.finetune import pasted
from foretrain.config.resolve import from_text, resolve, to_toml
from foretrain.reports.document import Message
from foretrain.web.answers import SCHEMA, Made, advice_json, answered, cards_json, plan_json
from foretrain.web.fields import form_json
from foretrain.web.form import Form, Kind, Text, compared, line_of
from foretrain.web.language import spoken

MOST_CHANGES = 8


class Asked(Record):
    """Which form."""

    kind: Kind = "pretraining"


class Pasted(Asked):
    """A text of the user's own, with the name of its file."""

    name: Text = ""
    text: Annotated[StrictStr, Field(max_length=200_000)]


def start(no_exact: str, no_runs: str = "") -> dict[str, Any]:
    """What the page needs once: texts and languages. `no_…`: why one has no such thing here, else ""."""
    return {"schema": SCHEMA, **spoken(), "no_exact": no_exact, "no_runs": no_runs}


def plan(form: Form) -> Made:
    """The plan of a form, estimated. Raises UserError."""
    line = line_of(form)
    request = line.request()
    (found,) = request.plans(Limits())
    return 200, {**plan_json(request, found), "command": line.command()}


def to_trace(form: Form) -> tuple[Any, Any]:
    """Return the request of a form with its plan, where such a run is traced. Raises UserError."""
    request = line_of(form).request()
    if not hasattr(request, "traced"):
        raise UserError("usage.inference_without", option="--exact")
    return request, request.plans(Limits())[0]


def traced(form: dict[str, Any], listen: Callable[[str], None]) -> dict[str, Any]:
    """The plan of a form with traced memory; `listen` hears how far the traces are. Raises UserError."""
    request, found = to_trace(Form.model_validate(form))
    return plan_json(request, request.traced(found, listen, Look()))


def advise(form: dict[str, Any]) -> dict[str, Any]:
    """What to change in a form. Raises UserError."""
    asked = Form.model_validate(form)
    request = line_of(asked).request()
    (found,) = request.plans(Limits())
    return advice_json(found, request.advices(found, asked.goal).top(MOST_CHANGES))


def cards(form: Form) -> Made:
    """The same run on several devices, one card each. Raises UserError."""
    return 200, cards_json(compared(form).request().plans(Limits()))


def read(found: Pasted) -> Made:
    """What a pasted text sets: `values` of options; `model`, `config`: what the form's become, where the text is or
    names a model that is known here; `said` and `notes`. Raises UserError."""
    name = printable(found.name).replace("\n", " ").strip() or "pasted"
    read_as = _read_config if found.kind == "pretraining" else _read_model
    return 200, {"schema": SCHEMA, **read_as(found, name)}


def _read_config(found: Pasted, name: str) -> dict[str, Any]:
    read = from_text(found.text, name)
    values = {key: getattr(read.config, key) for key in read.sources if key != "device"}  # which the form chooses
    said = say("page.was_read", count=len(values), name=read.name)
    notes = [printable(str(note)) for note in read.notes]
    return {"name": read.name, "model": "", "values": values, "said": printable(said), "notes": notes}


def _read_model(found: Pasted, name: str) -> dict[str, Any]:
    read = pasted.read_pasted(found.text, name)
    values = read.values if found.kind == "fine-tuning" else {}
    notes = [Message(f"note.{note.id}", note.values).text() for note in read.reading.notes] if values else []
    said, model = say("page.was_read", count=len(values), name=name), {}
    if read.model is not None:
        model = {"model": read.model.name, "config": pasted.shortened(read.model) if read.is_model else ""}
        said = say("page.finetune.model_read", model=read.model.name, name=name) if read.is_model else said
    elif read.named:
        notes.insert(0, say("page.finetune.not_here", model=read.named[:100]))
    else:
        notes.insert(0, say("page.finetune.no_model"))
    said, notes = printable(said), [printable(note) for note in notes]
    return {"name": name, **model, "values": values, "said": said, "notes": notes}


def toml(form: Form) -> Made:
    """The config of a form as a file that plan and train take. Raises UserError."""
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
    """What the page needs once, as JSON. What needs the machine of its user is said to be missing."""
    with messages.speaking(language):
        return _as_json(start(say("page.site.no_exact"), say("page.site.no_runs")))


def post(path: str, body: str, language: str) -> str:
    """JSON [status, answer] to a question that a server would have been posted."""
    with messages.speaking(language):
        return _as_json(POSTED[path](body))


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
