"""The process that traces for the page: a plan as JSON comes in, lines of progress and the deeper plan go out.

A process of its own, so that the server stays small and quick, and so that stopping it stops all that it started.
"""

import json
import os
import sys
from typing import Any

from foretrain.app.exact import traced_plan
from foretrain.base import bugs
from foretrain.base.errors import UserError
from foretrain.hardware.catalogue import Gpu
from foretrain.predict.plan import Plan


def work(job: dict[str, Any]) -> dict[str, Any]:
    """The answer to a job: {"plan": …} or {"error": a sentence}."""
    plan = Plan.model_validate(job["plan"])
    plan = plan.model_copy(update={"gpu": Gpu.model_validate(job["plan"]["gpu"])})
    try:
        deeper = traced_plan(plan, lambda text: _say({"progress": text}))
    except UserError as error:
        return {"error": str(error)}
    except Exception as error:
        return {"error": str(bugs.told(error))}
    return {"plan": deeper.to_json()}


def _say(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    if hasattr(os, "nice"):
        os.nice(10)  # a training that runs here goes first
    _say(work(json.load(sys.stdin)))
