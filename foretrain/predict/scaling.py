"""Scaling laws, published: L(N, D) = E + A / N^α + B / D^β, N all parameters, D tokens seen, L nats per token.

hoffmann: Hoffmann et al. 2022 (Chinchilla), arXiv:2203.15556, approach 3, with the digits of its TeX source (α 0.3392,
β 0.2849), which matter. besiroglu: Besiroglu et al. 2024, arXiv:2404.10102, the same runs fitted again, as the first
fit does not match them; the one that ranks here. muennighoff: Muennighoff et al. 2023, arXiv:2305.16264, appendix A: C4
with GPT-2's tokenizer, α = β. By its equations 5, 6 and 17, D tokens from U unique ones count as
U+U·R*·(1−exp(−(D/U−1)/R*)), and parameters beyond those that U deserves in the same way; at 40 epochs repeating is
worthless (figure 1). U is the whole dataset, so that the law is continuous where the first epoch ends.

The fits are of models of 44 M parameters and more (7 M for muennighoff). GPT-2 124M on 10 B tokens would get 3.01 to
3.04; llm.c reached 3.28 (karpathy/llm.c#481). Losses are comparable within one dataset and tokenizer only."""

import math
from dataclasses import dataclass

R_D, R_N = 15.387756, 5.309743  # Muennighoff et al. 2023, appendix A
MOST_EPOCHS = 40
SMALLEST_FITTED = 44e6  # parameters of the smallest model behind hoffmann and besiroglu
SMALLEST_VOCABULARY = 10_000  # tokens of bytes or characters hold less text, and their losses are of another kind


@dataclass(frozen=True)
class Fit:
    name: str
    source: str
    E: float
    A: float
    B: float
    alpha: float
    beta: float

    def loss(self, n_params: float, tokens: float, unique_tokens: float | None = None) -> float:
        """Nats a token. `unique_tokens`: tokens of the dataset; None: they never repeat."""
        if unique_tokens is not None:
            n_params = effective(n_params, self.optimal_params(unique_tokens), R_N)
            tokens = effective(tokens, unique_tokens, R_D)
        return self.E + self.A / n_params**self.alpha + self.B / tokens**self.beta

    def optimal_params(self, tokens: float) -> float:
        """The parameters for which these tokens are compute-optimal: where N·∂L/∂N = D·∂L/∂D."""
        return (self.alpha * self.A / (self.beta * self.B) * tokens**self.beta) ** (1 / self.alpha)


HOFFMANN = Fit("hoffmann", "arXiv:2203.15556", 1.6934, 406.4, 410.7, 0.3392, 0.2849)
BESIROGLU = Fit("besiroglu", "arXiv:2404.10102", 1.8172, 482.01, 2085.43, 0.3478, 0.3658)
MUENNIGHOFF = Fit(  # its repository gives the logarithms of E, A and B
    "muennighoff", "arXiv:2305.16264", math.exp(0.6254804), math.exp(6.255414), math.exp(7.3049974),
    0.3526596, 0.3526596,
)  # fmt: skip
FITS = (BESIROGLU, HOFFMANN, MUENNIGHOFF)


def effective(seen: float, unique: float, half_life: float) -> float:
    """What `seen` are worth when only `unique` are fresh: decaying returns of repetition."""
    if seen <= unique:
        return seen
    repeats = seen / unique - 1
    return unique + unique * half_life * (1 - math.exp(-repeats / half_life))


def effective_tokens(tokens: float, unique_tokens: float | None) -> float:
    return tokens if unique_tokens is None else effective(tokens, unique_tokens, R_D)


def good_tokens_per_step(flops: float) -> float:
    """A batch of near-lowest loss, in tokens: 0.2920·C^0.3271, fitted from 1e17 to 2e19 FLOPs (arXiv:2401.02954)."""
    return 0.2920 * flops**0.3271


@dataclass(frozen=True)
class Practice:
    """How many tokens a parameter others gave their models, for context."""

    model: str
    n_params: float
    tokens: float
    source: str


# Far more tokens than is optimal for training is common practice, because small models are cheap to use.
PRACTICE = (
    Practice("Chinchilla 70B", 70e9, 1.4e12, "arXiv:2203.15556"),
    Practice("GPT-2 124M of llm.c", 124e6, 10e9, "karpathy/llm.c#481"),
    Practice("Pythia 160M", 160e6, 300e9, "arXiv:2304.01373"),
    Practice("TinyLlama 1.1B", 1.1e9, 3e12, "arXiv:2401.02385"),
    Practice("SmolLM2 1.7B", 1.7e9, 11e12, "arXiv:2502.02737"),
)
