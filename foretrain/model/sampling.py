from dataclasses import dataclass


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. `temperature` 0: the likeliest. `top_k`: of the k likeliest, 0: of all; then `top_p`: of
    the fewest likeliest with this total probability (nucleus sampling, arXiv:1904.09751), 1: of all.
    """

    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 1.0
