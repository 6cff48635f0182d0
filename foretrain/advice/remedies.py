"""What would have saved a run that ran out of memory: the advisor's changes that leave the learning alone."""

from typing import Any

from foretrain.advice.advisor import advise
from foretrain.advice.record import Advice
from foretrain.base.errors import UserError
from foretrain.base.records import Record
from foretrain.config.options import RunConfig
from foretrain.hardware.catalogue import Gpu
from foretrain.predict.plan import plan
from foretrain.predict.spec import StepName

FREES_NOTHING = {"free_others", "another_card"}  # of the run's own memory


class Remedy(Record):
    """A change that fits by the plan. `changes`: option -> value; `saves_bytes`: of the process at its worst moment.

    `id`: the rules of the advisor. `slower`: the predicted step time over the current one, less 1; None where there is
    no prediction of time. `step`: whose program takes the changes; one of nanoGPT's runs may go over to foretrain's.
    """

    id: str
    step: StepName
    changes: dict[str, Any]
    saves_bytes: int
    needed_bytes: int
    slower: float | None


def remedies(
    config: RunConfig, gpu: Gpu, *, used_by_others_bytes: int = 0, over_bytes: int = 0, step: StepName = "foretrain",
    most: int = 3, expandable_segments: bool = True,
) -> tuple[Remedy, ...]:  # fmt: skip
    """Return exact changes that fit what the card had: those of the run's own program first.

    `over_bytes`: how far the request that failed was beyond what was there; where the forecast was lower, as much is
    kept free. Tokens of a step, and the sequences of an evaluation, stay as they are.
    """
    try:
        made = plan(config, gpu, used_by_others_bytes=used_by_others_bytes)
        if made.available_bytes is None:
            return ()
        short_bytes = short_of(made.available_bytes, made.memory_of(step).needed_bytes, over_bytes)
        held = used_by_others_bytes + short_bytes
        found = advise(plan(config, gpu, used_by_others_bytes=held), step, "fit")
    except UserError:  # a card that cannot do what the config asks for
        return ()
    kept = [a for a in found.advised if a.exactness == "exact" and not FREES_NOTHING & set(a.rules)]
    room = made.available_bytes
    changes = [_remedy(a) for a in kept if a.effect.saved_bytes >= max(1, over_bytes) and a.effect.needed_bytes <= room]
    usable = [r for r in changes if expandable_segments or "allocator_settings" not in r.changes]
    return tuple(sorted(usable, key=lambda remedy: remedy.step != step)[:most])


def short_of(available_bytes: int, needed_bytes: int, over_bytes: int) -> int:
    """Return the bytes by which a run that failed needed more than its forecast, at most all that there was."""
    return min(max(0, available_bytes + max(1, over_bytes) - needed_bytes), available_bytes)


def _remedy(advice: Advice) -> Remedy:
    effect = advice.effect
    return Remedy(
        id="+".join(advice.rules), step=advice.trainer,
        changes={setting.option: setting.after for setting in advice.settings},
        saves_bytes=effect.saved_bytes, needed_bytes=effect.needed_bytes, slower=effect.slower,
    )  # fmt: skip
