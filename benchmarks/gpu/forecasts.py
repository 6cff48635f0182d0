"""Forecast against measured: each way of ways.py and each whole run on a card, by the catalogue and by a calibration.

    python benchmarks/gpu/forecasts.py            (on any machine, a few seconds)

What was measured is read from benchmarks/results/gpu_h100_ways.json and gpu_h100_real.json, the calibration of the same
kind of card from recorded/h100_calibration.json. Steps of ways.py read their batches between micro-batches, which a run
of `foretrain train` does ahead.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from common import RESULTS, parser_of, report

from foretrain.base.units import GIB
from foretrain.config.checks import launched
from foretrain.hardware.calibration import Calibration
from foretrain.hardware.catalogue import match
from foretrain.predict.spec import StepName, StepSpec
from foretrain.predict.speed.time import step_time

HERE = Path(__file__).parent


def whose(side: str) -> StepName:
    return "nanogpt" if side == "nanogpt" else "foretrain"


def measured() -> Iterator[dict[str, Any]]:
    """Yield title, options, step, compiled, dtype and seconds of every timed step."""
    for row in json.loads((RESULTS / "gpu_h100_ways.json").read_text("utf-8"))["rows"]:
        if row["blocks"]:
            graph = {"cuda_graph": "on"} if row["step"] == "graphed" else {}
            yield {
                "title": row["title"], "knobs": {**row["knobs"], **graph}, "step": whose(row["step"]),
                "compiled": row["compiled"], "dtype": row["dtype"], "measured_s": row["step_s"],
            }  # fmt: skip
    for run in json.loads((RESULTS / "gpu_h100_real.json").read_text("utf-8"))["runs"]:
        for side, settings in run["ways"].items():
            ended = [row for row in run.get(side, []) if "step_s" in row]
            if ended:
                yield {
                    "title": f"{run['run']}: {side}, whole run", "knobs": {**run["options"], **settings}, "compiled": True,
                    "step": whose(side), "dtype": "bfloat16",
                    "measured_s": median(row["step_s"] for row in ended),
                }  # fmt: skip


def main() -> None:
    parser = parser_of(__doc__, "gpu_h100_forecasts")
    args = parser.parse_args()
    recorded = json.loads((HERE / "recorded" / "h100_calibration.json").read_text("utf-8"))
    found = match(recorded["gpu"], 80 * 10**9 / GIB, 132)
    assert found
    plain = found.model_copy(update={"calibration": None})
    known = plain.model_copy(update={"calibration": Calibration.model_validate(recorded["calibration"])})
    rows = []
    for row in measured():
        config = launched({**row["knobs"], "compile": row["compiled"]})
        for name, gpu in (("catalogue", plain), ("calibrated", known)):
            time = step_time(StepSpec.of(config, gpu, row["step"], dtype=row["dtype"], compiled=row["compiled"]))
            assert time
            row[name] = time.model_dump()
            row[f"{name}_error"] = time.expected_s / row["measured_s"] - 1
            row[f"{name}_within"] = time.low_s <= row["measured_s"] <= time.high_s
        rows.append(row)
    summary = {
        name: {
            "median_error": median(abs(row[f"{name}_error"]) for row in rows),
            "within_range": f"{sum(row[f'{name}_within'] for row in rows)} of {len(rows)}",
        }
        for name in ("catalogue", "calibrated")
    }
    document = {"what": (__doc__ or "").splitlines()[0], "gpu": found.name, "summary": summary, "rows": rows}
    report(args.out, document)


if __name__ == "__main__":
    main()
