"""Python's collector of reference cycles, put off while much is made at once."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collected_later(*, stays: bool = False) -> Iterator[None]:
    """Python's search for reference cycles is off while it lasts: it would visit everything that was made, many times.
    `stays`: it never visits what is there at the end, such as modules."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if stays:
            gc.freeze()
        if was:
            gc.enable()
