"""The data of a run."""

from dataclasses import replace

from foretrain.config.resolve import ResolvedConfig
from foretrain.data import dataset
from foretrain.data.builtin import prepare_built_in
from foretrain.data.dataset import DatasetInfo
from foretrain.data.locate import locate, no_dataset
from foretrain.data.remote import Bar, fetch, no_bar


def prepare_data(resolved: ResolvedConfig, bar: Bar = no_bar) -> tuple[ResolvedConfig, DatasetInfo]:
    """The dataset of a config, made if it is the built-in one, checked against the model. Raises UserError."""
    config = resolved.config
    if config.dataset == dataset.BUILT_IN:
        info = prepare_built_in(config)
    else:
        found = locate(config.dataset)
        if found is None:
            raise no_dataset(config.dataset)
        info = found
        fetch(info, bar)
    if info.vocab_size and "vocab_size" not in resolved.sources:
        config = config.model_copy(update={"vocab_size": info.vocab_size})
        resolved = replace(resolved, config=config, sources={**resolved.sources, "vocab_size": info.path})
    dataset.check_usable(info, config.vocab_size, config.block_size, config.eval_block)
    return resolved, info
