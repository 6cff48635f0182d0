"""A run's speed and its card over the hours, and when the card held its clock back: from what the run wrote down."""

import math
from collections.abc import Sequence
from typing import Any, Literal

from foretrain.base.records import Record
from foretrain.base.statistics import extremes
from foretrain.hardware.card import SLOWING

SignName = Literal["tokens_per_s", "mfu", "power_w", "temperature_c", "clock_ghz", "memory_bytes"]
SIGNS: tuple[SignName, ...] = ("mfu", "tokens_per_s", "power_w", "temperature_c", "clock_ghz", "memory_bytes")
MOST = 200  # points of a curve that are kept; its picture is small
MOST_SPANS = 60


class Sign(Record):
    """One curve: values at hours since the start. The unit stands in the name; mfu is a share of one."""

    name: SignName
    hours: tuple[float, ...]
    values: tuple[float, ...]


class Throttled(Record):
    """From one hour to another the card gave this reason for a lower clock."""

    reason: str
    from_hours: float
    to_hours: float


class VitalSigns(Record):
    """What there is. `on_card`: whether a card was there to be asked; a CPU has no such figures."""

    signs: tuple[Sign, ...]
    throttled: tuple[Throttled, ...]
    on_card: bool

    def sign(self, name: SignName) -> Sign | None:
        return next((sign for sign in self.signs if sign.name == name), None)


def of_lines(lines: Sequence[dict[str, Any]], *, on_card: bool) -> VitalSigns:
    """From lines with `elapsed_s` and any of the signs, `clock_reasons` among them; others are passed over."""
    points: dict[SignName, list[tuple[float, float]]] = {name: [] for name in SIGNS}
    reasons: list[tuple[float, list[str]]] = []
    last_hours = -1.0
    for line in lines:
        elapsed_s = _number(line.get("elapsed_s"))
        if elapsed_s is None or elapsed_s / 3600 < last_hours:
            continue
        last_hours = hours = elapsed_s / 3600
        for name in SIGNS:
            if (value := _number(line.get(name))) is not None:
                points[name].append((hours, value))
        given = line.get("clock_reasons")
        if isinstance(given, list):
            reasons.append((hours, [reason for reason in given if reason in SLOWING]))
    signs = tuple(_sign(name, found) for name, found in points.items() if len(found) > 1)
    return VitalSigns(signs=signs, throttled=_spans(reasons), on_card=on_card)


def of_samples(samples: Sequence[dict[str, Any]], card: int) -> list[dict[str, Any]]:
    """The samples of `foretrain watch` as lines for `of_lines`: one card's figures."""
    lines = []
    for sample in samples:
        cards = sample.get("cards")
        found = next((c for c in cards if isinstance(c, dict) and c.get("index") == card), None) if cards else None
        if found is not None:
            lines.append(
                {
                    "elapsed_s": sample.get("elapsed_s"), "power_w": found.get("power_w"),
                    "temperature_c": found.get("temperature_c"), "clock_ghz": found.get("clock_ghz"),
                    "clock_reasons": found.get("reasons"), "memory_bytes": found.get("ours_bytes"),
                }
            )  # fmt: skip
    return lines


def _number(value: Any) -> float | None:
    """A finite number; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _sign(name: SignName, found: list[tuple[float, float]]) -> Sign:
    kept = extremes([value for _, value in found], MOST)
    return Sign(name=name, hours=tuple(found[i][0] for i in kept), values=tuple(found[i][1] for i in kept))


def _spans(reasons: list[tuple[float, list[str]]]) -> tuple[Throttled, ...]:
    """Readings one after the other with the same reason are one span; of very many the longest are kept."""
    spans: list[Throttled] = []
    for reason in SLOWING:
        start, before = None, 0.0
        for hours, given in [*reasons, (reasons[-1][0] if reasons else 0.0, [])]:
            if reason in given and start is None:
                start = before  # what a line says holds since the line before it
            elif reason not in given and start is not None:
                spans.append(Throttled(reason=reason, from_hours=start, to_hours=before))
                start = None
            before = hours
    spans.sort(key=lambda span: span.from_hours - span.to_hours)
    return tuple(sorted(spans[:MOST_SPANS], key=lambda span: span.from_hours))
