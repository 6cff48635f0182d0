"""Finds what differs between two results of a case, leaving out what two runs of the same code may differ in."""

import difflib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

MISSING = "(nothing)"


@dataclass(frozen=True)
class Difference:
    """One place at which a case gave something else. `path`: such as steps[0].stdout.memory[1].verdict or
    steps[0].stdout:12 for a line of a text."""

    case: str
    path: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.case}: {self.path}: {self.old} -> {self.new}"


@dataclass(frozen=True)
class Declared:
    """A change that was meant. The patterns are searched in the case's name, the path, and the old and new text.

    `figures`: nothing but figures may differ, each by at most this share of itself (and one of its last digit).
    """

    case: str
    path: str
    reason: str
    old: str = ""
    new: str = ""
    figures: float | None = None

    def allows(self, found: Difference) -> bool:
        pairs = ((self.case, found.case), (self.path, found.path), (self.old, found.old), (self.new, found.new))
        if not all(re.search(pattern, text) for pattern, text in pairs):
            return False
        return self.figures is None or shifted(found.old, found.new, self.figures)


NUMBER = re.compile(r"\d[\d,]*(\.\d+)?(e[+-]?\d{1,2}(?![\w.]))?")


def shifted(old: str, new: str, share: float) -> bool:
    """Whether two texts differ in figures only, each by at most a share of itself and one of its last digit."""
    if NUMBER.sub("#", old) != NUMBER.sub("#", new):
        return False
    return all(
        abs(_value(a) - _value(b)) <= share * max(_value(a), _value(b)) + max(_last_digit(a), _last_digit(b)) * 1.01
        for a, b in zip(*([m[0] for m in NUMBER.finditer(text)] for text in (old, new)), strict=True)
    )


def _value(figure: str) -> float:
    return float(figure.replace(",", ""))


def _last_digit(figure: str) -> float:
    mantissa, _, exponent = figure.partition("e")
    return 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))


class Varies(NamedTuple):
    """Text that differs between two runs of the same code, what stands for it, and why."""

    pattern: str
    stands: str
    reason: str


VARIES = (
    Varies(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d+)?)?(Z|[+-]\d\d:\d\d)?( UTC)?", "<date>", "when it ran"),
    Varies(r"127\.0\.0\.1:\d+", "127.0.0.1:<port>", "the page's port is a free one"),
    Varies(r"(\d+/\d+) · \d+ s$", r"\1 · <seconds>", "how far a trace is, and for how long it has run"),
)
# Where a case is `measured`, figures stay only under these keys, and the digits of texts are masked: everything else
# there is a time, a speed or a memory of this machine, and differs from run to run.
REPEATS = re.compile(
    r"(loss|learning_rate|grad_norm|tokens|documents|step|steps|steps_done|n_params|parameters|best|bytes_per_token|"
    r"seed|vocab_size|ids|position|counter|epochs?|weight|shards?|schema|sha256|size)$"
)
# Digests of files that hold times; those of weights and moments are compared.
DIGESTS = {"state_sha256", "state.json"}
OTHERS = "machine"  # what other programs used of it: nothing on a quiet machine
SAMPLES = {"w/samples.jsonl": 1}  # one a fifth of a second: their number varies
FIGURE = re.compile(
    r"[\d.,]+( ?([µm]?s|min|h|[KMGT]?i?B(/s)?|[kMGT](?= tok))\b)?"
)  # with its unit: 900 KiB/s are 1.1 MiB/s next time
# Live lines come after so many seconds, processes may end before they are counted, and the rest is said on a machine
# with other work.
NOISE_EVENTS = {"machine_busy", "machine_quiet", "threads_sleep"}  # the same, in a run's record
NOISE = re.compile(
    r"^(step +[\d,]+/[\d,]+ +loss | +host memory|busy machine|the machine is quiet again|the run's threads now)"
)


def differences(old: dict[str, Any], new: dict[str, Any], *, measured: bool) -> list[Difference]:
    name = old["case"]
    before, after = (_readable(result, measured=measured) for result in (old, new))
    return [Difference(name, path, *sides) for path, *sides in _walk(before, after, "")]


def judged(found: list[Difference], declared: tuple[Declared, ...]) -> tuple[list[Difference], list[Declared]]:
    """The differences that no declaration allows, and the declarations that allow none."""
    left, used = [], set()
    for one in found:
        allowing = [declaration for declaration in declared if declaration.allows(one)]
        used.update(allowing)
        left += [] if allowing else [one]
    return left, [declaration for declaration in declared if declaration not in used]


