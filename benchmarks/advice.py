"""Advice on random runs and cards, checked against the plan, an exhaustive search, and traces.

python benchmarks/advice.py --pairs 500              the plan of every advice; a search over all sets
python benchmarks/advice.py --pairs 500 --exact 60   and traces of 60 of these runs that are eager and small

Counted: advices whose fit the plan of the changed config denies; figures that differ by more than 1% from the promise;
runs that do not fit, that some set of changes would make fit, and that got no advice; and advices whose fit the trace
denies. Resumable: finished and traced pairs are kept in --out.
"""

import hashlib
import json
import random
import time
from collections.abc import Iterator
from itertools import product
from typing import Any

from common import parser_of, report

from foretrain.advice import combine
from foretrain.advice.advisor import advise, start_of, state_of
from foretrain.advice.planner import Planner
from foretrain.advice.record import Advice, Advices
from foretrain.advice.rules import BY_ID
from foretrain.advice.rules.base import EXACTNESS, Exactness, State, loosest
from foretrain.config.checks import check
from foretrain.config.options import RunConfig
from foretrain.hardware.catalogue import catalogue
from foretrain.predict.memory import StepName
from foretrain.predict.plan import Plan, plan
from foretrain.predict.spec import StepSpec
from foretrain.predict.trace import self_test
from foretrain.predict.trace.forecast import requests_for
from foretrain.predict.trace.memory import exact

SEED = 20261121
TRACED_BLOCKS, TRACED_BATCH_TOKENS = 12, 16_384
TRACED_EACH = 2  # of the advices of one run
Pair = tuple[Plan, StepName]


def pairs(count: int) -> Iterator[Pair]:
    """Yield random runs on random cards: GPT-2 shapes and smaller, all techniques, desktops of 0 to 2.5 GB."""
    draw = random.Random(SEED)
    cards = [gpu for gpu in catalogue().values() if gpu.kind == "cuda" and gpu.memory_bytes]
    home = [gpu for gpu in cards if (gpu.memory_gib or 0) <= 24]
    made = 0
    while made < count:
        head = draw.choice((32, 64, 64, 64, 80, 128))
        heads = draw.choice((2, 4, 6, 8, 12, 16, 20, 25))
        values: dict[str, Any] = {
            "n_layer": draw.choice((1, 2, 2, 3, 3, 4, 4, 6, 6, 8, 12, 12, 24, 36)), "n_head": heads, "n_embd": heads * head,
            "block_size": draw.choice((128, 256, 512, 1024, 1024, 2048)), "batch_size": draw.choice((1, 2, 4, 8, 12, 16, 32, 64)),
            "gradient_accumulation_steps": draw.choice((1, 2, 5, 8, 40, 64)), "compile": draw.random() < 0.5,
            "vocab_size": draw.choice((256, 4096, 32000, 50257, 50304, 50304, 65536)), "dropout": draw.choice((0.0, 0.0, 0.1)),
            "bias": draw.random() < 0.3, "dtype": draw.choice(("auto", "auto", "auto", "float32", "float16")),
            "eval_batch_size": draw.choice((0, 0, 0, 4, 64)), "loss_chunk_size": draw.choice((0, 0, 0, 1024)),
            "activation_checkpointing": draw.random() < 0.15, "optimizer": draw.choice(("adamw", "adamw", "adamw", "muon", "adamw8bit")),
            "master_weights": draw.random() < 0.15,
        }  # fmt: skip
        gpu = draw.choice(home if draw.random() < 0.7 else cards)
        others = draw.choice((0, 0, draw.randint(0, 2_500_000_000)))
        step: StepName = draw.choice(("foretrain", "foretrain", "nanogpt"))
        config, _ = check(values, {})
        if config is None or others > (gpu.memory_bytes or 0):
            continue
        made += 1
        yield plan(config, gpu, name=f"pair {made}", used_by_others_bytes=others), step


