"""Tables and the picture of docs/speed.md from the results of benchmarks/limit.py: steps against the machine's limit."""

from collections.abc import Callable
from html import escape
from typing import Any

from results import result

GROUPS = {
    "forward": "matmuls, forward", "input_gradient": "matmuls, gradients of inputs",
    "weight_gradient": "matmuls, gradients of weights", "attention": "attention",
    "pointwise": "norms, activations, casts", "loss": "loss", "optimizer": "clipping, optimizer",
}  # fmt: skip
NOT_MEASURED = "Not measured yet."
REST = "launching, Python, the autograd engine"
COLOURS = ("#0072b2", "#56b4e9", "#9a86d6", "#009e73", "#f0e442", "#d55e00", "#cc79a7", "#999999")
TEXT = "#767676"  # four and a half to one against white, and against black
WIDTH, BAR, GAP, LEFT, RIGHT = 820, 20, 6, 250, 120


def _rows(model: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in model["contestants"] if "share" in row]


def _percent(share: float) -> str:
    return f"{share * 100:.0f} %" if share >= 0.1 else f"{share * 100:.1f} %"


def _who(row: dict[str, Any]) -> str:
    trained = ", as `foretrain train` runs it" if row.get("as_trained") else ""
    return f"{row['name']}, {'compiled' if row['compiled'] else 'eager'}, {row['dtype']}{trained}"


def _machines() -> list[list[dict[str, Any]]]:
    """The models of each machine."""
    models = result("limit")["models"]
    devices = dict.fromkeys(model["machine"]["device"] for model in models)
    return [[model for model in models if model["machine"]["device"] == device] for device in devices]


def _for_each(table: Callable[[list[dict[str, Any]]], str]) -> Callable[[], str]:
    """One table a machine."""
    return lambda: "\n\n".join(map(table, _machines())) or NOT_MEASURED


def peaks(models: list[dict[str, Any]]) -> str:
    """What the machine reaches: the best over all models' measurements, which were minutes apart."""
    model = models[0]
    lines = ["| what | peak |", "| --- | ---: |"]
    best: dict[tuple[str, str], float] = {}
    for each in (product for one in models for product in one["peaks"]["products"]):
        key = each["dtype"], each["kind"]
        best[key] = max(best.get(key, 0.0), each["flop_per_s"])
    kinds = {
        "matmul": "forward", "matmul_input": "gradient of the input", "matmul_weight": "gradient of the weight",
        "attention": "batched, as attention has it",
    }  # fmt: skip
    for dtype in dict.fromkeys(dtype for dtype, _ in best):
        lines += [f"| matmul, {dtype}, {kinds[k]} | {best[dtype, k] / 1e9:,.0f} GFLOP/s |" for k in kinds]
    rates = [rate for one in models for rate in one["peaks"]["bandwidths"]]
    largest = max(rate["moved_bytes"] for rate in rates)
    for access, name in (("copy", "copying"), ("in_place", "in place")):
        own = [rate for rate in rates if rate["access"] == access]
        memory = max(rate["bytes_per_s"] for rate in own if rate["moved_bytes"] == largest)
        cache = max(own, key=lambda rate: rate["bytes_per_s"])
        moved = cache["moved_bytes"] / 2**20
        lines.append(f"| memory, {name} | {memory / 1e9:,.0f} GB/s |")
        lines.append(f"| cache, {name} ({moved:,.0f} MiB) | {cache['bytes_per_s'] / 1e9:,.0f} GB/s |")
    each = [one["peaks"] for one in models]
    lines += [
        f"| a fresh page of {each[0]['page_bytes']:,} bytes | {min(one['page_s'] for one in each) * 1e9:,.0f} ns |",
        f"| the smallest operation | {min(one['launch_s'] for one in each) * 1e6:.1f} µs |",
        f"| the same with its gradient | {min(one['autograd_launch_s'] for one in each) * 1e6:.1f} µs |",
    ]
    took = max(one["took_s"] for one in each) / 2
    flags = ", ".join(model["machine"]["flags"])
    lines += ["", f"{model['machine']['device']} with {flags}; torch {model['versions']['torch']}; {model['date']}; "
              f"measured in {took:.0f} s."]  # fmt: skip
    return "\n".join(lines)


