"""How the next token is chosen, as somebody asks for it. No torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. `temperature` 0: the likeliest. `top_k`: of so many likeliest, 0: of all; then `top_p`: of
    the fewest likeliest that have this probability together (nucleus sampling, arXiv:1904.09751), 1: of all.
    """

    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 1.0
