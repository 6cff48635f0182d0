"""Tables of docs/reliability.md: every fault that a test puts in, what came of many, what an option does to a resume."""

import ast
from pathlib import Path
from typing import Any

from results import result

from foretrain.config.checks import EVALUATION, ROUNDING, effect_of
from foretrain.config.options import OPTIONS

# Name in tests/faults/: (what is done, the counts of what had to hold, with the count of all).
_FAULTS = {
    "kills": ("`kill -9` at a random time or inside a save; each run is resumed until it is done", "runs"),
    "every_call": ("`kill -9` before each call on files that the saves of a run make", "calls"),
    "sigterm": ("SIGTERM at a random moment", "signals"),
    "supervised": (
        "under `--auto-restart`: the training process is killed, then the supervisor is told to stop, then it is killed; "
        "each later process finds other threads and nothing measured",
        "runs",
    ),
    "killed_ranks": (
        "`kill -9` of one of 2, 3 or 4 ranks or of all at once, at a random time or before a call on a file; they start "
        "again until they are done",
        "runs",
    ),
    "stopped_ranks": (
        "SIGTERM to one of 2 or 3 ranks or to all at once, at a random moment of a whole run; they start again until they "
        "are done",
        "signals",
    ),
    "full_disk": ("the disk is full after each 64 KiB of a save", "offsets"),
    "bit_flips": ("one bit of a checkpoint is flipped", "flips"),
    "not_finite": ("NaN or infinity in a weight, an activation, a gradient or the loss", "places"),
    "out_of_memory": ("out of memory in a forward or backward pass, an evaluation, the optimizer", "points"),
    "fuzzed_configs": ("a config or `--key=value` that is wrong, absurd or torn, at random", "configs"),
    "hostile_configs": ("a config that wants to run a program, read a file, or take memory and time", "configs"),
    "hostile_payloads": ("a checkpoint, dataset, log, export, snapshot or cache that wants the same", "payloads"),
    "data_flips": ("one bit, or the end, of a prepared shard, its index, tokenizer or unfinished state", "damages"),
}
_SHOWN = {
    "in_a_save": "kills inside a save", "kills": "kills", "equal": "bit for bit the run without a fault",
    "unreadable": "unreadable checkpoints", "exit_75": "exit code 75", "durable": "state saved",
    "as_documented": "ended each time as documented",
    "slowest_s": "s, the slowest", "intact": "earlier checkpoint intact", "said": "message with need and room",
    "found": "found before use", "as_the_smaller": "bit for bit the run at the smaller micro-batch",
    "clean_stop": "stopped with exit code 5, nothing half-updated saved", "refused": "refused with a sentence",
    "accepted": "right after all, and run or planned as written", "tracebacks": "tracebacks", "hangs": "hangs",
    "silent": "accepted or changed in silence", "not_quantities": "forecasts that are no quantities",
    "executed": "run", "held": "ended in a sentence or an answer, in time and memory", "most_mib": "MiB more, the most",
    "kinds": "kinds of file", "no_effect": "without any effect", "missed": "missed",
}  # fmt: skip


