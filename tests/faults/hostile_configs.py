"""Hostile configs through the real command line, with an audit hook that sees whatever they make Python do."""

import os
import resource
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from foretrain.base.errors import ExitCode
from foretrain.base.process_memory import resident_bytes
from tests.faults import hostile, inputs
from tests.faults.hostile import CANARY, SECRET, Hostile
from tests.faults.limits import count_of, trials

TOKEN = "ttkS9vXq1-not-to-be-shown"
LONGEST = 3200  # characters of a line that explains; a path may have a thousand, and stand there three times
_DOING = {
    "os.system", "subprocess.Popen", "os.exec", "os.spawn", "os.posix_spawn", "os.fork", "os.forkpty", "pty.spawn", "os.remove",
    "os.rename", "os.mkdir", "os.rmdir", "os.chmod", "os.link", "os.symlink", "os.truncate", "shutil.rmtree", "shutil.copyfile",
    "socket.connect", "socket.bind", "socket.getaddrinfo", "ctypes.dlopen", "pickle.find_class", "webbrowser.open",
}  # fmt: skip
_RUNNING = {
    "os.system",
    "os.exec",
    "os.spawn",
    "os.posix_spawn",
    "os.fork",
    "pty.spawn",
    "exec",
    "import",
    "socket.connect",
    "subprocess.Popen",
}


class Guard:
    """Notes what Python is made to do while it is armed. An audit hook stays for the life of a process."""

    def __init__(self) -> None:
        self.armed = False
        self.seen: list[str] = []
        sys.addaudithook(self._event)

    @property
    def executed(self) -> list[str]:
        """What a file made Python run; commands of our own make folders, and start our own isolated readers."""
        started = f"subprocess.Popen ({sys.executable!r}"
        return [what for what in self.seen if what.split()[0] in _RUNNING and not what.startswith(started)]

    def _event(self, event: str, words: tuple[Any, ...]) -> None:
        if not self.armed:
            return
        if event in _DOING and not _own(event, words):
            self.seen.append(f"{event} {words!r}"[:200])
        elif event == "open":
            path, _, flags = words
            if isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and not _own(event, words):
                self.seen.append(f"open to write {path!r}"[:200])
            elif str(path).endswith(SECRET):
                self.seen.append("open of the secret")
        elif event == "exec" and _of_a_config(words[0]):
            self.seen.append(f"exec {words[0]!r}"[:200])
        elif event == "import" and words[0] == "evil":
            self.seen.append("import evil")


def _own(event: str, words: tuple[Any, ...]) -> bool:
    """What foretrain does by itself: its isolated reader of checkpoints, its cache, a look at the C library."""
    if event == "subprocess.Popen":
        return list(words[1])[:4] == [sys.executable, "-P", "-m", "foretrain.config.nanogpt_checkpoint"]
    if event == "open" and isinstance(words[0], int):  # of a descriptor, whose own opening was seen
        return True
    path = str(words[0])
    return path in ("None", "/dev/null") or path.startswith(os.environ["FORETRAIN_CACHE"])


def _of_a_config(code: Any) -> bool:
    """Whether code is a config's: by its file, or of a text with names that no annotation has."""
    doing = {"__import__", "open", "eval", "exec", "system"}.intersection(code.co_names)
    return code.co_filename.startswith("hostile") or (code.co_filename.startswith("<") and bool(doing))


_guards: list[Guard] = []


def guard() -> Guard:
    if not _guards:
        _guards.append(Guard())
    return _guards[0]


def begin() -> None:
    """Once a fork: an audit hook, and every module of the commands imported before it is armed."""
    warm_up()
    _guards.append(Guard())


def warm_up() -> None:
    """Import what the commands import, which costs more than what they then do."""
    inputs.alone()
    for words in (
        ("plan", "gpt2-124m", "--gpu=4070", "--json"),
        ("train", "gpt2-124m", "--n_layer=-1"),
        ("plan", "x.py", "--json"),
    ):
        inputs.run(words)


def one(number: int) -> dict[str, Any]:
    attempt, home = hostile.attempts()[number], Path.cwd()
    verb = ("train",) if number % 5 == 4 else ("plan", "--gpu=4070", "--json")
    folder = Path(f"hostile-{number}")
    folder.mkdir()
    os.chdir(folder)
    try:
        Path(SECRET).write_text(f"n_layer = 6  # {TOKEN}\n{hostile.WRITE}\n")
        Path("evil.py").write_text(f"{hostile.WRITE}\n")
        attempt.lay()
        return _tried(attempt, verb)
    finally:
        os.chdir(home)
        shutil.rmtree(folder)


def _tried(attempt: Hostile, verb: tuple[str, ...]) -> dict[str, Any]:
    watch, before = guard(), time.process_time()
    held = resident_bytes() or 0
    watch.seen.clear()
    watch.armed = True
    try:
        code, out, err = inputs.run((*verb[:1], *attempt.words, *verb[1:]))
    finally:
        watch.armed = False
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    found = {"name": attempt.name, "code": code, "took_s": time.process_time() - before, "grew": max(0, peak - held)}
    fate, why = _judged(attempt, watch, code, out, err)
    return {**found, "fate": fate, "why": why}


def _judged(attempt: Hostile, guard: Guard, code: int, out: str, err: str) -> tuple[str, str]:
    # A link that is a config's name may be followed: what it leads to is then the config that the user named.
    seen = [what for what in guard.seen if not (attempt.name == f"link to {SECRET}" and "secret" in what)]
    if seen or Path(CANARY).exists():
        return "executed", "; ".join(seen) or "the canary is there"
    if TOKEN in out + err:
        return "leaked", "what another file says was shown"
    if "Traceback" in err or code not in inputs.DOCUMENTED:
        return "traceback", (err.strip().splitlines() or [str(code)])[-1][:300]
    if attempt.refused and code != int(ExitCode.USAGE):
        return "accepted", f"exit code {code}"
    lines = [line for line in err.strip().splitlines() if not line.startswith("note: ")]
    if code and (not lines or max(map(len, lines)) > LONGEST):
        return "no sentence", f"{len(lines)} lines, the longest of {max(map(len, lines), default=0)} characters"
    return "held", ""


def hostile_configs(count: int, seed: int) -> dict[str, Any]:
    """Every attempt of the corpus (`count` of them at most, spread over it) through `plan` and `train`."""
    total = len(hostile.attempts())
    count = min(count, total)
    chosen = [i * total // count for i in range(count)]
    found = trials(len(chosen), lambda i: one(chosen[i]), begin)
    for each in found:
        if each["fate"] != "held":
            print({**each, "name": hostile.attempts()[chosen[each["number"]]].name}, file=sys.stderr)
    worst = max((each["took_s"] for each in found if "took_s" in each), default=0.0)
    counts = {
        "configs": len(found), "executed": count_of(found, "executed") + count_of(found, "leaked"),
        "held": count_of(found, "held"), "hangs": count_of(found, "hang"), "slowest_s": round(worst, 2),
        "most_mib": max((each["grew"] for each in found if "grew" in each), default=0) // 2**20,
    }  # fmt: skip
    return {**counts, "ok": counts["held"] == len(found) > 0}
