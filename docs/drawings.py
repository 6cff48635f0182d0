"""Pictures as SVG that the docs draw from results and from the present code: see `DRAWN`. docs/generate.py writes them."""

import io
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text
from tables import GIB, ROOT, result

import foretrain
from foretrain.cli import app
from foretrain.cli.common import OUT
from foretrain.predict.step_moments import step_moments
from foretrain.reports import charts
from foretrain.reports.axes import Scale, text_width
from foretrain.reports.plots import DIM, INK, Node, Plot, colour, framed, marks, markup, node, number
from foretrain.reports.views.memory import moments_picture

PICTURES = ROOT / "docs" / "pictures"
# rich's own without the fonts that it would fetch.
CONSOLE_FORMAT = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL).replace(
    "font-family: Fira Code, monospace", "font-family: ui-monospace, monospace"
)
STYLE = (
    "text{font:12px system-ui,sans-serif}:root{--ink:#1b1f24;--dim:#57606a;--line:#d1d9e0}"
    "@media (prefers-color-scheme:dark){:root{--ink:#e6edf3;--dim:#9ba4ae;--line:#3d444d;--line-0:#56b4e9;--line-1:#ff9e5e}}"
)
GREY = "#9aa1a9"


def drawn(plots: Iterable[tuple[Plot, float, float]], width: int, height: float) -> str:
    """Return one SVG of several plots, each at its place."""
    parts = [node("g", *plot.parts, transform=f"translate({x} {y})") for plot, x, y in plots]
    size = {"width": width, "height": height, "viewBox": f"0 0 {width} {height:.0f}"}
    return markup(node("svg", node("style", STYLE), *parts, xmlns="http://www.w3.org/2000/svg", fill="none", **size))


# -- predicted against measured -------------------------------------------------------------------------------------

Cloud = tuple[str, str, list[tuple[float, float]]]  # its name, its colour, (measured, predicted / measured)


def memory_clouds() -> list[Cloud]:
    """What nvidia-smi shows of pretraining and what PyTorch reserves for fine-tuning, before and after a correction."""
    blind, known = result("gpu_h100_blind"), result("gpu_h100_memory")["rows"]
    tuned = [row for row in result("gpu_h100_finetune")["rows"] if "error" not in row]
    sizes = {(row["name"], row["compiled"]): row["measured"]["process_bytes"] / GIB for row in known}
    reserved = {row["name"]: row["reserved_bytes"]["real"] / GIB for row in tuned}
    first = [(sizes[row["name"], row["compiled"]], 1 + row["process_error"]) for row in blind["pretraining"]]
    first += [(reserved[row["name"]], 1 + row["reserved_bytes"]["estimate"]) for row in blind["finetuning"]]
    now = [(row["measured"]["process_bytes"] / GIB, 1 + row["process_error"]) for row in known]
    now += [(reserved[row["name"]], 1 + row["reserved_bytes"]["estimate_error"]) for row in tuned]
    others = [
        (figure["measured"] / GIB, figure["predicted"] / figure["measured"])
        for case in result("accuracy")["cases"]
        for figure in case["figures"]
        if figure["kind"] in ("allocated", "requested", "reserved", "at rest") and "predicted" in figure
    ]
    others += [
        (row["measured"] / GIB, row["planned"] / row["measured"])
        for row in result("finetune_measured")["rows"]
        if row["kind"] != "tokens/s"
    ]
    return [
        (f"H100, blind ({len(first)})", GREY, first),
        (f"H100, after learning from these runs ({len(now)})", colour(0), now),
        (f"published by others, nothing fitted ({len(others)})", colour(1), others),
    ]