def cost() -> str:
    """What saving holds up."""
    found = result("checkpoint_cost")
    lines = [
        "| model | checkpoint | step | the loop writes itself | in the background: blocked | the steps beside it take longer by | "
        f"share of {found['interval_steps']:,} steps: blocked | with that |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for c in found["cases"]:
        lines.append(
            f"| {c['case']} | {c['checkpoint_bytes'] / 2**20:,.1f} MiB | {c['step_s'] * 1e3:,.0f} ms | "
            f"{c['loop_s'] * 1e3:,.0f} ms | {c['background_s'] * 1e3:,.1f} ms | {c['beside_s'] * 1e3:,.0f} ms | "
            f"{c['blocked_share'] * 100:.4f} % | {c['whole_share'] * 100:.3f} % |"
        )
    lines += ["", f"({found['threads']} threads on {found['machine']['cpu']}, {found['date']}; "
              "`python benchmarks/checkpoint_cost.py`. Not yet measured on a GPU.)"]  # fmt: skip
    return "\n".join(lines)


def faults() -> str:
    """What the last run of `make faults` or `make faults-long` counted, of faults and of wrong inputs."""
    lines, held = ["| fault | how often | what came of it |", "| --- | ---: | --- |"], []
    for file in ("faults", "fault_inputs"):
        found = result(file)
        lines += [_row(name, counts) for name, counts in found["experiments"].items()]
        held.append(f"{'All held' if found['ok'] else '**Not all held**'} (tier {found['tier']}, seed {found['seed']}, "
                    f"{found['date']}, {found['machine']['cpu']}, torch {found['versions']['torch']}; `make {'faults-long' if found['tier'] == 'nightly' else 'faults'}`).")  # fmt: skip
    return "\n".join([*lines, "", *dict.fromkeys(held)])


def _row(name: str, counts: dict[str, Any]) -> str:
    what, unit = _FAULTS[name]
    shown = [
        f"{counts[key]:,.1f} {text}" if isinstance(counts[key], float) else f"{counts[key]:,} {text}"
        for key, text in _SHOWN.items()
        if key in counts
    ]
    came = ", ".join(shown) or "nothing changed, nothing bad saved, exit code 6, the tensor named"
    return f"| {what} | {counts[unit]:,} {unit} | {came} |"


_SOAK = {
    "kill": "`kill -9`", "kill_in_a_save": "`kill -9` inside a save", "segmentation_fault": "segmentation fault",
    "flip_and_kill": "a flipped bit in the newest checkpoint and `kill -9`", "stop_and_go_on": "stopped for seconds",
    "full_disk": "full disk", "no_descriptors": "no file can be opened", "read_only": "read-only folder",
    "slow_disk": "slow disk", "no_memory": "out of memory",
}  # fmt: skip


def soak() -> str:
    """What the last soak counted."""
    found = result("soak")
    kinds = ", ".join(f"{found['kinds'][name]} x {text}" for name, text in _SOAK.items() if name in found["kinds"])
    grown = {
        name: f"{g['resident_bytes_per_h'] / 1e6:+.2f} MB an hour over {g['lived_h']:.2f} h, "
        f"open files {g['open_files']:.0f}, {g['open_files_grown']:+.0f}" if g else "not old enough to say"
        for name, g in found["grown"].items()
    }  # fmt: skip
    same = found["compared"]
    compared = "not compared yet"
    if same:
        equal = "bit for bit the same" if same["weights_moments_generators_equal"] else "**not the same**"
        compared = (f"weights, moments and generators {equal}; losses of {same['losses_equal']:,} of "
                    f"{same['steps']:,} steps the same")  # fmt: skip
    rows = [
        ("faults", f"{found['faults']} in {found['hours']:.2f} h, one each {found['every_s']:.0f} s: {kinds}"),
        ("faults that could not be put in", ", ".join(each["kind"] for each in found["not_done"]) or "none"),
        ("done by hand", str(found["manual_actions"])),
        ("training processes", str(found["processes"])),
        ("useful share of the time in which it could work", f"{found['goodput']:.1%}"),
        ("useful share of all time", f"{found['useful_share_of_wall']:.1%}"),
        ("restarts", f"{found['restart_s']:.0f} s of {found['wall_s']:.0f} s"),
        ("steps done again", f"{found['repeated_steps']:,}, for {found['steps']:,} that count"),
        ("memory of the training process", grown["child"]),
        ("memory of the supervisor", grown["supervisor"]),
        ("against the run without faults", compared),
    ]
    lines = ["| what | count |", "| --- | --- |", *(f"| {what} | {count} |" for what, count in rows)]
    held = "All held" if found["ok"] else "**Not all held**"
    if found["exit_code"] is None:
        held = "Under way: no result yet"
    lines += ["", f"{held} ({found['date']}, {found['machine']['cpu']}, shared with other work, "
              f"torch {found['versions']['torch']}; `make soak`)."]  # fmt: skip
    return "\n".join(lines)


_GROUPS = {
    "B.1": "Memory", "B.2": "Numbers", "B.3": "Disk, process, machine", "B.4": "Data", "B.5": "Configuration",
    "B.6": "Hostile input",
}  # fmt: skip
TESTS = Path(__file__).parent.parent / "tests"


def marked() -> list[tuple[str, str, str, str, str]]:
    """(group, fault, what is seen, what is safe, the test) of every `pytest.mark.fault`, as the tests have them."""
    found = []
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.parse(path.read_text("utf-8")).body:
            for mark in getattr(node, "decorator_list", []):
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.fault":
                    values = {word.arg: ast.literal_eval(word.value) for word in mark.keywords}
                    name = f"{path.relative_to(TESTS.parent).as_posix()}::{node.name}"  # type: ignore[attr-defined]
                    what = ast.literal_eval(mark.args[0])
                    found.append((values["row"], what, values["sees"], values["safe"], name))
    return sorted(found, key=lambda row: row[0])


def catalogue() -> str:
    """Fault, what you will see, what is safe, and the test that shows it."""
    lines, rows = [], marked()
    for group, title in _GROUPS.items():
        lines += [
            f"**{title}**",
            "",
            "| fault | what you will see | what is safe | test |",
            "| --- | --- | --- | --- |",
        ]
        for row, what, sees, safe, test in rows:
            if row == group:
                file, name = test.split("::")
                lines.append(f"| {what} | {sees} | {safe} | [`{name}`](../{file}) |")
        lines.append("")
    return "\n".join(lines[:-1])


def resume() -> str:
    """Every option under what another value of it does."""
    listed: dict[str, list[str]] = {"free": [], "rounding": [], "evaluation": [], "refuses": []}
    for knob in OPTIONS.values():
        effect = effect_of(knob.name)
        kind = "rounding" if knob.name in ROUNDING else "evaluation" if knob.name in EVALUATION else effect
        listed[kind].append(f"`{knob.name}`")
    texts = {
        "free": ("free", "nothing that is learned or measured hangs on it"),
        "rounding": ("warns", "the same training, but sums may round differently: no longer bit for bit"),
        "evaluation": ("warns", "training is not moved, but later evaluations do not compare with earlier ones"),
        "refuses": ("refuses", "it decides what is learned; start a new run"),
    }
    lines = ["| changed on resume | why | options |", "| --- | --- | --- |"]
    lines += [f"| {texts[kind][0]} | {texts[kind][1]} | {', '.join(names)} |" for kind, names in listed.items()]
    return "\n".join(lines)
