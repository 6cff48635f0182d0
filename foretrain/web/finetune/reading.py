"""A config.json or a trainer's config that was pasted into the page: what it sets in the form, what is said of it."""

from typing import Annotated, Any

from pydantic import Field, StrictStr

from foretrain.base.messages import printable, say
from foretrain.base.records import Record
from foretrain.config.finetune import pasted
from foretrain.reports.document import Message
from foretrain.web.answers import SCHEMA
from foretrain.web.planner import Text


class Pasted(Record):
    """A text that was pasted or dropped, with the name of its file."""

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
