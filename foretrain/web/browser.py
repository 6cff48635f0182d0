"""The page without a server: what the worker of the static site calls, in Python that runs in the browser (Pyodide)."""

import json
from typing import Any

from foretrain.base import messages
from foretrain.base.messages import say
from foretrain.web import calls


def start(language: str) -> str:
    """What the page needs once, as JSON. What needs the machine of its user is said to be missing."""
    with messages.speaking(language):
        return as_json(calls.start(say("page.site.no_exact"), say("page.site.no_runs")))


def post(path: str, body: str, language: str) -> str:
    """JSON [status, answer] to a question that a server would have been posted."""
    with messages.speaking(language):
        return as_json(calls.POSTED[path](body))


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
