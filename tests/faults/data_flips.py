"""Damage to a prepared dataset: one flipped bit, or a lost end, in its shards, its index, its tokenizer, or the state of
an unfinished preparation. Each must be found before a token of it is used."""

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from foretrain.base.errors import ExitCode, UserError
from foretrain.data.batches import TokenFile
from foretrain.data.dataset import read_info
from foretrain.data.inspection import verify
from foretrain.data.prepare import writer
from foretrain.data.shards import PROGRESS, TokenizerInfo, read_index
from foretrain.data.tokenizer import BpeTokenizer, digest_of, tokenizer_of
from tests.faults.harness import random_of, result_of
from tests.kit.data import documents, shards, write_shards

SETTINGS = "tokenizer_config.json"  # says again what the tokenizer knows: damage there may change nothing
Check = Callable[[Path], Any]


def make() -> dict[Path, Check]:
    """{file: who must find its damage}, in two datasets and an unfinished one."""
    folder, spoken = shards(Path("flips/byte"), count=40), Path("flips/bpe")
    texts = [f"the {word} of the {word[::-1]} ".encode() * 3 for word in ("tower", "lemon", "river", "stone")]
    words = BpeTokenizer.train(texts, 300)
    write_shards(
        spoken, {"train": documents(20), "val": documents(9)}, vocab=words.vocab_size, tokenizer="bpe", sha256=digest_of(words),
    )  # fmt: skip
    words.save(spoken)
    unfinished = Path("flips/unfinished")
    (unfinished / PROGRESS).mkdir(parents=True)
    identity = writer.Identity(
        settings=read_index(folder).settings, tokenizer=TokenizerInfo(name="byte", sha256="0" * 64, separator=0), source="s", stamps="t",
    )  # fmt: skip
    writer.write(
        unfinished, writer.Snapshot(identity=identity, duplicates=3, separators=2, seen=12345, digest="f" * 64)
    )
    found: dict[Path, Check] = dict.fromkeys(sorted(folder.iterdir()), _train)
    found |= {spoken / name: _speak for name in ("tokenizer.json", SETTINGS)}
    return {**found, unfinished / PROGRESS / writer.STATE: lambda path: writer.read(unfinished)}


def _train(path: Path) -> list[np.ndarray]:
    """Everything that a run reads of a dataset, as it reads it."""
    info = read_info(path.parent)
    rows = []
    for split in ("train", "val"):
        file = TokenFile(info, split, 256)
        starts = np.append(np.arange(0, file.tokens - 64, 64), file.tokens - 64)
        rows.append(file.rows(starts, 64).copy())
    return rows


def _speak(path: Path) -> tuple[str, int]:
    words = tokenizer_of(read_info(path.parent))
    return words.decode(list(range(words.vocab_size))), words.separator


def _refused(check: Check, path: Path, right: Any) -> bool | None:
    """Whether damage is found; None where what is read is what it was before, so that there is nothing to find."""
    try:
        now = check(path)
    except UserError as error:
        return error.exit_code == ExitCode.DATA
    return None if path.name == SETTINGS and now == right else False


def _verified(path: Path) -> bool:
    try:
        return bool(verify(read_info(path.parent), threads=1).problems)
    except UserError as error:
        return error.exit_code == ExitCode.DATA


def _damaged(data: bytes, chance: Any) -> bytes:
    """One bit the other way round, or every sixth time its end lost."""
    if chance.random() < 1 / 6:
        return data[: chance.randrange(len(data))]
    place = chance.randrange(len(data) * 8)
    return data[: place // 8] + bytes([data[place // 8] ^ 1 << place % 8]) + data[place // 8 + 1 :]


def data_flips(count: int, seed: int) -> dict[str, Any]:
    """Flips and truncations, one after the other, over all files in turn; each is put right again."""

    def work() -> dict[str, Any]:
        checks, found = make(), Counter[str]()
        right = {path: check(path) for path, check in checks.items()}
        missed = []
        for number in range(count):
            path = list(checks)[number % len(checks)]
            data, chance = path.read_bytes(), random_of(seed, number)
            wrong = _damaged(data, chance)
            path.write_bytes(wrong)
            seen = _refused(checks[path], path, right[path])
            ok = seen is None or (seen and (path.name == writer.STATE or _verified(path)))
            path.write_bytes(data)
            found["cut" if len(wrong) < len(data) else "flips"] += 1
            found["found" if seen else "no_effect" if seen is None else "missed"] += 1
            if not ok:
                missed.append(f"{path} {number}")
        shutil.rmtree("flips")
        return {"damages": count, **found, **({"missed_at": missed[:20]} if missed else {})}

    found = result_of(work)
    return {"missed": 0, **found, "ok": "missed_at" not in found and found["found"] > 0}