def steps(models: list[dict[str, Any]]) -> str:
    """Every contestant: how often as quick as nanoGPT, and what share of the limit."""
    lines = [
        "| model | who | ms a step | times nanoGPT (range) | limit ms | share of the limit | of the fastest dtype's |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for model in models:
        for row in _rows(model):
            ratio = f"{row['ratio']:.2f} ({row['lowest_ratio']:.2f} to {row['highest_ratio']:.2f})"
            lines.append(
                f"| {model['model']} | {_who(row)} | {row['step_s'] * 1e3:,.1f} | {ratio} | {row['limit_s'] * 1e3:,.1f} | "
                f"{_percent(row['share'])} | {_percent(row['share_of_machine'])} |"
            )
    return "\n".join([*lines, "", f"{models[0]['machine']['device']}."])


def _shown(model: dict[str, Any]) -> list[dict[str, Any]]:
    """nanoGPT's quicker step, and foretrain's quicker."""
    rows = _rows(model)
    found = []
    for name in ("nanoGPT", "foretrain"):
        own = [row for row in rows if row["name"] == name]
        found += [min(own, key=lambda row: row["step_s"])] if own else []
    return found


def operations(models: list[dict[str, Any]]) -> str:
    """Where the rest goes: each group measured, and at the limit."""
    sides = [(model, row) for model in models for row in _shown(model)]
    heads = [f"{model['model']}, {row['name']} {row['dtype']}" for model, row in sides]
    lines = [f"| ms: measured (limit) | {' | '.join(heads)} |", "| --- |" + " ---: |" * len(sides)]
    for group, name in GROUPS.items():
        cells = []
        for _, row in sides:
            found = next(each for each in row["groups"] if each["group"] == group)
            cells.append(f"{found['measured_s'] * 1e3:,.2f} ({found['limit_s'] * 1e3:,.2f})")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    rest = [f"{row['rest_s'] * 1e3:,.2f}" for _, row in sides]
    whole = [f"{row['step_s'] * 1e3:,.1f} ({row['limit_s'] * 1e3:,.1f})" for _, row in sides]
    lines += [f"| {REST} | {' | '.join(rest)} |", f"| a step | {' | '.join(whole)} |"]
    return "\n".join([*lines, "", f"{models[0]['machine']['device']}. {quicker(models)}"])


def quicker(models: list[dict[str, Any]]) -> str:
    """Whether anything was quicker than its limit, which would be a badly measured peak."""
    found = [
        f"{model['model']}, {_who(row)}: {', '.join(GROUPS[group] for group in row['quicker_than_limit'])}"
        for model in models
        for row in _rows(model)
        if row["quicker_than_limit"]
    ]
    if not found:
        return "No group of operations was quicker than its limit."
    return "Quicker than their limit, so that a peak was measured too low: " + "; ".join(found) + "."


def cards() -> str:
    """Runs on cards, against the peaks of the calibration that was recorded with them."""
    lines = [
        "| run | mode | dtype | ms a step | times nanoGPT | limit ms | share of the limit |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for card in result("limit")["cards"]:
        for row in card["rows"]:
            mode = "compiled" if row["compiled"] else "eager"
            ratio = f"{row['ratio']:.2f}" if row["ratio"] else "not measured"
            limit, share = "not measured", "not measured"
            if "share" in row:
                limit, share = f"{row['limit_s'] * 1e3:,.1f}", _percent(row["share"])
            lines.append(
                f"| {row['title']} | {mode} | {row['dtype']} | {row['step_s'] * 1e3:,.1f} | {ratio} | {limit} | {share} |"
            )
    return "\n".join(lines)


def picture() -> str:
    """For each model: the limit and the step, of foretrain and of nanoGPT, by group. Each model has its own scale. Of
    the first machine."""
    parts: list[str] = []
    y = 0
    for model in _machines()[0]:
        sides = _shown(model)[::-1]
        scale = (WIDTH - LEFT - RIGHT) / max(row["step_s"] for row in sides)
        parts.append(_text(0, y + 14, model["model"], "start", bold=True))
        y += 22
        for row in sides:
            limits = [each["limit_s"] for each in row["groups"]]
            measured = [*(each["measured_s"] for each in row["groups"]), max(0.0, row["rest_s"])]
            share = f"{row['limit_s'] * 1e3:,.1f} ms, {_percent(row['share'])}"
            parts += _bar(y, f"{row['name']}, {row['dtype']}: the limit", limits, scale, share)
            y += BAR + 2
            parts += _bar(
                y, f"{row['name']}, {row['dtype']}: a step", measured, scale, f"{row['step_s'] * 1e3:,.1f} ms"
            )
            y += BAR + GAP + 4
        y += 8
    for number, (name, colour) in enumerate(zip([*GROUPS.values(), REST], COLOURS, strict=True)):
        x, row_y = number % 3 * 275, y + number // 3 * 20
        parts.append(f'<rect x="{x}" y="{row_y}" width="12" height="12" fill="{colour}"/>')
        parts.append(_text(x + 18, row_y + 11, name, "start"))
    y += 64
    title = "Where a training step's time goes, beside its limit on this machine"
    style = "max-width:100%;height:auto;font:13px system-ui,sans-serif"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" role="img" '
        f'aria-label="{title}" style="{style}">\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _bar(y: int, label: str, seconds: list[float], scale: float, end: str) -> list[str]:
    parts, x = [_text(LEFT - 8, y + BAR - 6, label, "end")], float(LEFT)
    for name, colour, each in zip([*GROUPS.values(), REST], COLOURS, seconds, strict=False):
        width = each * scale
        if width >= 0.05:
            said = escape(f"{name}: {each * 1e3:,.2f} ms")
            place = f'x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}"'
            parts.append(f'<rect {place} fill="{colour}"><title>{said}</title></rect>')
            x += width
    return [*parts, _text(x + 6, y + BAR - 6, end, "start")]


def _text(x: float, y: float, text: str, anchor: str, *, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y}" fill="{TEXT}" text-anchor="{anchor}"{weight}>{escape(text)}</text>'


PARTS = {
    "limit-peaks": _for_each(peaks), "limit-steps": _for_each(steps), "limit-operations": _for_each(operations),
    "limit-cards": cards,
}  # fmt: skip
