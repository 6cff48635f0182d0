"""What `dataset = …` means: a folder, a name under data/, an address such as s3://bucket/set, or a mixture. No numpy.

A mixture is a TOML file that names datasets and weights:

    [weights]
    fineweb-edu = 0.7
    "../code/python" = 0.3

A name in it is a folder beside the file, else what it would be as `dataset` itself. Weights are shares of the rows
that a step sees, so of its tokens too; they need not sum to one.
"""

import hashlib
import math
from pathlib import Path
from typing import Any

from foretrain.base.bugs import without_password
from foretrain.base.errors import UserError
from foretrain.base.files import parse_toml, read_text
from foretrain.data.dataset import DatasetInfo, Part, find, read_info
from foretrain.data.token_layout import is_dataset

MIX_SUFFIX = ".toml"
_MAX_MIX_BYTES, MAX_PARTS = 2**20, 1000


def no_dataset(name: str) -> UserError:
    return UserError("data.no_dataset_at" if Path(name).is_absolute() else "data.no_dataset", name=name)


def is_remote(name: str) -> bool:
    return "://" in name


def locate(name: str) -> DatasetInfo | None:
    """Return the dataset of this name. Raises UserError 'data.…' for one that cannot be used."""
    if is_remote(name):
        from foretrain.data.remote import read_remote

        return read_remote(without_password(name))
    if name.endswith(MIX_SUFFIX) and Path(name).is_file():
        return read_mix(Path(name))
    path = find(name)
    return None if path is None else read_info(path)


def read_mix(path: Path) -> DatasetInfo:
    """Read the mixture in a TOML file, with its parts found and compared. Raises UserError 'data.…'."""
    parts = {}
    for name, weight in read_weights(path).items():
        beside = path.parent / name
        own = not is_remote(name) and is_dataset(beside)
        if not own and name.endswith(MIX_SUFFIX) and Path(name).is_file():  # which may name this one
            raise UserError("data.bad_mix", path=str(path), reason=f"{name} is a mixture itself")
        found = read_info(beside) if own else locate(name)
        if found is None:
            raise UserError("data.no_part", path=str(path), name=name)
        parts[name] = (found, weight)
    return make_mix(path.stem, str(path), parts)


def read_weights(path: Path) -> dict[str, float]:
    """Read the names and weights of a mixture's file. Raises UserError 'data.bad_mix'."""

    def bad(reason: str) -> UserError:
        return UserError("data.bad_mix", path=str(path), reason=reason)

    try:
        table = parse_toml(read_text(path, _MAX_MIX_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise bad(str(error).splitlines()[0][:200]) from None
    weights = table.pop("weights", None)
    if table:
        raise bad(f"{', '.join(sorted(table))[:80]} is not known; it has one table, [weights]")
    if not isinstance(weights, dict) or not weights:
        raise bad('it has no [weights], such as "fineweb-edu" = 0.7')
    if len(weights) > MAX_PARTS:
        raise bad(f"it has {len(weights):,} parts, and {MAX_PARTS:,} are the most")
    return {name: _weight(name, value, bad) for name, value in weights.items()}


def _weight(name: str, value: Any, bad: Any) -> float:
    if type(value) not in (int, float) or not 1e-6 <= value <= 1e12 or not math.isfinite(value):
        shown = repr(value)[:40] if isinstance(value, int | float | str) else f"a {type(value).__name__}"
        raise bad(f"the weight of {name[:80]} is {shown}, not a number from 0.000001 to 1e12")
    return float(value)


def make_mix(name: str, path: str, found: dict[str, tuple[DatasetInfo, float]]) -> DatasetInfo:
    infos, total = [info for info, _ in found.values()], sum(weight for _, weight in found.values())
    first = infos[0]
    for other in infos[1:]:
        for key in _compared(first, other):
            own, others = getattr(first, key), getattr(other, key)
            if own != others:
                raise UserError(
                    "data.mix_differs", path=path, key=key, first=first.name, own=str(own), other=other.name,
                    others=str(others),
                )  # fmt: skip
    parts = tuple(Part(weight=weight / total, dataset=info) for info, weight in found.values())
    digest = hashlib.sha256("".join(f"{p.dataset.fingerprint}:{p.weight!r};" for p in parts).encode())
    ids = [info.max_id for info in infos]
    return DatasetInfo(
        name=name, path=path, dtype=max((info.dtype for info in infos), key=lambda dtype: dtype == "uint32"),
        train_tokens=sum(info.train_tokens for info in infos), val_tokens=sum(info.val_tokens for info in infos),
        vocab_size=next((info.vocab_size for info in infos if info.vocab_size is not None), None),
        tokenizer=first.tokenizer, tokenizer_sha256=first.tokenizer_sha256,
        fingerprint=digest.hexdigest()[:32],
        max_id=None if None in ids else max(id for id in ids if id is not None), format="mix", parts=parts,
    )  # fmt: skip


def _compared(first: DatasetInfo, other: DatasetInfo) -> tuple[str, ...]:
    """Return what must match. The digest decides: a trained BPE has another name."""
    digests = first.tokenizer_sha256, other.tokenizer_sha256
    keys: tuple[str, ...] = ("tokenizer",)
    if None not in digests:
        keys = ("tokenizer_sha256",) if digests[0] == digests[1] else ("tokenizer", "tokenizer_sha256")
    known = first.vocab_size is not None and other.vocab_size is not None
    # llm.c's files name the tokenizer, without its digest or number of ids.
    return keys if first.tokenizer is not None and not known else (*keys, "vocab_size")


def mix_text(weights: dict[str, float]) -> str:
    quoted = {'"' + name.replace("\\", "\\\\").replace('"', '\\"') + '"': weight for name, weight in weights.items()}
    return "[weights]\n" + "".join(f"{name} = {weight!r}\n" for name, weight in quoted.items())
