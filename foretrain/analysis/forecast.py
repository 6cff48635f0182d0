"""The forecast of a run: the one that was written before it, else the same forecast made now."""

from pathlib import Path

from pydantic import ValidationError

from foretrain.base.errors import UserError
from foretrain.base.safe_read import read_text
from foretrain.predict.plan import Plan, plan
from foretrain.predict.ranks.plan import of_run
from foretrain.training.store import RunRecord


def plan_of(run: Path, record: RunRecord) -> Plan:
    """The plan beside a run's record, or one made now: where there is none, or it is of another number of ranks. Raises
    UserError 'data.bad_plan' for a damaged one."""
    path = run / "plan.json"
    if path.is_file():
        try:
            made = Plan.from_json(read_text(path))
        except (OSError, ValidationError, ValueError, RecursionError) as error:
            raise UserError("data.bad_plan", path=str(path), reason=str(error).splitlines()[0]) from None
        if made.world == record.world:
            return made
    return plan_now(record)


def plan_now(record: RunRecord) -> Plan:
    """The plan of a run as it trained in the end, made now."""
    config = record.config.model_copy(update={"compile": record.compiled, "dtype": record.dtype})
    made = plan(config, record.gpu, name=record.name, dataset_tokens=record.dataset.train_tokens)
    return of_run(made, record.world, record.per_node) if record.world > 1 else made


def highest(plan: Plan) -> tuple[int, int, int]:
    """(low, expected, high) of what a run measures at its highest: on a GPU the allocator's own, so without the
    context, which the forecast has in it; on a CPU the process."""
    memory = plan.memory_of("foretrain")
    low, expected, high = memory.neediest.needed_span
    if not plan.gpu.reserves:
        return low, expected, high
    held = memory.context
    return low - held.low_bytes, expected - held.expected_bytes, high - held.high_bytes
