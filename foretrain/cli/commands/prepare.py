"""`foretrain prepare`: text, JSON lines, Parquet or a dataset at Hugging Face to checked token shards."""

import re
import sys
import time
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from click.exceptions import Exit
from rich.text import Text

from foretrain.base.errors import ExitCode, UserError
from foretrain.base.messages import printable, say
from foretrain.base.quantities import parse_bytes, parse_count, read
from foretrain.base.signals import StopFlag
from foretrain.base.units import format_bytes, format_percent
from foretrain.cli.command import argument, command, flag, json_option, option, quiet_option
from foretrain.cli.common import (
    ERR,
    OUT,
    LiveLine,
    noted,
    print_answer,
    print_json,
    print_notes,
    rewrites_lines,
    wrong_value,
)
from foretrain.data.prepare.sources import not_utf8
from foretrain.reports.views import data as data_view

if TYPE_CHECKING:
    from foretrain.data.prepare.estimate import Outcome, Status
    from foretrain.data.prepare.sources import PrepareOptions

EPILOG = """Examples:
foretrain prepare books/ --tokenizer gpt2 --out data/books
foretrain prepare 'dump/*.jsonl.zst' --text-column content --train-bpe 32000 --dedup --out data/dump
foretrain prepare hf://datasets/HuggingFaceFW/fineweb-edu/sample/10BT --tokens 3.68B --val 0.5% --out data/edu --plan
zcat dump.jsonl.gz | foretrain prepare - --tokenizer byte --out data/dump
Run the same command again to resume."""

SCHEMA, PLAN_SCHEMA = "foretrain.data/1#prepared", "foretrain.data/1#plan"
_COUNTED = {
    "empty": "prepare.counted_empty", "bad": "prepare.counted_bad", "duplicates": "prepare.counted_duplicates",
    "replaced_utf8": "prepare.counted_replaced_utf8", "separator_bytes": "prepare.counted_separator_bytes",
}  # fmt: skip
LEAST_SHARD_TOKENS = 100_000  # fewer would make more files than a file system is good for
_LINE_EVERY_S, _LIVE_EVERY_S = 15.0, 0.5


@command("prepare", EPILOG)
@argument(
    "sources SOURCE...",
    "Files, folders, globs in quotes, hf://datasets/OWNER/NAME (and a path in it), or - for stdin: .txt, "
    ".jsonl (also .gz, .zst), .parquet.",
    nargs=-1,
    required=True,
)
@option("--out PATH", "Folder of the dataset; an unfinished one is resumed.", required=True)
@option("--tokenizer", "gpt2 (default), byte, cl100k_base, …, or the path of a tokenizer.json.")
@option(
    "--train-bpe", "Train a BPE tokenizer with this many ids on 64 MiB of the source, instead of --tokenizer.", type=int
)
@option("--tokens", "Stop after this many tokens, such as 3.68B, at the end of a document.")
@option("--val", "Share for validation: of documents (0.5%), or of one text's tokens (10%).")
@flag("--plan", "Show the size, disk space, memory, tokens and time it needs; prepare nothing.")
@option(
    "--shuffle-buffer", "Shuffle files, and documents in windows of this many (and 64 MiB). 0: source order.", default=0
)
@option("--seed", "Random seed of the shuffle.", default=1337)
@flag("--dedup", "Skip exact duplicates (23 to 46 bytes of memory per document).")
@option("--text-column", "Column of .jsonl and .parquet with the text.", default="text")
@option(
    "--split-documents",
    "How to split a .txt into documents: file, lines, blank-lines, or a separator text.",
    default="file",
)
@option("--max-document", "Longest document, up to 256MiB.", default="16MiB")
@option("--shard-tokens", "Tokens per shard.", default="100M")
@option("--workers", "Tokenizing processes. Default: one per core.", type=int)
@flag("--skip-bad", "Skip and count bad lines and too long documents.")
@flag("--restart", "Delete what was prepared in --out and start over.")
@json_option
@quiet_option
def prepare_command(plan: bool, as_json: bool, quiet: bool, **typed: Any) -> None:
    """Turn text into verified token shards, on all cores and in constant memory. Resumes after any stop."""
    options = _options(typed)
    if plan:
        _plan(options, Path(typed["out"]), as_json=as_json)
    else:
        _prepare(options, as_json=as_json, quiet=quiet)


def _app() -> ModuleType:
    from foretrain.app import prepare

    return prepare


def _options(typed: dict[str, Any]) -> "PrepareOptions":
    if typed["tokenizer"] is not None and typed["train_bpe"] is not None:
        raise UserError("usage.two_tokenizers")
    for name in ("split_documents", "out"):
        if not typed[name]:  # as an unset variable of a shell leaves it
            raise UserError("usage.empty_value", option=f"--{name.replace('_', '-')}")
    _within("--shuffle-buffer", typed["shuffle_buffer"], 0, 10_000_000)
    if typed["workers"] is not None:
        _within("--workers", typed["workers"], 1, 1024)
    if typed["train_bpe"] is not None:
        _within("--train-bpe", typed["train_bpe"], 257, 1 << 24)
    shard_tokens = _count("--shard-tokens", typed["shard_tokens"])
    _within("--shard-tokens", shard_tokens, LEAST_SHARD_TOKENS, 1 << 40)
    same = ("train_bpe", "shuffle_buffer", "seed", "dedup", "text_column", "split_documents", "skip_bad", "restart")
    return _app().options_of(
        typed["sources"], typed["out"], tokenizer=typed["tokenizer"] or "gpt2",
        max_tokens=None if typed["tokens"] is None else _count("--tokens", typed["tokens"]),
        max_document_bytes=_size("--max-document", typed["max_document"]),
        shard_tokens=shard_tokens, workers=typed["workers"], val_share=_share(typed["val"]) if typed["val"] else None,
        **{name: typed[name] for name in same},
    )  # fmt: skip


