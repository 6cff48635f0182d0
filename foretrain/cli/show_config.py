"""`--show-config`: every option of a run, with where its value is from."""

from typing import Any

from foretrain.app.limits import Limits
from foretrain.base.messages import option_help, option_unit
from foretrain.cli.common import OUT, print_json
from foretrain.reports import text
from foretrain.reports.document import Document, Message, Section, Table


def show_config_of(request: Any, limits: Limits, as_json: bool) -> None:
    """Print the options of what is asked, as a table or as one JSON object."""
    values, options, sources = request.settings(limits)
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
    text.render(Document(Message("config.title", {"name": request.name}), Message("config.subtitle"), [section]), OUT)
