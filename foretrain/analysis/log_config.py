"""The config of the run that a log is of: the file that the user names, under what the log itself says ran.

nanoGPT prints the config file that it was given, and every option of its command line. That is what trained. What the
user typed on this command line as `--key=value` stays as typed, and is held against the log.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from foretrain.config import weights_file
from foretrain.config.options import OPTIONS, RunConfig, named
from foretrain.config.presets import GPT2_SHAPES
from foretrain.config.resolve import ResolvedConfig
from foretrain.data.corpus import data_of_config
from foretrain.data.dataset import DatasetInfo
from foretrain.runs.trackers.tracker import Tracked
from foretrain.runs.training_log import TrainingLog

SOURCE = "the log"
# What says that a config is one of nanoGPT's.
_SHAPE = set(named(lambda each: each.from_weights and each.nanogpt == "has"))


def config_of(
    resolved: ResolvedConfig | None, log: TrainingLog | None, find: Callable[[str], DatasetInfo | None] | None = None
) -> RunConfig | None:
    """The config with what the log printed over it; a vocabulary that neither sets is the dataset's. None without one.

    `find`: how a dataset is looked for, as `lm.config_data.of_config` has it.
    """
    if resolved is None:
        return None
    resolved = as_printed(resolved, log) if log is not None else resolved
    said = log.header.vocab_size if log is not None else None
    return data_of_config(resolved, logged_vocab_size=said, find=find).config


def as_printed(resolved: ResolvedConfig, log: TrainingLog) -> ResolvedConfig:
    """The config with the log's own settings in it, where the user did not type others."""
    typed = {key for key, source in resolved.sources.items() if source.startswith("--")}
    found = {key: value for key, value in printed(log).items() if key not in typed}
    model = found.get("init_from")
    if model in GPT2_SHAPES and model != resolved.config.init_from:  # which brings its shape
        own = {key: getattr(resolved.config, key) for key in ("block_size", "vocab_size") if key in resolved.sources}
        found = own | found
        weights_file.apply(found, dict.fromkeys(found, SOURCE))
    config = laid_over(resolved.config, found)
    changed = {key for key in found if getattr(config, key) == found[key]}
    return replace(resolved, config=config, sources={**resolved.sources, **dict.fromkeys(changed, SOURCE)})


def of_watched(config: RunConfig | None, log: TrainingLog | None) -> RunConfig | None:
    """The config of a watched command, with what its log says: nanoGPT takes the vocabulary of its data alone."""
    if config is None or log is None:
        return config
    said = {"vocab_size": log.header.vocab_size} if log.header.vocab_size else {}
    return laid_over(config, printed(log) | said)


def of_tracked(tracked: Tracked) -> RunConfig | None:
    """The config of a run that a tracker has kept: ours, or nanoGPT's own; None of any other program's."""
    known = {key: value for key, value in tracked.config.items() if key in OPTIONS}
    if not tracked.is_ours and _SHAPE - known.keys():
        return None
    return laid_over(RunConfig(), known)


def printed(log: TrainingLog) -> dict[str, Any]:
    """{option: value} of what the log says ran."""
    return {key: value for key, value in log.header.settings.items() if key in OPTIONS and not OPTIONS[key].inert}


def laid_over(config: RunConfig, values: dict[str, Any]) -> RunConfig:
    """The config with these values; one that no such option can have is left out, as it says nothing that is known."""
    try:
        return RunConfig.model_validate({**config.model_dump(), **values})
    except ValidationError as error:
        bad = {str(detail["loc"][0]) for detail in error.errors() if detail["loc"]}
        kept = {key: value for key, value in values.items() if key not in bad}
        return laid_over(config, kept) if len(kept) < len(values) else config
