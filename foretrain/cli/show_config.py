"""`--show-config`: every option of a resolved config, with where its value is from."""

from typing import TYPE_CHECKING

from foretrain.base.messages import option_help, option_unit
from foretrain.cli.common import OUT, print_json
from foretrain.config.options import OPTIONS
from foretrain.config.resolve import ResolvedConfig
from foretrain.reports import text
from foretrain.reports.document import Document, Message, Section, Table

if TYPE_CHECKING:
    from foretrain.app.finetuning.question import FineTuneQuestion


def show_config_of(resolved: ResolvedConfig, as_json: bool) -> None:
    """Print them, as a table or as one JSON object."""
    config = resolved.config
    if as_json:
        sources = {name: resolved.sources.get(name, "default") for name in OPTIONS}
        print_json({"schema": "foretrain.config/1", "config": config.model_dump(mode="json"), "sources": sources})
        return

    rows = tuple(
        (
            knob.name,
            str(getattr(config, knob.name)),
            option_unit(knob.unit),
            resolved.sources.get(knob.name, "default"),
            option_help(knob.name, knob.help),
        )
        for knob in OPTIONS.values()
    )
    columns = tuple(Message(f"column.{name}") for name in ("key", "value", "unit", "source", "help"))
    section = Section(Message("config.knobs"), (Table(columns, rows),))
    text.render(Document(Message("config.title", {"name": resolved.name}), Message("config.subtitle"), [section]), OUT)


def show_finetune(asked: "FineTuneQuestion", as_json: bool) -> None:
    values = asked.tune.model_dump(mode="json")
    sources = {name: asked.origins.get(name, "default") for name in values}
    if as_json:
        print_json({"schema": "foretrain.config/1", "config": values, "sources": sources})
        return
    rows = tuple((name, str(value), sources[name]) for name, value in values.items())
    columns = tuple(Message(f"column.{name}") for name in ("key", "value", "source"))
    section = Section(Message("config.knobs"), (Table(columns, rows),))
    name = Message("config.title", {"name": asked.source.name})
    text.render(Document(name, Message("config.subtitle"), [section]), OUT)
