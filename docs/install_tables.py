"""Generated parts of docs/install.md and docs/repository.md: what an installation takes, and a comment."""

import json

from results import result

import foretrain
from foretrain.cli.repository.answers import Answer, in_short
from foretrain.cli.repository.pull_request import Change, markdown

CARD = "RTX 4070"


def base_install() -> str:
    """Packages, bytes and seconds of the first commands in an empty environment, by Python."""
    found = result("base_install")
    lines = [
        "| Python | packages | size | first `plan` | second `plan` | `demo` with `[train]` |",
        "| --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for version, row in found.items():
        train = row.get("train")
        demo = (
            f"{train['seconds']:.0f} s, loss {train['first_val_loss']:.2f} to {train['val_loss']:.2f}"
            if train else "not run"
        )  # fmt: skip
        lines.append(
            f"| {version} | {len(row['packages'])} | {row['size_bytes'] / 1e6:.1f} MB | {row['first_plan_s']:.2f} s | "
            f"{row['second_plan_s']:.2f} s | {demo} |"
        )
    one = next(iter(found.values()))
    busy = any((row.get("load") or 0) > 3 for row in found.values())
    network = "no network" if not any(row["network"] for row in found.values()) else "the network at hand"
    lines += [
        "",
        f"Measured on {one['system']}, {one['date']}: a fresh virtual environment, an empty home, no compiler, {network}; "
        + ("other programs ran beside it, so the seconds are too many; " if busy else "")
        + "the size is that of the packages without pip (`python release/empty_root.py dist --train`).",
    ]
    return "\n".join(lines)


def pull_request() -> str:
    """The comment on a config whose micro-batch grows, as GitHub gets it."""
    before, after = (_answer(batch_size) for batch_size in (8, 24))
    text = markdown([Change("config/train.toml", before, after)], [f"--gpu={CARD}"])
    return "\n".join(line for line in text.splitlines() if not line.startswith(("<!--", "###"))).strip()


def _answer(batch_size: int) -> Answer:
    made = foretrain.plan("gpt2-124m", gpu=CARD, batch_size=batch_size)
    return in_short(json.loads(made.model_dump_json()))
