"""Did the host take the branches of a real step? What it asked of tensors, and which optimizer steps were done.

On a card that computes nothing a scalar can hold anything, and programs branch on scalars: one that found `found_inf ==
0` to be False left out Muon's step and its memory. So each case also runs at a small size on the CPU, where values are
real, and what was asked and answered must be the same.
"""

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Compilers ask their own fake tensors; what they ask is not the program's.
NOT_THE_PROGRAM = ("torch/_dynamo", "torch/_inductor", "torch/_functorch", "torch/_subclasses", "torch/fx")
ASKED_BY = ("__bool__", "item", "__int__", "__float__", "__index__", "tolist")
Record = dict[str, Any]  # {"answers": {place: [answers]}, "optimizer_steps": n, "states": […], "without_states": n}


class Branches:
    """Within it, what the program asks of tensors is written down; `record` has it."""

    def __init__(self) -> None:
        self._answers: dict[str, set[str]] = {}
        self._steps = 0
        self._states: set[str] = set()
        self._without_states = 0
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> "Branches":
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook

        for name in ASKED_BY:
            original = getattr(torch.Tensor, name)
            setattr(torch.Tensor, name, self._asking(original))
            self._undo.append(lambda name=name, original=original: setattr(torch.Tensor, name, original))
        self._undo.append(register_optimizer_step_post_hook(self._stepped).remove)
        return self

    def __exit__(self, *error: object) -> None:
        for undo in reversed(self._undo):
            undo()

    def _asking(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def asked(tensor: Any, *words: Any) -> Any:
            answer = original(tensor, *words)
            place = _place(sys._getframe(1))
            if place:
                self._answers.setdefault(place, set()).add(_kind(answer, place))
            return answer

        return asked

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        import torch

        self._steps += 1
        self._states |= {
            key for state in optimizer.state.values() for key, value in state.items() if isinstance(value, torch.Tensor)
        }
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        self._without_states += sum(not optimizer.state.get(parameter) for parameter in trained)

    def record(self) -> Record:
        return {
            "answers": {place: sorted(answers) for place, answers in sorted(self._answers.items())},
            "optimizer_steps": self._steps, "states": sorted(self._states), "without_states": self._without_states,
        }  # fmt: skip


def _place(frame: Any) -> str:
    """file:line of who asks; '' for a compiler."""
    file = frame.f_code.co_filename
    if any(part in file for part in NOT_THE_PROGRAM) or file == __file__:
        return ""
    return f"{'/'.join(Path(file).parts[-2:])}:{frame.f_lineno}"


def _kind(answer: Any, place: str) -> str:
    """What of an answer decides a branch: a truth value itself, of a number whether it is finite.

    A gradient scaler sums up flags: there it also counts whether the sum is 0.
    """
    if isinstance(answer, bool):
        return str(answer)
    if isinstance(answer, int | float):
        if "grad_scaler.py" in place:
            return "zero" if answer == 0 else "not zero"
        return "finite" if math.isfinite(answer) else "not finite"
    return type(answer).__name__


def differences(card: Record, real: Record) -> list[str]:
    """Sentences, one for each way in which the card's run took another path than the real one; [] where it did not."""
    found = []
    for place in sorted(card["answers"].keys() | real["answers"].keys()):
        here, there = (", ".join(side["answers"].get(place, ["never asked"])) for side in (card, real))
        if here != there:
            found.append(f"{place}: the card answered {here}, a CPU {there}")
    for what, words in (
        ("optimizer_steps", "optimizer steps"), ("states", "states of the optimizer"),
        ("without_states", "parameters that a step left without states"),
    ):  # fmt: skip
        if card[what] != real[what]:
            found.append(f"{words}: {card[what]} on the card, {real[what]} on a CPU")
    return found
