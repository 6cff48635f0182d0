"""Answers of the planner that are kept on disk, so that the command line gives them at once when they are asked again.

An answer is kept under a hash of all that decides it: what was asked, the torch that it is for, the user's own cards,
and all code that it comes from. So the answer of another version is never read. What a CPU does depends on the machine
as it is now, and what a calibrated card does on what was measured here: neither is kept. The page keeps its answers in
memory; those with advice are in advice.py.
"""

import hashlib
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pydantic

from foretrain.base.cache import Cache
from foretrain.base.records import Record
from foretrain.config.options import RunConfig
from foretrain.config.presets import GPT2_SHAPES
from foretrain.hardware.catalogue import GPU_FILE_VARIABLE, Gpu, catalogue
from foretrain.predict import software
from foretrain.predict.plan import Plan
from foretrain.predict.plan import plan as predict_plan

Kept = TypeVar("Kept", bound=Record)
MOST = 300  # answers, of some kilobytes each
PLANS = Cache("plans", compressed=True, most_files=MOST)
ROOMS = ("base", "config", "data", "hardware", "model", "predict", "measure", "advice")  # that decide an answer


@cache
def code() -> str:
    """A hash of what answers come from: our code with its tables, and what checks records."""
    digest = hashlib.sha256(pydantic.VERSION.encode())
    for room in ROOMS:
        for folder, folders, files in os.walk(Path(__file__).parents[2] / room):
            folders.sort()
            for name in sorted(files):
                if name.endswith((".py", ".toml")):
                    digest.update(f"{room}/{name}".encode() + Path(folder, name).read_bytes())
    return digest.hexdigest()


def answer(
    what: str, question: dict[str, Any], gpu: Gpu, config: RunConfig, kind: type[Kept], make: Callable[[], Kept]
) -> Kept:
    """The answer to a question about a config on a card, made where it is not kept. Raises what `make` raises."""
    changes = config.init_from not in ("scratch", *GPT2_SHAPES)  # a file of weights can
    if (
        gpu.kind != "cuda" or gpu.calibration is not None or gpu.choices or changes
    ):  # nor is what was measured here in its record
        return make()
    own = [card.model_dump(mode="json") for card in catalogue().values()] if os.environ.get(GPU_FILE_VARIABLE) else []
    path = PLANS.path({"what": what, **question, "torch": str(software.of("")), "cards": own, "code": code()})
    if (found := PLANS.record(path, kind)) is not None:
        return found
    made = make()
    PLANS.keep(path, made.model_dump_json())
    return made


def plan(config: RunConfig, gpu: Gpu, **given: Any) -> Plan:
    """The same as `predict.plan.plan`. Raises UserError as it does."""
    question = {"config": config.model_dump(mode="json"), "gpu": gpu.model_dump(mode="json"), "given": given}
    return answer("plan", question, gpu, config, Plan, lambda: predict_plan(config, gpu, **given))
