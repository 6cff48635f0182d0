"""What the page asks of a fine-tuning run: JSON in, JSON out, as web/calls.py answers for GPTs."""

from collections.abc import Callable

from foretrain.advice.finetune_cards import compared
from foretrain.base.messages import printable, say
from foretrain.reports.as_json import document_json
from foretrain.reports.views.finetune import cards as cards_view
from foretrain.web.answers import SCHEMA
from foretrain.web.asking import Made, answered
from foretrain.web.finetune import asked as ask
from foretrain.web.finetune import fields, reading, search, shown
from foretrain.web.finetune.typed import command

_searches = search.Searches()


def plan(asked: ask.Asked) -> Made:
    """The plan of a form. Raises UserError."""
    question = ask.question(asked)
    made = ask.made(question, ask.target(asked))
    return 200, {**shown.plan_json(made, question), "command": printable(command(asked, question.tune))}


def cards(asked: ask.Asked) -> Made:
    """The same run on several cards. Raises UserError."""
    question = ask.question(asked)
    names = list(dict.fromkeys(asked.cards)) or [asked.gpu]
    forms = [
        asked.model_copy(update={"gpu": name, "others": asked.others if name == asked.gpu else ""}) for name in names
    ]
    plans = [ask.made(question, ask.target(form)) for form in forms]
    return 200, {"schema": SCHEMA, **document_json(cards_view.document(plans, compared(plans)))}


def changes(asked: ask.Asked) -> Made:
    """What was found so far of what to change, best first, and whether that is all. Raises UserError."""
    target = ask.target(asked)
    key = f"{asked.model_dump_json()} {target.used_by_others_bytes}"
    found = _searches.of(key, lambda: ask.made(ask.question(asked), target))
    found.go_on()
    listed = [shown.change_json(change) for change in found.found]
    said = "" if found.done and listed else say("callback.no_changes" if found.done else "page.finetune.looking")
    return 200, {"schema": SCHEMA, "done": found.done, "said": said, "changes": listed}


# What answers a body that is posted to a path.
POSTED: dict[str, Callable[[bytes | str], Made]] = {
    "/api/finetune": lambda body: answered(body, ask.Asked, plan),
    "/api/finetune/form": lambda body: answered(
        body, fields.Nothing, lambda _: (200, {"schema": SCHEMA, **fields.form()})
    ),
    "/api/finetune/cards": lambda body: answered(body, ask.Asked, cards),
    "/api/finetune/changes": lambda body: answered(body, ask.Asked, changes),
    "/api/finetune/read": lambda body: answered(body, reading.Pasted, lambda asked: (200, reading.answer(asked))),
}