def time_clouds() -> list[Cloud]:
    blind, known = result("gpu_h100_blind")["times"], result("gpu_h100_forecasts")["rows"]
    timed = [row for row in result("gpu_h100_speed")["rows"] if "step_s" in row["measured"]]
    first = [(row["measured"]["step_s"], 1 + its["catalogue_error"]) for row, its in zip(timed, blind, strict=True)]
    now = [(row["measured_s"], 1 + row["catalogue_error"]) for row in known]
    cases = result("time_against_logs")["cases"]
    others = [(tokens_of(case) / case["tokens_per_s"], 1 + case["error"]) for case in cases]
    return [
        (f"H100, blind ({len(first)})", GREY, first),
        (f"H100, after learning from these runs ({len(now)})", colour(0), now),
        (f"published by others ({len(others)})", colour(1), others),
    ]


def tokens_of(case: dict) -> float:
    config = case["config"]
    batch = config.get("batch_size", 12) * config.get("gradient_accumulation_steps", 40)
    return batch * config.get("block_size", 1024) * case.get("gpus", 1)


def against(title: str, across: str, clouds: list[Cloud], columns: list[float], shares: list[float]) -> Plot:
    """`shares`: of predicted / measured, at the lines; points beyond stand at the edge."""
    x, y = Scale(columns[0], columns[-1], log=True), Scale(shares[0], shares[-1])
    plot = Plot(430, 330.0, x, y, top=28.0, right=14.0)
    rows = [(share, f"{(share - 1) * 100:+.0f}%" if share != 1 else "exact") for share in shares]
    framed(plot, [[(value, f"{value:,g}") for value in columns]], [rows], (across, "predicted against measured"))
    plot.text(plot.left, 16, title, font_weight="600")
    plot.path([(columns[0], 1.0), (columns[-1], 1.0)], stroke=INK, stroke_width=1.2)
    for place, (_, fill, points) in enumerate(clouds):
        within = [(min(max(at, x.low), x.high), min(max(ratio, y.low), y.high)) for at, ratio in points]
        places = [(plot.px(at), plot.py(ratio)) for at, ratio in within]
        plot.parts.append(marks((0, 0, 1)[place], places, fill, 3.0, fill_opacity=".75"))
    for place, (name, fill, _) in enumerate(clouds):
        at = plot.height + 14 + 17 * place
        plot.parts.append(marks((0, 0, 1)[place], [(plot.left + 4, at - 4)], fill, 4.0))
        plot.text(plot.left + 14, at, name, fill=DIM)
    return plot


def trust() -> str:
    memory = against(
        "Memory", "measured, GiB", memory_clouds(), [0.05, 0.2, 1, 5, 20, 80], [0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.3]
    )
    times = against(
        "Time of a step, from the data sheet",
        "measured, s",
        time_clouds(),
        [0.005, 0.1, 1, 10, 100, 1000],
        [0.4, 0.6, 0.8, 1, 1.2, 1.4, 1.6],
    )
    return drawn([(memory, 0, 0), (times, 450, 0)], 880, 388)


# -- models and cards -----------------------------------------------------------------------------------------------

WAYS = {
    "full": ("full", "#0072b2", "full fine-tuning"), "lora": ("LoRA", "#56b4e9", "LoRA, weights in 16 bits"),
    "qlora": ("QLoRA", "#e69f00", "QLoRA, weights in 4 bits"),
    "unsloth": ("unsloth", "#f0e442", "QLoRA with unsloth, checkpoints on the host"),
}  # fmt: skip


