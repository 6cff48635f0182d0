"""`foretrain languages`: the languages, and how much of each is translated."""

from foretrain.base import messages
from foretrain.cli.command import command, json_option
from foretrain.cli.common import OUT, print_json
from foretrain.reports import text
from foretrain.reports.document import Cell, Document, Message, Section, Table

EPILOG = """Examples:
foretrain languages
foretrain plan gpt2-124m --gpu 4070 --lang en
FORETRAIN_LANG=en foretrain gpus"""


@command("languages", EPILOG)
@json_option
def languages_command(as_json: bool) -> None:
    """List the languages, and how much of each is translated."""
    english = messages.texts_of(messages.ENGLISH).keys()
    found = [(one, len(english & messages.texts_of(one.id).keys())) for one in messages.languages().values()]
    if as_json:
        rows = [
            {"id": one.id, "name": one.name, "direction": one.direction, "texts": texts, "of": len(english)}
            for one, texts in found
        ]
        print_json({"schema": "foretrain.languages/1", "languages": rows})
        return
    cells: list[tuple[Cell, ...]] = [
        (one.id, one.name, Message("languages.count", {"texts": texts, "of": len(english)})) for one, texts in found
    ]
    columns = tuple(Message(f"column.{id}") for id in ("language", "own_name", "texts"))
    section = Section(Message("languages.section"), (Table(columns, tuple(cells), frozenset({2})),))
    text.render(
        Document(Message("languages.title", {"count": len(found)}), Message("languages.subtitle"), [section]), OUT
    )
