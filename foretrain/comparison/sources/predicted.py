"""What a config alone says of a subject: its settings, and by the planner its speed and memory."""

from dataclasses import replace

from foretrain.base.errors import UserError
from foretrain.comparison import settings
from foretrain.comparison.sources.given import Given
from foretrain.comparison.subject import Memory, Subject
from foretrain.config.options import RunConfig
from foretrain.config.resolve import ResolvedConfig
from foretrain.data import dataset
from foretrain.data.corpus import data_of_config
from foretrain.hardware.catalogue import Gpu
from foretrain.hardware.devices import checked
from foretrain.predict.memory import predict
from foretrain.predict.plan import available
from foretrain.predict.spec import StepName, StepSpec
from foretrain.predict.speed.time import is_calibrated, step_time


def with_vocabulary(resolved: ResolvedConfig, vocab_size: int | None) -> RunConfig:
    """The config; a vocabulary that it does not set is the log's, else that of its dataset."""
    return data_of_config(resolved, logged_vocab_size=vocab_size, find=here).config


def here(name: str) -> dataset.DatasetInfo | None:
    """The dataset in a folder of this machine; a comparison asks no other one."""
    path = dataset.find(name)
    return dataset.read_info(path) if path else None


def bytes_per_token(given: Given, config: RunConfig | None, tokenizer: str = "") -> float | None:
    """As given; a token of the byte tokenizer is a byte. `tokenizer`: of the run's dataset, by its record."""
    stated = given.number("bytes_per_token", 0.1, 1000)
    if stated is None and config is not None and not tokenizer:
        tokenizer = config.tokenizer if config.dataset == dataset.BUILT_IN else _tokenizer_here(config.dataset)
    return stated if stated is not None else 1.0 if tokenizer == "byte" else None


def _tokenizer_here(name: str) -> str:
    """The tokenizer of a dataset on this machine; "" where it is not here, or cannot be read."""
    try:
        found = here(name)
    except UserError:
        return ""
    return (found.tokenizer or "") if found else ""


def with_forecast(subject: Subject, config: RunConfig, gpu: Gpu | None, step: StepName) -> Subject:
    """The subject with what its config settles; speed and memory predicted where they were not measured.

    Raises UserError where the card cannot do what the config asks for.
    """
    known = settings.of_config(config, gpu, step)
    subject = replace(
        subject, config=config, gpu=gpu, step=step, settings=known | subject.settings,
        tokens_per_step=subject.tokens_per_step or config.tokens_per_step,
    )  # fmt: skip
    if gpu is None:
        return subject
    spec = StepSpec.checked(config, gpu, step)
    if subject.kind == "config":
        subject = replace(subject, world=1, settings=subject.settings | {settings.RANKS: 1})
    if subject.step_s is not None and subject.step_source is not None:
        subject = subject.with_speed(subject.step_s, subject.step_source)
    else:
        step_s = step_time(spec)
        if step_s is not None:
            subject = subject.with_speed(step_s, "calibrated" if is_calibrated(spec) else "estimated")
    if subject.memory is None:
        subject = replace(subject, memory=needed(config, gpu, step, subject.used_by_others_bytes))
    return subject


def needed(config: RunConfig, gpu: Gpu, step: StepName, used_by_others_bytes: int = 0) -> Memory:
    """What the whole run needs. Raises UserError where others are said to hold more than the card has."""
    checked(gpu, used_by_others_bytes)
    room, _ = available(config, gpu, used_by_others_bytes)
    memory = predict(StepSpec.of(config, gpu, step), room)
    low, expected, high = memory.neediest.needed_span
    return Memory(low_bytes=low, expected_bytes=expected, high_bytes=high, source="estimated", what="needed")
