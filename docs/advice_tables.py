"""Tables of docs/advice.md: every rule of the advisor, and the results of benchmarks/advice.py."""

from results import result

from foretrain.advice.candidates import EACH_MORE, TOLLS
from foretrain.advice.rules import RULES
from foretrain.base.messages import say

LEARNING = {
    "exact": "exact", "rounding": "same in expectation", "other tokens": "other tokens per step", "other optimizer": "other optimizer", "other model": "other model",
}  # fmt: skip


def rules() -> str:
    """One row a rule, in the order in which users can afford them."""
    lines = ["| rule | what | why | what it costs | learning | who | reference |", "| --- " * 7 + "|"]
    for rule in (each for each in RULES if not each.several):
        what, why, costs = (say(f"rule.{rule.id}.{part}") for part in ("what", "why", "costs"))
        learning = LEARNING[rule.exactness] + (" ¹" if rule.exactness == "exact" and rule.redraws else "")
        who = "foretrain" if rule.ours or rule.id == "foretrain_step" else "both"
        who += ", by `--exact` only" if rule.traced else ""
        lines.append(f"| {rule.id} | {what} | {why} | {costs} | {learning} | {who} | {rule.reference} |")
    return "\n".join(lines)


def tolls() -> str:
    """What the order counts."""
    named = ", ".join(f"{LEARNING[kind]} {toll * 100:.0f} %" for kind, toll in TOLLS.items())
    return f"{named}; each change after the first {EACH_MORE * 100:.0f} %."


def held() -> str:
    """What the benchmark found."""
    found = result("advice")
    s = found["summary"]
    return (
        f"{s['pairs']} random runs on random cards got {s['advices']:,} advices: {s['denied_by_plan']} whose fit a new plan of the "
        f"changed config denies, and none whose figures differ by more than {s['worst_promise'] * 100:.2g} % from it. Of "
        f"{s['do_not_fit']} runs that do not fit with their margin, a search over every set of changes finds a fit for "
        f"{s['with_a_fit_in_the_space']}: {s['of_these_without_advice']} of these got no advice, "
        f"{s['of_these_less_exact_than_possible']} only a less exact one. {s['traced_advices']} advices of {s['traced_runs']} small "
        f"eager runs were traced: {s['denied_by_trace']} do not fit by the trace, {s['tight_by_trace']} fit without their margin "
        f"only. Median {s['median_s']:.2f} s of processor time, longest {s['longest_s']:.1f} s. (`python benchmarks/advice.py`, "
        f"{found['date']})"
    )
