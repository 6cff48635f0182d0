"""The generated parts of docs/several-cards.md: what the command prints, and the result of
benchmarks/cluster_measured.py."""

import io
import shlex
from typing import Any

from results import result
from rich.console import Console

from foretrain.advice.asked import Asked
from foretrain.app.ranks.plan import plan_cluster
from foretrain.hardware.links import links
from foretrain.reports import text
from foretrain.reports.views.cluster import screen as screen_view
from foretrain.reports.views.cluster import whole as whole_view

WIDTH = 90
MISS = 0.20


def _console() -> Console:
    return Console(file=io.StringIO(), width=WIDTH, color_system=None, highlight=False)


def _shown(console: Console, command: str) -> str:
    lines = (line.rstrip() for line in console.file.getvalue().rstrip().splitlines())  # type: ignore[attr-defined]
    return f"```console\n$ {command}\n" + "\n".join(lines) + "\n```"


def _screen(words: tuple[str, ...], gpus: str) -> str:
    """What `foretrain plan WORDS --gpus GPUS` prints."""
    console = _console()
    made = plan_cluster(list(words), gpus)
    text.render_screen(screen_view.screen(made, Asked(words=words, cards=("--gpus", gpus))), console)
    return _shown(console, f"foretrain plan {shlex.join(words)} --gpus {shlex.quote(gpus).replace(chr(39), chr(34))}")


def pair() -> str:
    return _screen(("gpt2-124m",), "2 x RTX 4090")


def hardly() -> str:
    return _screen(("gpt2-124m", "--gradient_accumulation_steps=2"), "2 x RTX 4090")


def nodes() -> str:
    return _screen(
        ("gpt2-1558m", "--batch_size=4", "--gradient_accumulation_steps=128"), "2 nodes x 8 x A100 SXM4 80GB"
    )


def communication() -> str:
    """One section of --full."""
    console = _console()
    made = plan_cluster(["gpt2-124m"], "2 x RTX 4090")
    document = whole_view.document(made)
    kept = [section for section in document.sections if section.title.id == "cluster.section.communication"]
    text.render(type(document)(document.title, document.subtitle, kept), console)
    return _shown(console, 'foretrain plan gpt2-124m --gpus "2 x RTX 4090" --full   # one section of it')


def names() -> str:
    """The links that --link and --network take."""
    lines = ["| name | also | GB/s as NCCL counts | usual for |", "| --- | --- | ---: | --- |"]
    for link in links().values():
        cards = [*link.cards, *link.joins, *link.between]
        usual = ", ".join(cards[:4]) + (", …" if len(cards) > 4 else "")
        rate = f"{link.bytes_per_s / 1e9:.3g}"
        if link.least_share:
            rate += f" (worst published {link.least_bytes_per_s / 1e9:.2g})"
        lines.append(f"| `{link.name}` | {', '.join(link.aliases)} | {rate} | {usual} |")
    return "\n".join(lines)


def _percent(share: float, *, signed: bool = False) -> str:
    return f"{share * 100:+.1f} %" if signed else f"{share * 100:.1f} %"


def measured() -> str:
    """Published runs by group."""
    found = result("cluster_measured")
    lines = [
        "| published runs | figures | median error | median of sizes | above 20 % (memory: 5 %) | in the stated range |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, one in found["summary"].items():
        inside = str(one["in_range"]) if name.startswith("time") else ""
        lines.append(
            f"| {name} | {one['rows']} | {_percent(one['median_error'], signed=True)} | "
            f"{_percent(one['median_abs_error'])} | {one['misses']} | {inside} |"
        )
    return "\n".join(lines)


def sentence() -> str:
    found = result("cluster_measured")
    time, fits = found["summary"]["time: all"], found["fits"]
    worlds = [row["world"] for row in found["rows"]]
    return (
        f"{time['rows']} published times of a step on {min(worlds)} to {max(worlds)} cards: the median of the errors' sizes is "
        f"{_percent(time['median_abs_error'])}, {time['in_range']} are in the stated range (`python benchmarks/cluster_measured.py`, "
        f"{found['date']}). Of llm-foundry's {fits['rows']} runs, each of which fitted its cards, {fits['rows'] - len(fits['refused'])} are "
        "said to fit. Nothing was measured by us."
    )


def misses() -> str:
    """Every figure that is further off than is asked for."""
    rows = result("cluster_measured")["rows"]
    lines = ["| run | of | cards | strategy | error | what differs |", "| --- | --- | --- | --- | ---: | --- |"]
    for row in sorted(rows, key=lambda row: -abs(row["error"])):
        if abs(row["error"]) > (MISS if row["of"] == "time" else 0.05):
            lines.append(_miss(row))
    return "\n".join(lines)


def _miss(row: dict[str, Any]) -> str:
    error = _percent(row["error"], signed=True)
    return f"| {row['id']} | {row['of']} | {row['cards']} | {row['strategy']} | {error} | {row['note']} |"


PARTS = {
    "cluster-pair": pair, "cluster-hardly": hardly, "cluster-nodes": nodes, "cluster-communication": communication,
    "cluster-links": names, "cluster-measured": measured, "cluster-sentence": sentence, "cluster-misses": misses,
}  # fmt: skip
