"""The generated parts of docs/accuracy.md, from benchmarks/results/accuracy.json."""

from typing import Any

from results import result

GIB, MIB = 2**30, 2**20
GROUPS = ("programs, eager", "programs, compiled", "single operations")
BLOB = "https://github.com/{}/blob/{}/{}"


def size(nbytes: float) -> str:
    return (
        f"{nbytes / GIB:,.3f} GiB"
        if nbytes >= GIB
        else f"{nbytes / MIB:,.2f} MiB"
        if nbytes >= MIB
        else f"{nbytes:,.0f} B"
    )


def percent(figure: dict[str, Any]) -> str:
    """'same' in all published digits; else as many digits as there is to say."""
    if figure["same"]:
        return "same"
    error = figure["error"]
    shown = f"{error * 100:+.3f} %" if abs(error) < 0.01 else f"{error * 100:+.1f} %"
    return "0.000 %" if float(shown[:-2]) == 0 else shown


def source(text: str) -> str:
    """owner/name@commit:path as a link, where it is one."""
    repository, colon, path = text.partition(":")
    name, at, commit = repository.partition("@")
    return f"[{name}]({BLOB.format(name, commit, path)})" if colon and at and " " not in repository else text


def _pairs(
    group: str, kinds: tuple[str, ...] = ("allocated", "requested", "reserved", "at rest")
) -> list[tuple[Any, Any]]:
    return [
        (case, figure)
        for case in result("accuracy")["cases"]
        if case["group"] == group
        for figure in case["figures"]
        if figure["kind"] in kinds and "predicted" in figure
    ]