def fits() -> str:
    """The most that fits, for each model and card."""
    found = result("fits")
    cards, models = list(found["cards"]), list(dict.fromkeys(row["model"] for row in found["rows"]))
    wide, high, left, top = 59, 26, 130, 62
    plot = Plot(left + wide * len(cards), top + high * len(models) + 56.0, Scale(0, 1), Scale(0, 1))
    for i, card in enumerate(cards):
        name = re.sub(r" (SXM\d?|Ti)? ?\d+GB", r" \1", card).replace("RTX ", "").strip()
        plot.text(
            left + wide * (i + 0.5),
            top - 26,
            name.removesuffix(" SXM4").removesuffix(" SXM5").removesuffix(" SXM"),
            "middle",
        )
        plot.text(left + wide * (i + 0.5), top - 10, f"{found['cards'][card]:g} GB", "middle", DIM)
    plot.text(
        0, 16, "The most that fits: fine-tuning at 1 × 2,048 tokens with activation checkpointing", font_weight="600"
    )
    for row in found["rows"]:
        x, y = left + wide * cards.index(row["card"]), top + high * models.index(row["model"])
        word, fill, _ = WAYS[row["way"]] if row["way"] else ("–", "none", "")
        plot.add(
            "rect",
            x=x + 1,
            y=y + 1,
            width=wide - 2,
            height=high - 2,
            rx=3,
            fill=fill,
            stroke="none" if row["way"] else "var(--line)",
        )
        ink = {"full": "#fff"}.get(row["way"], "#1b1f24") if row["way"] else DIM
        plot.text(x + wide / 2, y + high / 2 + 4, word, "middle", ink)
    for i, model in enumerate(models):
        plot.text(left - 8, top + high * (i + 0.5) + 4, model, "right")
    x, y = float(left), top + high * len(models) + 26
    for _, fill, label in WAYS.values():
        if x + text_width(label) + 20 > plot.width:
            x, y = float(left), y + 18
        plot.add("rect", x=x, y=y - 10, width=11, height=11, rx=2, fill=fill)
        plot.text(x + 16, y, label, fill=DIM)
        x += text_width(label) + 36
    return drawn([(plot, 0, 0)], plot.width, plot.height)


# -- one step, and the recipes --------------------------------------------------------------------------------------


def step() -> str:
    """What is allocated from moment to moment in a step of real case C, foretrain's own, with its legend."""
    made = foretrain.plan(ROOT / "examples" / "real-cases" / "c.py", gpu="RTX 4070", used_by_others="2.1GB")
    _, picture = moments_picture(made, step_moments(made.spec("foretrain")))
    drawn_chart = charts.chart(picture)
    plot = drawn_chart.views[0].draw(880)
    return drawn([(plot, 0, 0), (legend(drawn_chart.series, 880), 0, plot.height + 4)], 880, plot.height + 44)


def legend(series: Iterable[tuple[str, Node]], width: int) -> Plot:
    plot = Plot(width, 40.0, Scale(0, 1), Scale(0, 1))
    x, y = 40.0, 4.0
    for name, key in series:
        if x + text_width(name) + 30 > width:
            x, y = 40.0, y + 18
        plot.parts.append(node("g", *key[2:], transform=f"translate({number(x)} {number(y)})"))
        plot.text(x + 18, y + 11, name, fill=DIM)
        x += text_width(name) + 36
    return plot


RECIPES = {"nanogpt": (GREY, "nanoGPT's recipe"), "nanogpt tuned": (colour(0), "… at its best learning rate"),
           "modern, 1/6 of the steps": (colour(1), "modern, a sixth of the steps")}  # fmt: skip


def recipes() -> str:
    """Validation loss against time on a CPU, a line for each seed."""
    found, plots = result("time_to_loss"), []
    for place, (model, every_s, least, most) in enumerate((("4x128", 30, 1.4, 2.6), ("6x384", 500, 1.2, 2.6))):
        columns = [every_s * share for share in range(5)]
        plot = Plot(430, 300.0, Scale(0, 4.2 * every_s), Scale(least, most), top=28.0, right=18.0)
        rows = [(least + 0.2 * i, f"{least + 0.2 * i:.1f}") for i in range(round((most - least) / 0.2) + 1)]
        names = ("seconds of training", "validation loss, nats per byte")
        framed(plot, [[(value, f"{value:,.0f}") for value in columns]], [rows], names)
        plot.text(plot.left, 16, model.replace("x", " × "), font_weight="600")
        step_s = found["steps_s"][model]
        for run in found["runs"]:
            if run["model"] == model and run["run"] in RECIPES and len(run["curve"]) > 1:
                each_s = step_s["modern_step_s" if run["run"].startswith("modern") else "nanogpt_step_s"]
                points = [(point["step"] * each_s, point["val_loss"]) for point in run["curve"]]
                inside = [(x, y) for x, y in points if y <= most]
                plot.path(inside, stroke=RECIPES[run["run"]][0], stroke_width=1.8)
        plots.append((plot, 450 * place, 0))
    keys = [
        (label, node("g", node("path", d="M0 6H14", stroke=ink, stroke_width=2))) for ink, label in RECIPES.values()
    ]
    return drawn([*plots, (legend(keys, 880), 0, 304)], 880, 330)


