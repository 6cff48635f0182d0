"""A look at a pickle before it is loaded: places of the memo that no file of its size can need. Standard library only.

The unpickler's memo is an array, which grows to twice the highest place that a PUT names: nine bytes can ask for
gigabytes. Each PUT takes two bytes of the file at least, so a place beyond the file's size is never an honest one.
"""

import pickle
import pickletools

# How long what follows an opcode is: bytes, or below 0 one of pickletools' ways to say it.
_ARGUMENT_BYTES = {ord(op.code): op.arg.n if op.arg is not None else 0 for op in pickletools.opcodes}
_LENGTH_BYTES = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1, pickletools.TAKEN_FROM_ARGUMENT4: 4, pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}  # fmt: skip
_PUT, _BINARY_PUTS = pickle.PUT[0], {pickle.BINPUT[0], pickle.LONG_BINPUT[0]}
# What ends the reading: the pickle's own end, and opcodes that ask for a class, which the unpickler refuses.
_ENDS = {pickle.STOP[0], pickle.GLOBAL[0], pickle.INST[0]}


def check_memo(data: bytes) -> None:
    """Raises ValueError for a place that cannot be; what is no pickle is left for the unpickler to say."""
    position, size = 0, len(data)
    while position < size:
        opcode = data[position]
        argument_bytes = _ARGUMENT_BYTES.get(opcode)
        if argument_bytes is None or opcode in _ENDS:
            return
        start, position = position + 1, position + 1
        if argument_bytes >= 0:
            position += argument_bytes
            if opcode in _BINARY_PUTS:
                _check(int.from_bytes(data[start:position], "little"), size)
        elif argument_bytes == pickletools.UP_TO_NEWLINE:
            position = data.find(b"\n", start) + 1 or size
            if opcode == _PUT and (digits := data[start:position].strip()).isdigit():
                _check(int(digits) if len(digits) < 20 else size, size)
        else:
            position += _LENGTH_BYTES[argument_bytes]
            position += int.from_bytes(data[start:position], "little")


def _check(place: int, size: int) -> None:
    if place >= size:
        raise ValueError("its memo has a place beyond the file's size, which no memory snapshot needs")
