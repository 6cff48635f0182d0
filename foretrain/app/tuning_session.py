"""A search for the fastest setting, from its config to its record: what may be changed, the trials, the answer."""

import datetime
import math
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from foretrain.advice.micro_batch import choose
from foretrain.app.plan import with_dataset
from foretrain.base.cache import Cache
from foretrain.base.errors import UserError
from foretrain.base.installation import installed, installed_torch
from foretrain.config.checks import is_one_graph
from foretrain.config.options import RunConfig, step_options
from foretrain.config.resolve import ResolvedConfig
from foretrain.config.sharing import as_one_rank_of, check_ranks, config_of_all_ranks, config_of_rank
from foretrain.hardware.calibration import save_tuned
from foretrain.hardware.catalogue import Dtype, Gpu
from foretrain.hardware.cpu import cores_each, physical_cores, usable_cores
from foretrain.hardware.devices import used_here_bytes
from foretrain.measure import space as tune_space
from foretrain.measure.pool import Pool
from foretrain.measure.space import TUNABLE, Level, Machine, Setting, apply, default_options, learning, options, spec_of
from foretrain.measure.tune_record import (
    NEAR,
    ForecastError,
    TuneTrial,
    Tuning,
    Verdict,
    estimate,
    rounded_up,
    with_pareto,
)
from foretrain.measure.tuner import UNPAIRED_NOISE, Limits, Listen, Outlook, TriedSetting, Tuner
from foretrain.predict.plan import available
from foretrain.predict.speed.time import is_calibrated, step_of
from foretrain.training import starting as choices
from foretrain.training.device import Placement, keep_memory, obstacle_to_compile, place
from foretrain.training.place import host_name

KEPT = Cache("tuned")
SURE = 0.05  # a step time that may be wrong by more corrects nothing
QUIET = 0.25  # share of the machine that other programs may use, for a step time to count
SAME_ROOM = 1.1  # room that differs by less is the same where room decided


def path_of(base: RunConfig, choices: Sequence[Sequence[Level]], gpu: Gpu, version: str, world: int = 1) -> Path:
    driver = gpu.calibration.driver if gpu.calibration else ""
    space = [(name, sorted(map(str, levels))) for name, levels in zip(TUNABLE, choices, strict=True)]
    threads = os.environ.get("OMP_NUM_THREADS", "")
    what = [step_options(base), space, gpu.name, driver, usable_cores(), threads, installed_torch(), version]
    return KEPT.path([*what, world] if world > 1 else what)


def recall(path: Path, room_bytes: int | None, budget_s: float, trials: int) -> Tuning | None:
    """Return an earlier answer that still holds: as many trials, time and memory. None for a damaged file, too."""
    found = KEPT.record(path, Tuning)
    if found is None or found.most_trials < trials or (found.stop == "budget" and found.budget_s < budget_s):
        return None
    if room_bytes is not None and (found.best.peak_bytes or 0) > room_bytes:
        return None
    limited = found.fitting < found.settings or any(trial.verdict == "memory" for trial in found.trials)
    if limited and room_bytes and found.cap_bytes and room_bytes > SAME_ROOM * found.cap_bytes:
        return None
    return found.model_copy(update={"known": True})


def keep(found: Tuning, path: Path) -> None:
    if found.stop != "interrupted":
        KEPT.keep(path, found.model_dump_json(indent=1))


def feed(found: Tuning, configs: Sequence[RunConfig], gpu: Gpu, dtype: Dtype, threads: int) -> int:
    """Keep reliable timed steps for this device's plans; return how many. `threads`: PyTorch's own; 0 on cards."""
    if found.elsewhere > QUIET:
        return 0
    steps = []
    for trial, config in zip(found.trials, configs, strict=True):
        if _is_sure(trial):
            own = dtype if config.dtype == "auto" else config.dtype
            used = threads and (config.cpu_threads or threads)
            graphed = is_one_graph(config, gpu, own)
            steps.append(step_of(config, own, trial.step_s or 0.0, used, graphed=graphed))
    driver = gpu.calibration.driver if gpu.calibration else ""
    try:
        if steps:
            save_tuned(gpu.name, driver, tuple(steps))
    except OSError:
        return 0
    return len(steps)


def _is_sure(trial: TuneTrial) -> bool:
    if None in (trial.step_s, trial.low_s, trial.high_s) or trial.verdict in ("memory", "timeout", "failed", "changed"):
        return False
    return (trial.high_s or 0) / (trial.low_s or 1) <= (1 + SURE) ** 2