# -- a terminal -----------------------------------------------------------------------------------------------------

COLUMNS, SHOWN_S = 80, 5
SESSION = (
    "foretrain plan qwen3-8b --method qlora --gpu 4070",
    "foretrain advise qwen3-8b --method qlora --gpu 4070",
    "foretrain plan qwen3-8b --method qlora --loop unsloth --offload-checkpoints --gpu 4070",
)


def in_colour(command: str) -> str:
    """Return what a terminal shows of a command, with its colours."""
    before, out = (OUT.file, OUT.width, OUT._color_system, OUT._force_terminal), io.StringIO()
    OUT.file, OUT.width = out, COLUMNS
    OUT._color_system, OUT._force_terminal = Console(color_system="truecolor", force_terminal=True)._color_system, True
    try:
        app(command.split()[1:], standalone_mode=False)
    finally:
        OUT.file, OUT.width, OUT._color_system, OUT._force_terminal = before
    return out.getvalue().rstrip()


def recording() -> str:
    """Return the session as an SVG that shows one screen after another; without animation the first one stays."""
    screens = [Text.from_ansi(f"\x1b[1m$ {command}\x1b[0m\n{in_colour(command)}") for command in SESSION]
    consoles = []
    for screen in screens:
        console = Console(file=io.StringIO(), width=COLUMNS, record=True, force_terminal=True, color_system="truecolor")
        console.print(screen, soft_wrap=False)
        consoles.append(console)
    return animated(consoles)


def animated(consoles: list[Console]) -> str:
    """Return the consoles' pictures on top of one another, each shown in its turn."""
    texts = [console.export_text(clear=False).rstrip("\n").count("\n") + 1 for console in consoles]
    frames = []
    for i, console in enumerate(consoles):
        console.print("\n" * (max(texts) - texts[i]), end="")
        svg = console.export_svg(title="", theme=MONOKAI, code_format=CONSOLE_FORMAT, unique_id=f"t{i}")
        frames.append(svg.replace('class="rich-terminal"', f'class="rich-terminal s{i}"', 1))
    box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', frames[0])
    assert box
    turn = 100 / len(frames)
    rules = [
        f"@keyframes k{i}{{0%,{turn * i:.2f}%{{opacity:0}}{turn * i + 0.01:.2f}%,{turn * (i + 1):.2f}%{{opacity:1}}{min(turn * (i + 1) + 0.01, 100):.2f}%,100%{{opacity:{int(i == len(frames) - 1)}}}}}"
        f".s{i}{{opacity:{int(not i)};animation:k{i} {SHOWN_S * len(frames)}s step-end infinite}}"
        for i in range(len(frames))
    ]
    style = "".join(rules) + "@media (prefers-reduced-motion:reduce){svg svg{animation:none}}"
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {box[1]} {box[2]}"><style>{style}</style>{"".join(frames)}</svg>'


DRAWN: dict[str, Callable[[], str]] = {
    "plan-advise": recording, "trust": trust, "fits": fits, "step": step, "recipes": recipes,
}  # fmt: skip


def files() -> dict[Path, str]:
    return {PICTURES / f"{name}.svg": draw() for name, draw in DRAWN.items()}
