"""`Case`: commands that are run in an empty folder, and what they are given."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Step:
    """One command with what is sent to its stdin; or a piece of Python; or requests to the page."""

    words: tuple[str, ...] = ()
    stdin: str = ""
    python: str = ""
    requests: tuple[tuple[Any, ...], ...] = ()


@dataclass(frozen=True)
class Case:
    """What is run. `group`: light (no torch, 120 columns), narrow (80 columns), torch. `measured`: it holds times and
    speeds of this machine; only what must repeat is compared. `kept_as`: its folder becomes an input of other cases."""

    name: str
    steps: tuple[Step, ...]
    files: dict[str, str | bytes] = field(default_factory=dict)
    inputs: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    group: str = "light"
    measured: bool = False
    quick: bool = False
    kept_as: str = ""

    @property
    def command(self) -> str:
        return self.name.split()[0]


def case(name: str, *commands: str | tuple[str, ...] | Step, **more: Any) -> Case:
    """Return a case of commands, each a line of words or a tuple of them."""
    steps = tuple(
        one if isinstance(one, Step) else Step(tuple(one.split()) if isinstance(one, str) else one) for one in commands
    )
    texts = [word for step in steps for word in (*step.words, step.python)]
    inputs = set(more.pop("inputs", ()))
    inputs |= {"repo"} if any(folder in text for text in texts for folder in ("examples/", "tests/data/")) else set()
    return Case(name, steps, inputs=tuple(sorted(inputs)), **more)
