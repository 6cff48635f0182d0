"""What `foretrain tune` searches, decided: what the config leaves open, as `train` would, and what may be changed."""

import os

import torch

from foretrain.advice.micro_batch import choose
from foretrain.app.plan import with_dataset
from foretrain.app.tuning.search import Job
from foretrain.base.errors import UserError
from foretrain.config.options import RunConfig
from foretrain.config.ranks import as_one_rank_of, of_all, of_rank
from foretrain.config.resolve import ResolvedConfig
from foretrain.hardware.cpu import cores_each, physical_cores
from foretrain.hardware.devices import used_here_bytes
from foretrain.model.ranks.sharing import check_ranks
from foretrain.predict.plan import available
from foretrain.training import choices
from foretrain.training.device import Placement, obstacle_to_compile, place
from foretrain.training.host_memory import keep_memory
from foretrain.training.ranks.place import host_name
from foretrain.tuning.space import Machine, default_knobs, options


def prepare(resolved: ResolvedConfig, knobs: tuple[str, ...] = (), world: int = 1) -> Job:
    """Decide what the config leaves open as `train` would, and what may be changed. `world`: the ranks that share each
    step, on a card each. Raises UserError."""

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
    """With batch_size = auto the micro-batch that `train` would pick, for the part of a step that one rank does."""
    if not asked.auto_batch_size:
        return asked
    planned = of_rank(as_one_rank_of(asked, world), world).model_copy(update={"compile": placement.compiled})
    made = choose(planned, placement.gpu, placement.dtype, room).config
    return of_all(made, world).model_copy(update={"compile": asked.compile})


def _decided(config: RunConfig, placement: Placement, given: set[str], world: int) -> RunConfig:
    """With what is fastest on a CPU, where the config leaves it open."""
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
