"""A plan of pretraining, from what somebody names: a config by its words, a card by its name."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretrain.base.errors import UserError
from foretrain.base.installation import Later
from foretrain.base.records import Note
from foretrain.config.options import RunConfig
from foretrain.config.resolve import ResolvedConfig, Trainer, from_values, resolve
from foretrain.config.shape import ModelShape
from foretrain.config.sharing import micro_batch_choices
from foretrain.config.words import Vocabulary, as_word
from foretrain.data.corpus import ConfigData, data_of_config
from foretrain.hardware import devices
from foretrain.hardware.catalogue import NANOGPT_PEAK_FLOP_PER_S, DetectedGpu, Gpu, detect, stated_bytes
from foretrain.hardware.cluster import Cluster, cluster
from foretrain.hardware.devices import Target

if TYPE_CHECKING:
    from foretrain.advice import micro_batch
    from foretrain.advice.micro_batch import Choice
    from foretrain.analysis import log_checks
    from foretrain.data.dataset import DatasetInfo
    from foretrain.predict import plan as planner
    from foretrain.predict import ranks, spec
    from foretrain.predict.plan import Plan
    from foretrain.predict.ranks import ClusterPlan
else:  # an answer that is kept needs none of them
    micro_batch, log_checks = Later("foretrain.advice.micro_batch"), Later("foretrain.analysis.log_checks")
    planner, spec = Later("foretrain.predict.plan"), Later("foretrain.predict.spec")
    ranks = Later("foretrain.predict.ranks")


def data_notes(config: RunConfig, info: "DatasetInfo | None") -> Iterator[Note]:
    if info is None or info.format not in ("foretrain", "mix") or config.eval_only:
        return
    tokens = config.max_iters * config.tokens_per_step
    for part in info.parts:
        values = {"name": part.dataset.name, "share": part.weight, "tokens": part.dataset.train_tokens}
        yield Note(id="mix_part", values={**values, "epochs": tokens * part.weight / part.dataset.train_tokens})
    if info.parts or not info.train_tokens:
        return
    epochs = tokens / info.train_tokens
    if config.data_order == "random":
        # A token is missed by one row with probability 1 - block / tokens, and rows are drawn independently.
        yield Note(id="data_random", values={"epochs": epochs, "seen": -math.expm1(-epochs)})
    else:
        yield Note(id="data_epochs", values={"epochs": epochs, "block": config.block_size})


# How a config can be given: a name or path, words of the command line, options by name, or made already.
Config = str | Path | list[str] | tuple[str, ...] | Mapping[str, Any] | RunConfig | ResolvedConfig

MOST_CARDS = 100  # of --gpu; the catalogue has fewer


Listen = Callable[[str], None]
DataOf = Callable[[ResolvedConfig], ConfigData]


@dataclass(frozen=True)
class Cards:
    gpus: str = ""
    gpu: str = "auto"
    link: str = ""
    network: str = ""
    others: str = ""
    card: Gpu | None = None  # in the place of a name

    def targets(self, config: RunConfig) -> list[Target]:
        """Return the devices, each alone; "" and "auto" are this machine's. Raises UserError."""
        stated = stated_bytes(self.others, "--used-by-others") if self.others else None
        if self.card is not None:
            return [devices.checked(self.card, stated or 0)]
        wanted = [name.strip() for name in self.gpu.split(",") if name.strip()]
        if len(wanted) > MOST_CARDS:
            raise UserError("usage.too_many_cards", count=len(wanted), most=MOST_CARDS)
        wanted = list(dict.fromkeys(wanted)) or [devices.HERE]
        return [target_of(name, stated, config) for name in wanted]

    def clusters(self, config: RunConfig) -> list[Cluster]:
        """Return the cards that share a run, of each name so many. Raises UserError."""

        def named(name: str) -> Gpu:
            return self.card or target_of(name, None, config).gpu

        return [cluster(self.gpus, self.link, self.network, partial(named, name)) for name in self.gpu.split(",")]


def resolved_of(config: Config, options: Mapping[str, Any] = {}) -> ResolvedConfig:
    if isinstance(config, RunConfig):
        config = replace(from_values({}), config=config, sources=dict.fromkeys(config.model_fields_set, "call"))
    if isinstance(config, ResolvedConfig):
        if not options:
            return config
        config = {name: getattr(config.config, name) for name in config.sources}
    if isinstance(config, Mapping):
        return from_values({**config, **options})
    words = config if isinstance(config, list | tuple) else [str(config)]
    listed = {name: ",".join(map(str, each)) for name, each in options.items() if isinstance(each, list | tuple)}
    return resolve([*words, *(as_word(name, value) for name, value in (dict(options) | listed).items())])


@lru_cache(maxsize=2)
def _detected(index: int, moment: int) -> DetectedGpu | None:
    return detect(index)


def card_here(index: int = 0) -> DetectedGpu | None:
    """Return this machine's card, asked every five seconds at most. Raises UserError."""
    return _detected(index, int(time.monotonic() / 5))


def target_of(name: str, stated_bytes: int | None, config: RunConfig) -> Target:
    """Return the device of this name, as `hardware.devices.target` finds it; "auto" is the config's."""
    if name.lower() == devices.HERE and config.device == devices.CPU:
        name = devices.CPU
    return devices.target(name, stated_bytes, index=int(config.device.partition(":")[2] or 0), detect=card_here)


