"""Text to checked token shards. `foretrain.prepare` for Python."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from foretrain.base.errors import UserError
from foretrain.data.prepare import engine
from foretrain.data.prepare.estimate import Outcome, PreparePlan, Status
from foretrain.data.prepare.sources import PrepareOptions


def prepare(
    sources: str | Iterable[str],
    out: str | Path,
    *,
    val_share: float | None = None,
    stopping: Callable[[], str] = lambda: "",
    listen: Callable[[Status], None] = lambda status: None,
    **options: Any,
) -> Outcome:
    """How a preparation ended: `foretrain.prepare("books/", "data/books", tokenizer="gpt2").index`.

    `sources`: files, folders, globs, hf://datasets/OWNER/NAME: .txt, .jsonl (also .gz, .zst), .parquet. `out`: the
    dataset's folder; an unfinished one is resumed. `val_share`: of documents for validation, by default 0.005, of a
    single text's tokens 0.1. `options`: tokenizer, train_bpe, max_tokens, shuffle_buffer, seed, dedup, text_column,
    split_documents, max_document_bytes, shard_tokens, workers, skip_bad and restart, as in PrepareOptions.
    `stopping`: the name of a signal that came, or ''; the same call goes on later. `listen` hears how far it is.
    Raises UserError: wrong options 2, a package missing 4, data missing or damaged 7, disk full 8.
    """
    return prepare_with(options_of(sources, out, val_share=val_share, **options), stopping, listen)


def prepare_with(options: PrepareOptions, stopping: Callable[[], str], listen: Callable[[Status], None]) -> Outcome:
    return engine.prepare(options, stopping, listen)


def preparation_plan(options: PrepareOptions) -> PreparePlan:
    """Plan what a preparation would read, write, hold and take; nothing is written in `out`. Raises UserError."""
    return engine.plan(options)


def options_of(
    sources: str | Iterable[str],
    out: str | Path,
    *,
    val_share: float | None = None,
    workers: int | None = None,
    **more: Any,
) -> PrepareOptions:
    words = (sources,) if isinstance(sources, str) else tuple(sources)
    if unknown := more.keys() - PrepareOptions.model_fields.keys():
        raise UserError(
            "usage.bad_value",
            option="prepare",
            value=min(unknown),
            expected=", ".join(sorted(PrepareOptions.model_fields)),
        )
    given = {**more, **({} if workers is None else {"workers": workers})}
    try:
        options = PrepareOptions(sources=words, out=str(out), **given)
        share = (0.1 if options.is_one_document else 0.005) if val_share is None else val_share
        return PrepareOptions.model_validate({**options.model_dump(), "val_share": share})
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        raise UserError("usage.bad_value", option=name, value=str(first["input"])[:60], expected=first["msg"]) from None
