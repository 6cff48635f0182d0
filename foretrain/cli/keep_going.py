"""`foretrain train --auto-restart`: the run in a child process, begun again from its last checkpoint when that crashes.

A crash is a death by a signal (a segmentation fault, the kernel's killer), a bug's traceback, a lost card, or memory
that ran out in the optimizer, after which a resume takes a smaller micro-batch. What the user can mend (every other
exit code) is passed on. Ctrl-C and SIGTERM go to the child, which saves and stops; and if this process is killed, the
child sees its pipe close and stops in the same way. A closed terminal stops neither.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from rich.text import Text

from foretrain.base.errors import ExitCode, UserError
from foretrain.base.messages import say
from foretrain.cli.common import ERR
from foretrain.cli.old_options import spellings
from foretrain.config.options import RunConfig
from foretrain.training import store

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
    own = [word for word in words if word not in spellings("--auto-restart")]
    if not resume:
        return own
    kept, skip = [], False
    for word in own:
        if not skip and word != "--resume" and not word.startswith("--resume="):
            kept.append(word)
        skip = word == "--resume" and not skip
    return [*kept, "--resume=auto"]


def keep_going(config: RunConfig, *, wait: Callable[[float], object] = time.sleep) -> int:
    """Run this process's own command in children until one ends by itself; its exit code.

    Raises UserError 'environment.crashes' after too many crashes without a new checkpoint.
    """
    before = standing(config)
    crashes, alike, wait_s, last_step = 0, 0, FIRST_WAIT_S, -1
    while True:
        now = standing(config)
        code, stopped = one_attempt(child_words(sys.argv[1:], resume=now != before))
        if code >= 0 and code != ExitCode.INTERNAL and (stopped or not worth_another(config, code)):
            return code
        if stopped:  # it was told to stop and died of it
            return int(ExitCode.INTERRUPTED)
        new, died_at = standing(config) != now, step_reached(config)
        crashes, wait_s = (1, FIRST_WAIT_S) if new else (crashes + 1, wait_s * 2)
        alike, last_step = (1 if new or died_at != last_step else alike + 1), died_at
        name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        if alike >= MOST_CRASHES or crashes >= MOST_ANYWHERE:
            raise UserError("environment.crashes", count=crashes, how=name)
        again = min(wait_s, LONGEST_WAIT_S)
        ERR.print(Text(say("train.crashed", how=name, again=again), style="yellow"), soft_wrap=True)
        wait(again)


def worth_another(config: RunConfig, code: int) -> bool:
    """Whether an ending with a sentence is one that a new process can go on from by itself."""
    if code not in (ExitCode.ENVIRONMENT, ExitCode.OUT_OF_MEMORY):
        return False
    found = store.newest_unfinished(config.out_dir, config.max_iters)
    if found is None:
        return False
    record = found.read_record()  # "killed": of several ranks, the one that writes it
    return record.reason in store.BEGIN_AGAIN or (code == ExitCode.ENVIRONMENT and record.status == "killed")


def standing(config: RunConfig) -> tuple[str, str, int]:
    """(the run that --resume auto means, its newest checkpoint, that folder's number), '' and 0 where there is none.

    A damaged checkpoint that was written anew has its old name and another number.
    """
    found = store.newest_unfinished(config.out_dir, config.max_iters)
    if found is None:
        return "", "", 0
    newest = max(Path(found.checkpoints).glob("step-*"), default=None)
    return found.id, newest.name if newest else "", newest.stat().st_ino if newest else 0


def step_reached(config: RunConfig) -> int:
    """The last step that was logged; -1 where there is none. Not all lines are read: a run of weeks has many."""
    found = store.newest_unfinished(config.out_dir, config.max_iters)
    lines = found.read_lines("metrics", last_bytes=LAST_LINES_BYTES) if found else []
    return lines[-1]["step"] if lines else -1


def one_attempt(words: list[str]) -> tuple[int, bool]:
    """(the child's exit code, whether a signal was passed on to it)."""
    reader, writer = os.pipe()
    passed: list[int] = []
    child = subprocess.Popen(
        [sys.executable, "-m", "foretrain", *words], pass_fds=(reader,), env={**os.environ, PIPE: str(reader)},
        start_new_session=True,  # so that a Ctrl-C comes once, through us
    )  # fmt: skip
    os.close(reader)

    def hand_on(number: int, frame: FrameType | None) -> None:
        passed.append(number)
        child.send_signal(number)

    numbers = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) is not signal.SIG_IGN]
    old = {number: signal.signal(number, hand_on) for number in numbers}
    try:
        return child.wait(), bool(passed)
    finally:
        for number, handler in old.items():
            late = passed and number == signal.SIGTERM  # the child has ended, and so do we, with its exit code
            signal.signal(number, signal.SIG_IGN if late else handler)
        os.close(writer)