def words_of_cards(cards: Cards, words: Sequence[str], vocabulary: Vocabulary) -> tuple[Cards, list[str]]:
    """Return the cards alone, and how many there are of each as words of the run. Raises UserError."""
    if not cards.gpus:
        return cards, []
    for word in vocabulary.split(words):
        if word.key in ("world", "per_node"):
            raise UserError("usage.finetune_without.world_twice", option=word.name)
    found, *more = cards.clusters(RunConfig())
    own = [f"--world={found.world}", *([f"--per-node={found.per_node}"] if found.nodes > 1 else [])]
    links = ((name, getattr(cards, name)) for name in ("link", "network"))
    names = cards.gpu if more or cards.card else found.gpu.name
    return replace(cards, gpus="", gpu=names), [*own, *(f"--{name}={value}" for name, value in links if value)]


def make_plan(
    resolved: ResolvedConfig,
    target: Target,
    step_time: float | None = None,
    logged_mfu: float | None = None,
    data_of: DataOf = data_of_config,
) -> "Plan":
    """Plan a resolved config on a target. `data_of`: looks for the dataset."""
    data = data_of(resolved)
    config = data.config
    if step_time is not None and logged_mfu is not None:
        raise UserError("usage.two_speeds")
    for option, value in (("--step-time", step_time), ("--logged-mfu", logged_mfu)):
        check_speed(option, value)
    if logged_mfu is not None:
        flops = ModelShape.of(config).flops_per_token * config.tokens_per_step
        step_time = flops / (logged_mfu / 100 * NANOGPT_PEAK_FLOP_PER_S)
    _check_device(resolved, target.gpu)
    if step_time is not None:
        _check_speed(config, target.gpu, step_time, logged_mfu)
    decided = auto_batch(config, target, resolved.step) if config.auto_batch_size else None
    made = planner.plan(
        decided.config if decided else config, target.gpu, name=resolved.name,
        used_by_others_bytes=target.used_by_others_bytes,
        dataset_tokens=data.tokens, dataset_source=data.source, logged_step_s=step_time,
    )  # fmt: skip
    notes = (*([decided.note] if decided else []), *made.notes, *data_notes(made.config, data.info))
    return made.model_copy(update={"notes": notes, "assumptions": data.assumptions}).run_by(resolved.step)


def make_cluster_plan(
    resolved: ResolvedConfig, cards: Cluster, used_by_others_bytes: int = 0, data_of: DataOf = data_of_config
) -> "ClusterPlan":
    _check_cards(resolved, cards)
    resolved = replace(resolved, trainer="foretrain")  # whose step ranks share
    target = devices.checked(cards.gpu, used_by_others_bytes)
    if not resolved.config.auto_batch_size:
        return ranks.with_pays(ranks.share(make_plan(resolved, target, data_of=data_of), cards, resolved.sources))
    found = None
    for config in micro_batch_choices(resolved.config, cards.world):
        plan = make_plan(replace(resolved, config=config), target, data_of=data_of)
        found = ranks.share(plan, cards, resolved.sources)
        if found.best is not None and found.verdict == "fits":
            break
    assert found is not None  # one sequence at a time is always among them
    return ranks.with_pays(found)


def _check_cards(resolved: ResolvedConfig, cards: Cluster) -> None:
    """Raise UserError for what cannot be planned on these cards."""
    if resolved.config.eval_only:
        raise UserError("usage.cluster_eval_only")
    hybrid = "strategy" in resolved.sources and resolved.config.strategy == "hsdp"
    if hybrid and (cards.nodes == 1 or cards.per_node == 1):
        raise UserError("usage.hsdp_of_one_node", cluster=cards.text)


def check_speed(option: str, value: float | None) -> None:
    """Raise UserError for a step time or an MFU that no log shows."""
    if value is not None and not 1e-6 <= value <= 1e9:
        raise UserError("usage.bad_step_time", option=option, value=value)


def _check_device(resolved: ResolvedConfig, gpu: Gpu) -> None:
    """Raise UserError where a typed --device is not what is planned for; a file's gives way to --gpu."""
    source, device = resolved.sources.get("device", ""), resolved.config.device
    if source.startswith("-") and device != "auto" and (device == "cpu") != (gpu.kind == "cpu"):
        raise UserError("usage.two_devices", source=source, gpu=gpu.name)


def _check_speed(config: RunConfig, gpu: Gpu, step_s: float, logged_mfu: float | None) -> None:
    """Raise UserError for a measured speed that this device cannot have."""
    peak = gpu.matmul_peak_flop_per_s(config.matmul, spec.choose_dtype(config, gpu)[0])
    used = log_checks.utilization(config, gpu, step_s)
    flop_per_s = used.tokens_per_s * used.causal_flops_per_token
    if peak is None or flop_per_s <= log_checks.CLOCK_HEADROOM * peak:
        return
    option, value = ("--step-time", step_s) if logged_mfu is None else ("--logged-mfu", logged_mfu)
    id = "usage.step_time_impossible" if logged_mfu is None else "usage.logged_mfu_impossible"
    raise UserError(
        id, option=option, value=f"{value:g}", mfu=used.flop_per_s / peak, gpu=gpu.name, peak=peak, step=step_s,
        tokens=config.tokens_per_step,
    )  # fmt: skip


def auto_batch(config: RunConfig, target: Target, step: Trainer) -> "Choice":
    room, _ = planner.available(config, target.gpu, target.used_by_others_bytes)
    return micro_batch.choose(config, target.gpu, spec.choose_dtype(config, target.gpu)[0], room, step)


def with_dataset(resolved: ResolvedConfig) -> RunConfig:
    return data_of_config(resolved).config
