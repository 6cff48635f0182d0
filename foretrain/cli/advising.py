"""The answer of `foretrain advise`, of every kind of run: the list of changes, or one in full, which --write writes."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click
from click.exceptions import Exit

from foretrain.advice.asked import Asked
from foretrain.advice.cluster import options_of
from foretrain.advice.first_answer import changed_command, command_of
from foretrain.advice.record import SCHEMA, Advice, Advices, to_set, with_settings
from foretrain.advice.rules.base import Goal
from foretrain.app import planning
from foretrain.app.request import PretrainingRequest, Request
from foretrain.base import files as bounded
from foretrain.base.errors import UserError
from foretrain.base.installation import Later
from foretrain.base.messages import listed, say
from foretrain.cli import printing as plan_print
from foretrain.cli.answering import warn_of_backend
from foretrain.cli.common import print_error, print_json, working
from foretrain.cli.printing import document, screen
from foretrain.cli.reading import progress
from foretrain.config import nanogpt_file, writer
from foretrain.config.finetune.words import parse_words
from foretrain.config.finetune.yaml_file import read_text_of
from foretrain.config.microbatches import TOTAL
from foretrain.config.options import OPTIONS
from foretrain.config.resolve import ResolvedConfig
from foretrain.predict.memory import FAILING
from foretrain.predict.plan import Plan, plan
from foretrain.reports.views import advice as view

if TYPE_CHECKING:
    from foretrain.config.finetune import writer as trainer_file
else:  # advice of one kind of run does not wait for the others
    trainer_file = Later("foretrain.config.finetune.writer")

LISTED, TRACED = 10, 3  # changes with --full and --json, and those that --exact traces, where --top does not say
ENVIRONMENT = "allocator_settings"  # nanoGPT has them from PYTORCH_CUDA_ALLOC_CONF


def answer(context: click.Context, request: Request, asked: Asked) -> None:
    """Print what the options of `advise` ask for. Raises UserError."""
    given = context.params
    _check_options(given, request.kind)
    plan, found = _searched(request, given)
    number = given["apply"]
    shown = found.top(given["top"] or LISTED)
    if number:
        if not found.advised:
            raise UserError("usage.advise_nothing", number=number)
        if number > len(found.advised):
            raise UserError("usage.advise_number", number=number, count=len(found.advised))
        chosen = (found.advised[number - 1],)
        shown = found.model_copy(update={"advised": chosen, "partial": (), "useless": ()})
    problem = _written(request, plan, found, number, given["write"], asked) if given["write"] else None
    if given["as_json"]:
        print_json(shown.to_json(schema=SCHEMA))
    elif number:
        document(view.one(plan, found, number, asked))
    elif given["full"]:
        document(view.document(plan, shown, len(found.advised) - len(shown.advised)))
    else:
        screen(view.screen(plan, found, asked, given["top"]))
    if problem is not None:
        print_error(problem, as_json=False)
        raise Exit(int(problem.exit_code))


def _check_options(given: dict[str, Any], kind: str) -> None:
    goal, write, choices = given["goal"], given["write"], get_args(Goal)
    if goal and goal not in choices:
        raise UserError("usage.advise_goal", goal=goal[:80], choices=choices)
    if given["exact"] and goal == "quality":
        raise UserError("usage.advise_exact")
    if write is not None:
        if not given["apply"]:
            raise UserError("usage.advise_apply")
        endings = {"pretraining": (".toml", ".py"), "cards": (".toml",)}
        writer.check_writable(write, endings.get(kind, trainer_file.SUFFIXES))


def _searched(request: Request, given: dict[str, Any]) -> tuple[Any, Advices]:
    goal, count, quiet = given["goal"] or None, max(given["apply"], given["top"] or TRACED), given["quiet"]
    base, is_pretraining = planning.base_of(request, given["price"]), request.kind == "pretraining"
    with working(say("advice.searching"), quiet=quiet or goal != "quality" or not is_pretraining):
        found = planning.advised(base.plan, goal, given["price"])
    if given["exact"]:
        if is_pretraining:
            warn_of_backend("", quiet=quiet)
        with progress(quiet) as listen:
            found = planning.confirmed(found, base, count, listen)
    return base.plan, found


# -- what --write writes ---------------------------------------------------------------------------------------------


def _written(request: Request, plan: Any, found: Advices, number: int, path: Path, asked: Asked) -> UserError | None:
    """Write change `number`; return an error if the written config does not fit. Raises UserError, nothing written."""
    change = found.advised[number - 1]
    if request.kind == "pretraining":
        assert isinstance(request, PretrainingRequest)
        return write_changed(request.resolved, plan, found, number, path, asked)
    if request.kind == "cards":
        if not found.keeps_cards(change):
            cards = change.shared.text if change.shared else change.gpu
            raise UserError("usage.advise_card", number=number, gpu=cards)
        changes = options_of(plan, change)
        before = {name: say("written.was", value=str(getattr(plan.config, name))) for name in changes}
        plan_print.write_config(plan.config.model_copy(update=changes), path, asked, before)
        return None
    text = _keys_changed(plan, change, asked)
    if text is None:
        command = shlex.join(command_of(plan, change, asked))
        raise UserError("usage.advise_no_keys", number=number, path=str(path), command=command)
    writer.write_text(text, path)
    plan_print.tell_written(path, quiet=asked.quiet)
    return None


def _keys_changed(plan: Any, change: Advice, asked: Asked) -> str | None:
    """Return the given trainer's file with what was typed and the change; None where its keys cannot say that."""
    source, *words = asked.words
    read = next((note.values for note in plan.notes if note.id == "finetune_read_as"), None)
    if read is None or Path(source).suffix not in trainer_file.SUFFIXES:
        return None
    typed, _, others, _ = parse_words(words)
    if "model" in others:
        return None
    made = trainer_file.changed_text(read_text_of(Path(source)), source, read["format"], {**typed, **change.options})
    comments = () if made is None or made.lstrip().startswith("{") else writer.comments(plan_print.origin(asked))
    return made and "\n".join([*comments, made])


