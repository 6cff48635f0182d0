"""Rules about the card and about how a step is cut: whose step, others' memory, micro-batches, evaluation."""

from collections.abc import Sequence

from foretrain.advice.rules.base import Change, Rule, State
from foretrain.config.microbatches import divisors, sequences_of, with_micro_batch

TENTH_GB = 100_000_000
MOST_TIMES = 16  # as many sequences in a micro-batch, or micro-batches in a step


def foretrain_step(state: State) -> Sequence[Change]:
    """The same config by foretrain's step, unless the config asks that step for another learning."""
    own = state.config
    other_learning = own.recipe != "nanogpt" or own.optimizer != "adamw" or own.matmul != "dtype" or own.master_weights
    return [] if state.step == "foretrain" or other_learning else [Change(step="foretrain")]


def free_others(state: State) -> Sequence[Change]:
    """Less and less beside the run, in tenths of a GB down to nothing."""
    held = state.used_by_others_bytes
    if state.config.memory_limit_bytes is not None or not held:
        return []
    steps = range(1, -(-held // TENTH_GB) + 1)
    return [Change(used_by_others_bytes=max(0, held - n * TENTH_GB)) for n in steps]


def recut(state: State, batch: int) -> Change:
    """Another micro-batch with the tokens of a step and the sequences of an evaluation kept.

    nanoGPT counts an evaluation in micro-batches, so that there eval_iters has to follow; its random rows are then
    the very same, as torch.randint draws the same numbers in two halves as in one piece.
    """
    made = with_micro_batch(state.config, batch)
    options = {"batch_size": made.batch_size, "gradient_accumulation_steps": made.gradient_accumulation_steps}
    if state.step == "foretrain":
        if state.config.eval_batch_size > batch:
            options["eval_batch_size"] = 0
        return Change({**options, "eval_sequences": made.eval_sequences})
    rows = state.config.eval_iters * state.config.batch_size
    return Change({**options, "eval_iters": max(1, rows // batch)})


def _micro_batches(state: State) -> list[int]:
    return divisors(sequences_of(state.config) // state.world)


def micro_batch(state: State) -> Sequence[Change]:
    return [recut(state, d) for d in reversed(_micro_batches(state)) if d < state.config.batch_size]


def micro_batch_idle(state: State) -> str:
    return "" if state.config.batch_size > 1 else "smallest"


def larger_micro_batch(state: State) -> Sequence[Change]:
    """The next larger divisors, up to sixteen times as many sequences."""
    now = state.config.batch_size
    return [recut(state, d) for d in _micro_batches(state) if now < d <= MOST_TIMES * now]


def eval_batch(state: State) -> Sequence[Change]:
    """Halves of evaluation's micro-batch."""
    if state.step != "foretrain":
        return []
    found, size = [], state.config.eval_batch
    while size > 1:
        size //= 2
        found.append(Change({"eval_batch_size": size, "eval_sequences": state.config.eval_rows}))
    return found


def eval_batch_idle(state: State) -> str:
    return "smallest" if state.step == "foretrain" and state.config.eval_batch == 1 else ""


RULES = (
    Rule(
        "foretrain_step", "both", "exact", "docs/memory.md", foretrain_step, redraws=True, quick=True,
    ),
    Rule(
        "free_others", "memory", "exact", "nvidia-smi; docs/memory.md", free_others, usual=lambda found: -1,
        drop_order=60, quick=True,
    ),
    Rule(
        "micro_batch", "memory", "exact", "docs/budget.md; karpathy/nanoGPT train.py, gradient accumulation",
        micro_batch, micro_batch_idle, redraws=True, quick=True, recuts=True,
    ),
    Rule(
        "eval_batch", "memory", "exact", "docs/budget.md; karpathy/nanochat#237", eval_batch, eval_batch_idle,
        ours=True, quick=True,
    ),
)  # fmt: skip
LARGER = Rule(
    "larger_micro_batch", "speed", "exact", "docs/time.md: fewer launches and fewer sums of gradients",
    larger_micro_batch, redraws=True, quick=True, recuts=True,
)  # fmt: skip
