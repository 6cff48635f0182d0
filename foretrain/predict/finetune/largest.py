"""The largest value of an option with which a fine-tuning run still fits, by estimates. No torch."""

from foretrain.base.errors import UserError
from foretrain.base.records import Record
from foretrain.predict.finetune.plan import FineTunePlan, check_exact, replanned
from foretrain.predict.within import largest_count

# (granule, most) of each option that can be searched.
SEARCHED: dict[str, tuple[int, int]] = {"batch_size": (1, 4096), "seq_len": (64, 1_048_576), "lora_r": (1, 4096)}


class FineTuneLargest(Record):
    """What fits, and what the next larger value would need. `value`: 0 where not even the smallest fits.

    `positions`: those of the model, where no longer sequence was tried; `beyond_fits`: whether the next value fits,
    which the model was not trained for."""

    option: str
    value: int
    plan: FineTunePlan | None
    next_value: int
    next_needed_bytes: int | None
    positions: int | None = None
    beyond_fits: bool = False


def largest(plan: FineTunePlan, option: str) -> FineTuneLargest:
    """The largest value that fits. Raises UserError for an option that is not searched, or does nothing here."""
    if option not in SEARCHED:
        raise UserError("usage.finetune_largest", option=option, options=list(SEARCHED))
    check_exact(plan, f"--largest {option}")
    if option == "lora_r" and not plan.tune.adapters:
        raise UserError("usage.finetune_no_adapter", option=option, method=plan.tune.method)
    granule, most = SEARCHED[option]
    positions = plan.facts.max_positions if option == "seq_len" else most
    if positions < most:
        most, granule = positions, min(granule, positions)

    def fits(value: int) -> bool:
        other = replanned(plan, **{option: value})
        room = plan.available_bytes
        return other.verdict == "fits" and (room is None or other.needed_bytes <= room)

    found = granule * largest_count(lambda count: fits(count * granule), most // granule)
    beyond = found + granule
    ended = beyond > most and option == "seq_len"
    if ended and found < positions and fits(positions):  # which no granule ends at
        found, beyond = positions, positions + granule
    return FineTuneLargest(
        option=option, value=found, plan=replanned(plan, **{option: found}) if found else None, next_value=beyond,
        next_needed_bytes=replanned(plan, **{option: beyond}).needed_bytes if beyond <= most else None,
        positions=positions if ended else None,
        beyond_fits=ended and plan.facts.positions != "learned" and fits(beyond),
    )  # fmt: skip
