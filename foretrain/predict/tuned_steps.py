"""Steps that `foretrain tune` timed, as references for plans of steps like them.

The nearer a measured step is, the better it corrects a sum of kernels: a tuned step comes before the calibration's
where it is carried out in the same way and its sizes are within a factor of two.
"""

import math
from typing import Any

from pydantic import ValidationError

from foretrain.config.checks import launched
from foretrain.config.options import OPTIONS, RunConfig, named
from foretrain.hardware.calibration import Calibration, StepTime
from foretrain.predict.spec import StepSpec

DECIDING = named(lambda option: "speed" in option.affects)
SIZES = named(lambda option: option.reference == "near")
SAME = named(lambda option: "speed" in option.affects and option.reference == "same")
REACH = 1.0  # doublings, of each size


def step_of(config: RunConfig, dtype: str, time_s: float, threads: int, *, graphed: bool = False) -> StepTime:
    """A timed step to keep. `threads`: how many it ran on; 0 on a card. `graphed`: as one CUDA graph."""
    knobs: dict[str, Any] = {name: getattr(config, name) for name in DECIDING}
    knobs |= {"cpu_threads": threads, "cuda_graph": "on" if graphed else "off"}
    return StepTime(options=knobs, dtype=dtype, compiled=config.compile, time_s=time_s)


def tuned_like(found: Calibration, spec: StepSpec) -> StepTime | None:
    """The timed step that is nearest to this one, if one is near enough to correct it."""
    near = [
        (distance, step)
        for step in found.tuned
        if (step.dtype, step.compiled) == (spec.dtype, spec.compiled)
        and (distance := _distance(step, spec, found.threads)) is not None
    ]
    return min(near, key=lambda pair: pair[0])[1] if near else None


def _distance(step: StepTime, spec: StepSpec, threads: int) -> float | None:
    """Of the sizes, in doublings; None where the step is none of these."""
    config = spec.config
    for name in SAME:
        own, its = getattr(config, name), step.options.get(name, OPTIONS[name].default)
        if (name, own, its) == ("attention", "auto", "sdpa"):  # what a plan takes it for
            own = its
        if name == "cpu_threads" and its:
            own = own or threads
        if its != own:
            return None
    apart = []
    for name in SIZES:
        size = step.options.get(name)
        if not isinstance(size, int) or size < 1:
            return None
        apart.append(abs(math.log2(getattr(config, name) / size)))
    if max(apart) > REACH:
        return None
    try:
        timed = launched(step.options)
    except ValidationError:  # of another version, or damaged
        return None
    alike = [timed.checkpointed * config.n_layer == config.checkpointed * timed.n_layer]
    alike += [(timed.cuda_graph == "on") == spec.is_one_graph]
    alike += [bool(timed.loss_chunk_size) == bool(config.loss_chunk_size), bool(timed.dropout) == bool(config.dropout)]
    return sum(x * x for x in apart) if all(alike) else None
