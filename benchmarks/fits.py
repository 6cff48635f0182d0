"""Which way to fine-tune fits which card: popular models on common cards, by the planner alone.

    PYTHONPATH=. python benchmarks/fits.py

Each cell is the first of `WAYS` that fits with its margin: one sequence of 2,048 tokens, activation checkpointing, an
otherwise empty card. docs/drawings.py draws the result.
"""

from typing import Any

from common import parser_of, report

import foretrain
from foretrain.hardware.catalogue import find

MODELS = (
    "qwen3-0.6b", "llama-3.2-1b", "qwen3-1.7b", "llama-3.2-3b", "gemma-3-4b", "qwen3-4b", "mistral-7b-v0.3", "llama-3.1-8b",
    "qwen3-8b", "gemma-3-12b", "qwen3-14b", "mistral-small-24b", "gemma-3-27b", "qwen3-32b", "llama-3.3-70b",
)  # fmt: skip
CARDS = (
    "RTX 4060", "RTX 3060 12GB", "RTX 4070", "RTX 4060 Ti 16GB", "RTX 4080", "RTX 3090", "RTX 4090", "RTX 5090", "A100 SXM4 40GB",
    "L40S", "H100 SXM5 80GB", "H200 SXM 141GB",
)  # fmt: skip
# From the most that is trained to the least memory.
WAYS: dict[str, dict[str, Any]] = {
    "full": {"method": "full"},
    "lora": {"method": "lora"},
    "qlora": {"method": "qlora"},
    "unsloth": {"method": "qlora", "loop": "unsloth", "offload_checkpoints": True},
}


def cell(model: str, card: str) -> dict[str, Any]:
    """Return the first way that fits; of a model that does not fit, what the last way needs."""
    found: dict[str, Any] = {"model": model, "card": card, "way": None}
    for way, options in WAYS.items():
        try:
            plan = foretrain.plan(model, card, **options)
        except foretrain.UserError as error:  # such as unsloth's functions, which a family does not have
            found.setdefault("refused", {})[way] = error.id
            continue
        found["needed_bytes"] = plan.needed_bytes
        if plan.verdict == "fits":
            return {**found, "way": way}
    return found


def main() -> None:
    options = parser_of(__doc__, "fits").parse_args()
    cards = {card: find(card).memory_gib for card in CARDS}
    rows = [cell(model, card) for model in MODELS for card in CARDS]
    report(options.out, {"what": "fine-tuning at 1 x 2,048 tokens", "cards": cards, "rows": rows})


if __name__ == "__main__":
    main()
