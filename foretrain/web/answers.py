"""What the page draws, as JSON: documents with their texts made, and the numbers of pictures. No engine in here."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from pydantic import ValidationError

from foretrain.advice.cards import compared
from foretrain.advice.cluster import options_of
from foretrain.advice.record import Advice, Advices
from foretrain.app.request import Request
from foretrain.base.errors import ConfigError, UserError
from foretrain.base.messages import printable, say
from foretrain.base.records import Record
from foretrain.predict.finetune.plan import FineTunePlan
from foretrain.predict.forecast import AnyPlan
from foretrain.predict.memory import RunMemory
from foretrain.predict.plan import Plan
from foretrain.predict.ranks import ClusterPlan
from foretrain.predict.timing import Prices
from foretrain.reports.document import Message, cell_text
from foretrain.reports.html import block_json, document_json
from foretrain.reports.views import advice as advice_view
from foretrain.reports.views import cards as cards_view
from foretrain.reports.views import memory as memory_view
from foretrain.reports.views import page_of

SCHEMA = "foretrain.page/1"


def error_json(error: UserError) -> dict[str, Any]:
    problems = error.problems if isinstance(error, ConfigError) else [error]
    listed = [{"id": p.id, "message": printable(str(p)), "key": str(p.values.get("key", ""))} for p in problems]
    return {"schema": "foretrain.error/1", "id": error.id, "message": printable(str(error)), "problems": listed}


def plan_json(request: Request, plan: AnyPlan) -> dict[str, Any]:
    """Return a plan as the page shows it: verdict, key figures, memory of every phase, then the whole document."""
    shown = page_of(plan)
    document = document_json(shown.document, "terminal")  # pictures and figures stand above
    verdict, *sections = document["sections"]
    table, rows = (shown.screen.table, shown.screen.rows) if shown.screen else (None, ())
    lines = [[row.label.text(), printable(cell_text(row.text))] for row in rows if row.text is not None]
    notes = [printable(str(note)) for note in request.notes if isinstance(note, UserError)]
    # What pays stands among the lines.
    blocks = verdict["blocks"][:1] if isinstance(plan, ClusterPlan) else verdict["blocks"]
    return {
        "schema": SCHEMA, "title": document["title"], "sentences": [printable(each.text()) for each in shown.sentences],
        "verdict": blocks, "figures": block_json(shown.figures)["items"],
        "pictures": [block_json(picture) for picture in shown.pictures], "table": block_json(table) if table else None,
        "heading": say("page.strategies" if isinstance(plan, ClusterPlan) else "inference.formats"),
        "rows": lines, "strip": _strip(shown.needs, plan.available_bytes), "sections": sections, "notes": notes,
        "exact": any(memory.source == "traced" for _, memory, _ in shown.needs),
        "fits": plan.verdict in ("fits", None), "config": _options(request, plan),
    }  # fmt: skip


def _options(request: Any, plan: AnyPlan) -> dict[str, Any]:
    if isinstance(plan, Plan | ClusterPlan):
        return plan.config.model_dump(mode="json")
    if isinstance(plan, FineTunePlan):
        return {**request.asked.tune.model_dump(mode="json"), **Prices.of(request.costs.config).model_dump(mode="json")}
    return request.asked.model_dump(mode="json")


def _strip(needs: Sequence[tuple[Message, RunMemory, str | None]], free: int | None) -> list[dict[str, Any]]:
    """For each (name, memory, verdict) the phase that needs most beside what is free, as shares of the larger."""
    most = 1.06 * max([free or 0, *(memory.needed_bytes for _, memory, _ in needs)])
    found = []
    for name, memory, verdict in needs:
        values = {"step": name, "needed": memory.needed_bytes, "usable": free or 0}
        values |= {"verdict": Message(f"word.{verdict}")} if verdict else {}
        text = Message("page.strip" if free is not None and verdict else "page.strip_unknown", values).text()
        limit = None if free is None else free / most
        share = memory.needed_bytes / most
        found.append({"text": text, "tone": memory_view.TONES[verdict], "share": share, "limit": limit})
    return found


def cards_json(plans: Sequence[Any]) -> dict[str, Any]:
    return {"schema": SCHEMA, **document_json(cards_view.document(plans, compared(plans)))}


def advice_json(plan: AnyPlan, found: Advices) -> dict[str, Any]:
    """Return the changes as the terminal lists them, and what to set in the form for each."""
    document = advice_view.document(plan, found)
    at = next(i for i, section in enumerate(document.sections) if section.title.id == "advice.list")
    changes = [
        {"text": printable(advice_view.short(plan, each)), "set": _to_set(plan, found, each)} for each in found.advised
    ]
    return {"schema": SCHEMA, "sections": document_json(document)["sections"], "list": at, "changes": changes}


def _to_set(plan: AnyPlan, found: Advices, change: Advice) -> dict[str, Any]:
    changed: dict[str, Any] = {"values": options_of(plan, change) if isinstance(plan, ClusterPlan) else change.options}
    cards = changed["values"].pop("world", None)
    if change.shared and found.cluster and change.shared.cards != found.cluster.world:
        cards = change.shared.cards
    if cards:
        changed["count"] = str(cards)
    if change.gpu != found.gpu:
        changed["gpu"] = change.gpu
    if change.used_by_others_bytes != found.used_by_others_bytes:
        changed["others"] = f"{change.used_by_others_bytes}B"
    return changed if changed["values"] or len(changed) > 1 else {}


Made = tuple[int, dict[str, Any]]  # a status of HTTP, and what is answered


def answered(body: bytes | str, kind: type[Record], work: Callable[[Any], Made]) -> Made:
    """What `work` makes of a body that is a record of this kind: 400 where it is not one, 422 for what can be fixed."""
    try:
        asked = kind.model_validate(json.loads(body))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part)[:40] for part in first["loc"])
        return 400, error_json(UserError("page.bad_request", where=where or "body", reason=first["msg"]))
    except (ValueError, RecursionError):
        return 400, error_json(UserError("page.bad_request", where="body", reason="it is not JSON"))
    try:
        return work(asked)
    except UserError as error:
        return 422, error_json(error)