def some_set_fits(planner: Planner, base: State) -> Exactness | None:
    """Search every set of changes, with the given and the smallest micro-batch; return the most exact kind that fits,
    if any.

    The space: whose step, memory of other programs, a chunked loss, recomputation, masters, compilation, half
    precision, the optimizer and where its states are; each as it is or changed.
    """
    best: Exactness | None = None
    starts = [base, *(change.applied(base) for change in BY_ID["foretrain_step"].changes(base))]
    dimensions = (
        ("", "free_others"), ("", "chunked_loss"), ("", "recompute_norm_gelu", "checkpointing"), ("", "optimizer_offload"),
        ("", "master_weights"), ("", "compile"), ("", "half_precision"), ("", "adamw8bit", "muon"),
    )  # fmt: skip
    for start, chosen in product(starts, product(*dimensions)):
        members = tuple(rule for rule in chosen if rule)
        if (
            not all(combine.allowed(rule, start) for rule in members)
            or (state := combine.build(members, start)) is None
        ):
            continue
        moved = ("foretrain_step",) if start is not base else ()
        smaller = BY_ID["micro_batch"].changes(state)
        for rules, after in (
            (members, state),
            ((*members, "micro_batch"), smaller[-1].applied(state) if smaller else None),
        ):
            kind = loosest([BY_ID[rule].exactness_on(base) for rule in (*moved, *rules)] or ["exact"])
            if after is None or (best is not None and EXACTNESS.index(kind) >= EXACTNESS.index(best)):
                continue
            outcome = planner.outcome(after)
            if outcome is not None and outcome.fits:
                best = kind
        if best == "exact":
            break
    return best


def held(base: Plan, advice: Advice) -> dict[str, Any]:
    """Compare an advice with a new plan of its config."""
    state = state_of(advice, base)
    again = plan(state.config, state.gpu, used_by_others_bytes=state.used_by_others_bytes)
    memory = again.memory_of(advice.trainer)
    needed = memory.needed_bytes
    timing = again.timing_of(advice.trainer)
    off = abs(needed / advice.effect.needed_bytes - 1)
    if timing is not None and advice.effect.step_s:
        off = max(off, abs(timing.step_s.expected_s / advice.effect.step_s - 1))
    return {"denied": memory.verdict not in ("fits", None), "off": off}


def one(base: Plan, step: StepName) -> tuple[dict[str, Any], Advices]:
    started = time.process_time()
    found = advise(base, step)
    took_s = time.process_time() - started
    checks = [held(base, advice) for advice in found.advised]
    fitting = found.now.verdict == "fits"
    exhaustive = None if fitting else some_set_fits(Planner(), start_of(base, step))
    own = [a.exactness for a in found.advised if a.gpu == base.gpu.name]
    row = {
        "gpu": base.gpu.name, "step": step, "verdict": found.now.verdict, "goal": found.goal, "advised": len(found.advised),
        "denied": sum(each["denied"] for each in checks), "worst_promise": max((each["off"] for each in checks), default=0.0),
        "best": min(own, key=EXACTNESS.index, default=None), "exhaustive": exhaustive, "advise_s": round(took_s, 3),
        "planned": found.planned,
    }  # fmt: skip
    return row, found


def digest(base: Plan, step: StepName) -> str:
    """Hash a pair: rows of other runs are not reused."""
    what = [base.config.model_dump(mode="json"), base.gpu.name, base.used_by_others_bytes, step]
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]


def small_and_eager(config: RunConfig) -> bool:
    tokens = max(config.batch_size * config.block_size, config.eval_batch * config.eval_block)
    return not config.compile and config.n_layer <= TRACED_BLOCKS and tokens <= TRACED_BATCH_TOKENS


