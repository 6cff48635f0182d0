"""`foretrain data`: what a dataset is, whether it is what was written, its text, and mixtures of several."""

import os
from pathlib import Path
from typing import Any

from click.exceptions import Exit
from rich.text import Text

from foretrain.base.errors import ExitCode, UserError
from foretrain.base.files import not_written
from foretrain.base.messages import printable, say
from foretrain.base.quantities import parse_count, read
from foretrain.cli.command import Group, argument, flag, json_option, option, quiet_option
from foretrain.cli.common import ERR, OUT, need_one_of, noted, print_answer, print_json
from foretrain.data.inspection import document_at, documents_of, segments_of, separator_of, summarize, verify
from foretrain.data.locate import locate, make_mix, mix_text, no_dataset
from foretrain.data.token_reader import readers
from foretrain.data.tokenizer import tokenizer_of
from foretrain.reports import text
from foretrain.reports.views import data as data_view

EPILOG = """Examples:
foretrain data info data/fineweb-edu
foretrain data verify data/fineweb-edu --json
foretrain data head data/fineweb-edu --document 1000
foretrain data mix fineweb-edu=0.7 code=0.3 --out mix.toml --tokens 10B"""

INFO_EPILOG = """Examples:
foretrain data info data/fineweb-edu
foretrain data info s3://bucket/fineweb-edu --json
foretrain data info edu_fineweb10B --count   (no index: reads every token)"""
VERIFY_EPILOG = """Examples:
foretrain data verify data/fineweb-edu
foretrain data verify mix.toml --json"""

HEAD_EPILOG = """Examples:
foretrain data head data/fineweb-edu
foretrain data head data/fineweb-edu --split val --document 12 --tokens 500
foretrain data head openwebtext --at 1000000000"""

MIX_EPILOG = """Examples:
foretrain data mix fineweb-edu=0.7 code=0.3 --out mix.toml
foretrain data mix fineweb-edu=70 code=30 --tokens 10B"""
data_command = Group("data", help="Datasets: statistics, checksums, text behind tokens, mixtures.", epilog=EPILOG)
dataset_argument = argument("name DATASET", "A folder, a name under data/, a mix.toml, or s3://…, gs://…, hf://….")


def located(name: str) -> Any:
    found = locate(name)
    if found is None:
        raise no_dataset(name)
    return found


@data_command.command("info", epilog=INFO_EPILOG)
@dataset_argument
@flag("--count", "Without an index: read every token and count the documents.")
@json_option
def info_command(name: str, count: bool, as_json: bool) -> None:
    """Show documents, tokens, tokens per byte, ids, document lengths, tokenizer and files."""

    summary = summarize(located(name), count=count)
    print_answer(summary, "foretrain.data/1#info", lambda: data_view.info_document(summary), as_json=as_json)


def _tokenizer(info: Any) -> Any:
    try:
        words = tokenizer_of(info)
    except UserError as error:
        ERR.print(noted(error), soft_wrap=True)
        return None
    if words is None:
        note = str(UserError("data.no_tokenizer", path=info.path))
        ERR.print(noted(note), soft_wrap=True)
    return words


@data_command.command("verify", epilog=VERIFY_EPILOG)
@dataset_argument
@json_option
@quiet_option
def verify_command(name: str, as_json: bool, quiet: bool) -> None:
    """Verify the checksum of every block of every shard. Exits with code 7 if one is wrong."""
    from foretrain.cli.common import bytes_bar

    info = located(name)
    total = sum(segment.end for _, segment in segments_of(info))
    with bytes_bar(str(name), total, quiet=quiet or as_json) as bar:
        found = verify(info, bar)
    values = {
        "files": found.files, "size_bytes": found.size_bytes, "checked_bytes": found.checked_bytes,
        "took_s": round(found.took_s, 3),
    }  # fmt: skip
    if as_json:
        problems = [{"id": p.id, "message": str(p), "values": p.values} for p in found.problems]
        print_json(
            {"schema": "foretrain.data/1#verify", "path": info.path, "ok": not problems, **values, "problems": problems}
        )
    else:
        for problem in found.problems:
            OUT.print(Text(printable(str(problem)), style="red"), soft_wrap=True)
        known = "data.verify_good" if found.checked_bytes else "data.verify_unknown"
        rate = found.size_bytes / max(found.took_s, 1e-9)
        line = say(
            "data.verify_bad" if found.problems else known,
            name=str(name),
            count=len(found.problems),
            rate=rate,
            **values,
        )
        if not quiet or found.problems:
            OUT.print(Text(printable(line), style="red" if found.problems else ""), soft_wrap=True)
    if found.problems:
        raise Exit(int(ExitCode.DATA))


