"""`foretrain train --gpus N`: one process for each card, as torchrun starts them, with its variables.

Unlike torchrun it gives back the exit code of the first rank, passes signals on as they come and waits while the ranks
save, and no table stands beside the sentence of the rank that failed. Where nothing is left but to end a rank, it is
told which one died first. The ranks see their pipe close if this process is killed, and stop as SIGTERM makes them.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType

from foretrain.base.errors import ExitCode, UserError
from foretrain.base.messages import say
from foretrain.cli.common import ERR
from foretrain.cli.keep_going import PIPE
from foretrain.config.options import RunConfig
from foretrain.hardware.card import Cards
from foretrain.hardware.cpu import cores_each
from foretrain.model.ranks.sharing import check_ranks
from foretrain.training.ranks.place import LAUNCHED, host_name, place_of

GRACE_S = 12.0  # for ranks to end by themselves once another one has
ENDED_WELL = (int(ExitCode.DONE), int(ExitCode.STOPPED))
SKYPILOT_PORT = "29500"


@dataclass(frozen=True)
class Start:
    """The ranks to be started here: `local` of them, on the machine number `node` of `nodes`."""

    local: int
    node: int = 0
    nodes: int = 1
    address: str = "127.0.0.1"

    @property
    def world(self) -> int:
        """All ranks of the run."""
        return self.local * self.nodes


def wanted(gpus: int, config: RunConfig, environ: Mapping[str, str]) -> Start | None:
    """What to start; None where this process trains by itself, alone or as a rank. Raises UserError."""
    place = place_of(environ)
    if place.world > 1:
        if gpus not in (0, place.local_world):
            raise UserError("usage.gpus_of_a_rank", gpus=gpus, ranks=place.local_world)
        return None
    start = _of_skypilot(gpus, environ) or Start(gpus or 1)
    if start.world == 1:
        return None
    check_ranks(config, start.world, start.local)
    cards = len(Cards().facts) if config.device != "cpu" else 0
    if cards and start.local > cards:
        raise UserError("environment.more_ranks_than_cards", ranks=start.local, cards=cards, host=host_name())
    return start


def _of_skypilot(gpus: int, environ: Mapping[str, str]) -> Start | None:
    """SkyPilot runs the command once on each machine, and says how many there are."""
    nodes, node, cards = (
        environ.get(f"SKYPILOT_{name}", "") for name in ("NUM_NODES", "NODE_RANK", "NUM_GPUS_PER_NODE")
    )
    if not (nodes.isdigit() and node.isdigit()):
        return None
    addresses = environ.get("SKYPILOT_NODE_IPS", "").split()
    local = gpus or (int(cards) if cards.isdigit() else 1) or 1
    return Start(local, int(node), int(nodes), addresses[0] if addresses else "127.0.0.1")


def own_words(words: list[str]) -> list[str]:
    """The ranks' command line: ours without --gpus."""
    kept, skip = [], False
    for word in words:
        if not skip and word != "--gpus" and not word.startswith("--gpus="):
            kept.append(word)
        skip = word == "--gpus" and not skip
    return kept


def run(start: Start) -> int:
    """Start the ranks and wait for them; the exit code. Raises UserError where one died and the first said nothing."""
    reader, writer = os.pipe()
    environ = _environment(start) | {PIPE: str(reader)}
    command = [sys.executable, "-m", "foretrain", *own_words(sys.argv[1:])]
    children: list[subprocess.Popen[bytes]] = []
    sent: list[int] = []

    def hand_on(number: int, frame: FrameType | None) -> None:
        sent.append(number)
        for child in children:
            child.send_signal(number)

    numbers = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) is not signal.SIG_IGN]
    old = {number: signal.signal(number, hand_on) for number in numbers}
    try:
        for local in range(start.local):
            own = environ | {"RANK": str(start.node * start.local + local), "LOCAL_RANK": str(local)}
            children.append(subprocess.Popen(command, pass_fds=(reader,), start_new_session=True, env=own))
            if sent:
                children[-1].send_signal(sent[0])
        os.close(reader)
        first_dead = _wait(children)
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
        os.close(writer)
    codes = [child.returncode for child in children]
    if sent and codes[0] == -sent[0]:  # its own handler was not there yet
        ERR.print(say("train.stopped_before", signal=signal.Signals(sent[0]).name))
        return int(ExitCode.STOPPED)
    return _ending(codes, first_dead, start)


def _environment(start: Start) -> dict[str, str]:
    """As torchrun sets it. Threads are shared among the ranks, as each would take all cores."""
    environ = dict(os.environ)
    environ.setdefault("OMP_NUM_THREADS", str(cores_each(start.local)))
    environ.setdefault("MASTER_PORT", SKYPILOT_PORT if start.nodes > 1 else str(_free_port()))
    environ["MASTER_ADDR"] = environ.get("MASTER_ADDR") or start.address
    return environ | {"WORLD_SIZE": str(start.world), "LOCAL_WORLD_SIZE": str(start.local), LAUNCHED: "1"}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait(children: list[subprocess.Popen[bytes]]) -> int | None:
    """Until all have ended; the number of the first that ended badly."""
    first, since = None, 0.0
    while any(child.poll() is None for child in children):
        time.sleep(0.05)
        bad = next((n for n, c in enumerate(children) if c.poll() is not None and c.returncode not in ENDED_WELL), None)
        if first is None and bad is not None:
            first, since = bad, time.monotonic()
        if first is not None and time.monotonic() - since > GRACE_S:
            for child in children:
                child.kill()
    if first is None:
        first = next((n for n, child in enumerate(children) if child.returncode not in ENDED_WELL), None)
    return first


def _ending(codes: list[int], first_dead: int | None, start: Start) -> int:
    if codes[0] >= 0 or first_dead is None:  # the first rank has said why
        return codes[0]
    rank, code = start.node * start.local + first_dead, codes[first_dead]
    if code < 0:
        raise UserError("environment.rank_killed", rank=rank, signal=signal.Signals(-code).name)
    raise UserError("environment.ranks_lost", ranks=[rank], count=1, world=start.world)
