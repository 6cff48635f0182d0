"""The forecasts of an H100 before its runs corrected the model: benchmarks/results/gpu_h100_blind.json.

python benchmarks/gpu/blind.py            (in a clone with its history, a second)

Reads the results that were committed on the first day of measurements (COMMIT), and stores each run's errors. Nothing
is predicted again: the current model has learned from these runs.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from common import RESULTS

COMMIT = "8fa270ae"
MEMORY = ("allocated_error", "reserved_error", "ledger_error", "process_error", "under", "refused")


def committed(name: str) -> dict[str, Any]:
    path = f"{COMMIT}:benchmarks/results/gpu_h100_{name}.json"
    return json.loads(subprocess.run(["git", "show", path], capture_output=True, check=True).stdout)


def time_row(row: dict[str, Any]) -> dict[str, Any]:
    """Return a step's errors, and whether it was in the range."""
    found: dict[str, Any] = {"name": row["name"], "compiled": row["compiled"]}
    for kind in ("catalogue", "calibrated"):
        forecast = row[kind]
        found[f"{kind}_error"] = row[f"{kind}_error"]
        found[f"{kind}_within"] = forecast["low_s"] <= row["measured"]["step_s"] <= forecast["high_s"]
    return found | {"energy_error": row["energy_error"]}


def main() -> None:
    memory, tuning, speed = (committed(name) for name in ("memory", "finetune", "speed"))
    found = {
        "what": "Errors of forecasts made before the model was corrected with these runs.",
        "commit": COMMIT,
        "date": memory["date"],
        "card": memory["measured"]["gpu"],
        "torch": memory["measured"]["torch"],
        "pretraining": [
            {"name": row["name"], "compiled": row["compiled"]} | {key: row[key] for key in MEMORY}
            for row in memory["rows"]
        ],
        "finetuning": [
            {"name": row["name"]}
            | {what: {who: row[what][f"{who}_error"] for who in ("trace", "estimate")}
               for what in ("allocated_bytes", "reserved_bytes")}
            for row in tuning["rows"]
            if "error" not in row
        ],
        "times": [time_row(row) for row in speed["rows"] if "step_s" in row.get("measured", {})],
    }  # fmt: skip
    (RESULTS / "gpu_h100_blind.json").write_text(json.dumps(found, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
