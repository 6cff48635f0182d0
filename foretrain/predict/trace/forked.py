"""Work in a forked child, so that its effects stay there and a function may come from a notebook, which has no name to
import. Only its result or error comes back."""

import contextlib
import os
import pickle
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
CAN_FORK = hasattr(os, "fork")


class ChildEnded(RuntimeError):
    """The child ended without an answer; the sentence says how."""


def in_child(work: Callable[[], T]) -> T:
    """Return what `work` returns in a forked child, or raise its error, or ChildDied where it is killed."""
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        # of Python 3.12, for threads; the child starts none of theirs
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        os.close(reading)
        _answer(work, writing)
    os.close(writing)
    try:
        with os.fdopen(reading, "rb") as pipe:
            data = pipe.read()
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        raise
    finally:
        _, status = os.waitpid(child, 0)
    if not data:
        code = os.waitstatus_to_exitcode(status)
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        raise ChildEnded(f"the process that traced ended without an answer ({how}); memory may have run out")
    done, value = pickle.loads(data)
    if done:
        return value
    raise value


def _answer(work: Callable[[], Any], writing: int) -> None:
    code = 1
    try:
        try:
            data = pickle.dumps((True, work()))
        except BaseException as error:
            data = pickle.dumps((False, _portable(error)))
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(data)
        code = 0
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _portable(error: BaseException) -> BaseException:
    where = "".join(traceback.format_exception(error))
    try:
        found = pickle.loads(pickle.dumps(error))
    except Exception:
        found = RuntimeError(f"{type(error).__name__}: {error}")
    found.add_note(where)
    return found
