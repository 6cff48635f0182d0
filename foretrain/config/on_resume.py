"""What each option does when a stopped run is resumed with another value of it: free, warns or refuses. No torch.

Each option says it itself (`on_resume`, config/options.py). The table of all is in docs/reliability.md, made from this.
"""

from typing import Literal

from foretrain.config.one_graph import is_one_graph
from foretrain.config.options import OPTIONS, RunConfig, named
from foretrain.hardware.catalogue import Dtype, Gpu

ROUNDING = frozenset(named(lambda option: option.on_resume == "rounding"))
EVALUATION = frozenset(named(lambda option: option.on_resume == "evaluation"))
SPLIT = ("batch_size", "gradient_accumulation_steps")  # only their product decides what is learned
# Sums round otherwise where the value of one of these is another; of the others what they come to counts.
BY_VALUE = ROUNDING.difference(SPLIT, {"compile", "cpu_threads", "cuda_graph"})

Effect = Literal["free", "warns", "refuses"]


def effect_of(key: str) -> Effect:
    """What another value of an option does to a resume."""
    kind = OPTIONS[key].on_resume
    return "warns" if kind in ("rounding", "evaluation") else kind


def decides(key: str) -> bool:
    """Whether an option by itself decides what is learned."""
    return effect_of(key) == "refuses"


def way_of_steps(config: RunConfig, gpu: Gpu, dtype: Dtype, world: int) -> str:
    """What cuda_graph comes to for so many ranks: on or off."""
    return "on" if world == 1 and is_one_graph(config, gpu, dtype) else "off"
