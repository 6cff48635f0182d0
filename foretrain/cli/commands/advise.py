"""`foretrain advise`: what to change, each change planned for the user's own run and card."""

import shlex
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, get_args

import click
from click.exceptions import Exit

from foretrain.advice.asked import Asked
from foretrain.advice.candidates import to_set, with_settings
from foretrain.advice.first_answer import changed_command
from foretrain.advice.record import SCHEMA, Advice, Advices
from foretrain.advice.rules.base import Goal
from foretrain.app import kept_answers as kept_advice
from foretrain.app.advise import confirmed
from foretrain.app.request import PretrainingRequest
from foretrain.base import files as bounded
from foretrain.base.errors import UserError
from foretrain.base.installation import Later
from foretrain.base.messages import listed, say
from foretrain.cli.command import OF_CONFIG, command, flag, json_option, option, quiet_option, words_argument
from foretrain.cli.common import (
    ERR,
    OUT,
    print_error,
    print_json,
)
from foretrain.cli.planning import exact as plan_exact
from foretrain.cli.planning import options, reading
from foretrain.cli.planning import printing as plan_print
from foretrain.cli.planning.exact import Depth
from foretrain.config import nanogpt_file, writer
from foretrain.config.microbatches import TOTAL
from foretrain.config.options import OPTIONS
from foretrain.config.resolve import ResolvedConfig
from foretrain.config.writer import check_writable
from foretrain.predict.memory import FAILING
from foretrain.predict.plan import Plan, plan
from foretrain.reports import text
from foretrain.reports.views import advice as advice_view
from foretrain.reports.views import advice_screen

advising = Later("foretrain.cli.advising")


def write(
    resolved: ResolvedConfig, changes: Mapping[str, Any], before: Mapping[str, str], path: Path, asked: Asked
) -> None:
    """Write it. `changes`: options with their new values; `before`: what each was, in words."""
    sources = [file for file in resolved.files if file.suffix == ".py"]
    text = "\n".join(bounded.read_bytes(file, nanogpt_file.MAX_BYTES).decode("utf-8-sig") for file in sources)
    told = (f"{option}: {before[option]}" for option in changes)
    lines: Sequence[str] = [*plan_print.origin(asked), *told]
    writer.write_text(writer.nanogpt_text(text, {**_typed(resolved), **changes}, lines), path)
    plan_print.tell_written(path, quiet=asked.quiet)


def _typed(resolved: ResolvedConfig) -> dict[str, Any]:
    """nanoGPT's options that were typed beside its file."""
    return {
        key: getattr(resolved.config, key)
        for key, source in resolved.sources.items()
        if source.startswith(("-", TOTAL)) and not OPTIONS[key].ours
    }


LISTED = 10  # changes with --full and --json where --top does not say
TRACED = 3  # how many advices --exact traces where --top does not say

EPILOG = """Examples:

foretrain advise config/train_gpt2.py --gpu "RTX 4070" --used-by-others 2.1GB   (what makes nanoGPT fit?)

foretrain advise my.toml --gpu 4070 --goal speed

foretrain advise my.toml --gpu 4070 --used-by-others 2GB --apply 1 --write smaller.toml

foretrain advise gpt2-774m --gpu 3060 --goal cost --price "3060=0.08,4090=0.35,A100-SXM4-80GB=1.2"

foretrain advise my.py --gpus "2 x RTX 4090"   (would one card do, what would four give, sharding, accumulation)

foretrain advise my.py --gpu 4070 --exact --top 2   (traces each and replays it at the card's limit)

foretrain advise my.toml --gpu 4070 --goal quality   (a lower loss in the same hours)

foretrain advise qwen3-8b --method lora --batch-size 1 --gpu 4070   (fine-tuning)

foretrain advise llama-3.3-70b --inference --weights q4_k_m --gpu 3090   (generating text)"""