def summary() -> str:
    found = result("accuracy")
    lines = [
        "| memory figures | figures | same | median error | 90 % within | largest | within 0.5 % | within 3 % |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for group in found["summary"]:
        n = group["figures"]
        lines.append(
            f"| {group['group']} | {n} | {group['same']} | {group['median_abs_error'] * 100:.3f} % | {group['p90_abs_error'] * 100:.2f} % | "
            f"{group['worst_abs_error'] * 100:.1f} % | {group['within_half_percent']} ({group['within_half_percent'] / n:.0%}) | "
            f"{group['within_3_percent']} ({group['within_3_percent'] / n:.0%}) |"
        )
    return "\n".join([*lines, "", sentence()])


def sentence() -> str:
    """The headline, with its sources."""
    found = result("accuracy")
    group = found["summary"][0]
    programs = found["summary"][1]
    fits = found["fits"]
    ways = sorted(
        {(c["with"]["torch"], c["with"]["foretrain"], c["with"]["commit"]) for c in found["cases"] if "with" in c}
    )
    text = (
        f"{group['figures']} memory figures that others measured on single GPUs: median error {group['median_abs_error'] * 100:.3f} %, "
        f"{group['within_3_percent'] / group['figures']:.0%} within 3 %. Of whole programs alone {programs['figures']}: "
        f"median {programs['median_abs_error'] * 100:.3f} %, {programs['within_3_percent'] / programs['figures']:.0%} within 3 %."
    )
    if fits["figures"]:
        text += f" Runs that ended out of memory: {fits['right']} of {fits['figures']} foretold."
    times = result("time_against_logs")["groups"]
    whole, judged = (next(g for g in times if g["group"] == name) for name in ("all", "only judged"))
    text += (
        f" Step times from the catalogue: {whole['runs']}, median error {whole['median_abs_error'] * 100:.1f} %, "
        f"{whole['inside']} in the stated range; of the {judged['runs']} that are only judged "
        f"{judged['median_abs_error'] * 100:.1f} % and {judged['inside']}."
    )
    with_ = ", ".join(f"foretrain {v} ({c}), torch {t}" if c else f"foretrain {v}, torch {t}" for t, v, c in ways)
    text += f" Predicted with {with_}; {found['date']}; `python -m benchmarks.accuracy`."
    waiting = [case for case in found["cases"] if case["state"] != "predicted"]
    if waiting:
        text += f" Not predicted yet: {len(waiting)} of {len(found['cases'])} cases ({', '.join(case['id'] for case in waiting)})."
    return text


def _table(group: str) -> str:
    lines = [
        "| what | source | measured on | grade | figure | measured | predicted | error |",
        "| --- | --- | --- | --- | --- | ---: | ---: | ---: |",
    ]
    before, notes = "", []
    for case, figure in _pairs(group):
        first = case["id"] != before
        before = case["id"]
        mark = ""
        if figure["named"]:
            if figure["named"] not in notes:
                notes.append(figure["named"])
            mark = f" ({notes.index(figure['named']) + 1})"
        phase = figure["id"].partition("/")[2]
        kind = figure["kind"] + (f", {phase}" if phase and phase not in ("peak", "rest") else "")
        what = [
            case["what"],
            source(case["source"]),
            f"{case['measured_on']}; torch {case['measured_torch']}",
            case["grade"],
        ]
        head = " | ".join(what if first else ["", "", "", ""])
        lines.append(
            f"| {head} | {kind} | {size(figure['measured'])} | {size(figure['predicted'])} | {percent(figure)}{mark} |"
        )
    if len(lines) == 2:
        return "Not predicted yet: `python -m benchmarks.accuracy --checkouts DIR`."
    return "\n".join(
        [*lines, *([""] if notes else []), *(f"({n}) {note}.\n" for n, note in enumerate(notes, 1))]
    ).rstrip()


def eager() -> str:
    return _table("programs, eager")


def compiled() -> str:
    return _table("programs, compiled")


def single() -> str:
    return _table("single operations")


def limits() -> str:
    """Runs that ended out of memory."""
    lines = ["| run | source | measured on | its memory | predicted |", "| --- | --- | --- | ---: | --- |"]
    for case in result("accuracy")["cases"]:
        for figure in case["figures"]:
            if figure["kind"] == "out of memory" and "predicted" in figure:
                verdict = "fits" if figure["predicted"] else "does not fit"
                lines.append(
                    f"| {case['what']} | {source(case['source'])} | {case['measured_on']} | out of memory | "
                    f"{verdict}: {'right' if figure['right'] else 'wrong'} |"
                )
    return "\n".join(lines)


def times() -> str:
    """All published times in groups; each run stands in docs/time.md."""
    lines = [
        "| published times | runs | median error | largest (run) | in the range |",
        "| --- | ---: | ---: | --- | ---: |",
    ]
    for g in result("time_against_logs")["groups"]:
        lines.append(
            f"| {g['group']} | {g['runs']} | {g['median_abs_error'] * 100:.1f} % | "
            f"{g['worst_abs_error'] * 100:.0f} % ({g['worst']}) | {g['inside']} ({g['inside'] / g['runs']:.0%}) |"
        )
    return "\n".join(lines)


def left_out() -> str:
    found = result("accuracy")
    lines = ["| figures | GPUs | from | why not |", "| ---: | --- | --- | --- |"]
    lines += [f"| {row['count']} | {row['world']} | {row['rows']} | {row['why']} |" for row in found["left_out"]]
    total = sum(row["count"] for row in found["left_out"])
    lines.append(f"| **{total}** | | | of {found['collected']:,} collected |")
    return "\n".join(lines)


def recordings() -> str:
    """Recordings of whole runs, allocation by allocation."""
    rows = result("recordings")["rows"]
    lines = [
        "| recorded program | recorded with | traced with | allocations | same size in the same order | freed before the same one | the rest |",
        "| --- | --- | --- | ---: | ---: | ---: | --- |",
    ]
    lines += [
        f"| {row['what']} | torch {row['measured_torch']} | {row['torch']} | {row['recorded']:,} | {row['in_order']:,} | "
        f"{row['freed_alike']:,} | {row['named']} |"
        for row in rows
    ]
    everything, same = sum(row["recorded"] for row in rows), sum(row["in_order"] for row in rows)
    freed = sum(row["freed_alike"] for row in rows)
    return "\n".join(
        [
            *lines,
            "",
            f"Together {same:,} of {everything:,} allocations in order; {freed:,} are also freed at the same place.",
        ]
    )


def calculators() -> str:
    """Published formulas beside the same runs: the summary, then each run."""
    found = result("accuracy_calculators")
    names = [one["calculator"] for one in found["summary"]]
    lines = ["| | runs | median error | from | to | counts |", "| --- | ---: | ---: | ---: | ---: | --- |"]
    lines += [
        f"| {s['calculator']} | {s['figures']} | {s['median_abs_error'] * 100:.3g} % | {s['lowest_error']:+.0%} | "
        f"{s['highest_error']:+.0%} | {s['counts']} |"
        for s in found["summary"]
    ]
    lines += ["", "| run | measured | " + " | ".join(names) + " |", "| --- | ---: |" + " ---: |" * len(names)]
    for row in found["rows"]:
        says = [row["foretrain"], *(row["says"][name] for name in names[1:])]
        reserved = " reserved" if row["kind"] == "reserved" else ""
        lines.append(
            f"| {row['what']} | {row['measured'] / GIB:.2f}{reserved} | "
            + " | ".join(f"{s / GIB:.2f}" for s in says)
            + " |"
        )
    return "\n".join(lines)


PARTS = {
    "gpu-calculators": calculators,
    "gpu-recordings": recordings,
    "gpu-summary": summary,
    "gpu-sentence": sentence,
    "gpu-eager": eager,
    "gpu-compiled": compiled,
    "gpu-single": single,
    "gpu-limits": limits,
    "gpu-times": times,
    "gpu-left-out": left_out,
}
