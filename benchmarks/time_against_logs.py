"""The uncalibrated time model against training speeds that others published.

    python benchmarks/time_against_logs.py

The runs and their sources are in published_logs.json. Nothing here is measured: it shows what the stated range of
`foretrain plan` is worth on cards that nobody has calibrated.
"""

import json
from pathlib import Path

from common import arguments, report

from foretrain.configfile import resolve
from foretrain.hardware import find
from foretrain.lm.shape import ModelShape
from foretrain.predict.time import step_time


def main() -> None:
    options = arguments("time_against_logs", __doc__ or "")
    logs = json.loads((Path(__file__).parent / "published_logs.json").read_text("utf-8"))["logs"]
    rows, cases = [], []
    for log in logs:
        config = resolve([f"--{key}={value}" for key, value in log["config"].items()]).config
        gpu = find(log["gpu"])
        predicted = step_time(config, gpu, log["dtype"], "nanogpt", compiled=log["compiled"])
        assert predicted
        logged_s = config.tokens_per_step / log["tokens_per_s"]
        error = predicted.expected_s / logged_s - 1
        inside = predicted.low_s <= logged_s <= predicted.high_s
        mfu = log["tokens_per_s"] * ModelShape.of(config).flops_per_token / (gpu.peak_flop_per_s(log["dtype"]) or 1)
        rows.append(
            [log["id"], log["gpu"], f"{log['tokens_per_s']:,}", f"{config.tokens_per_step / predicted.expected_s:,.0f}",
             f"{error:+.1%}", "yes" if inside else "no", f"{mfu:.0%}"]
        )  # fmt: skip
        cases.append(
            {**log, "predicted": predicted.model_dump(), "logged_s": logged_s, "error": error, "inside": inside}
        )
    columns = ["run", "card", "logged tok/s", "predicted tok/s", "step time", "in range", "MFU of the card"]
    report(
        options.out,
        "Time model against published runs",
        columns,
        rows,
        {"what": (__doc__ or "").splitlines()[0], "cases": cases},
    )


if __name__ == "__main__":
    main()
