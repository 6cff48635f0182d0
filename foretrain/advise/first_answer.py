"""What the first screen of `plan` says beside the plan itself: what limits the run, and which command comes next.

Everything is worked out here; report/first_view.py only puts it into words.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from foretrain.advise.advice import Advice
from foretrain.advise.advisor import short_list
from foretrain.advise.asked import Asked
from foretrain.advise.candidates import to_set
from foretrain.predict.bottleneck import Bottleneck, bottleneck
from foretrain.predict.memory import StepName
from foretrain.predict.plan import Plan
from foretrain.records import Record

if TYPE_CHECKING:
    from collections.abc import Sequence

MOST_FLAGS = 4  # more settings than that are written to a file

START: dict[StepName, tuple[str, ...]] = {"foretrain": ("foretrain", "train"), "nanogpt": ("python", "train.py")}

Next = Literal["train", "change", "advise", "write", "card"]


class FirstAnswer(Record):
    """`next` is what `command` does; `advice` the change that it makes, or the one that would save much time."""

    bottleneck: Bottleneck | None
    next: Next
    command: tuple[str, ...]
    advice: Advice | None = None


def first_answer(plan: Plan, asked: Asked) -> FirstAnswer:
    """What to say of one plan."""
    slow = bottleneck(plan.config, plan.gpu, plan.dtype, plan.step, compiled=plan.compiled)
    found = short_list(plan, plan.step)
    best = found.advised[0] if found else None
    if plan.verdict in (None, "fits"):
        gain = best if best is not None and best.gpu == plan.gpu.name and found and found.goal == "speed" else None
        command = (*START[plan.step], *_words(asked, plan, plan.step))
        return FirstAnswer(bottleneck=slow, next="train", command=command, advice=gain)
    helps = best is not None and best.gpu == plan.gpu.name and (best.settings or best.step != plan.step)
    changes = to_set(best.settings) if best is not None else ()
    if best is None or not helps or len(changes) > MOST_FLAGS:
        command = ("foretrain", "advise", *asked.words, *asked.card_options())
        return FirstAnswer(bottleneck=slow, next="advise", command=command, advice=best)
    return FirstAnswer(bottleneck=slow, next="change", command=changed_command(plan, best, asked), advice=best)


def changed_command(plan: Plan, advice: Advice, asked: Asked) -> tuple[str, ...]:
    """The command that runs what was asked about with an advice's changes. nanoGPT reads True, not true."""
    changes = to_set(advice.settings)
    if advice.step == "nanogpt":  # it has the allocator's settings from its environment
        changes = tuple(setting for setting in changes if setting.option != "allocator_settings")
    said = str if advice.step == "nanogpt" else _value
    flags = tuple(f"--{setting.option}={said(setting.after)}" for setting in changes)
    kept = without(_words(asked, plan, advice.step), [setting.option for setting in changes])
    return (*START[advice.step], *kept, *flags)


def _words(asked: Asked, plan: Plan, step: StepName) -> tuple[str, ...]:
    """The words with which the trainer of a step runs what was planned: on a CPU foretrain is told so, and a config
    that names the CPU is told of the card.

    nanoGPT's train.py reads no stdin: what was piped in is a file there.
    """
    on_cpu = step == "foretrain" and plan.gpu.kind == "cpu" and plan.config.device != "cpu"
    words = asked.words if step == "foretrain" else ("FILE.py" if word == "-" else word for word in asked.words)
    on_card = plan.gpu.kind == "cuda" and plan.config.device == "cpu"
    return (*words, *(("--device=cpu",) if on_cpu else ("--device=cuda",) if on_card else ()))


def without(words: Sequence[str], knobs: Sequence[str]) -> tuple[str, ...]:
    """The words of a config without those that set one of these knobs."""
    kept: list[str] = []
    skip = False
    for i, word in enumerate(words):
        name, equals, _ = word.removeprefix("--").partition("=")
        if skip:
            skip = False
        elif word.startswith("--") and name.replace("-", "_") in knobs:
            skip = not equals and i + 1 < len(words) and not words[i + 1].startswith("--")
        else:
            kept.append(word)
    return tuple(kept)


def _value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
