"""Tables of docs/reliability.md: injected faults, and what each knob does to a resume."""

from typing import Any

from results import result

from foretrain.config import knobs
from foretrain.resume_keys import EVALUATION, ROUNDING, effect_of

# Name in tests/faults/: (what is done, the counts of what had to hold, with the count of all).
_FAULTS = {
    "kills": ("`kill -9` at a random time or inside a save; each run is resumed until it is done", "runs"),
    "every_call": ("`kill -9` before each call on files that the saves of a run make", "calls"),
    "sigterm": ("SIGTERM at a random moment", "signals"),
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
    "slowest_s": "s, the slowest", "intact": "earlier checkpoint intact", "said": "message with need and room",
    "found": "found before use", "as_the_smaller": "bit for bit the run at the smaller micro-batch",
    "clean_stop": "stopped with exit code 5, nothing half-updated saved", "refused": "refused with a sentence",
    "accepted": "right after all, and run or planned as written", "tracebacks": "tracebacks", "hangs": "hangs",
    "silent": "accepted or changed in silence", "not_quantities": "forecasts that are no quantities",
    "executed": "run", "held": "ended in a sentence or an answer, in time and memory", "most_mib": "MiB more, the most",
    "kinds": "kinds of file", "no_effect": "without any effect", "missed": "missed",
}  # fmt: skip


def faults() -> str:
    """What the last run of `make faults` or `make faults-long` counted, of faults and of wrong inputs."""
    lines, held = ["| fault | how often | what came of it |", "| --- | ---: | --- |"], []
    for file in ("faults", "fault_inputs"):
        found = result(file)
        lines += [_row(name, counts) for name, counts in found["experiments"].items()]
        held.append(f"{'All held' if found['ok'] else '**Not all held**'} (tier {found['tier']}, seed {found['seed']}, "
                    f"{found['date']}, {found['machine']['cpu']}, torch {found['versions']['torch']}; `make faults`).")  # fmt: skip
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


def resume() -> str:
    """Every knob under what another value of it does."""
    listed: dict[str, list[str]] = {"free": [], "rounding": [], "evaluation": [], "refuses": []}
    for knob in knobs():
        effect = effect_of(knob.name)
        kind = "rounding" if knob.name in ROUNDING else "evaluation" if knob.name in EVALUATION else effect
        listed[kind].append(f"`{knob.name}`")
    texts = {
        "free": ("free", "nothing that is learned or measured hangs on it"),
        "rounding": ("warns", "the same training, but sums may round differently: no longer bit for bit"),
        "evaluation": ("warns", "training is not moved, but later evaluations do not compare with earlier ones"),
        "refuses": ("refuses", "it decides what is learned; start a new run"),
    }
    lines = ["| changed on resume | why | knobs |", "| --- | --- | --- |"]
    lines += [f"| {texts[kind][0]} | {texts[kind][1]} | {', '.join(names)} |" for kind, names in listed.items()]
    return "\n".join(lines)
