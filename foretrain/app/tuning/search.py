"""A search for the fastest setting, from its config to its record: what may be changed, the trials, the answer."""

import datetime
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from foretrain.base.installation import installed, installed_torch
from foretrain.config.options import RunConfig
from foretrain.predict.speed.time import is_calibrated
from foretrain.training.device import Placement
from foretrain.tuning import answer as tune_answer
from foretrain.tuning import cache as tune_memory
from foretrain.tuning import space as tune_space
from foretrain.tuning.cache import path_of, recall
from foretrain.tuning.forecast import spec_of
from foretrain.tuning.pool import Pool
from foretrain.tuning.record import Tuning
from foretrain.tuning.space import Machine, Setting, apply
from foretrain.tuning.tuner import Limits, Listen, Outlook, Tuner


@dataclass(frozen=True)
class Job:
    """What is to be searched, and where. `base`: the config with everything decided that `train` would decide;
    `room_bytes`: what a process may take."""

    name: str
    base: RunConfig
    choices: list[tuple[Any, ...]]
    machine: Machine
    placement: Placement
    room_bytes: int | None

    @property
    def path(self) -> Path:
        return path_of(self.base, self.choices, self.placement.gpu, installed("foretrain"), self.machine.world)

    def settings(self) -> list[Setting]:
        return list(tune_space.settings(self.base, self.choices, self.machine.world))

    @property
    def cpu_clock(self) -> bool:
        """Whether every setting runs on one thread, so that its CPU time can be counted instead of the wall's."""
        own = self.base.cpu_threads or torch.get_num_threads()
        if self.machine.world > 1:  # they wait for each other
            return False
        return not self.machine.cuda and own == 1 and set(self.choices[-1]) <= {0, 1}

    def recalled(self, budget_s: float, trials: int | None) -> Tuning | None:
        """The answer of before, where it still holds."""

        return recall(self.path, self.room_bytes, budget_s, trials or 0)

    def run(self, budget_s: float, trials: int | None, *, recall: bool, listen: Listen) -> Tuning:
        """The answer of before where it still holds and is wanted, else a search. Raises UserError."""
        kept = self.recalled(budget_s, trials) if recall else None
        return kept or self.search(budget_s, trials, listen)

    def search(self, budget_s: float, trials: int | None, listen: Listen) -> Tuning:
        """Measure; the answer is kept. Raises UserError where nothing runs."""
        started, gpu, dtype = time.monotonic(), self.placement.gpu, self.placement.dtype
        world = self.machine.world
        calibrated = is_calibrated(spec_of(self.base, gpu, dtype))
        outlook = Outlook(gpu, dtype, self.room_bytes, calibrated, world)
        with Pool(self.room_bytes, self.room_bytes, cpu_clock=self.cpu_clock, world=world) as pool:
            tuner = Tuner(self.settings(), outlook, pool, Limits(budget_s, trials), time.monotonic, listen)
            tuner.run()
        found = Tuning(
            name=self.name, device=gpu.name, world=world, torch_version=installed_torch(), calibrated=calibrated,
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            tokens_per_step=self.base.tokens_per_step, given_options=self.settings()[0].named,
            took_s=time.monotonic() - started, budget_s=budget_s, most_trials=tuner.most,
            clock="cpu" if self.cpu_clock else "wall", cap_bytes=self.room_bytes, **tune_answer.answer(tuner),
        )  # fmt: skip
        if world == 1:  # a step of several is none that a plan of one could learn from
            configs = [apply(self.base, tuple(trial.options.values())) for trial in found.trials]
            threads = 0 if self.machine.cuda else torch.get_num_threads()
            found = found.model_copy(update={"fed": tune_memory.feed(found, configs, gpu, dtype, threads)})
        tune_memory.keep(found, self.path)
        return found
