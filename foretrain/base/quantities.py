"""Parsers of quantities, text in, base units out. All raise ValueError; `read` makes that the sentence of an option."""

import math
import re
from collections.abc import Callable, Mapping
from typing import Literal, TypeVar

from foretrain.base.errors import UserError
from foretrain.base.records import Record
from foretrain.base.units import BYTE_UNITS, MIB

T = TypeVar("T")
LimitKind = Literal["time", "energy", "money", "tokens"]

_NUMBER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]*)?|[0-9][0-9_]*(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?"
_QUANTITY = re.compile(rf"\s*({_NUMBER})\s*([A-Za-z]*)\s*")
_SECONDS = {
    "d": 86400, "day": 86400, "days": 86400, "h": 3600, "hour": 3600, "hours": 3600,
    "m": 60, "min": 60, "mins": 60, "minutes": 60, "s": 1, "sec": 1, "seconds": 1, "ms": 1e-3, "us": 1e-6,
}  # fmt: skip
_JOULES = {"wh": 3600.0, "kwh": 3.6e6, "mwh": 3.6e9}
_COUNTS = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_PER_S = re.compile(r"\s*(?:tok|tokens)?/s(?:ec)?\s*$", re.IGNORECASE)
_PER_HOUR = re.compile(r"\s*/\s*(h|hr|hour)\s*$", re.IGNORECASE)
_SYMBOLS = {"€": "EUR", "$": "USD", "£": "GBP"}
_CURRENCY = r"[€$£]|[A-Za-z]{3}"
_MONEY = re.compile(rf"\s*(?:({_CURRENCY})\s*({_NUMBER})|({_NUMBER})\s*({_CURRENCY})?)\s*")

# More than any run takes: a mistyped unit.
MOST_S, MOST_J, MOST_MONEY, MOST_TOKENS = 100 * 365.25 * 86400, 3.6e15, 1e9, 1e16


class Limit(Record):
    kind: LimitKind
    amount: float
    text: str
    currency: str = ""

    @property
    def as_option(self) -> str:
        return f"{'--tokens' if self.kind == 'tokens' else '--within'} {self.text[:80]}"


class Money(Record):
    amount: float
    currency: str


def read(parse: Callable[[str], T], text: str, error: UserError) -> T:
    try:
        return parse(text)
    except ValueError:
        raise error from None


def _number(text: str) -> float:
    return float(text.replace("_", "").replace(",", ""))


def _quantity(text: str, units: Mapping[str, float], what: str) -> float:
    match = _QUANTITY.fullmatch(text)
    factor = units.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ValueError(f"{text!r} is not {what}")
    return _number(match[1]) * factor


def _bounded(value: float, most: float, text: str) -> float:
    if not math.isfinite(value) or not 0 < value <= most:
        raise ValueError(f"{text!r} is not above zero, or more than can be meant")
    return value


def parse_bytes(text: str) -> int:
    """Parse '2.1GB', '10 GiB', '786MiB' or a plain number of bytes from a MiB on."""
    size = _quantity(text, BYTE_UNITS, "a size such as 10GiB, 2.1GB or 786MiB")
    if not text.strip()[-1].isalpha() and 0 < size < MIB:  # somebody meant 2 as gigabytes, not as two bytes
        raise ValueError(f"{text!r} is not a size such as 10GiB: it has no unit")
    if not size <= 1e18:
        raise ValueError(f"{text!r} is not a possible size")
    return round(size)


def parse_rate(text: str) -> float:
    """Parse '134k', '1.2M', '134,433' or '39000 tok/s' into tokens per second."""
    return _quantity(_PER_S.sub("", text), {"": 1, "k": 1e3, "m": 1e6, "g": 1e9}, "a rate such as 134k")


def parse_seconds(text: str) -> float:
    """Parse '3.9', '3900ms', '2min' or another duration."""
    try:
        return _quantity(text, {"": 1}, "a time such as 3.9s")
    except ValueError:
        return parse_duration(text)


def parse_clock_ghz(text: str) -> float:
    """Parse '2.63GHz' or '2630 MHz'; a number without a unit is refused."""
    return _quantity(text, {"ghz": 1, "mhz": 1e-3}, "a clock such as 2.63GHz")


def currency_code(text: str) -> str:
    return _SYMBOLS.get(text, text.upper())


def parse_duration(text: str) -> float:
    """Parse '12h', '90m', '30min', '1d12h', '1.5 h', '500ms'; each unit once, the largest first."""
    total, position, last = 0.0, 0, math.inf
    while position < len(text.rstrip()):
        match = _QUANTITY.match(text, position)
        seconds = _SECONDS.get(match[2].lower()) if match else None
        if match is None or seconds is None or seconds >= last:
            raise ValueError(f"{text!r} is not a duration such as 12h, 90m or 1d12h")
        total += _number(match[1]) * seconds
        position, last = match.end(), seconds
    return _bounded(total, MOST_S, text)


def parse_energy(text: str) -> float:
    return _bounded(_quantity(text, _JOULES, "an energy such as 3kWh"), MOST_J, text)


def parse_count(text: str) -> int:
    """Parse '10B', '3.68 B', '500M', '1e9' or '1_000_000'; B is 1e9, T is 1e12."""
    return max(1, round(_bounded(_quantity(text, _COUNTS, "a count such as 10B, 500M or 1e9"), MOST_TOKENS, text)))


def parse_money(text: str) -> Money:
    """Parse '5EUR', '5 eur', '$5', '€0.35', or '5' without a currency."""
    match = _MONEY.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not an amount such as 5EUR or $5")
    amount = _bounded(_number(match.group(2) or match.group(3)), MOST_MONEY, text)
    return Money(amount=amount, currency=currency_code(match.group(1) or match.group(4) or ""))


def parse_limit(text: str) -> Limit:
    """Parse a limit of time ('12h'), energy ('3kWh') or money ('5EUR'); its unit says which."""
    quantity = _QUANTITY.fullmatch(text)
    if quantity and quantity[2].lower() in _JOULES:
        return Limit(kind="energy", amount=parse_energy(text), text=text)
    money = _MONEY.fullmatch(text)
    # Of three letters, 'min' and 'day' are time and not a currency.
    code = (money.group(1) or money.group(4) or "") if money else ""
    if code and code.lower() not in _SECONDS:
        amount = parse_money(text)
        return Limit(kind="money", amount=amount.amount, text=text, currency=amount.currency)
    return Limit(kind="time", amount=parse_duration(text), text=text)


def parse_price(text: str) -> Money:
    """Parse the price of an hour: '0.35/h', '0.35', '$0.35/h', '0.35 EUR/h'."""
    price = parse_money(_PER_HOUR.sub("", text))
    return Money(amount=_bounded(price.amount, 1e6, text), currency=price.currency)
