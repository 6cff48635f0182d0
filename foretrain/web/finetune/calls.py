"""What the page asks of a fine-tuning run: JSON in, JSON out, as web/calls.py answers for GPTs."""

import shlex
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Annotated, Any

from pydantic import Field, StrictStr

from foretrain.advice.cards import compared
from foretrain.advice.record import Advice
from foretrain.app.finetune import searched
from foretrain.base.messages import printable, say
from foretrain.base.records import Record
from foretrain.config.finetune import pasted
from foretrain.config.finetune.options import OPTION_OF, FineTune
from foretrain.config.finetune.together import idle
from foretrain.predict.finetune.plan import FineTunePlan
from foretrain.reports.document import Message
from foretrain.reports.html import document_json
from foretrain.reports.views.finetune import limits as cards_view
from foretrain.web import devices
from foretrain.web.answers import SCHEMA, Made, answered
from foretrain.web.finetune import asked as ask
from foretrain.web.finetune import fields, shown
from foretrain.web.finetune.asked import CONFIG, Asked, words_of
from foretrain.web.planner import Text


class Pasted(Record):
    name: Text = ""
    text: Annotated[StrictStr, Field(max_length=200_000)]


def answer(asked: Pasted) -> dict[str, Any]:
    """`model`, `config`: what the form's become, where the text is or names a model that is known here; `values`: of
    options; `said` and `notes`: what was read, and what of it is not known or not planned. Raises UserError."""
    name = printable(asked.name).replace("\n", " ").strip() or "pasted"
    found = pasted.read_pasted(asked.text, name)
    notes = [Message(f"note.{note.id}", note.values).text() for note in found.reading.notes]
    said = say("page.was_read", count=len(found.values), name=name)
    model: dict[str, str] = {}
    if found.model is not None:
        model = {"model": found.model.name, "config": pasted.shortened(found.model) if found.is_model else ""}
        said = say("page.finetune.model_read", model=found.model.name, name=name) if found.is_model else said
    elif found.named:
        notes.insert(0, say("page.finetune.not_here", model=found.named[:100]))
    else:
        notes.insert(0, say("page.finetune.no_model"))
    return {
        "schema": SCHEMA, "name": name, **model, "values": found.values, "said": printable(said),
        "notes": [printable(note) for note in notes],
    }  # fmt: skip


# What to change, looked for a little at a time: each question plans for a moment and says what was found so far.
#
# So a deep model, of which each change takes a second and more, keeps nobody waiting: neither the form, nor, where
# the page has no server, the one thread that answers everything.

MOMENT_S = 0.25
_KEPT = 4


class Search:
    """The search of one plan. `found`: the best changes so far; `done`: whether these are all."""

    def __init__(self, plan: FineTunePlan) -> None:
        self.found: tuple[Advice, ...] = ()
        self.done = False
        self._turn = threading.Lock()
        self._steps: Iterator[tuple[Advice, ...]] = searched(plan)

    def go_on(self) -> None:
        with self._turn:
            end = time.monotonic() + MOMENT_S
            while not self.done:
                found = next(self._steps, None)
                self.done = found is None
                self.found = self.found if found is None else found
                if time.monotonic() >= end:
                    return


class Searches:
    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._kept: OrderedDict[str, Search] = OrderedDict()

    def of(self, asked: str, plan: Callable[[], FineTunePlan]) -> Search:
        """The search of this question, which may have begun already; else it begins with its plan."""
        with self._turn:
            found = self._kept.pop(asked, None)
        found = found or Search(plan())
        with self._turn:
            self._kept[asked] = found
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
            return found


def command(asked: Asked, tune: FineTune) -> str:
    """The same plan in a terminal; `tune`: as it was read. Of a name that is a preset to pretrain from too, --method
    tells which is meant. What does nothing is left out: a terminal refuses it, and a form has it all the same."""
    words = ["foretrain", "plan", CONFIG if asked.config else asked.model]
    words += ["--gpu", asked.gpu] if asked.gpu != devices.HERE else []
    words += ["--used-by-others", asked.others] if asked.others.strip() else []
    if "method" not in asked.values:
        words.append(f"--method={FineTune().method}")
    nothing = idle(tune)
    values = {key: value for key, value in asked.values.items() if OPTION_OF.get(key) not in nothing}
    return shlex.join([*words, *words_of(asked.model_copy(update={"values": values}))])


_searches = Searches()


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
    return 200, {"schema": SCHEMA, **document_json(cards_view.cards_document(plans, compared(plans)))}


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
    "/api/finetune/read": lambda body: answered(body, Pasted, lambda asked: (200, answer(asked))),
}
