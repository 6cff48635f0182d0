"""Plans as a subject: a file of `foretrain plan --json`, a run's plan.json, a config or a preset."""

import json
import re
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from foretrain.base.errors import UserError
from foretrain.base.files import read_text
from foretrain.comparison import settings
from foretrain.comparison.sources.request import SourceRequest
from foretrain.comparison.subject import Memory, Source, Subject
from foretrain.config.options import RunConfig
from foretrain.config.presets import preset_named
from foretrain.config.resolve import ResolvedConfig, resolve
from foretrain.data import dataset
from foretrain.data.corpus import data_of_config
from foretrain.hardware.catalogue import Gpu, catalogue
from foretrain.hardware.devices import checked
from foretrain.predict.finetune.plan import FineTunePlan
from foretrain.predict.forecast import AnyPlan, kind_of
from foretrain.predict.memory import predict
from foretrain.predict.plan import SCHEMA, Plan, available
from foretrain.predict.ranks import ClusterPlan
from foretrain.predict.spec import StepName, StepSpec
from foretrain.predict.speed.time import is_calibrated, step_time


def claims(path: Path, head: bytes) -> bool:
    return re.search(rb'"schema":\s*"foretrain\.', head[:200]) is not None or (
        path.name == "plan.json" and head.lstrip()[:1] == b"{"
    )


def load(given: SourceRequest) -> Subject:
    """Load the plan of the step that it means. Raises UserError for other records."""
    if given.words:
        raise UserError("usage.source_has_config", path=given.path)
    made = read(Path(given.path))
    low, expected, high = made.needs.neediest.needed_span
    traced = "traced" if made.needs.source == "traced" else "estimated"
    memory = Memory(low_bytes=low, expected_bytes=expected, high_bytes=high, what="needed", source=traced)
    label = given.label or (made.name if given.name in ("plan", "-") else given.name)
    subject = Subject(label=label, path=given.path, kind="plan", gpu=made.gpu, memory=memory)
    subject = _with_options(given, subject, made)
    if made.timing is None:
        return subject
    source: Source = made.timing.source
    return subject.with_speed(made.timing.step_s, source)


def _with_options(given: SourceRequest, subject: Subject, made: AnyPlan) -> Subject:
    if isinstance(made, Plan | ClusterPlan):
        one = made.one_card if isinstance(made, ClusterPlan) else made
        config, world, devices = one.config, one.world, one.devices
        if isinstance(made, ClusterPlan):
            config = config.model_copy(update={"strategy": (made.best or made.least).strategy})
            world = devices = made.cluster.world
        return replace(
            subject, settings=settings.of_config(config, made.gpu, one.step) | {settings.RANKS: world}, config=config,
            world=world, devices=devices, step=one.step, tokens_per_step=config.tokens_per_step,
            used_by_others_bytes=one.used_by_others_bytes, bytes_per_token=bytes_per_token(given, config),
        )  # fmt: skip
    tuned = isinstance(made, FineTunePlan)
    options, tokens = (made.tune, made.tune.tokens_per_step) if tuned else (made.asked, made.asked.batch)
    prices = made.timing.prices if made.timing else None
    known = {"model": made.where, **settings.of_options(options.model_dump()), **settings.of_gpu(made.gpu)}
    world = made.tune.world if isinstance(made, FineTunePlan) else 1
    return replace(
        subject, settings=known | ({settings.RANKS: world} if tuned else {}), world=world, devices=world,
        generates=not tuned,
        tokens_per_step=tokens, used_by_others_bytes=made.used_by_others_bytes,
        mfu=made.timing.mfu if made.timing else None, rent_per_hour=prices.price_per_hour if prices else None,
    )  # fmt: skip


def read(path: Path) -> AnyPlan:
    """Return the plan of any kind of run in a file. Raises UserError for what is none."""
    try:
        text = read_text(path)
        data = json.loads(text)
        schema = data.get("schema") if isinstance(data, dict) else None
        if schema not in (None, SCHEMA):
            raise UserError("data.not_a_plan", path=str(path), schema=str(schema)[:60])
        return kind_of(data).from_json(text)
    except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
        reason = str(error).splitlines()[0]
        if isinstance(error, ValidationError):
            reason = "{loc}: {msg}".format(**{**(first := error.errors()[0]), "loc": ".".join(map(str, first["loc"]))})
        raise UserError("data.plan_unreadable", path=str(path), reason=reason[:200]) from None


def is_config(path: Path, head: bytes) -> bool:
    return path.suffix in (".toml", ".py") or preset_named(str(path)) is not None


def load_config(given: SourceRequest) -> Subject:
    """Plan the config on the card. Raises ConfigError, and UserError without a card."""
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


def with_vocabulary(resolved: ResolvedConfig, vocab_size: int | None) -> RunConfig:
    """Fill in a vocabulary that the config does not set: the log's, else that of its dataset."""
    return data_of_config(resolved, logged_vocab_size=vocab_size, find=here).config


def here(name: str) -> dataset.DatasetInfo | None:
    path = dataset.find(name)
    return dataset.read_info(path) if path else None


def bytes_per_token(given: SourceRequest, config: RunConfig | None, tokenizer: str = "") -> float | None:
    """Return the user's figure; else one for the byte tokenizer. `tokenizer`: of the run's dataset, by its record."""
    stated = given.number("bytes_per_token", 0.1, 1000)
    if stated is None and config is not None and not tokenizer:
        tokenizer = config.tokenizer if config.dataset == dataset.BUILT_IN else _tokenizer_here(config.dataset)
    return stated if stated is not None else 1.0 if tokenizer == "byte" else None


def _tokenizer_here(name: str) -> str:
    try:
        found = here(name)
    except UserError:
        return ""
    return (found.tokenizer or "") if found else ""


def with_forecast(subject: Subject, config: RunConfig, gpu: Gpu | None, step: StepName) -> Subject:
    """Add what the config settles, predicted where not measured. Raises UserError where the card cannot run it."""
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
    """Return what the whole run needs. Raises UserError where other programs use more than the card has."""
    checked(gpu, used_by_others_bytes)
    room, _ = available(config, gpu, used_by_others_bytes)
    memory = predict(StepSpec.of(config, gpu, step), room)
    low, expected, high = memory.neediest.needed_span
    return Memory(low_bytes=low, expected_bytes=expected, high_bytes=high, source="estimated", what="needed")
