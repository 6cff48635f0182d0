"""Blocks of a page that show a command and what it prints."""

import io
import os
import shlex
import sys

from foretrain.base import messages
from foretrain.cli import app
from foretrain.cli.common import OUT
from foretrain.cli.language import VARIABLE

WIDTH = 90  # what a page of the site shows without scrolling at 1280 pixels


def block(command: str, output: str) -> str:
    """A console block."""
    return f"```console\n$ {command}\n{output}\n```"


def shown(command: str) -> str:
    """What a terminal of 90 columns shows of a command; it is run in this process."""
    words = shlex.split(command)
    before, out = (OUT.file, OUT.width, sys.argv), io.StringIO()
    OUT.file, OUT.width, sys.argv = out, WIDTH, words
    try:
        app(words[1:], standalone_mode=False)
    finally:
        messages.set_language(messages.ENGLISH)
        OUT.file, OUT.width, sys.argv = before
        os.environ.pop(VARIABLE, None)
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip().splitlines())
