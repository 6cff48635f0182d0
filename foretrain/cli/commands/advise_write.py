"""`foretrain advise --apply N --write FILE`: the changed config as what it came from, and whether it fits."""

import shlex
from pathlib import Path
from typing import Any

from foretrain.advice.asked import Asked
from foretrain.advice.candidates import to_set, with_settings
from foretrain.advice.first_answer import changed_command
from foretrain.advice.record import Advice, Advices
from foretrain.base import safe_read as bounded
from foretrain.base.errors import UserError
from foretrain.base.messages import listed, say
from foretrain.cli.commands import plan_limits
from foretrain.config import nanogpt_file
from foretrain.config import writer as config_writer
from foretrain.config.microbatches import TOTAL
from foretrain.config.options import OPTIONS
from foretrain.config.resolve import ResolvedConfig
from foretrain.predict.plan import Plan, plan
from foretrain.reports.views import advice as advice_view

ENVIRONMENT = "allocator_settings"  # nanoGPT has them from PYTORCH_CUDA_ALLOC_CONF


def write(
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
        text = "\n".join(bounded.read_bytes(file, nanogpt_file.MAX_BYTES).decode("utf-8-sig") for file in sources)
        told = (f"{s.option}: {before[s.option]}" for s in changes)
        values = {**_typed(resolved), **{s.option: s.after for s in changes}}
        lines = [*plan_limits.origin(asked), *told]
        config_writer.write_text(config_writer.nanogpt_text(text, values, lines), path)
        plan_limits.tell_written(path, quiet=asked.quiet)
    else:
        plan_limits.write_config(with_settings(base.config, advice.settings), path, asked, before)
    return _does_not_fit(base, found, advice, path)


def _presets(resolved: ResolvedConfig) -> bool:
    return any(source.startswith("preset ") for source in resolved.sources.values())


def _typed(resolved: ResolvedConfig) -> dict[str, Any]:
    """nanoGPT's options that were typed beside its file."""
    return {
        key: getattr(resolved.config, key)
        for key, source in resolved.sources.items()
        if source.startswith(("-", TOTAL)) and not OPTIONS[key].ours
    }


def _does_not_fit(base: Plan, found: Advices, advice: Advice, path: Path) -> UserError | None:
    """What a new plan of the changed config says of the card as it was asked about."""
    config = with_settings(base.config, advice.settings)
    made = plan(config, base.gpu, used_by_others_bytes=base.used_by_others_bytes)
    if made.verdict_of(advice.step) != "does_not_fit":
        return None
    return UserError(
        "check.advise_written", path=str(path), gpu=base.gpu.name, needed=made.memory_of(advice.step).needed_bytes,
        available=made.available_bytes or 0, do=_what_to_do(base, found, advice),
    )  # fmt: skip


def _what_to_do(base: Plan, found: Advices, advice: Advice) -> str:
    return listed(message.text() for message in advice_view.commands(base.config, found, advice))
