"""A child process of `foretrain tune`: one setting's training steps, timed in short bursts whenever the parent asks.

The parent writes one JSON object a line: first the job, then orders. Each is answered by one line. What is timed is
foretrain's own step (model/step.py) on random tokens, which are the same for every setting. A step of many
micro-batches is cut short: the rest of them take as long as those between the first and the last. The child ends with
its parent, whose end it notices by its standard input, and takes its compiler's processes and the scratch folder with
it. Where several ranks share a step, this is the first one (tuning/ranks.py), or one that the first one started.
"""

import json
import os
import queue
import shutil
import signal
import sys
import threading
import time
import traceback
from typing import Any

from foretrain.base.errors import ExitCode

IS_OTHER = "FORETRAIN_TUNE_RANK" in os.environ


def main() -> None:
    """Serve the parent on the standard streams."""
    reply = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is not an answer
    job = json.loads(sys.stdin.readline())
    orders: queue.Queue[dict[str, Any]] = queue.Queue()

    def listen() -> None:
        for line in sys.stdin:
            orders.put(json.loads(line))
        shutil.rmtree(job["scratch"], ignore_errors=True)  # nobody is left to do it
        os.killpg(0, signal.SIGKILL)

    def answer(value: dict[str, Any]) -> None:
        if IS_OTHER and "died" in value:
            os._exit(int(ExitCode.OUT_OF_MEMORY))  # which the first rank tells
        reply.write(json.dumps(value) + "\n")
        reply.flush()

    threading.Thread(target=listen, daemon=True).start()
    try:
        from foretrain.tuning.timed_step import serve

        serve(job, orders, answer)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        if job["world"] > 1:
            time.sleep(1.0)  # another rank may have ended, which the thread that watches them tells
        os._exit(1)
    os._exit(0)  # the thread above still reads


if __name__ == "__main__":
    main()
