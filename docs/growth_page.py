"""The pictures and tables of docs/growth.md, from the result of benchmarks/growth.py."""

import math
from collections.abc import Callable
from html import escape
from statistics import median
from typing import NamedTuple

from results import RESULTS, result

WIDTH, HEIGHT, ACROSS = 250, 190, 3
LEFT, RIGHT, TOP, BOTTOM = 54, 12, 26, 30
QUIET = 0.1  # of the cores, that other programs may use
NOT_YET = "Not measured on a quiet machine yet: `python benchmarks/tool_speed.py`."
TEXT = "#767676"  # four and a half to one against white, and against black
MEASURED, THEORY = "#c2410c", "#3b82c4"
UNITS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
STEP = ("layers", "width", "context", "batch", "vocabulary")
TOOLS = (
    ("plan", "seconds", "plan: seconds", "`plan`"),
    ("prepare", "seconds", "prepare: seconds", "`prepare`"),
    ("prepare", "peak_bytes", "prepare: peak memory", "`prepare`, memory"),
    ("resume", "seconds", "resume: seconds", "`train --resume auto`"),
    ("resume", "load_s", "resume: loading alone", "loading alone"),
)
AXES = {
    "layers": "n_layer", "width": "n_embd", "context": "block_size", "batch": "batch_size", "vocabulary": "vocab_size",
    "plan": "parameters", "prepare": "bytes of text", "resume": "bytes of the checkpoint",
}  # fmt: skip


class Panel(NamedTuple):
    """One picture in log-log: measured points with their range, and the line of theory where there is one."""

    title: str
    axis: str
    xs: list[float]
    measured: list[list[float]]
    theory: list[float]
    scaled: bool  # theory is in other units: its line is moved to the middle of what was measured
    said: Callable[[float], str]


def seconds(value: float) -> str:
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"


def size(value: float) -> str:
    return f"{value / 2**30:.3g} GiB" if value >= 2**30 else f"{value / 2**20:.3g} MiB"


def number(value: float) -> str:
    if value < 100_000:
        return f"{value:,.0f}"
    for unit, letter in UNITS:
        if value >= unit:
            return f"{value / unit:.3g}{letter}"
    return f"{value:g}"


def panel(part: str, name: str, title: str) -> Panel:
    found = result("growth")["parts"][part]
    points, theory = found["points"], found["theory"][name]
    said = size if name == "peak_bytes" else seconds
    return Panel(
        title, AXES[part], [point["x"] for point in points], [point[name] for point in points],
        [point[theory] for point in points], name != "peak_bytes", said,
    )  # fmt: skip


# -- drawing -----------------------------------------------------------------------------------------------