def _plan(options: "PrepareOptions", out: Path, *, as_json: bool) -> None:
    made = _app().preparation_plan(options)
    shown = partial(data_view.preparation_document, made, printable(str(out)))
    print_answer(made, PLAN_SCHEMA, shown, as_json=as_json, fits=made.fits)
    if not made.fits:
        raise Exit(int(ExitCode.DISK_FULL))


def _prepare(options: "PrepareOptions", *, as_json: bool, quiet: bool) -> None:
    print_notes(not_utf8(options.sources), quiet=quiet)
    line = _Line(quiet=quiet or as_json, most=options.max_tokens)
    with StopFlag() as flag:
        try:
            done = _app().prepare_with(options, lambda: flag.signal_name, line)
        finally:
            line.clear()
    if as_json:
        print_json(_result(options, done))
    if done.index is None:
        ERR.print(Text(say("prepare.stopped", signal=done.signal, tokens=done.tokens)), soft_wrap=True)
        raise Exit(int(ExitCode.STOPPED))
    if not quiet:
        for name, count in done.index.counts.to_json().items():
            if count:
                ERR.print(noted(say(_COUNTED[name], count=count)), soft_wrap=True)
        if not done.index.splits["val"].tokens:
            ERR.print(noted(say("prepare.no_val"), "yellow"), soft_wrap=True)
    if not quiet and not as_json:
        splits = done.index.splits
        values = {
            "out": options.out, "train": splits["train"].tokens, "val": splits["val"].tokens, "took": done.elapsed_s,
            "documents": sum(split.documents for split in splits.values()),
            "shards": sum(len(split.shards) for split in splits.values()),
        }  # fmt: skip
        OUT.print(Text(printable(say("prepare.existed" if done.existed else "prepare.done", **values))), soft_wrap=True)


def _result(options: "PrepareOptions", done: "Outcome") -> dict[str, Any]:
    result: dict[str, Any] = {
        "schema": SCHEMA, "out": options.out, "status": "stopped" if done.index is None else "finished",
        "signal": done.signal, "resumed": done.resumed, "existed": done.existed, "tokens": done.tokens,
        "elapsed_s": done.elapsed_s,
    }  # fmt: skip
    if done.index is not None:
        index = done.index.to_json()
        for split in index["splits"].values():
            split["shards"] = len(split["shards"])
        result |= {"fingerprint": done.index.fingerprint, **index}
    return result


class _Line:
    def __init__(self, *, quiet: bool, most: int | None) -> None:
        self.quiet, self.most, self.live = quiet, most, rewrites_lines(terminal=sys.stderr.isatty())
        self.first: Status | None = None
        self._next_s = time.monotonic() + (0 if self.live else _LINE_EVERY_S)
        self._live_line = LiveLine(ERR)

    def __call__(self, status: "Status") -> None:
        self.first = self.first or status
        if self.quiet or time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + (_LIVE_EVERY_S if self.live else _LINE_EVERY_S)
        seconds = max(status.elapsed_s - self.first.elapsed_s, 1e-3)
        rate = (status.tokens - self.first.tokens) / seconds
        share = self._share(status)
        begun = self._share(self.first)
        eta = ""
        if share is not None and begun is not None and share > begun:
            left_s = (1 - share) / (share - begun) * seconds
            eta = say("prepare.eta", time=left_s)
        shown = f"{format_percent(share)}  " if share is not None else f"{format_bytes(status.read_bytes)}  "
        text = say(
            "prepare.live", share=shown, tokens=status.tokens, rate=rate, documents=status.documents,
            shards=status.shards, eta=eta,
        )  # fmt: skip
        if self.live:
            self._live_line.show(text)
        else:
            sys.stderr.write(text + "\n")
            sys.stderr.flush()

    def _share(self, status: "Status") -> float | None:
        of_source = min(1.0, status.read_bytes / status.total_bytes) if status.total_bytes else None
        of_tokens = min(1.0, status.tokens / self.most) if self.most else None
        shares = [share for share in (of_source, of_tokens) if share is not None]
        return max(shares, default=None)

    def clear(self) -> None:
        self._live_line.clear()


# -- what people type --------------------------------------------------------------------------------------


def _count(option: str, text: str) -> int:
    return read(parse_count, text, wrong_value(option, text, "count"))


def _size(option: str, text: str) -> int:
    size = read(parse_bytes, text, wrong_value(option, text, "size"))
    _within(option, size, 1, 256 * 2**20)
    return size


def _share(text: str) -> float:
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(%?)\s*", text)
    share = float(match.group(1)) / (100 if match.group(2) else 1) if match else -1.0
    if not 0 <= share < 1:
        raise wrong_value("--val", text, "share")
    return share


def _within(option: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise wrong_value(option, f"{value:,}", "from_to", low=f"{least:,}", high=f"{most:,}")
