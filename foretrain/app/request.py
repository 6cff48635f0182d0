"""What is asked of a run: its words and its cards, of which each kind of run makes its forecasts."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from foretrain.app.limits import NO_LIMITS, Limits, check_limits, priced, prices_of
from foretrain.app.plan import Cards, DataOf, check_speed, make_cluster_plan, make_plan
from foretrain.base.errors import UserError
from foretrain.base.installation import GPU_FILE_VARIABLE, Later
from foretrain.base.records import Note
from foretrain.config.option import Option
from foretrain.config.options import OPTIONS
from foretrain.config.presets import GPT2_SHAPES
from foretrain.config.resolve import ResolvedConfig
from foretrain.data.corpus import data_of_config
from foretrain.data.dataset import DATA_DIR
from foretrain.data.locate import MIX_SUFFIX
from foretrain.hardware.catalogue import stated_bytes
from foretrain.hardware.devices import CPU, HERE, Target

if TYPE_CHECKING:
    from foretrain.predict import pretraining
    from foretrain.predict import ranks as sharing
    from foretrain.predict.forecast import Forecast
else:  # a plan waits for its own kind of run alone
    pretraining, sharing = Later("foretrain.predict.pretraining"), Later("foretrain.predict.ranks")


class Request:
    """A run on a card, or on each of several. `given`: the options that the user set; `aliases`: other names of those
    that --largest takes; `compares_limits`: --within can be asked of several cards at once."""

    kind: str
    cards: Cards
    aliases: ClassVar[Mapping[str, str]] = {}
    compares_limits: ClassVar[bool] = False
    files: Sequence[Path] = ()
    given: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        raise NotImplementedError

    @property
    def notes(self) -> Sequence[UserError | Note]:
        return ()

    def settings(self, limits: Limits) -> tuple[Any, Mapping[str, Option], Mapping[str, str]]:
        """Return the values of the options, the options, and where each value is from."""
        raise NotImplementedError

    def check(self, limits: Limits, *, look: str, traced: bool, largest: str) -> None:
        """Raise UserError for options that do not go together."""
        check_limits(limits, 1, bool(look) or traced or bool(largest))

    @property
    def costs(self) -> ResolvedConfig:
        """Return a config with the run's prices."""
        raise NotImplementedError

    def forecast_on(self, place: Any, costs: ResolvedConfig, step_s: float | None, mfu: float | None) -> "Forecast":
        raise NotImplementedError

    def forecasts(
        self, limits: Limits = NO_LIMITS, step_s: float | None = None, logged_mfu: float | None = None
    ) -> "list[Forecast]":
        """Return a forecast for each card. Raises UserError."""
        check_speed("--step-time", step_s)
        costs = priced(self.costs, limits)
        found = self.cards.clusters(costs.config) if self.cards.gpus else self.cards.targets(costs.config)
        if not self.compares_limits:
            check_limits(limits, len(found), traces=False)
            if len(found) > 1 and (step_s is not None or logged_mfu is not None):
                option = "--step-time" if step_s is not None else "--logged-mfu"
                raise UserError("usage.one_speed", option=option, count=len(found))
        made = []
        for place, rent in zip(found, prices_of(limits, costs.config, [each.gpu for each in found]), strict=True):
            own = replace(costs, config=costs.config.model_copy(update={"price_per_hour": rent}))
            made.append(self.forecast_on(place, own, step_s, logged_mfu))
        return made


@dataclass(frozen=True)
class PretrainingRequest(Request):
    """A config on one card, on each of several, or on cards that share it. `data_of`: what looks for its dataset."""

    resolved: ResolvedConfig
    cards: Cards
    data_of: DataOf = data_of_config

    @property
    def kind(self) -> str:  # type: ignore[override]
        return "cards" if self.cards.gpus else "pretraining"

    @property
    def name(self) -> str:
        return self.resolved.name

    @property
    def notes(self) -> Sequence[UserError]:
        return self.resolved.notes

    @property
    def files(self) -> Sequence[Path]:  # type: ignore[override]
        return self.resolved.files

    @property
    def given(self) -> frozenset[str]:  # type: ignore[override]
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
        if self.cards.gpus and largest and traced:
            raise UserError("usage.finetune_largest_alone", option="--exact")
        super().check(limits, look=look, traced=traced, largest=largest)

    @property
    def costs(self) -> ResolvedConfig:
        return self.resolved

    def forecast_on(self, place: Any, costs: ResolvedConfig, step_s: float | None, mfu: float | None) -> "Forecast":
        if isinstance(place, Target):
            return pretraining.of_plan(make_plan(costs, place, step_s, mfu, self.data_of))
        others = stated_bytes(self.cards.others, "--used-by-others") if self.cards.others else 0
        made = make_cluster_plan(costs, place, others, self.data_of)
        return pretraining.of_cluster(made if step_s is None else sharing.timed(made, step_s))