def write_changed(
    resolved: ResolvedConfig, base: Plan, found: Advices, number: int, path: Path, asked: Asked
) -> UserError | None:
    """Write change `number`; return an error if the written config does not fit. Raises UserError, nothing written."""
    advice = found.advised[number - 1]
    if advice.gpu != base.gpu.name:
        raise UserError("usage.advise_card", number=number, gpu=advice.gpu)
    sources = [file for file in resolved.files if file.suffix == ".py"]
    nanogpt = bool(sources) and len(sources) == len(resolved.files) and not _presets(resolved)
    changes = to_set(advice.settings)
    if advice.step == "nanogpt":
        changes = tuple(setting for setting in changes if setting.option != ENVIRONMENT)
    to_foretrain = nanogpt and advice.step == "foretrain"  # a TOML is for foretrain's step
    if not changes and not (to_foretrain and path.suffix == ".toml"):
        if advice.step == found.step:
            raise UserError("usage.advise_no_change", number=number, do=_what_to_do(base, found, advice))
        command = shlex.join(changed_command(base, advice, asked))
        raise UserError("usage.advise_needs_foretrain", number=number, path=str(path), command=command)
    before = {s.option: say("written.was", value=str(s.before)) for s in changes}
    if path.suffix == ".py":
        if not nanogpt:
            raise UserError("usage.advise_python", path=str(path))
        if advice.step != "nanogpt" or any(setting.ours for setting in changes):
            command = shlex.join(changed_command(base, advice, asked))
            raise UserError("usage.advise_needs_foretrain", number=number, path=str(path), command=command)
        _write_python(resolved, {s.option: s.after for s in changes}, before, path, asked)
    else:
        plan_print.write_config(with_settings(base.config, advice.settings), path, asked, before)
    return _does_not_fit(base, found, advice, path)


def _presets(resolved: ResolvedConfig) -> bool:
    return any(source.startswith("preset ") for source in resolved.sources.values())


def _does_not_fit(base: Plan, found: Advices, advice: Advice, path: Path) -> UserError | None:
    config = with_settings(base.config, advice.settings)
    made = plan(config, base.gpu, used_by_others_bytes=base.used_by_others_bytes)
    if made.verdict_of(advice.trainer) not in FAILING:
        return None
    return UserError(
        "check.advise_written", path=str(path), gpu=base.gpu.name, needed=made.memory_of(advice.trainer).needed_bytes,
        available=made.available_bytes or 0, do=_what_to_do(base, found, advice),
    )  # fmt: skip


def _what_to_do(base: Plan, found: Advices, advice: Advice) -> str:
    return listed(message.text() for message in view.commands(base.config, found, advice))


def _write_python(
    resolved: ResolvedConfig, changes: Mapping[str, Any], before: Mapping[str, str], path: Path, asked: Asked
) -> None:
    """Write nanoGPT's own file. `changes`: options with their new values; `before`: what each was, in words."""
    sources = [file for file in resolved.files if file.suffix == ".py"]
    text = "\n".join(bounded.read_bytes(file, nanogpt_file.MAX_BYTES).decode("utf-8-sig") for file in sources)
    before_lines = (f"{option}: {before[option]}" for option in changes)
    lines: Sequence[str] = [*plan_print.origin(asked), *before_lines]
    writer.write_text(writer.nanogpt_text(text, {**_typed(resolved), **changes}, lines), path)
    plan_print.tell_written(path, quiet=asked.quiet)


def _typed(resolved: ResolvedConfig) -> dict[str, Any]:
    return {
        key: getattr(resolved.config, key)
        for key, source in resolved.sources.items()
        if source.startswith(("-", TOTAL)) and not OPTIONS[key].ours
    }
