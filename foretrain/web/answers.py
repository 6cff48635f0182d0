"""What the page draws, as JSON: documents with their texts made, and the numbers of pictures. No engine in here."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from pydantic import ValidationError

from foretrain.base.errors import ConfigError, UserError
from foretrain.base.messages import printable
from foretrain.base.records import Record
from foretrain.config.resolve import ResolvedConfig
from foretrain.predict.memory import RunMemory
from foretrain.predict.plan import Plan
from foretrain.reports.document import Message
from foretrain.reports.html import block_json, document_json
from foretrain.reports.views import memory as memory_view
from foretrain.reports.views import plan as plan_view

__all__ = ["SCHEMA", "document_json", "error_json", "plan_json", "strip"]

SCHEMA = "foretrain.page/1"


def error_json(error: UserError) -> dict[str, Any]:
    """An error as the command line's --json has it, with the knob of each problem."""
    problems = error.problems if isinstance(error, ConfigError) else [error]
    listed = [{"id": p.id, "message": printable(str(p)), "key": str(p.values.get("key", ""))} for p in problems]
    return {"schema": "foretrain.error/1", "id": error.id, "message": printable(str(error)), "problems": listed}


def plan_json(plan: Plan, found: ResolvedConfig) -> dict[str, Any]:
    """A plan as the page shows it: verdicts, key figures, the memory of every phase, then the rest of the document."""
    document = plan_view.document(plan)
    verdict, *rest = document_json(document, "terminal")["sections"]  # pictures and figures stand above
    return {
        "schema": SCHEMA, "title": printable(document.title.text()), "subtitle": document.subtitle.text(),
        "verdict": verdict["blocks"], "figures": block_json(plan_view.of_plan(plan))["items"],
        "pictures": [block_json(picture) for picture in memory_view.phase_pictures(plan)], "strip": _strip(plan),
        "sections": rest, "exact": bool(plan.exact), "config": plan.config.model_dump(mode="json"),
        "sources": found.sources, "notes": [printable(str(note)) for note in found.notes],
    }  # fmt: skip


def _strip(plan: Plan) -> list[dict[str, Any]]:
    rows = [(memory_view.step_mode(memory), memory, plan.verdict_of(memory.step)) for memory in plan.memories]
    return strip(rows, plan.available_bytes)


def strip(rows: Sequence[tuple[Message, RunMemory, str | None]], free: int | None) -> list[dict[str, Any]]:
    """For each (name, memory, verdict) the phase that needs most beside what is free, as shares of the larger."""
    most = 1.06 * max([free or 0, *(memory.needed_bytes for _, memory, _ in rows)])
    found = []
    for name, memory, verdict in rows:
        values = {"step": name, "needed": memory.needed_bytes, "usable": free or 0}
        values |= {"verdict": Message(f"word.{verdict}")} if verdict else {}
        text = Message("page.strip" if free is not None and verdict else "page.strip_unknown", values).text()
        limit = None if free is None else free / most
        share = memory.needed_bytes / most
        found.append({"text": text, "tone": memory_view.TONES[verdict], "share": share, "limit": limit})
    return found


Made = tuple[int, dict[str, Any]]  # a status of HTTP, and what is answered


def answered(body: bytes | str, kind: type[Record], work: Callable[[Any], Made]) -> Made:
    """What `work` makes of a body that is a record of this kind: 400 where it is not one, 422 for what can be fixed."""
    try:
        asked = _record(body, kind)
    except UserError as error:
        return 400, error_json(error)
    return sentences(lambda: work(asked))


def sentences(work: Callable[[], Made]) -> Made:
    """The result of `work`; 422 with the sentences of a UserError."""
    try:
        return work()
    except UserError as error:
        return 422, error_json(error)


def _record(body: bytes | str, kind: type[Record]) -> Record:
    """The body as a record. Raises UserError where it is none."""
    try:
        return kind.model_validate(json.loads(body))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part)[:40] for part in first["loc"])
        raise UserError("page.bad_request", where=where or "body", reason=first["msg"]) from None
    except (ValueError, RecursionError):
        raise UserError("page.bad_request", where="body", reason="it is not JSON") from None
