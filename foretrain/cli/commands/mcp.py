"""`foretrain mcp`: commands as tools of coding agents, by the Model Context Protocol over stdin and stdout.

A tool takes the words of its command and runs it in a process of its own, so that nothing it prints reaches the agent
beside the answer. What writes a file or starts a program is refused.
"""

import contextlib
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import click
from pydantic import Field

from foretrain.base.errors import ExitCode, UserError, need_extra
from foretrain.base.installation import installed
from foretrain.base.processes import finished
from foretrain.cli.command import command

EPILOG = """Examples:
foretrain mcp   (for an agent, which starts it)"""
TOOLS = ("plan", "advise", "explain", "compare")
REFUSED = ("write", "write_job", "write_script", "snapshot", "python")  # options that write files or start programs
MOST_S = 600.0
MOST_BYTES = 2**20  # of a config's text
INSTRUCTIONS = """What a training, a fine-tuning or generating text needs on a card: whether it fits, how long it takes,
what it costs, what to change, and why a run took what it took. Nothing is run or written; plans need no card."""
Words = Annotated[list[str], Field(description="Words as behind the command, such as ['qwen3-8b', '--gpu', '4070']")]
Text = Annotated[str, Field(description="Instead of a file: its text, which comes before the words")]
Name = Annotated[str, Field(description="What that file would be called; its ending says what it is")]


class Answer(NamedTuple):
    text: str
    value: dict[str, Any] | None  # what --json prints
    failed: bool = False


@command("mcp", EPILOG)
@click.pass_context
def mcp_command(context: click.Context) -> None:
    """Offer the planner to coding agents as tools: an MCP server over stdin and stdout."""
    server(context.find_root().command).run()


def server(program: Any) -> Any:
    """Return the SDK's server with a tool for each of TOOLS."""
    sdk, types = need_extra("mcp.server", "mcp"), need_extra("mcp_types", "mcp")
    made = sdk.MCPServer("foretrain", instructions=INSTRUCTIONS, version=installed("foretrain"))
    unchanging = types.ToolAnnotations(read_only_hint=True, destructive_hint=False)
    for name, each in program.members().items():
        if name in TOOLS:
            about = f"{each.help}\n\n{each.epilog}"
            made.add_tool(_tool(each, types), name, description=about, annotations=unchanging, structured_output=False)
    return made


def _tool(program: click.Command, types: Any) -> Callable[..., Any]:
    def tool(words: Words, config: Text = "", config_name: Name = "config.toml") -> Any:
        found = answer(program, words, config, config_name)
        content = [types.TextContent(type="text", text=found.text)]
        return types.CallToolResult(content=content, structured_content=found.value, is_error=found.failed)

    return tool


def answer(program: click.Command, words: Sequence[str], config: str = "", config_name: str = "config.toml") -> Answer:
    """Return what a command prints, short and as JSON; of a failure its sentence."""
    try:
        _check(program, words, config)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / (Path(config_name).name or "config.toml")
            if config:
                file.write_text(config, "utf-8")
            return _answered(program.name or "", [*([str(file)] if config else []), *words])
    except (UserError, OSError, ValueError) as error:  # also for words that no process can be given
        return Answer(str(error), None, failed=True)


def _check(program: click.Command, words: Sequence[str], config: str) -> None:
    if len(config.encode("utf-8", "replace")) > MOST_BYTES:
        raise UserError("usage.mcp_large", limit=MOST_BYTES)
    refused = {spelling for param in program.params if param.name in REFUSED for spelling in param.opts}
    if found := next((word for word in words if word.partition("=")[0] in refused), ""):
        raise UserError("usage.mcp_refused", option=found.partition("=")[0])


def _answered(name: str, words: Sequence[str]) -> Answer:
    os.environ["COLUMNS"], value = "100", None
    try:
        done = finished("foretrain", name, "--json", *words, most_s=MOST_S)
        with contextlib.suppress(ValueError):  # --help prints none
            value = json.loads(done.stdout)
        if done.returncode not in (ExitCode.DONE, ExitCode.CHECK_FAILED):
            text = value["message"] if value else done.stderr.decode("utf-8", "replace")[-1000:]
            return Answer(text, value, failed=True)
        shown = finished("foretrain", name, *words, most_s=MOST_S)
    except subprocess.TimeoutExpired:
        raise UserError("usage.mcp_slow", seconds=MOST_S) from None
    return Answer(shown.stdout.decode("utf-8", "replace"), value)
