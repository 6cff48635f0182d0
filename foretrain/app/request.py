"""What is asked of a run: words and cards become a request, one class for each kind of run, which plans, traces and
explains it."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from foretrain.app.limits import Limits, check_limits, make_plans, priced
from foretrain.app.plan import Cards, DataOf, Listen, Look, targets
from foretrain.base.errors import UserError
from foretrain.base.installation import GPU_FILE_VARIABLE, Later
from foretrain.base.records import Note
from foretrain.config.option import Option
from foretrain.config.options import OPTIONS
from foretrain.config.presets import GPT2_SHAPES, is_surely_asked
from foretrain.config.resolve import ResolvedConfig, resolve
from foretrain.data.corpus import data_of_config
from foretrain.data.dataset import DATA_DIR
from foretrain.data.locate import MIX_SUFFIX
from foretrain.hardware.devices import CPU, HERE

if TYPE_CHECKING:
    from foretrain.analysis.components import Explanation
    from foretrain.analysis.finetune_memory import FineTuneExplanation
    from foretrain.app import cluster as ranks
    from foretrain.app import exact, generation
    from foretrain.app import finetune as finetuning
    from foretrain.config.hub.facts import ModelSource
    from foretrain.predict import pretraining
    from foretrain.predict import ranks as cluster
    from foretrain.predict.forecast import Forecast
    from foretrain.predict.largest import Largest
else:  # a plan waits for its own kind of run alone, and for traces where it has some
    exact, generation = Later("foretrain.app.exact"), Later("foretrain.app.generation")
    finetuning, ranks = Later("foretrain.app.finetune"), Later("foretrain.app.cluster")
    pretraining, cluster = Later("foretrain.predict.pretraining"), Later("foretrain.predict.ranks")


class PlanRequest(Protocol):
    """The request of every kind of run. Some can also be `traced`, searched for the `largest`, and `write_snapshot`."""

    aliases: ClassVar[Mapping[str, str]]  # other names of the options that --largest takes

    @property
    def kind(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def notes(self) -> Sequence[UserError | Note]: ...
    @property
    def files(self) -> Sequence[Path]: ...
    @property
    def given(self) -> frozenset[str]:
        """Return the options that the user set."""
        ...

    def check(self, limits: Limits, *, look: str, traced: bool, largest: str) -> None:
        """Raise UserError for options that do not go together."""
        ...

    def plans(self, limits: Limits, step_s: float | None = None, logged_mfu: float | None = None) -> list[Any]:
        """Return a plan for each card. Raises UserError."""
        ...

    def forecast(self, plan: Any) -> "Forecast": ...
    def explained(self, plan: Any, listen: Listen, look: Look) -> "Explanation | FineTuneExplanation": ...


@dataclass(frozen=True)
class PretrainingRequest:
    """A config on one card, or on each of several. `data_of`: what looks for its dataset."""

    resolved: ResolvedConfig
    cards: Cards
    data_of: DataOf = data_of_config
    kind = "pretraining"
    aliases: ClassVar[Mapping[str, str]] = {}

    @property
    def name(self) -> str:
        return self.resolved.name

    @property
    def notes(self) -> tuple[UserError, ...]:
        return self.resolved.notes

    @property
    def files(self) -> tuple[Path, ...]:
        return self.resolved.files

    @property
    def given(self) -> frozenset[str]:
        return frozenset(self.resolved.sources)

    @property
    def deciding(self) -> tuple[Path, ...] | None:
        """Return the files that decide the answer, those that may come included; None where more than files does."""
        config, cards = self.resolved.config, {name.strip() for name in self.cards.gpu.lower().split(",")}
        known = config.init_from in ("scratch", *GPT2_SHAPES) and GPU_FILE_VARIABLE not in os.environ
        elsewhere = "://" in config.dataset or config.dataset.endswith(MIX_SUFFIX)
        if not known or elsewhere or not cards.isdisjoint({"", HERE, CPU}):
            return None
        return (*self.resolved.files, *self.resolved.looked, Path(config.dataset), DATA_DIR / config.dataset)

    def settings(self, limits: Limits) -> tuple[Any, Mapping[str, Option], Mapping[str, str]]:
        resolved = priced(self.resolved, limits)
        return resolved.config, OPTIONS, resolved.sources

    def check(self, limits: Limits, *, look: str, traced: bool, largest: str) -> None:
        check_limits(limits, 1, bool(look) or traced or bool(largest))

    def plans(self, limits: Limits, step_s: float | None = None, logged_mfu: float | None = None) -> list[Any]:
        resolved = priced(self.resolved, limits)
        found = targets(self.cards.gpu, self.cards.others, resolved.config)
        check_limits(limits, len(found), traces=False)
        if len(found) > 1 and (step_s is not None or logged_mfu is not None):
            option = "--step-time" if step_s is not None else "--logged-mfu"
            raise UserError("usage.one_speed", option=option, count=len(found))
        return make_plans(resolved, found, limits, step_s, logged_mfu, self.data_of)

    def forecast(self, plan: Any) -> "Forecast":
        return pretraining.of_plan(plan)

    def largest(self, plan: Any, option: str, listen: Listen, look: Look) -> "Largest":
        return exact.largest(plan, option, listen, look.alloc_conf)

    def traced(self, plan: Any, listen: Listen, look: Look) -> Any:
        return exact.traced_plan(plan, listen, look.alloc_conf)

    def explained(self, plan: Any, listen: Listen, look: Look) -> "Explanation":
        readings = {"observed_bytes": look.observed_bytes, "process_bytes": look.process_bytes}
        return exact.explained(plan, plan.step, listen, look.alloc_conf, **readings)

    def write_snapshot(self, plan: Any, path: Path, listen: Listen, look: Look) -> None:
        exact.write_snapshot(plan, plan.step, path, listen, look.alloc_conf)


@dataclass(frozen=True)
class CardsRequest(PretrainingRequest):
    kind = "cards"

    def check(self, limits: Limits, *, look: str, traced: bool, largest: str) -> None:
        if largest and traced:
            raise UserError("usage.finetune_largest_alone", option="--exact")
        super().check(limits, look=look, traced=traced, largest=largest)

    def plans(self, limits: Limits, step_s: float | None = None, logged_mfu: float | None = None) -> list[Any]:
        return ranks.answers(self.resolved, self.cards, limits, step_s, self.data_of)

    def forecast(self, plan: Any) -> "Forecast":
        return pretraining.of_cluster(plan)

    def traced(self, plan: Any, listen: Listen, look: Look) -> Any:
        return ranks.traced_cluster(plan, listen, alloc_conf=look.alloc_conf)

    def explained(self, plan: Any, listen: Listen, look: Look) -> "Explanation":
        return super().explained(cluster.rank_of(plan), listen, look)

    def write_snapshot(self, plan: Any, path: Path, listen: Listen, look: Look) -> None:
        super().write_snapshot(cluster.rank_of(plan), path, listen, look)


GENERATES = "--inference"  # among the words of a run that generates text


def kind_of(words: Sequence[str], cards: Cards, *, inference: bool = False) -> str:
    """Return the kind of run that these words mean."""
    if inference or GENERATES in words:
        return "generation"
    if not is_surely_asked(words) and finetuning.is_asked(words):
        return "fine-tuning"
    return "cards" if cards.gpus else "pretraining"


def request_of(
    kind: str, words: Sequence[str], cards: Cards, data_tokens: str = "", model: "ModelSource | None" = None
) -> PlanRequest:
    """Return what these words ask of this kind of run, about `model` where it is known. Raises UserError."""
    if kind == "generation":
        return generation.GenerationRequest.of([word for word in words if word != GENERATES], cards, model)
    if kind == "fine-tuning":
        return finetuning.FineTuningRequest.of(words, cards, data_tokens, model)
    return (CardsRequest if kind == "cards" else PretrainingRequest)(resolve(list(words)), cards)