def answer(tuner: Tuner) -> dict[str, Any]:
    """Return a search's fields of a `Tuning`. Raises UserError where nothing that was tried runs."""
    living = [trial for trial in tuner.tried.values() if trial.lives]
    if not living:
        raise _nothing(tuner)
    winner = tuner.winner
    if winner is None or not tuner.tried[winner].lives:
        winner = min(living, key=lambda trial: trial.middle).number
    trials = [_record(tuner, trial, winner) for trial in tuner.tried.values()]
    trials.sort(key=lambda t: (t.verdict != "best", t.step_s is None, t.step_s or 0.0))
    given = tuner.tried.get(tuner.given) if tuner.given is not None else None
    gain = tuner.slower(given.number, winner) if given is not None and given.lives else None
    first = tuner.tried.get(int(tuner.model.prior.argmin()))
    lived = [trial for trial in trials if trial.step_s is not None]
    return {
        "config": tuner.settings[winner].config, "trials": with_pareto(trials), "settings": tuner.total,
        "fitting": len(tuner.settings), "given_fits": gain is not None,
        "gain": math.expm1(gain.mean) if gain else None, "gain_low": math.expm1(gain.low) if gain else None,
        "gain_high": math.expm1(gain.high) if gain else None,
        "first_choice": math.expm1(tuner.slower(first.number, winner).mean) if first and first.lives else None,
        "time_error": ForecastError.of([(t.predicted_s, t.step_s) for t in lived]),
        "memory_error": ForecastError.of([(t.predicted_bytes, t.peak_bytes) for t in lived]),
        "stop": tuner.stop, "rounds": len(tuner.race.rounds),
        "least_budget_s": tuner.least_budget_s() if tuner.stop == "budget" else None,
        "elsewhere": statistics.median(burst.elsewhere for trial in living for burst in trial.bursts),
    }  # fmt: skip


def _nothing(tuner: Tuner) -> UserError:
    failures = [trial.failure for trial in tuner.tried.values() if trial.failure is not None]
    if tuner.stop == "interrupted" or not failures:
        return UserError("check.tune_nothing_yet")
    failed = [failure for failure in failures if failure.reason == "failed"]
    if failed:
        return UserError("environment.tune_failed", count=len(failures), problem=failed[0].problem)
    if any(failure.reason == "timeout" for failure in failures):
        least_s = tuner.least_budget_s() or 2 * tuner.budget_s
        values = {"count": len(failures), "budget": tuner.budget_s, "least": rounded_up(least_s)}
        return UserError("check.tune_too_slow", **values)
    peak = min(failure.peak_bytes for failure in failures)
    return UserError("memory.tune_none_lives", count=len(failures), peak=peak, cap=tuner.outlook.room_bytes or 0)


def _record(tuner: Tuner, trial: TriedSetting, winner: int) -> TuneTrial:
    setting = tuner.settings[trial.number]
    times: dict[str, Any] = {}
    if trial.lives:
        logs = [math.log(burst.step_s) for burst in tuner.tried[winner].bursts]
        slower, own = tuner.slower(trial.number, winner), estimate(logs)
        half = slower.half
        if trial.number == winner:  # its own steps, drift included
            half = own.half if math.isfinite(own.half) else 2 * UNPAIRED_NOISE
        middle = statistics.median(logs) + slower.mean
        times = {
            "step_s": math.exp(middle), "low_s": math.exp(middle - half), "high_s": math.exp(middle + half),
            "tokens_per_s": setting.config.tokens_per_step / math.exp(middle),
        }  # fmt: skip
    return TuneTrial(
        options=setting.named, gradient_accumulation_steps=setting.config.gradient_accumulation_steps,
        learning=learning(tuner.base, setting.config), verdict=_verdict(tuner, trial, winner),
        given=trial.number == tuner.given, predicted_s=trial.predicted_s, predicted_bytes=trial.predicted_bytes,
        peak_bytes=trial.peak_bytes or None, started_s=trial.started_s, bursts=len(trial.bursts),
        problem=trial.failure.problem if trial.failure else "", **times,
    )  # fmt: skip


def _verdict(tuner: Tuner, trial: TriedSetting, winner: int) -> Verdict:
    if trial.changed:
        return "changed"
    if trial.failure is not None:
        return trial.failure.reason
    if trial.number == winner:
        return "best"
    if trial.number in tuner.race.alive:
        return "as_good" if tuner.slower(trial.number, winner).mean <= NEAR else "close"
    return "slower"


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
        """Return the earlier answer where it still holds and is wanted, else search. Raises UserError."""
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
            clock="cpu" if self.cpu_clock else "wall", cap_bytes=self.room_bytes, **answer(tuner),
        )  # fmt: skip
        if world == 1:  # a step of several is none that a plan of one could learn from
            configs = [apply(self.base, tuple(trial.options.values())) for trial in found.trials]
            threads = 0 if self.machine.cuda else torch.get_num_threads()
            found = found.model_copy(update={"fed": feed(found, configs, gpu, dtype, threads)})
        keep(found, self.path)
        return found


def prepare(resolved: ResolvedConfig, names: tuple[str, ...] = (), world: int = 1) -> Job:
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
    found = options(asked, base, given, names or default_options(asked, given, machine), machine)
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
