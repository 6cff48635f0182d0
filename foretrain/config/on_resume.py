"""What each option does when a stopped run is resumed with another value of it: free, warns or refuses. No torch.

Each option says it itself (`on_resume`, config/options.py). The table of all is in docs/reliability.md, made from this.
"""

from typing import Literal

from foretrain.config.options import OPTIONS, named

ROUNDING = frozenset(named(lambda option: option.on_resume == "rounding"))
EVALUATION = frozenset(named(lambda option: option.on_resume == "evaluation"))
SPLIT = ("batch_size", "gradient_accumulation_steps")  # only their product decides what is learned

Effect = Literal["free", "warns", "refuses"]


def effect_of(key: str) -> Effect:
    """What another value of an option does to a resume."""
    kind = OPTIONS[key].on_resume
    return "warns" if kind in ("rounding", "evaluation") else kind


def decides(key: str) -> bool:
    """Whether an option by itself decides what is learned."""
    return effect_of(key) == "refuses"
