"""The process that advises for the page: a form comes in as JSON, [status, answer] goes out."""

import json
import os
import sys
from typing import Any

from foretrain.base import bugs, languages
from foretrain.web import answers, calls


def work(job: dict[str, Any]) -> calls.Made:
    """The answer to a job, in its language; status 500 where foretrain has a bug."""
    with languages.speaking(job["language"]):
        try:
            return calls.advice(job["body"])
        except Exception as error:
            return 500, answers.error_json(bugs.told(error))


if __name__ == "__main__":
    if hasattr(os, "nice"):
        os.nice(10)  # sliders, and a training that runs here, go first
    sys.stdin.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    sys.stdout.write(json.dumps(work(json.load(sys.stdin)), allow_nan=False))
