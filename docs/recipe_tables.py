"""The table of docs/recipes.md from the results of benchmarks/time_to_loss.py."""

from statistics import mean
from typing import Any

from results import result


def _runs() -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
    found = result("time_to_loss")
    by_name: dict[str, list[dict[str, Any]]] = {}
    for run in found["runs"]:
        by_name.setdefault(run["run"], []).append(run)
    return found, by_name


def time_to_loss() -> str:
    """Every recipe and seed."""
    _, runs = _runs()
    seeds = [run["seed"] for run in next(iter(runs.values()))]
    lines = [
        f"| recipe | steps | {' | '.join(f'loss, seed {s}' for s in seeds)} | CPU seconds |",
        "| --- " * (3 + len(seeds)) + "|",
    ]
    for name, own in runs.items():
        losses = " | ".join(f"{run['val_loss']:.3f}" for run in own)
        lines.append(f"| {name} | {own[0]['step']:,} | {losses} | {mean(run['cpu_s'] for run in own):.0f} |")
    return "\n".join(lines)


def sentence() -> str:
    """What follows from it."""
    found, _ = _runs()
    shares = [m["quarter_cpu_share"] * 100 for m in found["margins"]]
    walls = [m["quarter_wall_share"] * 100 for m in found["margins"]]
    below = min(min(m["quarter_below_nanogpt"], m["quarter_below_tuned"]) for m in found["margins"])
    return (
        f"After a quarter of the steps the modern recipe's loss is lower than either baseline's, by {below:.3f} or more in each of "
        f"{len(found['margins'])} seeds, in {min(shares):.0f} to {max(shares):.0f} % of their CPU time and "
        f"{min(walls):.0f} to {max(walls):.0f} % of the wall time."
    )
