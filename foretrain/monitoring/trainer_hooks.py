"""`Hooks`: what a Trainer does and tells no callback: its micro-batches, evaluations and saves, and what ends them.

A callback hears nothing of an exception. So while a run trains, the Trainer's own methods are called through a wrapper
on the instance, which says what begins, what ends and what failed, and changes nothing.
"""

import functools
import inspect
import sys
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Protocol

PARTS = {"training_step": "micro_batch", "evaluate": "evaluate", "_save_checkpoint": "save"}
MOST_FRAMES = 40


class Listener(Protocol):
    """Who hears of it. None of these may raise."""

    def entered(self, part: str, args: tuple[Any, ...]) -> None:
        """A part begins: micro_batch, optimizer, evaluate or save."""
        ...

    def left(self, part: str) -> None:
        """It ended as it should."""
        ...

    def failed(self, part: str, error: BaseException) -> None:
        """It raised this, which goes on to whoever called; part '' is anywhere else in the program."""
        ...


def calling_trainer() -> Any:
    """The Trainer that is calling, looked for in the frames above; None where there is none."""
    frame: FrameType | None = inspect.currentframe()
    for _ in range(MOST_FRAMES):
        frame = frame.f_back if frame else None
        if frame is None:
            return None
        found = frame.f_locals.get("self")
        if all(hasattr(type(found), name) for name in ("train", "training_step", "evaluate")):
            return found
    return None


class Hooks:
    """Wrappers around a Trainer's methods, and around sys.excepthook for what ends the program between them."""

    def __init__(self, trainer: Any, optimizer: Any, listener: Listener) -> None:
        self.listener = listener
        self._set: list[tuple[Any, str, Any, Any]] = []  # owner, name, ours, what stood there
        self._before = sys.excepthook
        self._failing = 0  # which error was told; never the error, whose frames hold tensors
        if trainer is not None:
            for name, part in PARTS.items():
                self._wrap(trainer, name, part)
        if optimizer is not None:
            self._wrap(optimizer, "step", "optimizer")
        sys.excepthook = self._at_the_end

    def remove(self) -> None:
        """Leave everything as it was."""
        for owner, name, ours, before in reversed(self._set):
            if vars(owner).get(name) is not ours:  # somebody wrapped it again
                continue
            if before is None:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
        self._set.clear()
        if sys.excepthook == self._at_the_end:
            sys.excepthook = self._before

    def _wrap(self, owner: Any, name: str, part: str) -> None:
        original: Callable[..., Any] | None = getattr(owner, name, None)
        if original is None:
            return
        before = vars(owner).get(name)

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self._failing = 0
            self.listener.entered(part, (*args, *kwargs.values()))
            try:
                result = original(*args, **kwargs)
            except BaseException as error:
                self._told(part, error)
                raise
            self.listener.left(part)
            return result

        setattr(owner, name, wrapped)
        self._set.append((owner, name, wrapped, before))

    def _told(self, part: str, error: BaseException) -> None:
        if id(error) != self._failing:  # one within another part is told once
            self._failing = id(error)
            self.listener.failed(part, error)

    def _at_the_end(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._told("", error)
        self._before(kind, error, trace)
