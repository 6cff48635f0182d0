"""What the page asks of the ledger: JSON in, JSON out. No HTTP: the server and the static site both call it."""

from collections.abc import Callable
from typing import Any

from foretrain.advice.cards import choose
from foretrain.base.messages import printable, say
from foretrain.config.resolve import from_text, to_toml
from foretrain.reports.views import cards as cards_view
from foretrain.web import advices, answers, devices, planner
from foretrain.web.answers import Made, answered
from foretrain.web.finetune import calls as finetune
from foretrain.web.language import spoken
from foretrain.web.planner import fields
from foretrain.web.ranks import shown as ranks


def start(no_exact: str, no_runs: str = "") -> dict[str, Any]:
    """What the page needs once: the form, texts, devices, presets. `no_…`: why one has no such thing here, else ""."""
    return {
        "schema": answers.SCHEMA, **spoken(), "fields": fields(), "devices": devices.listed(),
        "presets": planner.presets(), "no_exact": no_exact, "no_runs": no_runs,
    }  # fmt: skip


def plan(asked: planner.Asked) -> Made:
    """The plan of a form, by the ledger. Raises UserError."""
    found = planner.resolved(asked)
    if planner.count(asked) > 1:
        answer = ranks.plan_json(asked, found)
    else:
        answer = answers.plan_json(planner.made(found, asked.gpu, asked.others), found)
    return 200, {**answer, "command": printable(planner.command(asked))}


def advice(body: bytes | str) -> Made:
    """What to change in a form. What advises is loaded when somebody first asks."""
    return answered(body, advices.AskedAdvice, lambda asked: (200, advices.answer(asked)))


def cards(asked: planner.Asked) -> Made:
    """The same config on several devices, one card each. Raises UserError."""
    planner.check_alone(asked, "page.count_compare")
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
        "said": printable(say("page.was_read", count=len(values), name=found.name)),
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
    **finetune.POSTED,
}
