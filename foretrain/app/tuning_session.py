"""A search for the fastest setting, from its config to its record: what may be changed, the trials, the answer."""

import datetime
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from foretrain.advice.micro_batch import choose
from foretrain.app.plan import with_dataset
from foretrain.base.errors import UserError
from foretrain.base.installation import installed, installed_torch
from foretrain.config.options import RunConfig
from foretrain.config.resolve import ResolvedConfig
from foretrain.config.sharing import as_one_rank_of, check_ranks, config_of_all_ranks, config_of_rank
from foretrain.hardware.cpu import cores_each, physical_cores
from foretrain.hardware.devices import used_here_bytes
from foretrain.measure import space as tune_space
from foretrain.measure import tune_cache as tune_answer
from foretrain.measure import tune_cache as tune_memory
from foretrain.measure.pool import Pool
from foretrain.measure.space import Machine, Setting, apply, default_knobs, options, spec_of
from foretrain.measure.tune_cache import path_of, recall
from foretrain.measure.tune_record import Tuning
from foretrain.measure.tuner import Limits, Listen, Outlook, Tuner
from foretrain.predict.plan import available
from foretrain.predict.speed.time import is_calibrated
from foretrain.training import starting as choices
from foretrain.training.device import Placement, keep_memory, obstacle_to_compile, place
from foretrain.training.place import host_name


@dataclass(frozen=True)
class Job:
    """What is to be searched, and where. `base`: the config with everything decided; `room_bytes`: of a process."""

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
        """Return whether every setting runs on one thread, so that its CPU time can be counted."""
        own = self.base.cpu_threads or torch.get_num_threads()
        if self.machine.world > 1:  # they wait for each other
            return False
        return not self.machine.cuda and own == 1 and set(self.choices[-1]) <= {0, 1}

    def recalled(self, budget_s: float, trials: int | None) -> Tuning | None:
        return recall(self.path, self.room_bytes, budget_s, trials or 0)

    def run(self, budget_s: float, trials: int | None, *, recall: bool, listen: Listen) -> Tuning:
        """Return the answer of before where it still holds and is wanted, else search. Raises UserError."""
        kept = self.recalled(budget_s, trials) if recall else None
        return kept or self.search(budget_s, trials, listen)

    def search(self, budget_s: float, trials: int | None, listen: Listen) -> Tuning:
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


def prepare(resolved: ResolvedConfig, knobs: tuple[str, ...] = (), world: int = 1) -> Job:
    """Decide what the config leaves open as `train` would. `world`: ranks that share each step. Raises UserError."""

    asked = with_dataset(resolved)
    if world > 1:
        check_ranks(asked, world, world)
    placement, given = place(asked), frozenset(resolved.sources)
    if placement.gpu.kind == "mps":
        raise UserError("environment.not_on_mps", command="tune")
    cuda = placement.device.type == "cuda"
    if cuda and (cards := torch.cuda.device_count()) < world:
        raise UserError("environment.more_ranks_than_cards", ranks=world, cards=cards, host=host_name())
    if not cuda:
        keep_memory()
    room, _ = available(asked, placement.gpu, used_here_bytes(placement.gpu, placement.device.index or 0))
    room = room if cuda or room is None else room // world
    config = _picked(asked, placement, room, world)
    base = _decided(config, placement, set(given), world)
    threads = () if cuda or world > 1 else _threads(asked, base)
    machine = Machine(cuda, obstacle_to_compile(placement.device) is None, threads, world)
    found = options(asked, base, given, knobs or default_knobs(asked, given, machine), machine)
    return Job(resolved.name, base, found, machine, placement, room)


def _picked(asked: RunConfig, placement: Placement, room: int | None, world: int) -> RunConfig:
    if not asked.auto_batch_size:
        return asked
    planned = config_of_rank(as_one_rank_of(asked, world), world).model_copy(update={"compile": placement.compiled})
    made = choose(planned, placement.gpu, placement.dtype, room).config
    return config_of_all_ranks(made, world).model_copy(update={"compile": asked.compile})


def _decided(config: RunConfig, placement: Placement, given: set[str], world: int) -> RunConfig:
    if world > 1:  # each has its share of the cores, and no fp32 masters, as in `train`
        own = config.cpu_threads or cores_each(world)
        asked = config.model_copy(update={"cpu_threads": own})
        chosen = choices.decide(asked, placement, given | {"master_weights", "cpu_threads"})
        found = chosen.config.model_copy(update={"cpu_threads": config.cpu_threads})
    else:
        chosen = choices.decide(config, placement, given)
        found = chosen.config
    return found.model_copy(
        update={
            "dtype": chosen.placement.dtype, "compile": placement.compiled, "device": str(placement.device),
            "auto_batch_size": False,
        }
    )  # fmt: skip


def _threads(asked: RunConfig, base: RunConfig) -> tuple[int, ...]:
    """Numbers worth trying besides the base's own, unless the environment decides: the cores, half of them, one."""
    if "OMP_NUM_THREADS" in os.environ and not asked.cpu_threads:
        return ()
    own = base.cpu_threads or torch.get_num_threads()
    return tuple(n for n in sorted({physical_cores(), max(1, physical_cores() // 2), 1}, reverse=True) if n != own)
