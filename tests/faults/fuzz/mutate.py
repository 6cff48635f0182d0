"""Files with something changed: bytes, numbers, words, lines and whole pieces, by a seeded generator."""

import random
import re
from collections.abc import Callable, Sequence

EXTREMES = (
    b"0", b"-1", b"1", b"65536", b"2147483648", b"9223372036854775808", b"-9223372036854775809", b"1" + b"0" * 400,
    b"9" * 5000, b"0.0", b"-0.0", b"1e-400", b"1e309", b"-1e309", b"nan", b"NaN", b"inf", b"-Infinity", b"null", b"true",
    b"None", b"\"\"", b"''", b"[]", b"{}", b"[[]]", b"\"a\"", b"\"\\ud800\"", b"1_0", b"0x1F", b"1,5", b"1 000",
)  # fmt: skip
PIECES = (
    b"\0", b"\r", b"\n", b"\r\n", b"\t", b" ", b"\x1b[2J", b"\x1b]0;x\x07", b"\x7f", b"\x80", b"\xff\xfe", b"\xef\xbb\xbf",
    b"\xed\xa0\x80", "\u202e".encode(), "\u2028".encode(), "\u0660".encode(), b"%s%n", b"{0.__class__}", b"<script>", b"[red]",
    b"[" * 400, b"{" * 400, b"a" * 5000, b"\"", b"'", b"\\", b"#", b"=", b":", b",", b"]", b"}", b"---\n", b"&a [*a]", b"!!python/object:os.system",
    b"__import__('os')", b"../../..", b"/dev/zero", b"*", b"|", b">",
)  # fmt: skip
_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")
_WORD = re.compile(rb"[A-Za-z_][\w.-]*")
Change = Callable[[bytes, random.Random, Sequence[bytes]], bytes]


def _flip(data: bytes, rng: random.Random, _: Sequence[bytes]) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        if changed:
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _insert(data: bytes, rng: random.Random, _: Sequence[bytes]) -> bytes:
    at = rng.randint(0, len(data))
    return data[:at] + rng.choice(PIECES + EXTREMES) + data[at:]


def _cut(data: bytes, rng: random.Random, _: Sequence[bytes]) -> bytes:
    first, last = sorted((rng.randint(0, len(data)), rng.randint(0, len(data))))
    return data[:first] if rng.random() < 0.5 else data[:first] + data[last:]


def _repeat(data: bytes, rng: random.Random, _: Sequence[bytes]) -> bytes:
    first = rng.randint(0, len(data))
    piece = data[first : first + rng.choice((1, 8, 64, 512))]
    return data[:first] + piece * rng.choice((1, 2, 100)) + data[first:]


def _number(data: bytes, rng: random.Random, _: Sequence[bytes]) -> bytes:
    found = list(_NUMBER.finditer(data))
    if not found:
        return _insert(data, rng, _)
    one = rng.choice(found)
    return data[: one.start()] + rng.choice(EXTREMES) + data[one.end() :]


def _word(data: bytes, rng: random.Random, others: Sequence[bytes]) -> bytes:
    found = list(_WORD.finditer(data))
    known = _WORD.findall(rng.choice(others))
    if not found or not known:
        return _insert(data, rng, others)
    one = rng.choice(found)
    return data[: one.start()] + rng.choice(known) + data[one.end() :]


def _lines(data: bytes, rng: random.Random, others: Sequence[bytes]) -> bytes:
    lines = data.splitlines(keepends=True)
    if len(lines) < 2:
        return _repeat(data, rng, others)
    at = rng.randrange(len(lines))
    match rng.randrange(4):
        case 0:
            del lines[at]
        case 1:
            lines.insert(at, lines[at])
        case 2:
            other = rng.randrange(len(lines))
            lines[at], lines[other] = lines[other], lines[at]
        case _:
            lines.insert(at, rng.choice(rng.choice(others).splitlines(keepends=True) or [b"\n"]))
    return b"".join(lines)


def _spliced(data: bytes, rng: random.Random, others: Sequence[bytes]) -> bytes:
    other = rng.choice(others)
    return data[: rng.randint(0, len(data))] + other[rng.randint(0, len(other)) :]


CHANGES: tuple[Change, ...] = (_flip, _insert, _cut, _repeat, _number, _number, _word, _lines, _spliced)


def mutated(seeds: Sequence[bytes], rng: random.Random) -> bytes:
    data = rng.choice(seeds)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        data = rng.choice(CHANGES)(data, rng, seeds)
    return data


def smallest(data: bytes, fails: Callable[[bytes], bool], *, tries: int = 400) -> bytes:
    """As little of a file as still fails, by leaving pieces out that are not needed."""
    size, left = max(1, len(data) // 2), tries
    while size >= 1 and left > 0:
        at = 0
        while at < len(data) and left > 0:
            shorter, left = data[:at] + data[at + size :], left - 1
            if fails(shorter):
                data = shorter
            else:
                at += size
        size //= 2
    return data
