"""What people type for limits and prices: durations, energy, money, counts. Text in, base units out.

Every parser raises ValueError for what it cannot read; the command line turns that into one sentence.
"""

import math
import re
from typing import Literal

from foretrain.base.records import Record

LimitKind = Literal["time", "energy", "money", "tokens"]

_NUMBER = r"[0-9][0-9_]*(?:\.[0-9]+)?"
_SECONDS = {
    "d": 86400, "day": 86400, "days": 86400, "h": 3600, "hour": 3600, "hours": 3600,
    "m": 60, "min": 60, "mins": 60, "minutes": 60, "s": 1, "sec": 1, "seconds": 1,
}  # fmt: skip
_DURATION_PART = re.compile(rf"\s*({_NUMBER})\s*([a-z]+)", re.IGNORECASE)
_JOULES = {"wh": 3600.0, "kwh": 3.6e6, "mwh": 3.6e9}
_ENERGY = re.compile(rf"\s*({_NUMBER})\s*([kM]?Wh)\s*", re.IGNORECASE)
_COUNT = re.compile(rf"\s*({_NUMBER}(?:e[0-9]{{1,2}})?)\s*([kMBT]?)\s*", re.IGNORECASE)
_SYMBOLS = {"€": "EUR", "$": "USD", "£": "GBP"}
_CURRENCY = r"[€$£]|[A-Za-z]{3}"
_MONEY = re.compile(rf"\s*(?:({_CURRENCY})\s*({_NUMBER})|({_NUMBER})\s*({_CURRENCY})?)\s*")

# What no single run takes; beyond it a unit was mistyped.
MOST_S, MOST_J, MOST_MONEY, MOST_TOKENS = 100 * 365.25 * 86400, 3.6e15, 1e9, 1e16


class Limit(Record):
    """What a run may take, in base units: seconds, joules, `currency`, tokens. `text` is as it was typed."""

    kind: LimitKind
    amount: float
    text: str
    currency: str = ""

    @property
    def as_option(self) -> str:
        """'--within 12h', for a sentence about what was typed."""
        return f"{'--tokens' if self.kind == 'tokens' else '--within'} {self.text[:80]}"


class Money(Record):
    """An amount and the ISO code of its currency, '' where none was typed."""

    amount: float
    currency: str


def _bounded(value: float, most: float, text: str) -> float:
    if not math.isfinite(value) or not 0 < value <= most:
        raise ValueError(f"{text!r} is not above zero, or more than can be meant")
    return value


def _number(text: str) -> float:
    return float(text.replace("_", ""))


def currency_code(text: str) -> str:
    """'€' and 'eur' are EUR; a code is taken as it is."""
    return _SYMBOLS.get(text, text.upper())


def parse_duration(text: str) -> float:
    """Seconds of '12h', '90m', '30min', '1d12h', '1.5 h'; each unit once, the largest first."""
    total, position, last = 0.0, 0, math.inf
    while position < len(text.rstrip()):
        match = _DURATION_PART.match(text, position)
        seconds = _SECONDS.get(match.group(2).lower()) if match else None
        if match is None or seconds is None or seconds >= last:
            raise ValueError(f"{text!r} is not a duration such as 12h, 90m or 1d12h")
        total += _number(match.group(1)) * seconds
        position, last = match.end(), seconds
    return _bounded(total, MOST_S, text)


def parse_energy(text: str) -> float:
    """Joules of '3kWh' or '500 Wh'."""
    match = _ENERGY.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not an energy such as 3kWh")
    return _bounded(_number(match.group(1)) * _JOULES[match.group(2).lower()], MOST_J, text)


def parse_count(text: str) -> int:
    """A whole number of '10B', '3.68 B', '500M', '1e9' or '1_000_000'; B is 1e9, T is 1e12."""
    match = _COUNT.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a count such as 10B, 500M or 1e9")
    factor = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}[match.group(2).lower()]
    return max(1, round(_bounded(_number(match.group(1)) * factor, MOST_TOKENS, text)))


def parse_money(text: str) -> Money:
    """'5EUR', '5 eur', '$5', '€0.35', or '5' without a currency."""
    match = _MONEY.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not an amount such as 5EUR or $5")
    amount = _bounded(_number(match.group(2) or match.group(3)), MOST_MONEY, text)
    return Money(amount=amount, currency=currency_code(match.group(1) or match.group(4) or ""))


def parse_limit(text: str) -> Limit:
    """A limit of time ('12h'), energy ('3kWh') or money ('5EUR'); its unit says which."""
    if _ENERGY.fullmatch(text):
        return Limit(kind="energy", amount=parse_energy(text), text=text)
    money = _MONEY.fullmatch(text)
    # Of three letters, 'min' and 'day' are time and not a currency.
    code = (money.group(1) or money.group(4) or "") if money else ""
    if code and code.lower() not in _SECONDS:
        amount = parse_money(text)
        return Limit(kind="money", amount=amount.amount, text=text, currency=amount.currency)
    return Limit(kind="time", amount=parse_duration(text), text=text)


def parse_price(text: str) -> Money:
    """What an hour costs: '0.35/h', '0.35', '$0.35/h', '0.35 EUR/h'."""
    price = parse_money(re.sub(r"\s*/\s*(h|hr|hour)\s*$", "", text, flags=re.IGNORECASE))
    return Money(amount=_bounded(price.amount, 1e6, text), currency=price.currency)
