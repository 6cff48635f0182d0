"""Payloads against every reader of foreign files: nothing runs, little memory, few seconds, one sentence."""

import os
import resource
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from tests.faults import harness, hostile_configs, inputs, payloads
from tests.faults.harness import Shared, fork, wait
from tests.faults.hostile import CANARY
from tests.faults.limits import count_of, free_memory, trials
from tests.faults.payloads import Payload

MEMORY_BYTES, VERDICT_S = 2**30, 10.0
LONGEST = 3200  # characters of a line that explains


def one(number: int) -> dict[str, Any]:
    """What comes of one payload, in a folder and a process of its own, so that memory is its own too."""
    payload, home = payloads.payloads()[number], Path.cwd()
    folder = Path(f"payload-{number}")
    folder.mkdir()
    os.chdir(folder)
    os.environ["FORETRAIN_CACHE"] = str(Path("cache").absolute())
    try:
        _lay(payload)
        return _tried(payload)
    finally:
        os.chdir(home)
        shutil.rmtree(folder)


def _lay(payload: Payload) -> None:
    """In a process whose parent is gone, so that what making it takes is not counted with what reading it takes."""
    reader, writer = os.pipe()

    def lay() -> int:
        free_memory()
        payload.lay()
        os.write(writer, b"1")
        return 0

    pid = fork(lambda: fork(lay) and 0)
    os.close(writer)
    wait(pid)
    with os.fdopen(reader, "rb") as pipe:
        if not pipe.read():
            raise RuntimeError(f"{payload.kind}, {payload.name}: could not be made")


def _seconds() -> float:
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def _tried(payload: Payload) -> dict[str, Any]:
    before, began = _seconds(), time.monotonic()
    guard = hostile_configs.guard()
    guard.armed = True
    try:
        code, out, err = inputs.run(payload.words)
    finally:
        guard.armed = False
    peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) * 1024
    found = {"code": code, "took_s": _seconds() - before, "clock_s": time.monotonic() - began, "peak": peak}
    fate, why = _judged(payload, guard.executed, code, out, err, found["took_s"])
    guard.seen.clear()
    return {"kind": payload.kind, "name": payload.name, **found, "fate": fate, "why": why}


def _judged(payload: Payload, executed: list[str], code: int, out: str, err: str, took_s: float) -> tuple[str, str]:
    if executed or list(Path().rglob(CANARY)):
        return "executed", "; ".join(executed) or "the canary is there"
    if "Traceback" in err or code not in inputs.DOCUMENTED:
        return "traceback", (err.strip().splitlines() or [str(code)])[-1][:300]
    if "\x1b" in out + err:
        return "control character", repr(err[:200])
    if payload.refused and code == 0:
        return "accepted", out[:200]
    if took_s > VERDICT_S:
        return "slow", f"{took_s:.1f} s"
    longest = max(map(len, err.splitlines()), default=0)
    return ("no sentence", f"a line of {longest} characters") if code and not 0 < longest <= LONGEST else ("held", "")


def hostile_payloads(count: int, seed: int) -> dict[str, Any]:
    """Every payload (`count` of them at most, spread over all) by the command that reads it."""
    total = len(payloads.payloads())
    count = min(count, total)
    chosen = [i * total // count for i in range(count)]
    short = {"max_iters": 3, "lr_decay_iters": 3, "eval_interval": 3}
    assert wait(fork(lambda: harness.run("whole-run", Shared(), **short))) == 0
    hostile_configs.warm_up()
    found = trials(len(chosen), lambda i: one(chosen[i]), apart=True)
    base = found[0]["base"] if found else 0
    for each in found:
        if "peak" in each and each["peak"] - each["base"] > MEMORY_BYTES:
            each |= {"fate": "memory", "why": f"{(each['peak'] - each['base']) >> 20} MiB beyond its start"}
        if each["fate"] != "held":
            print({**each, "name": payloads.payloads()[chosen[each["number"]]][:3]}, file=sys.stderr)
    kinds = {payloads.payloads()[i].kind for i in chosen}
    counts = {
        "payloads": len(found), "kinds": len(kinds), "executed": count_of(found, "executed"), "held": count_of(found, "held"),
        "hangs": count_of(found, "hang"), "slowest_s": round(max(each.get("took_s", 0.0) for each in found), 1),
        "most_mib": max(each.get("peak", base) - each.get("base", base) for each in found) >> 20,
    }  # fmt: skip
    return {**counts, "ok": counts["held"] == len(found)}
