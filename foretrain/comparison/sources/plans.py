"""A plan as a subject: the file that `foretrain plan --json` wrote, or a run's plan.json."""

import json
from pathlib import Path

from pydantic import ValidationError

from foretrain.base.errors import UserError
from foretrain.base.files import read_text
from foretrain.comparison import settings
from foretrain.comparison.sources.given import Given
from foretrain.comparison.sources.predicted import bytes_per_token
from foretrain.comparison.subject import Memory, Source, Subject
from foretrain.predict.plan import SCHEMA, Plan


def claims(path: Path, head: bytes) -> bool:
    """JSON that says it is foretrain's."""
    return b'"schema": "foretrain.' in head[:200] or (path.name == "plan.json" and head.lstrip()[:1] == b"{")


def load(given: Given) -> Subject:
    """The plan, of the step that it means. Raises UserError for other records."""
    if given.words:
        raise UserError("usage.source_has_config", path=given.path)
    made = read(Path(given.path))
    step, timing = made.memory_of(made.step), made.timing_of(made.step)
    low, expected, high = step.neediest.needed_span
    source = "traced" if step.source == "traced" else "estimated"
    memory = Memory(low_bytes=low, expected_bytes=expected, high_bytes=high, source=source, what="needed")
    subject = Subject(
        label=given.label or (made.name if given.name in ("plan", "-") else given.name), path=given.path, kind="plan",
        settings=settings.of_config(made.config, made.gpu, made.step) | {settings.RANKS: made.world},
        config=made.config, gpu=made.gpu, world=made.world, devices=made.devices,
        step=made.step, tokens_per_step=made.config.tokens_per_step,
        used_by_others_bytes=made.used_by_others_bytes, memory=memory,
        bytes_per_token=bytes_per_token(given, made.config),
    )  # fmt: skip
    if timing is None:
        return subject
    source: Source = timing.source
    return subject.with_speed(timing.step_s, source)


def read(path: Path) -> Plan:
    """The plan of a file. Raises UserError for what is none."""
    try:
        text = read_text(path)
        data = json.loads(text)
        schema = data.get("schema") if isinstance(data, dict) else None
        if schema not in (None, SCHEMA):
            raise UserError("data.not_a_plan", path=str(path), schema=str(schema)[:60])
        return Plan.from_json(text)
    except (OSError, ValidationError, ValueError, AttributeError, TypeError, RecursionError) as error:
        raise UserError("data.plan_unreadable", path=str(path), reason=str(error).splitlines()[0][:200]) from None
