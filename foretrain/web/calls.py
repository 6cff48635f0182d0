"""What the page asks of the ledger: JSON in, JSON out. No HTTP: the server and the static site both call it."""

import json
from collections.abc import Callable
from typing import Any

from pydantic import ValidationError

from foretrain.advice.cards import choose
from foretrain.base.errors import UserError
from foretrain.base.messages import printable
from foretrain.base.records import Record
from foretrain.config.presets import PRESETS
from foretrain.config.resolve import from_text, to_toml
from foretrain.reports.views import cards as cards_view
from foretrain.web import advices, answers, devices, planner
from foretrain.web.fields import fields
from foretrain.web.language import spoken

Made = tuple[int, dict[str, Any]]  # a status of HTTP, and what is answered


def start(no_exact: str, no_runs: str = "") -> dict[str, Any]:
    """What the page needs once: the form, texts, devices, presets. `no_…`: why one has no such thing here, else ""."""
    return {
        "schema": answers.SCHEMA, **spoken(), "fields": fields(), "devices": devices.listed(),
        "presets": list(PRESETS), "drawing": answers.drawing(), "no_exact": no_exact, "no_runs": no_runs,
    }  # fmt: skip


def answered(body: bytes | str, kind: type[Record], work: Callable[[Any], Made]) -> Made:
    """What `work` makes of a body that is a record of this kind: 400 where it is none, 422 with what can be mended."""
    try:
        asked = _record(body, kind)
    except UserError as error:
        return 400, answers.error_json(error)
    return sentences(lambda: work(asked))


def sentences(work: Callable[[], Made]) -> Made:
    """The result of `work`; 422 with the sentences of a UserError."""
    try:
        return work()
    except UserError as error:
        return 422, answers.error_json(error)


def _record(body: bytes | str, kind: type[Record]) -> Record:
    """The body as a record. Raises UserError where it is none."""
    try:
        return kind.model_validate(json.loads(body))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part)[:40] for part in first["loc"])
        raise UserError("page.bad_request", where=where or "body", reason=first["msg"]) from None
    except (ValueError, RecursionError):
        raise UserError("page.bad_request", where="body", reason="it is no JSON") from None


def plan(asked: planner.Asked) -> Made:
    """The plan of a form, by the ledger. Raises UserError."""
    found = planner.resolved(asked)
    made = planner.made(found, asked.gpu, asked.others)
    return 200, {**answers.plan_json(made, found), "command": printable(planner.command(asked))}


def advice(body: bytes | str) -> Made:
    """What to change in a form. What advises is loaded when somebody first asks."""
    return answered(body, advices.AskedAdvice, lambda asked: (200, advices.answer(asked)))


def cards(asked: planner.Asked) -> Made:
    """The same config on several devices. Raises UserError."""
    found = planner.resolved(asked)
    names = list(dict.fromkeys(asked.cards)) or [asked.gpu]
    plans = [planner.made(found, name, asked.others if name == asked.gpu else "") for name in names]
    return 200, {"schema": answers.SCHEMA, **answers.document_json(cards_view.document(plans, choose(plans)))}


def read(pasted: planner.Pasted) -> Made:
    """What a pasted config sets. Raises UserError."""
    found = from_text(pasted.text, printable(pasted.name).replace("\n", " ") or "pasted")
    values = {key: getattr(found.config, key) for key in found.sources}
    return 200, {
        "schema": answers.SCHEMA, "name": found.name, "values": values, "sources": found.sources,
        "notes": [printable(str(note)) for note in found.notes],
    }  # fmt: skip


def toml(asked: planner.Asked) -> Made:
    """The config of a form as a file that plan and train take. Raises UserError."""
    text = to_toml(planner.resolved(asked).config)
    return 200, {"schema": answers.SCHEMA, "name": f"{asked.preset or 'config'}.toml", "text": text}


# What answers a body that is posted to a path.
POSTED: dict[str, Callable[[bytes | str], Made]] = {
    "/api/plan": lambda body: answered(body, planner.Asked, plan),
    "/api/advice": advice,
    "/api/cards": lambda body: answered(body, planner.Asked, cards),
    "/api/read": lambda body: answered(body, planner.Pasted, read),
    "/api/toml": lambda body: answered(body, planner.Asked, toml),
}
