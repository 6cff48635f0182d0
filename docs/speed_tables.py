"""Tables of docs/speed.md from the results of benchmarks/against_nanogpt.py and benchmarks/compile_start.py."""

from typing import Any

from results import result


def _way(row: dict[str, Any]) -> str:
    chosen = row["chosen"]
    kernels = f", attention {chosen['attention']}" if chosen else ""
    masters = ", master weights" if chosen.get("master_weights") else ""
    return f"{row['name']}, {'compiled' if row['compiled'] else 'eager'}, {row['dtype']}{kernels}{masters}"


def against() -> str:
    """Every contestant of every model."""
    found = result("against_nanogpt")
    lines = [
        "| model | threads | who | ms a step | tokens/s | times nanoGPT (range) | loss differs, mean and most | rounds |",
        "| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for model in found["models"]:
        for row in model["contestants"]:
            if "ratio" not in row:
                continue
            loss = row["loss_difference"]
            pairs = sum(a is not None for a in row["blocks_s"])
            lines.append(
                f"| {model['model']} | {model['threads']} | {_way(row)} | {row['step_s'] * 1e3:,.1f} | "
                f"{row['tokens_per_s']:,.0f} | {row['ratio']:.2f} ({row['lowest_ratio']:.2f} to "
                f"{row['highest_ratio']:.2f}) | {loss['mean'] * 100:.3f} %, {loss['largest'] * 100:.2f} % in {loss['steps']} steps | {pairs} |"
            )
    return "\n".join(lines)


def real() -> str:
    """nanoGPT's own train.py, whole processes, a table for each machine."""
    runs = result("against_real_nanogpt")["runs"]
    return "\n\n".join(_real_on(device, runs) for device in dict.fromkeys(run["machine"]["device"] for run in runs))


def _real_on(device: str, runs: list[dict[str, Any]]) -> str:
    lines = [
        "| run | dtype | nanoGPT s | foretrain s (range) | times nanoGPT | first start s | ms a step | times nanoGPT | resident MB, nanoGPT's |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    own = [run for run in runs if run["machine"]["device"] == device]
    for run in own:
        walls = [row["wall_s"] for row in run["foretrain"]]
        lines.append(
            f"| {run['run']} steps | {run['foretrain'][0]['dtype']} | {run['nanogpt_wall_s']:.1f} | "
            f"{run['foretrain_wall_s']:.1f} ({min(walls):.1f} to {max(walls):.1f}) | "
            f"{run['wall_ratio']:.2f} | {run['first_start']['wall_s']:.1f} | {run['foretrain_step_s'] * 1e3:,.1f} | {run['step_ratio']:.2f} | "
            f"{run['foretrain_resident_bytes'] / 1e6:,.0f}, {run['nanogpt_resident_bytes'] / 1e6:,.0f} |"
        )
    flags, versions = ", ".join(own[0]["machine"]["flags"]), own[0]["versions"]
    dates = " and ".join(sorted({run["date"] for run in own}))
    return "\n".join([*lines, "", f"{device} with {flags}; torch {versions['torch']}; {dates}."])


def machine() -> str:
    """What the figures hold for."""
    model = result("against_nanogpt")["models"][0]
    flags = ", ".join(model["machine"]["flags"])
    return f"{model['machine']['device']} with {flags}; torch {model['versions']['torch']}; {model['date']}"


def start() -> str:
    """Cold starts."""
    found = result("compile_start")
    lines = ["| compiled | first step s | steady step ms |", "| --- | ---: | ---: |"]
    for row in found["rows"]:
        lines.append(f"| {row['compiled']} | {row['first_s']:.0f} | {row['step_s'] * 1e3:.1f} |")
    return "\n".join(lines)
