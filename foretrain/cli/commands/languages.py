"""`foretrain languages`: the languages, and what each lacks."""

from typing import Annotated

import typer

from foretrain.base import languages
from foretrain.base.errors import UserError
from foretrain.cli import help as spoken_help
from foretrain.cli.common import OUT, Json, print_json
from foretrain.config.finetune.options import FINETUNE_OPTIONS
from foretrain.config.options import OPTIONS
from foretrain.reports import text
from foretrain.reports.document import Cell, Document, Message, Paragraph, Quantity, Section, Table, Verbatim

EPILOG = """Examples:

foretrain languages

foretrain languages en

foretrain plan gpt2-124m --gpu 4070 --lang en

FORETRAIN_LANG=en foretrain gpus"""


def add_to(app: typer.Typer) -> None:
    app.command("languages", epilog=EPILOG)(languages_command)


def languages_command(
    ctx: typer.Context,
    language: Annotated[
        str | None, typer.Argument(help="List the texts that this language lacks or leaves in English.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the languages, and how much of each is translated."""
    if language is not None and languages.matching(language) is None:
        known = list(languages.known())
        raise UserError("usage.unknown_language", source="languages", word=language[:40], known=known)
    wanted = [languages.matching(language) or ""] if language else list(languages.known())
    own = {f"knob.{name}" for name in OPTIONS} | {f"finetune_knob.{name}" for name in FINETUNE_OPTIONS}
    helps = frozenset(own | spoken_help.texts(ctx.find_root().command).keys())
    found = [languages.coverage(id, helps) for id in wanted]
    if as_json:
        listed = [
            {
                "id": one.language.id, "name": one.language.name, "direction": one.language.direction,
                "texts": one.texts, "of": one.of, "missing": list(one.missing), "unknown": list(one.unknown),
                "untranslated": {id: list(words) for id, words in one.untranslated},
            }
            for one in found
        ]  # fmt: skip
        print_json({"schema": "foretrain.languages/1", "languages": listed})
        return
    text.render(_document(found, with_ids=language is not None), OUT)


def _document(found: list[languages.Coverage], *, with_ids: bool) -> Document:
    rows: list[tuple[Cell, ...]] = [
        (
            one.language.id, one.language.name, Message("languages.count", {"texts": one.texts, "of": one.of}),
            Quantity(one.texts / one.of, "percent"),
        )
        for one in found
    ]  # fmt: skip
    columns = tuple(Message(f"column.{id}") for id in ("language", "own_name", "texts", "share"))
    sections = [Section(Message("languages.section"), (Table(columns, tuple(rows), frozenset({2, 3})),))]
    for one in found if with_ids else ():
        left = tuple(f"{id}  {' '.join(words)}" for id, words in one.untranslated)
        for title, said, ids in (
            ("languages.missing_title", "languages.missing", one.missing),
            ("languages.untranslated_title", "languages.untranslated", left),
            ("languages.unknown_title", "languages.unknown", one.unknown),
        ):
            if ids:
                blocks = (Paragraph(Message(said, {"count": len(ids)})), Verbatim("\n".join(ids)))
                sections.append(Section(Message(title), blocks))
    title = Message("languages.title", {"count": len(languages.known())})
    return Document(title, Message("languages.subtitle"), sections)
