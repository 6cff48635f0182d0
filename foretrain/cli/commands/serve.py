"""`foretrain serve`: the planner and the runs as a page on this machine."""

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from foretrain.base import messages
from foretrain.base.errors import UserError
from foretrain.base.messages import say
from foretrain.cli.common import OUT, Json, Quiet, print_json
from foretrain.cli.language import asked_for

EPILOG = """Examples:

foretrain serve

foretrain serve --open

foretrain serve --runs ~/experiments --runs out --port 9000"""


def add_to(app: typer.Typer) -> None:
    app.command("serve", epilog=EPILOG)(serve_command)


def serve_command(
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port. Default: 8765, or a free one if that is taken.")
    ] = None,
    runs: Annotated[
        list[Path] | None,
        typer.Option(help="Folder to search for runs, two levels deep; can be repeated. Default: here."),
    ] = None,
    open_it: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Open the planner in your browser: move sliders, watch runs. For this machine only."""
    try:
        from foretrain.web import server
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("starlette", "uvicorn", "h11", "anyio"):
            raise
        raise UserError("environment.missing_extra", package=error.name, extra="serve") from None

    roots = runs or [Path()]
    for folder in roots:
        if not folder.is_dir():
            raise UserError("data.no_folder", path=str(folder))
    served = server.prepare(port, roots, asked_for())
    if as_json:
        print_json({"schema": "foretrain.serve/1", "url": served.link, "port": served.port})
    else:
        OUT.print(Text(messages.without_marks(say("page.served", link=served.link))), soft_wrap=True)  # to be copied
        if not quiet:
            OUT.print(Text(say("page.served_how")), style="dim")
    with server.opener(served.link) as path:
        if open_it:
            typer.launch(path.as_uri())
        served.run()
