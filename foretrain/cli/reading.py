"""What was typed behind `plan` and `advise`: the run that is meant, and which options go with it."""

import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from foretrain.advice.asked import Asked
from foretrain.app import kept_answers
from foretrain.app.plan import Cards
from foretrain.app.planning import kind_of, request_of
from foretrain.app.request import PretrainingRequest, Request
from foretrain.base.errors import UserError
from foretrain.base.installation import Later
from foretrain.base.messages import say
from foretrain.base.process_memory import collected_seldom
from foretrain.base.records import Note
from foretrain.cli.common import OUT, need_one_of, print_notes, print_shown, working
from foretrain.config.presets import is_surely_asked
from foretrain.config.resolve import ResolvedConfig
from foretrain.predict.finetune import traced

if TYPE_CHECKING:
    from foretrain.app import generation
    from foretrain.config.finetune import read as finetune
    from foretrain.predict.inference.plan import RunnableModels
else:  # of other kinds of run
    finetune, generation = Later("foretrain.config.finetune.read"), Later("foretrain.app.generation")
OWN = ("gpus", "link", "network", "write_job")  # options that only a plan for several cards has
LIMITS = ("co2", "within", "tokens", "data_tokens")  # options of `plan` that a plan of a changed run has as well
TRACES = ("alloc_conf", "python")  # and those of its trace
# Options that a kind of run cannot have: of fine-tuning, each with the sentence that says what to take instead.
ALONE = {"plan": ("logged_mfu",), "advise": ("exact",)}
FINE_TUNING = {
    "plan": {name: name for name in ("trainer", "logged_mfu", "best", "write", "write_job")},
    "advise": {"trainer": "trainer"},
}
# Options of one card, which --smallest-card cannot have beside it.
NOT_OF_CARDS = (
    *("exact", "explain", "largest", "snapshot", "full", "check"),
    *("within", "tokens", "best", "step_time", "logged_mfu"),
)
# Options whose answer is more than what is printed, has the time in it, or hangs on the torch that traces.
UNKEPT = (
    *("check", "exact", "explain", "full", "largest", "python", "show_config", "smallest_card", "snapshot"),
    *("write", "write_job"),
)
ANY_CARD = "RTX 4090"  # where the question names no card: all of the catalogue are tried
CARDS = ("gpu", "gpus", "link", "network", "others", "price")
ANY_KIND = (*CARDS, "full", "as_json", "quiet", "words", "lang", "gpu_file")
OF_ALL = ("inference", "gpu", "others", "full", "as_json", "quiet", "words", "lang", "gpu_file")  # without a model
GENERATION = {  # which options go with generating text
    "plan": (
        *("inference", "largest", "smallest_card", "explain", "observed", "process", "check", "oneline", "show_config"),
        *ANY_KIND,
    ),
    "advise": ("goal", "top", "apply", "write", *ANY_KIND),
}


@contextmanager
def progress(quiet: bool) -> Iterator[Callable[[str], None]]:
    """A line on stderr that moves while workers trace; nothing where nobody watches."""
    with working(say("exact.tracing", state=""), quiet=quiet) as show:
        yield lambda text: show(say("exact.tracing", state=text))


@contextmanager
def unasked_progress(quiet: bool) -> Iterator[Callable[[str], None]]:
    """The same of a trace that nobody asked for; a sentence says what it is for."""
    print_shown((Note(id="family_tracing", values={}),), quiet=quiet)
    with progress(quiet) as show:
        yield show