def _text(x: float, y: float, text: str, anchor: str = "start", more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{TEXT}" text-anchor="{anchor}"{more}>{escape(text)}</text>'


def _middle(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def _drawn(shown: Panel, left: float, top: float) -> str:
    """One panel; its plot fills the place with a tenth of room on each side."""
    middles = [median(values) for values in shown.measured]
    factor = _middle(middles) / _middle(shown.theory) if shown.scaled else 1.0
    theory = [value * factor for value in shown.theory]
    everything = [*(v for values in shown.measured for v in values), *theory]
    low, high = math.log(min(everything)), math.log(max(everything))
    room = max(0.1 * (high - low), 0.2)
    low, high = low - room, high + room
    first, last = math.log(shown.xs[0]), math.log(shown.xs[-1])

    def x(value: float) -> float:
        inside = WIDTH - LEFT - RIGHT - 16
        return left + LEFT + 8 + (math.log(value) - first) / (last - first) * inside

    def y(value: float) -> float:
        return top + TOP + (high - math.log(value)) / (high - low) * (HEIGHT - TOP - BOTTOM)

    right, bottom = left + WIDTH - RIGHT, top + HEIGHT - BOTTOM
    parts = [_text(left + LEFT, top + 15, shown.title, more=' font-weight="600"')]
    parts.append(f'<path d="M{left + LEFT} {top + TOP}V{bottom}H{right}" fill="none" stroke="{TEXT}"/>')
    for value in (shown.xs[0], shown.xs[2], shown.xs[-1]):
        parts.append(_text(x(value), bottom + 13, number(value), "middle"))
    parts.append(_text((left + LEFT + right) / 2, bottom + 26, shown.axis, "middle"))
    for value in {middles[0], middles[-1]} if high - low > 0.6 else {middles[-1]}:
        parts.append(_text(left + LEFT - 4, y(value) + 4, shown.said(value), "end"))
        parts.append(f'<path d="M{left + LEFT} {y(value):.1f}H{right}" stroke="{TEXT}" stroke-opacity=".2"/>')
    line = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in zip(shown.xs, theory, strict=True))
    parts.append(f'<polyline points="{line}" fill="none" stroke="{THEORY}" stroke-width="2" stroke-dasharray="5 4"/>')
    for at, values in zip(shown.xs, shown.measured, strict=True):
        parts.append(f'<path d="M{x(at):.1f} {y(max(values)):.1f}V{y(min(values)):.1f}" stroke="{MEASURED}"/>')
        parts.append(f'<circle cx="{x(at):.1f}" cy="{y(median(values)):.1f}" r="3.5" fill="{MEASURED}"/>')
    return "".join(parts)


def _svg(title: str, panels: list[Panel], theory: str) -> str:
    rows = -(-len(panels) // ACROSS)
    height = rows * HEIGHT + 24
    drawn = "".join(_drawn(each, i % ACROSS * WIDTH, i // ACROSS * HEIGHT) for i, each in enumerate(panels))
    at = rows * HEIGHT + 14
    legend = (
        f'<circle cx="{LEFT + 6}" cy="{at - 4}" r="3.5" fill="{MEASURED}"/>'
        + _text(LEFT + 16, at, "measured: median and range")
        + f'<path d="M{LEFT + 200} {at - 4}h26" stroke="{THEORY}" stroke-width="2" stroke-dasharray="5 4"/>'
        + _text(LEFT + 232, at, theory)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {ACROSS * WIDTH} {height}" role="img" '
        f'aria-label="{escape(title, quote=True)}" font-family="system-ui, sans-serif" font-size="11">'
        f"{drawn}{legend}</svg>\n"
    )


def pictures() -> dict[str, str]:
    """SVG files by name, readable on white and on black."""
    steps = [panel(axis, "seconds", f"{axis}: seconds a step") for axis in STEP]
    peaks = [panel(axis, "peak_bytes", f"{axis}: peak memory") for axis in STEP]
    tools = [panel(part, name, title) for part, name, title, _ in TOOLS if part in result("growth")["parts"]]
    return {
        "growth-step.svg": _svg("Seconds of a step over five sizes", steps, "FLOPs of the plan, moved to the middle"),
        "growth-memory.svg": _svg("Peak memory of a step over five sizes", peaks, "the estimate"),
        "growth-tools.svg": _svg("Seconds and memory of the tools", tools, "theory; times moved to the middle"),
    }


# -- tables ------------------------------------------------------------------------------------------------


def _table(rows: list[tuple[str, str, str]]) -> str:
    """Slopes of (part, quantity, name)."""
    lines = [
        "| | from, to | measured | slope (rounds) | theory | between the largest two | theory there |",
        "| --- | --- | --- | --- | ---: | ---: | ---: |",
    ]
    for part, name, label in rows:
        found = result("growth")["parts"][part]
        s, points = found["slopes"][name], found["points"]
        said = size if name == "peak_bytes" else seconds
        first, last = points[0], points[-1]
        rounds = f" ({s['low']:.2f} to {s['high']:.2f})" if len(first[name]) > 1 else ""
        lines.append(
            f"| {label} | {number(first['x'])}, {number(last['x'])} {AXES[part]} | "
            f"{said(median(first[name]))}, {said(median(last[name]))} | {s['measured']:.2f}{rounds} | "
            f"{s['theory']:.2f} | {s['measured_at_end']:.2f} | {s['theory_at_end']:.2f} |"
        )
    return "\n".join(lines).replace("-0.00", "0.00")


def steps() -> str:
    return _table([(axis, "seconds", axis) for axis in STEP])


def memory() -> str:
    points = [point for axis in STEP for point in result("growth")["parts"][axis]["points"]]
    furthest = max(abs(point["estimated_bytes"] - median(point["peak_bytes"])) for point in points)
    rows = _table([(axis, "peak_bytes", axis) for axis in STEP])
    return f"{rows}\n\nOf {len(points)} points the furthest estimate is {furthest:,.0f} bytes from what was measured."


def tools() -> str:
    """Those that are measured, and which are not."""
    found = result("growth")["parts"]
    shown = _table([(part, name, label) for part, name, _, label in TOOLS if part in found])
    missing = list(dict.fromkeys(part for part, *_ in TOOLS if part not in found))
    if missing:
        parts = " ".join(missing)
        how = f"`python benchmarks/growth.py --only {parts}`"
        shown += f"\n\nNot measured on a quiet machine yet: {', '.join(missing)} ({how})."
    return shown


def machine() -> str:
    """Where and when, and how many rounds were thrown away."""
    found = result("growth")
    parts = found["parts"].values()
    rounds, disturbed = sum(part["rounds"] for part in parts), sum(part["disturbed"] for part in parts)
    quiet = [name for name, part in found["parts"].items() if part.get("others_share", 0) <= QUIET]
    busy = [f"{name} {part['others_share']:.0%}" for name, part in found["parts"].items() if name not in quiet]
    beside = f"; other programs used at most, of both cores: {', '.join(busy)}" if busy else ""
    return (
        f"{found['machine']['cpu']}, torch {found['versions']['torch']}, {found['date']}: {rounds} rounds, "
        f"{disturbed} more thrown away because other programs used a tenth of the cores{beside} "
        "(`python benchmarks/growth.py`)."
    )


def speed() -> str:
    """What was asked of the tools, and what they take (benchmarks/tool_speed.py), where the machine was quiet."""
    if not (RESULTS / "tool_speed.json").is_file():
        return NOT_YET
    found = result("tool_speed")
    quiet = [row for row in found["figures"].values() if row["others_share"] <= QUIET]
    if not quiet:
        return NOT_YET
    lines = ["| | asked | median | range | runs | reached |", "| --- | ---: | ---: | --- | ---: | --- |"]
    for row in quiet:
        reached = "yes" if row["median_s"] <= row["asked_s"] else "no"
        lines.append(
            f"| {row['name']} | {seconds(row['asked_s'])} | {seconds(row['median_s'])} | {seconds(row['low_s'])} to "
            f"{seconds(row['high_s'])} | {row['runs']} | {reached} |"
        )
    lines += ["", f"{found['machine']['cpu']}, torch {found['versions']['torch']}, {found['date']} "
              "(`python benchmarks/tool_speed.py`)."]  # fmt: skip
    return "\n".join(lines)
