"""Whether two losses mean the same: vocabulary, tokenizer, text, unit. Where they do not, bits per byte may."""

import math
from dataclasses import replace
from typing import Literal

from foretrain.advise.subject import Curve, Subject

Basis = Literal["nats a token", "bits a byte", "not"]
# GPT-2's tokenizer has 50,257 tokens; padded rows are never the answer, so they change no loss.
_GPT2 = {50257, 50304}


def reasons(one: Subject, other: Subject) -> tuple[str, ...]:
    """What the two are known to have different of: vocab_size, tokenizer, dataset, unit. Unknown is not different."""
    found = []
    a, b = one.settings, other.settings
    sizes = {a.get("vocab_size"), b.get("vocab_size")} - {None}
    if len(sizes) > 1 and not sizes <= _GPT2:
        found.append("vocab_size")
    built_in = all(s.get("dataset", "").startswith("python-stdlib") for s in (a, b))
    tokenizers = {a.get("tokenizer"), b.get("tokenizer")} - {None}
    if built_in and len(tokenizers) > 1:
        found.append("tokenizer")
    if _other_text(a.get("dataset"), b.get("dataset")):
        found.append("dataset")
    if one.val_unit != other.val_unit and len(one.val) and len(other.val):
        found.append("unit")
    return tuple(found)


def _other_text(one: str | None, other: str | None) -> bool:
    """By fingerprints where both have one, else by names; a config has a name alone."""
    if one is None or other is None:
        return False
    (name, _, mark), (other_name, _, other_mark) = one.partition(" ("), other.partition(" (")
    return mark != other_mark if mark and other_mark else name != other_name


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