def is_typed(context: click.Context, name: str) -> bool:
    """Return whether an option was given on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def spelled(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def read(context: click.Context, words: list[str]) -> Request:
    """Return what is asked, and print its notes. Raises UserError for options that do not go together."""
    given = context.params
    gpu = given["gpu"]
    if given.get("smallest_card"):
        if others := next((name for name in NOT_OF_CARDS if is_typed(context, name)), None):
            raise UserError("usage.smallest_alone", option=spelled(others))
        gpu = gpu if is_typed(context, "gpu") else ANY_CARD
    cards = Cards(given["gpus"], gpu, given["link"], given["network"], given["others"])
    kind = kind_of(words, cards, inference=given.get("inference", False))
    if not is_surely_asked(words) and kind != "generation":
        print_shown(finetune.how_chosen(words), quiet=given["quiet"])
    _check_options(context, kind)
    check_cards(context)
    if kind in ("fine-tuning", "generation"):
        context.with_resource(traced.shown_by(partial(unasked_progress, given["quiet"])))
    found = request_of(kind, words, cards, given.get("data_tokens") or "")
    if kind == "pretraining":
        assert isinstance(found, PretrainingRequest)
        found = replace(found, resolved=with_trainer(found.resolved, given["trainer"]))
    print_notes(tuple(note for note in found.notes if isinstance(note, UserError)), quiet=given["quiet"])
    shown_below = kind == "fine-tuning" and bool(given.get("full"))  # by the answer itself
    print_shown([note for note in found.notes if isinstance(note, Note)], quiet=given["quiet"] or shown_below)
    return found


def models_asked(context: click.Context, words: list[str]) -> "RunnableModels | None":
    """Return what runs on a card where --inference names no model. Raises UserError for options that need one."""
    given = context.params
    found = generation.runnable_models(words, Cards(given["gpus"], given["gpu"], "", "", given["others"]))
    if found and (other := next((each for each in given if each not in OF_ALL and is_typed(context, each)), "")):
        raise UserError("usage.inference_needs_model", option=spelled(other))
    return found


class Copy:
    def __init__(self, stream: Any) -> None:
        self.stream, self.text = stream, ""

    def write(self, text: str) -> int:
        self.text += text
        return self.stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def print_kept(context: click.Context, words: list[str], answer: Callable[[Request], None]) -> None:
    """Print what `answer` prints of what is asked, and keep it for `main`, which repeats it at once."""
    began_ns = time.time_ns()
    context.with_resource(collected_seldom())
    with redirect_stderr(Copy(sys.stderr)) as stderr_copy:  # type: ignore[type-var]
        request = read(context, words)
    elsewhere = any(name.endswith("ALLOC_CONF") for name in os.environ) or OUT.file is not sys.stdout or "-" in words
    with redirect_stdout(Copy(sys.stdout)) as printed:  # type: ignore[type-var]
        answer(request)
    if request.kind == "pretraining" and not elsewhere and not any(map(context.params.get, UNKEPT)):
        assert isinstance(request, PretrainingRequest)
        if (files := request.deciding) is not None:
            kept_answers.keep(files, stderr_copy.text, printed.text, began_ns)


def with_trainer(resolved: ResolvedConfig, trainer: str) -> ResolvedConfig:
    """Return the config for the trainer that --trainer names; `ResolvedConfig.step` has the rule for the rest."""
    if trainer:
        need_one_of("--trainer", trainer, ("foretrain", "nanogpt"))
    return replace(resolved, trainer="nanogpt" if trainer == "nanogpt" else "foretrain") if trainer else resolved


def _check_options(context: click.Context, kind: str) -> None:
    given, command = context.params, context.command.name or ""
    if given.get("write_script") and kind in ("pretraining", "cards"):
        raise UserError("usage.script_alone", words=shlex.join(given["words"][:3])[:200])
    if kind == "fine-tuning":
        for name, id in FINE_TUNING[command].items():
            if is_typed(context, name):
                raise UserError(f"usage.finetune_without.{id}")
    elif kind == "generation":
        for name in given:
            if name not in GENERATION[command] and is_typed(context, name):
                raise UserError("usage.inference_without", option=spelled(name))
    elif kind == "cards":
        for name in ALONE[command]:
            if is_typed(context, name):
                raise UserError("usage.cluster_alone", option=spelled(name))
        if given["trainer"] not in ("", "foretrain"):
            raise UserError("usage.cluster_trainer", value=given["trainer"][:40])


def check_cards(context: click.Context) -> None:
    """Raise UserError for options of several cards without --gpus, and for cards that are named twice."""
    given = context.params
    for name in () if given["gpus"] else OWN:
        if given.get(name):
            raise UserError("usage.needs_gpus", option=spelled(name))
    if given["gpus"] and is_typed(context, "gpu") and not given["gpus"].strip().isdigit():
        raise UserError("usage.cluster_two", gpus=given["gpus"][:80], gpu=given["gpu"][:80])


def asked_of(context: click.Context, request: Any, words: list[str]) -> Asked:
    """Return what was typed, for the command that comes next: it takes the run, its cards and money."""
    given = context.params
    limits = [word for name in LIMITS if given.get(name) is not None for word in _typed(name, given[name])]
    limits += [word for name in TRACES if given.get(name) for word in _typed(name, given[name])]
    speeds = [name for name in ("step_time", "logged_mfu") if given.get(name) is not None]
    cards = tuple(word for name in OWN[:3] if given[name] for word in (f"--{name}", given[name]))
    wrote = given.get("write")
    typed = request.words if request.kind == "generation" else tuple(words)
    return Asked(
        command=context.command.name or "", words=typed, gpu=given["gpu"], cards=cards, others=given["others"],
        quiet=given["quiet"], price=given["price"] or "", exact=given.get("exact", False), limits=tuple(limits),
        wrote=str(wrote) if wrote else None, speed=spelled(speeds[0]) if speeds else "",
        nanogpt_file=request.kind == "pretraining" and request.resolved.has_nanogpt_file,
    )  # fmt: skip


def _typed(name: str, value: object) -> tuple[str, str]:
    return spelled(name), f"{value:g}" if isinstance(value, float) else str(value)
