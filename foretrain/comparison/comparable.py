"""Whether two losses mean the same: vocabulary, tokenizer, text, unit. Where they do not, bits per byte may."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from foretrain.comparison.settings import CONTENTS
from foretrain.comparison.subject import Curve, Subject
from foretrain.monitoring.formats.log_format import LossUnit

Basis = LossUnit | Literal["not"]
# GPT-2's tokenizer has 50,257 tokens; padded rows are never the answer, so they change no loss.
_GPT2 = {50257, 50304}


def reasons(one: Subject, other: Subject) -> tuple[str, ...]:
    """What the two are known to have different of: vocab_size, tokenizer, dataset, unit. Unknown is not different."""
    found = []
    a, b = one.settings, other.settings
    sizes = {a.get("vocab_size"), b.get("vocab_size")} - {None}
    if len(sizes) > 1 and not sizes <= _GPT2:
        found.append("vocab_size")
    tokenizers = {a.get("tokenizer"), b.get("tokenizer")} - {None}
    if len(tokenizers) > 1:
        found.append("tokenizer")
    if _other_text(a, b):
        found.append("dataset")
    if one.train_unit != other.train_unit or (one.val_unit != other.val_unit and len(one.val) and len(other.val)):
        found.append("unit")
    return tuple(found)


def _other_text(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """By the contents where both know them, else by names."""
    for name in (CONTENTS, "dataset"):
        if one.get(name) is not None and other.get(name) is not None:
            return one[name] != other[name]
    return False


def brought_together(one: Subject, other: Subject) -> tuple[Subject, Subject, Basis, tuple[str, ...]]:
    """The two with losses that may be compared, in what unit, and what is different of them.

    Basis "not": bytes a token are not known of both, so nothing can be compared.
    """
    different = reasons(one, other)
    if not different:
        return one, other, one.val_unit, ()
    first, second = in_bits(one), in_bits(other)
    if first is None or second is None:
        return one, other, "not", different
    return first, second, "bits a byte", different


def in_bits(subject: Subject) -> Subject | None:
    """Losses in bits a byte of text; None where it is not known how many bytes a token has."""
    per_token = subject.bytes_per_token
    if subject.val_unit not in ("nats a token", "bits a byte"):
        return None
    if subject.val_unit == "bits a byte" and not per_token:
        return replace(subject, train=Curve())
    if not per_token:
        return None
    val = subject.val if subject.val_unit == "bits a byte" else _scaled(subject.val, per_token)
    return replace(
        subject, train=_scaled(subject.train, per_token), val=val, val_unit="bits a byte", train_unit="bits a byte"
    )


def _scaled(curve: Curve, per_token: float) -> Curve:
    return curve.model_copy(update={"losses": tuple(loss / math.log(2) / per_token for loss in curve.losses)})
