"""The process that compares large runs for the page: ids and folders come in as JSON, the page's answer goes out."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from foretrain.base import bugs, languages
from foretrain.web import comparison
from foretrain.web.observe import ObservedRun


def work(job: dict[str, Any]) -> dict[str, Any]:
    """The answer to a job, in its language; {"bug": a sentence} where foretrain has one."""
    with languages.speaking(job["language"]):
        try:
            return comparison.made([(id, ObservedRun(Path(path)) if path else None) for id, path in job["runs"]])
        except Exception as error:
            return {"bug": str(bugs.told(error))}


if __name__ == "__main__":
    if hasattr(os, "nice"):
        os.nice(10)  # a training that runs here goes first
    sys.stdin.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    sys.stdout.write(json.dumps(work(json.load(sys.stdin)), allow_nan=False))
