"""The generated parts of docs/tune.md, from the result of benchmarks/tune.py."""

from results import result


def against_everything() -> str:
    """One row a config: tune's pick against the best of an exhaustive search."""
    found = result("tune")
    cases = [case for case in found["cases"] if "best" in case]
    if not cases:
        return "Not measured to the end yet: `python benchmarks/tune.py` on an idle machine."
    lines = [
        "| config | settings | tried | tune's pick | best of all | pick slower by | as given slower by | tune | all |",
        "| --- | ---: | ---: | --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for case in cases:
        lines.append(
            f"| {case['name']} | {case['settings']} | {case['trials']} | {case['pick']} | {case['best']} | "
            f"{case['gap'] * 100:+.1f} % ± {case['gap_half'] * 100:.1f} | {case['given_in_table'] * 100:+.0f} % | "
            f"{case['tune_s']:.0f} s | {case['exhaustive_s']:.0f} s |"
        )
    clocks = {"cpu": "CPU time on one thread", "wall": "wall time"}
    clock = " and ".join(sorted({clocks[case["clock"]] for case in cases}))
    busy = max(case["elsewhere"] for case in cases)
    lines += [
        "",
        f"{found['machine']['cpu']}, torch {found['versions']['torch']}, {found['date']}, {clock}; other programs used up "
        f"to {busy * 100:.0f} % of the machine (`python benchmarks/tune.py`).",
    ]
    return "\n".join(lines)


def console() -> str:
    """What the search of the benchmark's first config printed."""
    case = result("tune")["cases"][0]
    shown = "\n".join(line.rstrip() for line in case["console"].rstrip().splitlines())
    return f"```\n{shown}\n```"
