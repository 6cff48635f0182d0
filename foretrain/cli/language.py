"""The language of the command line: `--lang` of every command, FORETRAIN_LANG, and `foretrain languages`.

English unless another one is asked for, whatever the system's locale says: most terminals cannot show Arabic in its
order, and logs and errors are read by others and looked up. With --json all is English, for programs read it.
"""

import os
from functools import cache
from typing import Annotated, Any

import typer
import typer.main
from typer.core import TyperGroup

from foretrain.base import languages
from foretrain.base.errors import UserError
from foretrain.cli import completion, gpu_file, mistyped, wrong_usage
from foretrain.cli import help as spoken_help
from foretrain.cli.common import OUT, Json, option_of, own_words, print_json
from foretrain.config.options import knobs
from foretrain.reports.document import Cell, Document, Message, Paragraph, Quantity, Section, Table, Verbatim

VARIABLE = "FORETRAIN_LANG"
EPILOG = """Examples:

foretrain languages

foretrain languages en

foretrain plan gpt2-124m --gpu 4070 --lang en

FORETRAIN_LANG=en foretrain gpus"""


def add_to(app: typer.Typer) -> None:
    app.command("languages", epilog=EPILOG)(languages_command)


class Group(TyperGroup):
    """A group of commands that each take --lang, and --gpu-file where they take a card. Help is in that language."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _give_options(self)

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        with wrong_usage.told(self, _speak_typed):
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        with wrong_usage.told(self, _speak_typed):
            return super().invoke(ctx)


def _give_options(command: Any) -> None:
    for each in (command, *getattr(command, "commands", {}).values()):
        names = {parameter.name for parameter in each.params}
        if "lang" not in names:
            each.params.append(_option())
        if "gpu_file" not in names and ("gpu" in names or each.name in gpu_file.COMMANDS):
            each.params.append(gpu_file.option())
        spoken_help.speak(each)
        mistyped.watch(each)
        completion.complete(each)
        if each is not command and hasattr(each, "commands"):
            _give_options(each)


@cache
def _option() -> Any:
    """The option, made once."""
    return option_of(_only_this, "lang")


def _chosen(value: str | None) -> None:
    if value is not None:
        speak(value, "--lang")


def _only_this(
    lang: Annotated[
        str | None,
        typer.Option(
            "--lang",
            metavar="LANGUAGE",
            expose_value=False,
            is_eager=True,
            callback=_chosen,
            show_default=False,
            help=f"The language, such as ar; else {VARIABLE}, else en. `foretrain languages` lists them.",
        ),
    ] = None,
) -> None:
    """Nothing; see _option."""


def speak(word: str, source: str) -> None:
    """Speak the language of this word, and have child processes speak it. Raises UserError where it is not known."""
    id = languages.matching(word)
    if id is None:
        raise UserError("usage.unknown_language", source=source, word=word[:40], known=list(languages.known()))
    os.environ[VARIABLE] = id
    languages.use(languages.ENGLISH if "--json" in own_words() else id)


def from_environment() -> None:
    """Speak what the environment asks for, or --lang behind --help, which answers before it is read. Raises
    UserError."""
    word = os.environ.get(VARIABLE, "")
    if word:
        speak(word, VARIABLE)
    if not {"--help", "-h"}.isdisjoint(own_words()):
        _speak_typed()


def _speak_typed() -> None:
    """Speak what --lang asks for, wherever it stands: before anything else is read."""
    words = own_words()
    for number, each in enumerate(words):
        name, equals, value = each.partition("=")
        if name == "--lang" and (value or (not equals and number + 1 < len(words))):
            speak(value or words[number + 1], "--lang")


def asked_for() -> str | None:
    """The language that was asked for, by option or environment; None where none was."""
    return languages.matching(os.environ.get(VARIABLE, ""))


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
    helps = frozenset(f"knob.{knob.name}" for knob in knobs()) | spoken_help.texts(ctx.find_root().command).keys()
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
    from foretrain.reports import text

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
