"""What a plan shows of a run that only evaluates (`eval_only`): batches, seconds, memory; there are no steps."""

from foretrain.predict.plan import Plan, Timing
from foretrain.reports.document import Cell, Message


def work_row(plan: Plan) -> tuple[Cell, ...]:
    """How many batches are evaluated, and of how many tokens."""
    c = plan.config.as_nanogpt() if plan.step == "nanogpt" else plan.config
    batches = plan.evaluation_batches
    values = {
        "batches": batches, "batch_size": c.eval_batch, "block_size": c.eval_block,
        "tokens": 2 * c.eval_rows * c.eval_block,
    }  # fmt: skip
    return Message("row.evaluation"), Message("value.evaluation_work", values)


def time_row(plan: Plan, timing: Timing) -> tuple[Cell, ...]:
    """Seconds of all batches, which the whole run has beside its compilation."""
    took = timing.evaluation_s
    assert took is not None
    values = {"batches": plan.evaluation_batches, "low": took.low_s, "expected": took.expected_s, "high": took.high_s}
    return Message("row.evaluation"), Message("value.evaluation_time", values)
