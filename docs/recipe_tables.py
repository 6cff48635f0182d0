"""The tables of docs/recipes.md from the results of benchmarks/time_to_loss.py and recipe_parts.py."""

from statistics import mean
from typing import Any

from results import result


def _losses(row: dict[str, Any]) -> str:
    return ", ".join(f"{loss:.3f}" for loss in row["losses"])


def time_to_loss() -> str:
    """Every recipe at each size."""
    lines = [
        "| model | recipe | steps | loss of each seed | mean | of nanoGPT's steps | of its wall time |",
        "| --- " * 7 + "|",
    ]
    for row in result("time_to_loss")["table"]:
        spread = f" ± {row['sd']:.3f}" if "sd" in row else ""
        wall = f"{row['wall_share'] * 100:.1f} %" if "wall_share" in row else ""
        lines.append(
            f"| {row['model'].replace('x', ' × ')} | {row['run']} | {row['steps']:,} | {_losses(row)} | "
            f"{row['mean']:.3f}{spread} | {row['steps_share'] * 100:.1f} % | {wall} |"
        )
    return "\n".join(lines)


def _reached(rows: list[dict[str, Any]], model: str, name: str, *, bpe: bool = False) -> dict[str, Any] | None:
    """The shortest modern run that is at or below a recipe's loss with every seed that both have. `bpe`: of BPEs."""
    own = {row["run"]: row for row in rows if row["model"] == model}
    if name not in own:
        return None
    wanted = dict(zip(own[name]["seeds"], own[name]["losses"], strict=True))
    found = []
    for row in own.values():
        losses = dict(zip(row["seeds"], row["losses"], strict=True))
        both = losses.keys() & wanted.keys()
        if (
            row["run"].startswith("modern")
            and bpe == ("BPE" in row["run"])
            and both
            and all(losses[seed] <= wanted[seed] for seed in both)
        ):
            found.append({**row, "both": len(both)})
    return min(found, key=lambda row: row["steps"], default=None)


def sentence() -> str:
    """What follows from it."""
    data, words = result("time_to_loss"), []
    for model in dict.fromkeys(row["model"] for row in data["table"]):
        for name, called, recipe, bpe in (
            ("nanogpt", "nanoGPT's recipe", "the modern recipe", False),
            ("nanogpt tuned", "nanoGPT's recipe at its best rate", "the modern recipe", False),
            ("nanogpt", "nanoGPT's recipe", "the modern recipe with a BPE of its corpus", True),
        ):
            row = _reached(data["table"], model, name, bpe=bpe)
            if row is None:
                continue
            wall = f" and {row['wall_share'] * 100:.0f} % of its wall time" if "wall_share" in row else ""
            seeds = f"each of {row['both']} seeds" if row["both"] > 1 else "the one seed that both have"
            words.append(
                f"At {model.replace('x', ' × ')} {recipe} is at or below the loss of {called} after "
                f"{row['steps_share'] * 100:.1f} % of its steps{wall}, with {seeds}."
            )
    return "\n".join(words)


def tokenizer() -> str:
    """What a tokenizer of the run's own corpus gains."""
    data, words = result("time_to_loss"), []
    rows = {(row["model"], row["run"]): row for row in data["table"]}
    bits: dict[tuple[str, str], dict[int, float]] = {}
    for run in data["runs"]:
        if run.get("bits_per_byte"):
            bits.setdefault((run["model"], run["run"]), {})[run["seed"]] = run["bits_per_byte"]
    for (model, name), own in bits.items():
        same = (model, name.removesuffix(", BPE of 1,024"))
        seeds = sorted(own.keys() & bits.get(same, {}).keys())
        if "BPE" not in name or not seeds:
            continue
        after, before = (mean(found[seed] for seed in seeds) for found in (own, bits[same]))
        shares = [rows[key].get("wall_share") for key in ((model, name), same)]
        time = f" in {shares[0] / shares[1]:.2f} times the time" if all(shares) else ""
        words.append(
            f"At {model.replace('x', ' × ')} a BPE of 1,024 tokens, trained on the corpus (`tokenizer = bpe`), ends at "
            f"{after:.3f} bits a byte instead of {before:.3f} after as many steps{time}; both over the whole validation "
            f"split, {'seed' if len(seeds) == 1 else 'mean of seeds'} {', '.join(map(str, seeds))}."
        )
    return "\n".join(words)


def step_seconds() -> str:
    """Seconds a step of both."""
    if not result("time_to_loss")["steps_s"]:
        return "Not measured yet."
    lines = ["| model | nanoGPT, ms a step | modern, ms a step | ratio | threads |", "| --- " * 5 + "|"]
    for model, own in result("time_to_loss")["steps_s"].items():
        lines.append(
            f"| {model.replace('x', ' × ')} | {own['nanogpt_step_s'] * 1e3:.0f} (float32) | "
            f"{own['modern_step_s'] * 1e3:.0f} ({own['modern_dtype']}) | {own['ratio']:.2f} "
            f"({own['lowest_ratio']:.2f} to {own['highest_ratio']:.2f}) | {own['threads']} |"
        )
    return "\n".join(lines)


def _noise(row: dict[str, Any]) -> str:
    spread = f" ± {row['more_sd']:.3f}" if row["more_sd"] is not None else ""
    return "" if row["part"] == "all parts" else f"{row['more']:+.3f}{spread}"


def _table(rows: list[dict[str, Any]], first: str) -> str:
    if not rows:
        return ""
    lines = [f"| {first} | seeds | loss | against all parts |", "| --- " * 4 + "|"]
    for row in rows:
        seeds = ", ".join(map(str, row["seeds"]))
        lines.append(f"| {row['part']} | {seeds} | {row['loss']:.3f} | {_noise(row)} |")
    return "\n".join(lines)


def parts() -> str:
    """The recipe without one part at a time."""
    found = result("time_to_loss_parts")
    return _table([row for row in found["table"] if row["part"] not in found["tried"]], "recipe")


def tried() -> str:
    """What was tried and left out."""
    found = result("time_to_loss_parts")
    return _table([row for row in found["table"] if row["part"] in found["tried"]], "tried")


def tuning() -> str:
    """What was chosen on the tuning corpus, in that order."""
    lines = ["| recipe | tried | seeds | loss | against the same unchanged |", "| --- " * 5 + "|"]
    for row in result("time_to_loss_choices")["table"]:
        more = "" if row["tried"] == "unchanged" else _noise({**row, "part": row["tried"]})
        seeds = ", ".join(map(str, row["seeds"]))
        lines.append(f"| {row['recipe']} | {row['tried']} | {seeds} | {row['loss']:.3f} | {more} |")
    return "\n".join(lines)
