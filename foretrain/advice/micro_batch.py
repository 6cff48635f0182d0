"""batch_size = auto: the micro-batch for a device by the estimate, among divisors of a step's sequences: on a card the
largest that fits with its margin, on a CPU the smallest whose step is at most 3% longer than the fastest."""

from typing import Literal

from foretrain.base.records import Record
from foretrain.config.microbatches import divisors, sequences_of, with_micro_batch
from foretrain.config.options import RunConfig
from foretrain.hardware.catalogue import Dtype, Gpu
from foretrain.predict.memory import Verdict, predict
from foretrain.predict.plan import Note
from foretrain.predict.spec import StepName, StepSpec
from foretrain.predict.speed.time import step_time

NEAR = 1.03  # a step that is so much longer is as good

Reason = Literal["auto_largest", "auto_whole", "auto_quick", "auto_smallest", "auto_unknown"]


class Choice(Record):
    """The micro-batch that was chosen, and why.

    `auto_largest`: the next divisor does not fit; `auto_whole`: all fits at once; `auto_quick`: as fast as larger
    (CPU); `auto_smallest`: not even one sequence fits with its margin; `auto_unknown`: as given.
    """

    config: RunConfig
    reason: Reason
    sequences: int
    needed_bytes: int
    available_bytes: int | None
    next_size: int | None = None
    next_needed_bytes: int | None = None

    @property
    def note(self) -> Note:
        c = self.config
        values = {
            "batch_size": c.batch_size, "accumulation": c.gradient_accumulation_steps, "sequences": self.sequences,
            "needed": self.needed_bytes, "available": self.available_bytes or 0, "next_size": self.next_size or 0,
            "next_needed": self.next_needed_bytes or 0, "share": NEAR - 1, "tokens": c.tokens_per_step,
        }  # fmt: skip
        return Note(id=self.reason, values=values)


def choose(
    config: RunConfig, gpu: Gpu, dtype: Dtype, available_bytes: int | None, step: StepName = "foretrain"
) -> Choice:
    """The micro-batch for a config. `available_bytes`: what the process may take, context included."""
    sequences = sequences_of(config)

    def choice(batch: int, reason: Reason, following: int | None = None) -> Choice:
        return Choice(
            config=with_micro_batch(config, batch), reason=reason, sequences=sequences, needed_bytes=need(batch)[0],
            available_bytes=available_bytes, next_size=following,
            next_needed_bytes=need(following)[0] if following else None,
        )  # fmt: skip

    def need(batch: int) -> tuple[int, Verdict | None]:
        memory = predict(StepSpec.of(with_micro_batch(config, batch), gpu, step, dtype=dtype), available_bytes)
        return memory.needed_bytes, memory.verdict

    if available_bytes is None:
        return choice(config.batch_size, "auto_unknown")
    fitting: list[int] = []
    following: int | None = None
    for batch in divisors(sequences):  # the need grows with the micro-batch
        if need(batch)[1] != "fits":
            following = batch
            break
        fitting.append(batch)
    if not fitting:
        return choice(1, "auto_smallest")
    if gpu.kind == "cpu" and (quick := _quick(config, gpu, dtype, fitting)) is not None and quick < fitting[-1]:
        return choice(quick, "auto_quick")
    return choice(fitting[-1], "auto_largest" if following else "auto_whole", following)


def _quick(config: RunConfig, gpu: Gpu, dtype: Dtype, batches: list[int]) -> int | None:
    """The smallest of these whose step is nearly as fast as the fastest; None where speeds are not known."""
    times = {}
    for batch in batches:
        found = step_time(StepSpec.of(with_micro_batch(config, batch), gpu, dtype=dtype))
        if found is None:
            return None
        times[batch] = found.expected_s
    return min(batch for batch, time_s in times.items() if time_s <= NEAR * min(times.values()))
