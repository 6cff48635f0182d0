"""`--show-config`: every option of a run, with where its value is from."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from foretrain.base.messages import option_help, option_unit
from foretrain.base.records import Record
from foretrain.cli.common import OUT, print_json
from foretrain.config.finetune.options import FINETUNE_OPTIONS
from foretrain.config.option import Option
from foretrain.config.options import OPTIONS
from foretrain.config.resolve import ResolvedConfig
from foretrain.reports import text
from foretrain.reports.document import Document, Message, Section, Table

if TYPE_CHECKING:
    from foretrain.app.finetuning.question import FineTuneQuestion


def show_config_of(resolved: ResolvedConfig, as_json: bool) -> None:
    _show(resolved.name, resolved.config, OPTIONS, resolved.sources, as_json)


def show_finetune(asked: "FineTuneQuestion", as_json: bool) -> None:
    _show(asked.source.name, asked.tune, FINETUNE_OPTIONS, asked.origins, as_json)


def _show(name: str, values: Record, options: Mapping[str, Option], sources: Mapping[str, str], as_json: bool) -> None:
    """Print them, as a table or as one JSON object."""
    sources = {name: sources.get(name, "default") for name in options}
    if as_json:
        print_json({"schema": "foretrain.config/1", "config": values.model_dump(mode="json"), "sources": sources})
        return
    rows = tuple(
        (
            each.name,
            str(getattr(values, each.name)),
            option_unit(each.unit),
            sources[each.name],
            option_help(each.name, each.help, each.texts),
        )
        for each in options.values()
    )
    columns = tuple(Message(f"column.{name}") for name in ("key", "value", "unit", "source", "help"))
    section = Section(Message("config.knobs"), (Table(columns, rows),))
    text.render(Document(Message("config.title", {"name": name}), Message("config.subtitle"), [section]), OUT)
