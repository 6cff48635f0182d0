"""A config or a preset as a subject: planned, nothing measured."""

from pathlib import Path

from foretrain.base.errors import UserError
from foretrain.comparison.sources.given import Given
from foretrain.comparison.sources.predicted import bytes_per_token, with_forecast, with_vocabulary
from foretrain.comparison.subject import Subject
from foretrain.config.presets import preset_named
from foretrain.config.resolve import resolve
from foretrain.hardware.catalogue import catalogue


def claims(path: Path, head: bytes) -> bool:
    """A TOML file, a nanoGPT file, or the name of a preset."""
    return path.suffix in (".toml", ".py") or preset_named(str(path)) is not None


def load(given: Given) -> Subject:
    """The plan of the config on the card. Raises ConfigError, and UserError without a card."""
    resolved = resolve([given.path, *given.words])
    gpu = given.card
    if gpu is None:
        raise UserError("gpu.none_here", count=len(catalogue()))
    config = with_vocabulary(resolved, None)
    subject = Subject(
        label=given.name, path=given.path, kind="config", used_by_others_bytes=given.held_bytes,
        bytes_per_token=bytes_per_token(given, config),
    )  # fmt: skip
    return with_forecast(subject, config, gpu, resolved.step)