@data_command.command("head", epilog=HEAD_EPILOG)
@dataset_argument
@option("--split", "train or val.", default="train")
@option("--at", "Start at this token.", type=int, low=0)
@option("--document", "Start at this document, counted from 0.", type=int, low=0)
@option("--tokens", "Tokens to show.", default=200, low=1, high=1_000_000)
@json_option
def head_command(name: str, split: str, at: int | None, document: int | None, tokens: int, as_json: bool) -> None:
    """Show the text behind tokens, from any position. Control characters are shown as symbols."""
    need_one_of("--split", split, ("train", "val"))
    if at is not None and document is not None:
        raise UserError("usage.two_places")

    info = located(name)
    for number, part in enumerate([part.dataset for part in info.parts] or [info]):
        reader, words = readers(part, split)[0], _tokenizer(part)
        position = at or 0
        if document is not None:
            separator = separator_of(part) if words is None else words.separator
            if separator is None:
                raise UserError("data.no_tokenizer", path=part.path)
            position = document_at(reader, separator, document, documents_of(part, split))
        if position >= reader.tokens:
            raise UserError("data.no_position", path=part.path, position=position, tokens=reader.tokens)
        ids = reader.ids(position, tokens)
        text = None if words is None else words.decode([id for id in ids if id < words.vocab_size])
        if as_json and not number:
            shown = {"path": part.path, "split": split, "position": position, "ids": ids, "text": text}
            print_json({"schema": "foretrain.data/1#head", **shown})
            return
        place = say("data.head", name=part.name, split=split, first=position, last=position + len(ids) - 1,
                    tokens=reader.tokens)  # fmt: skip
        OUT.print(Text(printable(place), style="bold"), soft_wrap=True)
        OUT.print(Text(visible(text) if text is not None else " ".join(map(str, ids))), soft_wrap=True)


def visible(text: str) -> str:
    """Text of others for a terminal: control characters as their pictures (U+2400 and on), other odd ones as U+FFFD."""
    shown = {c: 0x2400 + c for c in range(32) if chr(c) not in "\n\t"} | {127: 0x2421}
    return printable(text.translate(shown))


@data_command.command("mix", epilog=MIX_EPILOG)
@argument("parts NAME=WEIGHT...", "Datasets and their shares.", nargs=-1, required=True)
@option("--out", "Write the mixture to this file, for dataset = mix.toml.", type=Path)
@option("--tokens", "Show the epochs over each part for this many training tokens, such as 10B.", default="")
@json_option
def mix_command(parts: list[str], out: Path | None, tokens: str, as_json: bool) -> None:
    """Mix prepared datasets by weight: how much comes from each, and how often it repeats."""

    weights = dict(_weight(part) for part in parts)
    if len(weights) < len(parts):
        raise UserError("usage.mix_twice")
    found = {name: located(name) for name in weights}
    for name, info in found.items():
        if info.parts:
            raise UserError("data.bad_mix", path=name, reason="it is a mixture itself")
    info = make_mix(out.stem if out else "mix", str(out or "mix"), {n: (found[n], w) for n, w in weights.items()})
    trained = _count(tokens) if tokens else None
    if out is not None:
        if out.suffix != ".toml":
            raise UserError("usage.mix_suffix", path=str(out))
        base = out.resolve().parent
        names = {n: n if found[n].remote else _relative(Path(found[n].path), base) for n in weights}
        try:
            out.write_text(mix_text({names[n]: weight for n, weight in weights.items()}), "utf-8")
        except OSError as error:
            raise not_written(out, error) from None
    if as_json:
        listed = [
            {"name": p.dataset.name, "path": p.dataset.path, "weight": p.weight, "tokens": p.dataset.train_tokens,
             "epochs": trained * p.weight / p.dataset.train_tokens if trained else None}
            for p in info.parts
        ]  # fmt: skip
        print_json({"schema": "foretrain.data/1#mix", "out": str(out) if out else None, "parts": listed})
        return

    text.render(data_view.mix_document(info, trained, str(out) if out else None), OUT)


def _relative(path: Path, base: Path) -> str:
    try:
        return Path(os.path.relpath(path.resolve(), base)).as_posix()
    except ValueError:  # another drive
        return str(path.resolve())


def _weight(text: str) -> tuple[str, float]:
    name, _, value = text.rpartition("=")
    try:
        weight = float(value)
    except ValueError:
        weight = -1.0
    if not name or not 1e-6 <= weight <= 1e12:
        raise UserError("usage.mix_part", text=text[:80])
    return name, weight


def _count(text: str) -> int:
    return read(parse_count, text, UserError("usage.bad_count", option="--tokens", value=text[:40]))
