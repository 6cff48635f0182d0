"""A changed config as a file of nanoGPT's own: its lines, what was typed beside them, and what advice sets."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from foretrain.advice.asked import Asked
from foretrain.base import safe_read as bounded
from foretrain.cli.planning import limits as plan_limits
from foretrain.config import nanogpt_file, writer
from foretrain.config.microbatches import TOTAL
from foretrain.config.options import OPTIONS
from foretrain.config.resolve import ResolvedConfig


def write(
    resolved: ResolvedConfig, changes: Mapping[str, Any], before: Mapping[str, str], path: Path, asked: Asked
) -> None:
    """Write it. `changes`: options with their new values; `before`: what each was, in words."""
    sources = [file for file in resolved.files if file.suffix == ".py"]
    text = "\n".join(bounded.read_bytes(file, nanogpt_file.MAX_BYTES).decode("utf-8-sig") for file in sources)
    told = (f"{option}: {before[option]}" for option in changes)
    lines: Sequence[str] = [*plan_limits.origin(asked), *told]
    writer.write_text(writer.nanogpt_text(text, {**_typed(resolved), **changes}, lines), path)
    plan_limits.tell_written(path, quiet=asked.quiet)


def _typed(resolved: ResolvedConfig) -> dict[str, Any]:
    """nanoGPT's options that were typed beside its file."""
    return {
        key: getattr(resolved.config, key)
        for key, source in resolved.sources.items()
        if source.startswith(("-", TOTAL)) and not OPTIONS[key].ours
    }
