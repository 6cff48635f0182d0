"""The commands of docs/start-no-gpu.md as a newcomer runs them, in an empty folder, with what they print.

python benchmarks/quick_start.py
"""

import json
import os
import re
import shlex
import tempfile
import time
from pathlib import Path

from common import arguments, console, report

COMMANDS = (
    "foretrain plan baby --gpu cpu --max_iters=100 --lr_decay_iters=100 --eval_interval=50",
    "foretrain train baby --max_iters=100 --lr_decay_iters=100 --eval_interval=50 --out_dir=first",
    "foretrain compare first",
    "foretrain sample first --prompt 'def ' --tokens 100",
    "foretrain report first",
    "foretrain runs",
)


def main() -> None:
    options = arguments("quick_start", __doc__ or "")
    consoles, seconds = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for command in COMMANDS:
            before, (_, verb, *words) = time.perf_counter(), shlex.split(command)
            shown = console([verb, *words], folder, both=True, FORETRAIN_CACHE=f"{folder}/.cache")
            seconds[verb], consoles[verb] = time.perf_counter() - before, f"$ {command}\n{shown}"
        record = json.loads((Path(folder) / "first" / "run.json").read_text("utf-8"))
    data = {
        "what": (__doc__ or "").splitlines()[0], "consoles": consoles, "seconds": seconds, "load": round(os.getloadavg()[0], 2),
        "run": {key: record[key] for key in ("first_val_loss", "val_loss", "wall_s", "steps_done")},
    }  # fmt: skip
    report(options.out, data)
    assert not re.search(r"/(tmp|home)/", json.dumps(consoles))


if __name__ == "__main__":
    main()
