"""`foretrain serve`: the planner and the runs as a page on this machine."""

from pathlib import Path

import click
from rich.text import Text

from foretrain.base import messages
from foretrain.base.errors import UserError
from foretrain.base.messages import say
from foretrain.cli.command import command, flag, json_option, option, quiet_option
from foretrain.cli.common import OUT, asked_for, print_json

EPILOG = """Examples:
foretrain serve
foretrain serve --open
foretrain serve --runs ~/experiments --runs out --port 9000"""


@command("serve", EPILOG)
@option("--port", "Port. Default: 8765, or a free one if that is taken.", type=int, low=1, high=65535)
@option(
    "--runs", "Folder to search for runs, two levels deep; can be repeated. Default: here.", multiple=True, type=Path
)
@flag("--open", "Open the page in the browser.", name="open_it")
@json_option
@quiet_option
def serve_command(port: int | None, runs: list[Path], open_it: bool, as_json: bool, quiet: bool) -> None:
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
        print_json({"schema": "foretrain.report/1#serve", "url": served.link, "port": served.port})
    else:
        OUT.print(Text(messages.without_marks(say("page.served", link=served.link))), soft_wrap=True)  # to be copied
        if not quiet:
            OUT.print(Text(say("page.served_how")), style="dim")
    with server.opener(served.link) as path:
        if open_it:
            click.launch(path.as_uri())
        served.run()
