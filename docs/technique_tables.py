"""Tables of docs/techniques.md: the registry, and the results of benchmarks/small_memory.py."""

from typing import Any

from results import result

from foretrain.model.techniques import TECHNIQUES

GIB = 2**30
WORDS = {
    "exact": "same maths; at most a different order of sums",
    "rounding": "same maths, different half-precision rounding",
    "other optimizer": "different updates",
}


def registry() -> str:
    """Every technique."""
    lines = ["| technique | how | saves | costs | learning | source |", "| --- | --- | --- | --- | --- | --- |"]
    for t in TECHNIQUES:
        knobs = " ".join(
            f"`{key} = {str(value).lower() if isinstance(value, bool) else value}`" for key, value in t.options.items()
        )
        lines.append(f"| {t.id} | {knobs} | {t.saves} | {t.costs} | {WORDS[t.exactness]} | {t.source} |")
    return "\n".join(lines)


def small_memory() -> str:
    """The documented configs compared with nanoGPT's own step."""
    found: dict[str, Any] = result("small_memory")
    lines = [
        "| config | batch | peak | card needs | nanoGPT eager | nanoGPT compiled | of eager | of compiled | estimated time |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for case in found["cases"]:
        eager, compiled = (case["nanogpt"][way]["peak_bytes"] for way in ("eager", "compiled"))
        peak = case["peak_bytes"]
        lines.append(
            f"| [{case['config']}](../examples/small-memory/{case['config']}.toml) | {case['batch']} | {peak / GIB:.2f} GiB | "
            f"{case['needed_bytes'] / GIB:.2f} GiB | {eager / GIB:.2f} GiB | {compiled / GIB:.2f} GiB | {peak / eager:.2f} | "
            f"{peak / compiled:.2f} | {case['time_ratio']:.2f} × |"
        )
    return "\n".join(lines)


def cpu_sentence() -> str:
    """The one that was also executed."""
    cpu = result("small_memory")["cpu"]
    return (
        f"Executed on a CPU (eager, bfloat16), {cpu['config']} took {cpu['real_bytes'] / GIB:.3f} GiB of the allocator's "
        f"memory; its trace there says {cpu['traced_bytes'] / GIB:.3f} GiB."
    )