@command("advise", EPILOG, **OF_CONFIG)
@words_argument
@options.gpu
@options.gpus
@options.link
@options.network
@options.others
@option(
    "--goal GOAL",
    "fit, speed, cost or quality (a lower loss in the same time). Default: fit if it does not fit, else speed.",
    default="",
)
@option(
    "--trainer NAME",
    "Which step runs now: foretrain or nanogpt. Default: nanogpt for nanoGPT's own files, else foretrain.",
    default="",
)
@flag("--exact", "Check each listed change with a trace of the real step. Takes seconds to minutes; needs torch.")
@option("--top N", "How many changes to list, and to trace with --exact.", type=int, low=1, high=100)
@flag("--full", "Print everything: what is not enough, what does not help, and the sources.")
@option("--apply N", "Show change N in full, with the diff of the config.", default=0, low=0)
@option("--write FILE", "With --apply: write the changed config; a nanoGPT .py file can stay one.", type=Path)
@options.price
@json_option
@quiet_option
@click.pass_context
def advise_command(
    context: click.Context,
    words: list[str],
    gpu: str,
    gpus: str,
    link: str,
    network: str,
    others: str,
    goal: str,
    trainer: str,
    exact: bool,
    top: int | None,
    full: bool,
    apply: int,
    write: Path | None,
    price: str | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Find what to change: every option and technique, planned for your run and ranked by gain and cost."""
    request = reading.read(context, words)
    asked = reading.asked_of(context, request, words)
    if isinstance(request, PretrainingRequest):
        _check_options(goal, exact, apply, write)
    if not isinstance(request, PretrainingRequest) or request.kind == "cards":
        advising.answer(context, request, asked)
        return
    resolved = request.resolved
    base = kept_advice.base_plan(resolved, gpu, others, price)
    with _progress(quiet or goal != "quality"):
        found = kept_advice.advices(base, goal or None, price)
    count = max(apply, top or TRACED)
    if exact:
        plan_exact.check_depth(Depth(exact=True, quiet=quiet), ())
        with plan_exact.progress(quiet) as listen:
            found = confirmed(found, base, count, listen)
    if apply:
        _apply(resolved, base, found, apply, write, asked, as_json=as_json)
        return
    shown = found.top(top or LISTED)
    if as_json:
        print_json(shown.to_json(schema=SCHEMA))
        return
    if full:
        text.render(advice_view.document(base, shown, len(found.advised) - len(shown.advised)), OUT)
    else:
        text.render_screen(advice_screen.screen(base, found, asked, top), OUT)


def _check_options(goal: str, exact: bool, apply: int, write: Path | None) -> None:
    choices = get_args(Goal)
    if goal and goal not in choices:
        raise UserError("usage.advise_goal", goal=goal[:80], choices=choices)
    if exact and goal == "quality":
        raise UserError("usage.advise_exact")
    if write is not None and not apply:
        raise UserError("usage.advise_apply")
    if write is not None:
        check_writable(write, python=True)


def _progress(quiet: bool) -> AbstractContextManager[object]:
    """A line on stderr while shapes are searched; nothing where nobody watches."""
    return nullcontext() if quiet or not ERR.is_terminal else ERR.status(say("advice.searching"))


def _apply(
    resolved: ResolvedConfig, base: Plan, found: Advices, number: int, write: Path | None, asked: Asked, *,
    as_json: bool,
) -> None:  # fmt: skip
    if not found.advised:
        raise UserError("usage.advise_nothing", number=number)
    if number > len(found.advised):
        raise UserError("usage.advise_number", number=number, count=len(found.advised))
    advice = found.advised[number - 1]
    problem = write_changed(resolved, base, found, number, write, asked) if write is not None else None
    if as_json:
        print_json(found.model_copy(update={"advised": (advice,), "partial": (), "useless": ()}).to_json(schema=SCHEMA))
    else:
        text.render(advice_view.one(base, found, number), OUT)
    if problem is not None:
        print_error(problem, as_json=False)
        raise Exit(int(problem.exit_code))


ENVIRONMENT = "allocator_settings"  # nanoGPT has them from PYTORCH_CUDA_ALLOC_CONF


def write_changed(
    resolved: ResolvedConfig, base: Plan, found: Advices, number: int, path: Path, asked: Asked
) -> UserError | None:
    """None, or what to say where the written config does not fit the card that was asked about.

    Raises UserError, with nothing written, where a config cannot hold the advice or nanoGPT cannot do it.
    """
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
        write(resolved, {s.option: s.after for s in changes}, before, path, asked)
    else:
        plan_print.write_config(with_settings(base.config, advice.settings), path, asked, before)
    return _does_not_fit(base, found, advice, path)


def _presets(resolved: ResolvedConfig) -> bool:
    return any(source.startswith("preset ") for source in resolved.sources.values())


def _does_not_fit(base: Plan, found: Advices, advice: Advice, path: Path) -> UserError | None:
    """What a new plan of the changed config says of the card as it was asked about."""
    config = with_settings(base.config, advice.settings)
    made = plan(config, base.gpu, used_by_others_bytes=base.used_by_others_bytes)
    if made.verdict_of(advice.trainer) not in FAILING:
        return None
    return UserError(
        "check.advise_written", path=str(path), gpu=base.gpu.name, needed=made.memory_of(advice.trainer).needed_bytes,
        available=made.available_bytes or 0, do=_what_to_do(base, found, advice),
    )  # fmt: skip


def _what_to_do(base: Plan, found: Advices, advice: Advice) -> str:
    return listed(message.text() for message in advice_view.commands(base.config, found, advice))
