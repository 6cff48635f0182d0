"""Python's collector of reference cycles, put off while much is made at once."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collected_later(*, stays: bool = False) -> Iterator[None]:
    """While it lasts Python does not look for cycles, which would go over all that was made again and again. `stays`:
    nor later in what there is at its end, such as modules."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if stays:
            gc.freeze()
        if was:
            gc.enable()