def _readable(result: dict[str, Any], *, measured: bool) -> dict[str, Any]:
    """A result with its texts taken apart (JSON as values, the rest as lines) and what varies replaced."""
    folder = result["folder"]
    # Lines may be wrapped within a path.
    path = re.compile(r"\s*".join(map(re.escape, folder))) if folder else None

    def told(text: str) -> str:
        if path is not None:
            text = path.sub("<folder>", text)
        for varying in VARIES:
            text = re.sub(varying.pattern, varying.stands, text)
        return text

    def parsed(text: str, name: str = "") -> Any:
        text = told(text)
        if text.lstrip()[:1] in ("{", "["):
            try:
                if name.endswith(".jsonl"):
                    records = [_figures(json.loads(line), measured) for line in text.splitlines()]
                    kept = [one for one in records if one.get("id") not in NOISE_EVENTS]
                    return _in_order(kept)[: SAMPLES.get(name)]
                return _figures(json.loads(text), measured)
            except ValueError:
                pass
        if name.endswith(".html"):
            text = text.replace("<", "\n<")
        lines = [line.rstrip() for line in text.splitlines()]
        if measured:
            lines = _in_order([FIGURE.sub("#", line) for line in lines if not NOISE.match(line)])
        return _Lines(lines)

    def values(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: values(part) for key, part in value.items()}
        if isinstance(value, list):
            return [values(part) for part in value]
        return told(value) if isinstance(value, str) else value

    steps = []
    for step in result["steps"]:
        shown = {key: parsed(text) if key in ("stdout", "stderr") else values(text) for key, text in step.items()}
        steps.append(_figures(shown, measured) if "answers" in shown else shown)
    written = {}
    for name, content in result["written"].items():
        text = content.get("text")
        shown = None if text is None else parsed(text, name)
        if measured and shown == [] and text:  # a run on a quiet machine has no such file
            continue
        written[name] = content if shown is None else {"text": shown, "rights": content["rights"]}
    return {"steps": steps, "written": written, "removed": result["removed"]}


def _in_order(lines: list[Any]) -> list[Any]:
    """What tells of a saved checkpoint last: another thread saves, and tells of it when it is done."""
    return sorted(
        lines, key=lambda one: one.get("id") == "saved" if isinstance(one, dict) else one.startswith("saved ")
    )


class _Lines(list[str]):
    """A text, line by line."""


def _figures(value: Any, measured: bool, key: str = "") -> Any:
    if not measured:
        return value
    if key in DIGESTS:
        return "<digest>"
    if key == OTHERS:
        return "<machine>"
    if isinstance(value, dict):
        if key == "config":  # what was asked for
            return value
        return {name: _figures(part, measured, name) for name, part in value.items()}
    if isinstance(value, list):
        return [_figures(part, measured, key) for part in value]
    if isinstance(value, (int, float)) and not isinstance(value, bool) and not REPEATS.search(key):
        return "<figure>"
    return value


def _walk(old: Any, new: Any, path: str) -> Iterator[tuple[str, str, str]]:
    if isinstance(old, _Lines) and isinstance(new, _Lines):
        yield from _lines(old, new, path)
    elif isinstance(old, dict) and isinstance(new, dict):
        if list(old) != list(new) and set(old) == set(new):
            yield f"{path} (order)", ", ".join(old)[:200], ", ".join(new)[:200]
        for key in [*old, *(key for key in new if key not in old)]:
            yield from _walk(old.get(key, MISSING), new.get(key, MISSING), f"{path}.{key}" if path else str(key))
    elif isinstance(old, list) and isinstance(new, list):
        for i in range(max(len(old), len(new))):
            here = [side[i] if i < len(side) else MISSING for side in (old, new)]
            yield from _walk(here[0], here[1], f"{path}[{i}]")
    elif type(old) is not type(new) or old != new:
        yield path, *_apart(str(old), str(new))


def _lines(old: list[str], new: list[str], path: str) -> Iterator[tuple[str, str, str]]:
    if old == new:
        return
    for kind, a, b, c, d in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if kind == "equal":
            continue
        for i in range(max(b - a, d - c)):
            before = old[a + i] if a + i < b else MISSING
            after = new[c + i] if c + i < d else MISSING
            yield f"{path}:{a + i + 1}", *_apart(before, after)


def _apart(old: str, new: str, most: int = 160) -> tuple[str, str]:
    """Both from shortly before where they part, at most so long."""
    if max(len(old), len(new)) <= most:
        return old, new
    same = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    begin = max(0, same - 40)
    before, after = (("…" if begin else "") + text[begin : begin + most] for text in (old, new))
    return before, after
