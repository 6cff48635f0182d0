"""How a question of the page is taken: a body as the record that it should be, and sentences for what is wrong."""

import json
from collections.abc import Callable
from typing import Any

from pydantic import ValidationError

from foretrain.base.errors import UserError
from foretrain.base.records import Record
from foretrain.web import answers

Made = tuple[int, dict[str, Any]]  # a status of HTTP, and what is answered


def answered(body: bytes | str, kind: type[Record], work: Callable[[Any], Made]) -> Made:
    """What `work` makes of a body that is a record of this kind: 400 where it is not one, 422 for what can be fixed."""
    try:
        asked = _record(body, kind)
    except UserError as error:
        return 400, answers.error_json(error)
    return sentences(lambda: work(asked))


def sentences(work: Callable[[], Made]) -> Made:
    """The result of `work`; 422 with the sentences of a UserError."""
    try:
        return work()
    except UserError as error:
        return 422, answers.error_json(error)


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
