"""The largest value of an option with which a fine-tuning run still fits, by estimates. No torch."""

from foretrain.base.errors import UserError
from foretrain.base.records import Record
from foretrain.predict.finetune.plan import FineTunePlan, replanned
from foretrain.predict.search import largest_count

# (granule, most) of each option that can be searched.
SEARCHED: dict[str, tuple[int, int]] = {"batch_size": (1, 4096), "seq_len": (64, 1_048_576), "lora_r": (1, 4096)}


class FineTuneLargest(Record):
    """What fits, and what the next larger value would need. `value`: 0 where not even the smallest fits."""

    option: str
    value: int
    plan: FineTunePlan | None
    next_value: int
    next_needed_bytes: int | None


def largest(plan: FineTunePlan, option: str) -> FineTuneLargest:
    """The largest value that fits. Raises UserError for an option that is not searched, or does nothing here."""
    if option not in SEARCHED:
        raise UserError("usage.finetune_largest", option=option, options=list(SEARCHED))
    if option == "lora_r" and not plan.tune.adapters:
        raise UserError("usage.finetune_no_adapter", option=option, method=plan.tune.method)
    granule, most = SEARCHED[option]
    if option == "seq_len" and plan.facts.positions == "learned":
        most = plan.facts.max_positions

    def fits(count: int) -> bool:
        other = replanned(plan, **{option: count * granule})
        room = plan.available_bytes
        return other.verdict == "fits" and (room is None or other.needed_bytes <= room)

    found = largest_count(fits, most // granule)
    beyond = (found + 1) * granule
    needed = replanned(plan, **{option: beyond}).needed_bytes if beyond <= most else None
    return FineTuneLargest(
        option=option, value=found * granule, plan=replanned(plan, **{option: found * granule}) if found else None,
        next_value=beyond, next_needed_bytes=needed,
    )  # fmt: skip
