"""Rank and world size of this process, by the variables of torchrun, Slurm, or foretrain. No torch."""

import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Any, Literal

from foretrain.base.errors import UserError
from foretrain.base.messages import say
from foretrain.runs.record import RankFigures

StartedBy = Literal["foretrain", "torchrun", "slurm"]
LAUNCHED = "FORETRAIN_LAUNCHED"  # set by `foretrain train --gpus`
_PORTS = 20_000, 20_000  # the first, and how many, from which a Slurm job takes one by its number


@dataclass(frozen=True)
class Place:
    """A process of a run; ranks meet at `address`:`port`, where with `agent` the launcher listens already."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    address: str = ""
    port: int = 0
    by: StartedBy = "torchrun"
    agent: bool = False
    attempt: int = 0

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def meeting(self) -> str:
        return f"{self.address}:{self.port}"


ALONE = Place()


class OfRank(UserError):
    """A rank's error with its id and exit code, as the first one reports it for all."""

    def __init__(self, word: dict[str, Any]) -> None:
        super().__init__(word["id"], **word["values"])
        self.rank, self.host, self.message = word["rank"], word["host"], word["said"]

    def __str__(self) -> str:
        return say("error.environment.of_rank", rank=self.rank, host=self.host, message=self.message)


def place_of(environ: Mapping[str, str]) -> Place:
    """Return the place of this process; ALONE where no variable names others. Raises UserError."""
    world = environ.get("WORLD_SIZE", "")
    if "RANK" in environ and world not in ("", "0", "1"):
        return _of_torchrun(environ)
    if world not in ("", "0", "1"):
        raise UserError("environment.no_rank", count=world[:20])
    # A batch script has Slurm's variables too, but only `srun` starts a process for each task.
    in_a_step = any(environ.get(name, "").isdigit() for name in ("SLURM_STEP_ID", "SLURM_STEPID"))
    tasks = environ.get("SLURM_STEP_NUM_TASKS") or (environ.get("SLURM_NTASKS") if in_a_step else None)
    return _of_slurm(environ, _number(tasks, "SLURM_NTASKS")) if tasks not in (None, "", "1") else ALONE


def _of_torchrun(environ: Mapping[str, str]) -> Place:
    def number(name: str, default: str | None = None) -> int:
        return _number(environ.get(name, default), name)

    place = Place(
        rank=number("RANK"),
        world=number("WORLD_SIZE"),
        local_rank=number("LOCAL_RANK", environ["RANK"]),
        local_world=number("LOCAL_WORLD_SIZE", environ["WORLD_SIZE"]),
        address=environ.get("MASTER_ADDR") or "127.0.0.1",
        port=number("MASTER_PORT", "29500"),
        by="foretrain" if environ.get(LAUNCHED) else "torchrun",
        agent=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=number("TORCHELASTIC_RESTART_COUNT", "0"),
    )
    return _checked(place)


def _of_slurm(environ: Mapping[str, str], world: int) -> Place:
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST", "")
    job = _number(environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID") or "0", "SLURM_JOB_ID")
    step = _number(environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID") or "0", "SLURM_STEP_ID")
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or str(world)
    own_port = environ.get("MASTER_PORT")
    place = Place(
        rank=_number(environ.get("SLURM_PROCID"), "SLURM_PROCID"),
        world=world,
        local_rank=_number(environ.get("SLURM_LOCALID", "0"), "SLURM_LOCALID"),
        local_world=_expanded(tasks, _number(environ.get("SLURM_NODEID", "0"), "SLURM_NODEID")),
        address=environ.get("MASTER_ADDR") or first_node(nodes) or "127.0.0.1",
        port=_number(own_port, "MASTER_PORT") if own_port else _PORTS[0] + (job + step) % _PORTS[1],
        by="slurm",
    )
    return _checked(place)


def first_node(nodes: str) -> str:
    """Return the first of Slurm's list of nodes: gpu-03 of 'gpu-[03-05,11],big-1'."""
    found = re.match(r"([^,\[]*)(?:\[([^\],-]+)[^\]]*\])?([^,\[]*)", nodes)
    return "".join(part or "" for part in found.groups()) if found else ""


def _expanded(counts: str, node: int) -> int:
    """Return the number for a node of Slurm's '8(x2),4': 8, 8, 4."""
    found: list[int] = []
    for part in counts.split(","):
        if parsed := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip()):
            found += [int(parsed[1])] * int(parsed[2] or 1)
    return found[node] if node < len(found) else max(found, default=1)


def _number(text: str | None, name: str) -> int:
    if text is None or not re.fullmatch(r"\d{1,12}", text):
        raise UserError("environment.bad_rank", name=name, value=(text or "")[:40])
    return int(text)


def _checked(place: Place) -> Place:
    most = {"RANK": place.world - 1, "LOCAL_RANK": place.local_world - 1, "MASTER_PORT": 65_535}
    values = {"RANK": place.rank, "LOCAL_RANK": place.local_rank, "MASTER_PORT": place.port}
    for name, value in values.items():
        if value > most[name]:
            raise UserError("environment.bad_rank", name=name, value=str(value))
    return place


def host_name() -> str:
    return socket.gethostname()[:64]


SLOW = 0.15  # slower than the median by more
LEAST_S = 0.2  # of a meaningful evaluation


def slow(figures: Sequence[RankFigures]) -> list[tuple[RankFigures, float]]:
    """Return the ranks that compute so much slower than the median that all wait for them, and by which share."""
    times = {f.rank: f.evaluated_s / f.evaluated_tokens for f in figures if f.evaluated_tokens}
    if not times or max(f.evaluated_s for f in figures) < LEAST_S:
        return []
    usual = median_low(times.values())
    behind = [(f, times[f.rank] / usual - 1) for f in figures if f.rank in times]
    return [(f, share) for f, share in behind if share > SLOW]
