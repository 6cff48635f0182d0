"""What the processes of tests/base/test_processes.py do."""

import os
import signal
import subprocess
import sys
import time

from foretrain.base.processes import Parent


def clean_up() -> None:
    sys.stderr.write("cleaned up\n")
    sys.stderr.flush()
    os._exit(3)


def main(parent: Parent, what: str) -> None:
    if what == "echoes":
        while (frame := parent.receive()) is not None:
            sys.stdout.write("a library prints\n")
            sys.stdout.flush()
            os.system("echo and what it starts prints")
            parent.send({"value": frame.value, "bytes": len(frame.payload)}, frame.payload[::-1])
    elif what == "raises":
        parent.send(1)
        raise ValueError("no such thing")
    elif what == "exits":
        sys.exit(7)
    elif what == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "floods":
        for number in range(1_000):
            parent.send(number, bytes(10_000))
    elif what == "starts another":
        parent.send(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid)
        parent.receive()
    elif what == "cleans up":
        parent.gone = clean_up
        parent.send(os.getpid())
        parent.receive()
    time.sleep(0 if what == "floods" else 600)
