"""Pickles of others, read as plain data: tables, lists, numbers and texts. Nothing in one can run.

A name in the stream is refused, unless the caller says what it stands for. Before the pickle is loaded, places of the
memo are looked at that no file of its size can need: the unpickler's memo is an array, which grows to twice the highest
place that a PUT names, so nine bytes can ask for gigabytes. Each PUT takes two bytes of the file at least, so a place
beyond the file's size is never an honest one. Standard library only.
"""

import io
import pickle
import pickletools
from collections.abc import Callable, Mapping
from typing import Any

# How long what follows an opcode is: bytes, or below 0 one of pickletools' ways to say it.
_ARGUMENT_BYTES = {ord(op.code): op.arg.n if op.arg is not None else 0 for op in pickletools.opcodes}
_LENGTH_BYTES = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1, pickletools.TAKEN_FROM_ARGUMENT4: 4, pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}  # fmt: skip
_PUT, _BINARY_PUTS = pickle.PUT[0], {pickle.BINPUT[0], pickle.LONG_BINPUT[0]}
_TWO_LINES = {pickle.GLOBAL[0], pickle.INST[0]}  # a module and a name


class Asks(ValueError):
    """The pickle asks for something by name; the text is the name."""


class _Reader(pickle.Unpickler):
    def __init__(
        self, data: bytes, allowed: Mapping[tuple[str, str], Any], outside: Callable[[Any], Any] | None
    ) -> None:
        super().__init__(io.BytesIO(data))
        self._allowed, self._outside = allowed, outside

    def find_class(self, module: str, name: str, /) -> Any:
        if (module, name) not in self._allowed:
            raise Asks(shown(f"{module[:60]}.{name[:60]}"))
        return self._allowed[module, name]

    def persistent_load(self, pid: Any, /) -> Any:
        if self._outside is None:
            raise Asks("something from outside")
        return self._outside(pid)


def shown(name: str) -> str:
    """A name or an error for a sentence, without what a terminal would obey."""
    return "".join(c if c.isprintable() else "?" for c in name)


def loads(
    data: bytes, allowed: Mapping[tuple[str, str], Any] | None = None, outside: Callable[[Any], Any] | None = None
) -> Any:
    """The plain values of a pickle. `allowed`: what a module's name in it stands for; `outside`: what a persistent id.

    Raises Asks; ValueError for a memo that cannot be; and of what is damaged almost any exception.
    """
    _check_memo(data)
    return _Reader(data, allowed or {}, outside).load()


def _check_memo(data: bytes) -> None:
    """Raises ValueError for a place that cannot be; what is no pickle is left for the unpickler to say."""
    position, size = 0, len(data)
    while position < size:
        opcode = data[position]
        argument_bytes = _ARGUMENT_BYTES.get(opcode)
        if argument_bytes is None or opcode == pickle.STOP[0]:
            return
        start, position = position + 1, position + 1
        if argument_bytes >= 0:
            position += argument_bytes
            if opcode in _BINARY_PUTS:
                _check(int.from_bytes(data[start:position], "little"), size)
        elif argument_bytes == pickletools.UP_TO_NEWLINE:
            position = data.find(b"\n", start) + 1 or size
            if opcode in _TWO_LINES:
                position = data.find(b"\n", position) + 1 or size
            elif opcode == _PUT:  # the unpickler also reads +9 and 9_9, which nothing writes
                digits = data[start:position].strip()
                _check(int(digits) if digits.isdigit() and len(digits) < 20 else size, size)
        else:
            position += _LENGTH_BYTES[argument_bytes]
            position += int.from_bytes(data[start:position], "little")


def _check(place: int, size: int) -> None:
    if place >= size:
        raise ValueError("its memo has a place beyond the file's size, which no pickle needs")