def traced(base: Plan, found: Advices) -> list[dict[str, Any]]:
    """Return the exact plans of the first advices that stay eager."""
    rows = []
    for advice in [a for a in found.advised if not state_of(a, base).config.compile][:TRACED_EACH]:
        state = state_of(advice, base)
        changed = plan(state.config, state.gpu, used_by_others_bytes=state.used_by_others_bytes)
        requests = requests_for(
            StepSpec.of(state.config, state.gpu, advice.trainer, dtype=changed.dtype, compiled=False)
        )
        made = exact(
            [self_test.trace(request.job()) for request in requests], changed.memory_of(advice.trainer),
            available_bytes=changed.available_bytes, device_bytes=state.gpu.memory_bytes,
        )  # fmt: skip
        needed = made.memory.needed_bytes
        rows.append({
            "rules": advice.rules, "verdict": made.memory.verdict, "needed_bytes": needed,
            "lives_from_bytes": made.smallest_limit_bytes + made.memory.context.expected_bytes,
            "promised_bytes": advice.effect.needed_bytes, "allocated_bytes": made.memory.worst.allocated_bytes,
            "promised_allocated_bytes": advice.effect.allocated_bytes, "available_bytes": changed.available_bytes,
        })  # fmt: skip
    return rows


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    hard = [row for row in rows if row["verdict"] != "fits"]
    solvable = [row for row in hard if row["exhaustive"]]
    looser = [r for r in solvable if r["best"] is None or EXACTNESS.index(r["best"]) > EXACTNESS.index(r["exhaustive"])]
    seen = [each for row in rows for each in row.get("traced", [])]
    seconds = sorted(row["advise_s"] for row in rows)
    return {
        "pairs": len(rows), "advices": sum(row["advised"] for row in rows), "denied_by_plan": sum(row["denied"] for row in rows),
        "worst_promise": max(row["worst_promise"] for row in rows), "do_not_fit": len(hard),
        "with_a_fit_in_the_space": len(solvable), "of_these_without_advice": sum(not row["advised"] for row in solvable),
        "of_these_less_exact_than_possible": len(looser), "traced_runs": sum("traced" in row for row in rows),
        "traced_advices": len(seen), "denied_by_trace": sum(each["verdict"] == "does_not_fit" for each in seen),
        "tight_by_trace": sum(each["verdict"] == "tight" for each in seen),
        "worst_allocated_error": max((abs(e["promised_allocated_bytes"] / e["allocated_bytes"] - 1) for e in seen), default=0.0),
        "median_s": seconds[len(seconds) // 2], "longest_s": seconds[-1],
    }  # fmt: skip


def main() -> None:
    parser = parser_of(__doc__, "advice")
    parser.add_argument("--pairs", type=int, default=500, help="how many random runs")
    parser.add_argument("--exact", type=int, default=0, help="how many of the small eager ones are traced")
    asked = parser.parse_args()
    before = json.loads(asked.out.read_text("utf-8")) if asked.out.exists() else {}
    known: dict[str, dict[str, Any]] = before.get("rows", {}) if before.get("seed") == SEED else {}
    rows: dict[str, dict[str, Any]] = {}
    left = asked.exact
    for base, step in pairs(asked.pairs):
        asked_of = digest(base, step)
        row = known.get(base.name)
        row = row if row is not None and row["asked_of"] == asked_of else None
        wants_trace = small_and_eager(base.config) and left > 0
        if row is None or (wants_trace and "traced" not in row):
            row, found = one(base, step)
            row["asked_of"] = asked_of
            if wants_trace and found.advised:
                row["traced"] = traced(base, found)
        left -= "traced" in row
        rows[base.name] = row
        if len(rows) % 20 == 0 or "traced" in row:  # so that a stopped run resumes from here
            asked.out.write_text(json.dumps({"seed": SEED, "rows": {**known, **rows}}) + "\n", "utf-8")
            print(len(rows), asked.exact - left, flush=True)
    found_summary = summary(list(rows.values()))
    report(asked.out, {"seed": SEED, "summary": found_summary, "rows": rows})


if __name__ == "__main__":
    main()
