"""`foretrain train --auto-restart`: the run in a child process, begun again from its last checkpoint after a signal, a
traceback, a lost card or memory that ran out in the optimizer; other exit codes and signals are passed on."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from rich.text import Text

from foretrain.base import processes
from foretrain.base.errors import ExitCode, UserError
from foretrain.base.messages import say
from foretrain.base.signals import heard
from foretrain.cli.common import ERR
from foretrain.config.options import RunConfig
from foretrain.config.sharing import check_ranks
from foretrain.hardware.card import Cards
from foretrain.hardware.cpu import cores_each
from foretrain.runs import folder
from foretrain.training.place import LAUNCHED, host_name, place_of

PIPE = "FORETRAIN_KEEP_GOING_PIPE"
# One after the other, without a new checkpoint in between: at the same step each time, which is a bug or a broken
# machine, and at whatever steps, which is bad luck that has to end some time.
MOST_CRASHES, MOST_ANYWHERE = 4, 12
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 300.0
LAST_LINES_BYTES = 65536


def end_with_parent() -> None:
    """In the child: stop as SIGTERM does when the process that keeps us going is gone."""
    if (number := os.environ.pop(PIPE, "")).isdigit():
        handle = int(number)

        def wait() -> None:
            os.read(handle, 1)  # nothing is ever written: it ends with the other side
            os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=wait, daemon=True, name="parent").start()


def child_words(words: list[str], *, resume: bool) -> list[str]:
    """The child's command line: ours without --auto-restart; with `resume`, --resume auto whatever was asked for."""
    own = [word for word in words if word != "--auto-restart"]
    return [*without(own, "--resume"), "--resume=auto"] if resume else own


def without(words: list[str], option: str) -> list[str]:
    kept, skip = [], False
    for word in words:
        if not skip and word != option and not word.startswith(f"{option}="):
            kept.append(word)
        skip = word == option and not skip
    return kept


def keep_going(config: RunConfig, *, wait: Callable[[float], object] = time.sleep) -> int:
    """Run this command in children until one ends by itself; return its exit code. Raises UserError."""
    before = standing(config)
    crashes, alike, wait_s, last_step = 0, 0, FIRST_WAIT_S, -1
    while True:
        now = standing(config)
        code, stopped = one_attempt(child_words(sys.argv[1:], resume=now != before))
        if code >= 0 and code != ExitCode.INTERNAL and (stopped or not worth_another(config, code)):
            return code
        if stopped:  # the stop signal ended it
            return int(ExitCode.INTERRUPTED)
        new, ended_at = standing(config) != now, step_reached(config)
        crashes, wait_s = (1, FIRST_WAIT_S) if new else (crashes + 1, wait_s * 2)
        alike, last_step = (1 if new or ended_at != last_step else alike + 1), ended_at
        name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        if alike >= MOST_CRASHES or crashes >= MOST_ANYWHERE:
            raise UserError("environment.crashes", count=crashes, how=name)
        again = min(wait_s, LONGEST_WAIT_S)
        ERR.print(Text(say("train.crashed", how=name, again=again), style="yellow"), soft_wrap=True)
        wait(again)


def worth_another(config: RunConfig, code: int) -> bool:
    """Whether an ending with a sentence is one from which a new process can resume by itself."""
    if code not in (ExitCode.ENVIRONMENT, ExitCode.OUT_OF_MEMORY):
        return False
    found = folder.newest_unfinished(config.out_dir, config.max_iters)
    if found is None:
        return False
    record = found.read_record()  # "killed": of several ranks, the one that writes it
    return record.reason in folder.BEGIN_AGAIN or (code == ExitCode.ENVIRONMENT and record.status == "killed")


def standing(config: RunConfig) -> tuple[str, str, int]:
    """Return (the run that --resume auto means, its newest checkpoint, that folder's number), '' and 0 without one."""
    found = folder.newest_unfinished(config.out_dir, config.max_iters)
    if found is None:
        return "", "", 0
    newest = max(Path(found.checkpoints).glob("step-*"), default=None)
    return found.id, newest.name if newest else "", newest.stat().st_ino if newest else 0


def step_reached(config: RunConfig) -> int:
    """The last step that was logged; -1 where there is none. Not all lines are read: a run of weeks has many."""
    found = folder.newest_unfinished(config.out_dir, config.max_iters)
    lines = found.read_lines("metrics", last_bytes=LAST_LINES_BYTES) if found else []
    return lines[-1]["step"] if lines else -1


def one_attempt(words: list[str]) -> tuple[int, bool]:
    """(the child's exit code, whether a signal was passed on to it)."""
    reader, writer = os.pipe()
    passed: list[int] = []
    variables = processes.variables() | ({PIPE: str(reader)} if os.name == "posix" else {})
    child = subprocess.Popen(processes.command("foretrain", *words), env=variables, **processes.heeding(reader))
    os.close(reader)

    def hand_on(number: int, frame: FrameType | None) -> None:
        passed.append(number)
        child.send_signal(number)

    old = {number: signal.signal(number, hand_on) for number in heard()}
    try:
        return child.wait(), bool(passed)
    finally:
        for number, handler in old.items():
            late = passed and number != signal.SIGINT  # the child has ended, and so do we, with its exit code
            signal.signal(number, signal.SIG_IGN if late else handler)
        os.close(writer)


# `foretrain train --gpus N`: one process for each card, as torchrun starts them, with its variables.
#
# Unlike torchrun it gives back the exit code of the first rank, passes signals on as they come and waits while the
# ranks save, and no table stands beside the sentence of the rank that failed. Where nothing is left but to end a
# rank, it learns which one ended first. The ranks see their pipe close if this process is killed, and stop as SIGTERM
# makes them.

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
    nodes, node, cards = (
        environ.get(f"SKYPILOT_{name}", "") for name in ("NUM_NODES", "NODE_RANK", "NUM_GPUS_PER_NODE")
    )
    if not (nodes.isdigit() and node.isdigit()):
        return None
    addresses = environ.get("SKYPILOT_NODE_IPS", "").split()
    local = gpus or (int(cards) if cards.isdigit() else 1) or 1
    return Start(local, int(node), int(nodes), addresses[0] if addresses else "127.0.0.1")


def run(start: Start) -> int:
    """Start the ranks and wait for them; the exit code. Raises UserError where one ended and the first did not."""
    reader, writer = os.pipe()
    environ = _environment(start) | ({PIPE: str(reader)} if os.name == "posix" else {})
    command = processes.command("foretrain", *without(sys.argv[1:], "--gpus"))
    children: list[subprocess.Popen[Any]] = []
    sent: list[int] = []

    def hand_on(number: int, frame: FrameType | None) -> None:
        sent.append(number)
        for child in children:
            child.send_signal(number)

    old = {number: signal.signal(number, hand_on) for number in heard()}
    try:
        for local in range(start.local):
            own = environ | {"RANK": str(start.node * start.local + local), "LOCAL_RANK": str(local)}
            children.append(subprocess.Popen(command, env=own, **processes.heeding(reader)))
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
    environ = processes.variables()
    environ.setdefault("OMP_NUM_THREADS", str(cores_each(start.local)))
    environ.setdefault("MASTER_PORT", SKYPILOT_PORT if start.nodes > 1 else str(_free_port()))
    environ["MASTER_ADDR"] = environ.get("MASTER_ADDR") or start.address
    return environ | {"WORLD_SIZE": str(start.world), "LOCAL_WORLD_SIZE": str(start.local), LAUNCHED: "1"}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait(children: list[subprocess.Popen[Any]]) -> int | None:
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
