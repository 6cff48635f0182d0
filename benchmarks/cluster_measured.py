"""Plans for several cards, against published runs: tokens per second, step times, memory of a rank.

python benchmarks/cluster_measured.py

The runs and their sources are in published_clusters.csv, each as a config of one of foretrain's families; `note` has
what differs. No constant of the plans is fitted to them. A row of llm-foundry states that the run fitted its card: that
is compared too, with the loss in chunks, as its fused kernel makes no whole logits in fp32 either.
"""

import csv
import json
from pathlib import Path
from statistics import median
from typing import Any

from common import arguments, report

from foretrain.config.options import RunConfig
from foretrain.config.resolve import from_values
from foretrain.config.sharing import STRATEGIES, Sharing, config_of_rank
from foretrain.hardware.cluster import cluster
from foretrain.predict.memory import estimated
from foretrain.predict.ranks import NcclMemory
from foretrain.predict.spec import StepSpec
from foretrain.predict.speed.ranks import rank_time
from foretrain.predict.speed.time import step_time

CASES = Path(__file__).parent / "published_clusters.csv"
LONG = 4096  # tokens of context from which on attention, then another kernel, is much of a step
MISS = {"time": 0.20, "memory": 0.05}
GROUPS = {
    "lf": "llm-foundry, FSDP", "mne": "modded-nanogpt, DDP", "nc": "nanochat d20", "tt": "torchtitan, FSDP2",
    "ng": "nanoGPT, DDP", "fm": "fine-tuning, FSDP",
}  # fmt: skip


def cases() -> list[dict[str, str]]:
    with CASES.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def config_of(case: dict[str, str]) -> RunConfig:
    """Return the config of a row; its accumulation is of all ranks together."""
    return from_values(json.loads(case["options"])).config


def compare(case: dict[str, str]) -> dict[str, Any]:
    config, cards = config_of(case), cluster(case["cards"], case["link"], case["network"])
    sharing = Sharing(strategy=case["strategy"], world=cards.world, per_node=cards.per_node)  # type: ignore[arg-type]
    assert sharing.strategy in STRATEGIES
    own = config_of_rank(config, cards.world)
    spec = StepSpec.of(own, cards.gpu, sharing=sharing)
    found = {
        **{key: case[key] for key in ("id", "cards", "strategy", "measured", "note", "source")},
        "group": _group(case, config), "world": cards.world, "of": "memory",
    }  # fmt: skip
    measured = float(case["value"])
    if case["unit"] == "B":
        phase = estimated(spec).memory.phase("steady_step")
        predicted = phase.allocated_bytes if case["measured"] == "allocated_bytes" else phase.reserved_bytes or 0
        return {**found, "measured_value": measured, "predicted": predicted, "error": predicted / measured - 1}
    time, alone = rank_time(spec, sharing, cards), step_time(StepSpec.of(own, cards.gpu))
    assert time is not None
    assert alone is not None
    tokens = config.tokens_per_step
    if case["unit"] == "tok/s":
        per_step = tokens / cards.world if case["measured"].endswith("per_card") else tokens
        measured = per_step / measured
    low, expected, high = time.step_s.low_s, time.step_s.expected_s, time.step_s.high_s
    return {
        **found, "of": "time", "measured_value": measured, "predicted": expected, "low": low, "high": high,
        "waiting_share": time.waiting_share, "own_work_s": time.compute_s.expected_s,
        "in_range": low <= measured <= high, "error": expected / measured - 1,
    }  # fmt: skip


def _group(case: dict[str, str], config: RunConfig) -> str:
    name = GROUPS[case["id"].partition("-")[0]]
    if not case["id"].startswith("lf-"):
        return name
    return f"{name}, {'up to' if config.block_size <= LONG else 'above'} {LONG:,} tokens"


def fits(case: dict[str, str]) -> bool | None:
    """Return whether the plan fits a run that did; None for rows that do not tell."""
    if not case["id"].startswith("lf-"):
        return None
    cards = cluster(case["cards"])
    sharing = Sharing(strategy=case["strategy"], world=cards.world, per_node=cards.per_node)  # type: ignore[arg-type]
    own = config_of_rank(config_of(case), cards.world).model_copy(update={"loss_chunk_size": 1024})
    room = cards.gpu.memory_bytes or 0
    nccl = NcclMemory.of(cards, sharing)
    judged = estimated(StepSpec.of(own, cards.gpu, sharing=sharing)).judged(room - nccl.low_bytes, room)
    return judged.verdict != "does_not_fit"


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return by group and quantity: count, median error, median absolute error, misses, and in range."""
    found: dict[str, Any] = {}
    for of in ("time", "memory"):
        kinds = [row for row in rows if row["of"] == of]
        for name in ("all", *dict.fromkeys(row["group"] for row in kinds)):
            errors = [row["error"] for row in kinds if name in ("all", row["group"])]
            inside = [row["in_range"] for row in kinds if name in ("all", row["group"]) and of == "time"]
            found[f"{of}: {name}"] = {
                "rows": len(errors), "median_error": median(errors), "median_abs_error": median(map(abs, errors)),
                "misses": sum(abs(error) > MISS[of] for error in errors), "in_range": sum(inside),
            }  # fmt: skip
    return found


def main() -> None:
    out, known = arguments("cluster_measured", __doc__ or "").out, cases()
    rows = [compare(case) for case in known]
    fitting = {case["id"]: found for case in known if (found := fits(case)) is not None}
    refused = sorted(id for id, found in fitting.items() if not found)
    report(out, {"summary": summary(rows), "fits": {"rows": len(fitting), "refused": refused}, "rows": rows})


if __name__ == "__main__":
    main()
