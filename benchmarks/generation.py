"""Generation on this CPU: with the KV cache, without it, and transformers' generate with the same weights.

    python benchmarks/generation.py [--out FILE]

Greedy tokens after a prompt on one core, in rounds one after another; the best round of each counts. All three must write the same.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from common import arguments, report

from foretrain.config.families import family_of
from foretrain.config.resolve import resolve
from foretrain.config.shape import ModelShape
from foretrain.model import foreign
from foretrain.model.language_model import make_model
from foretrain.model.writer import generate

PRESETS = ("gpt2-30m",)
PROMPT, TOKENS, ROUNDS = 384, 96, 3


def theirs(config: Any, model: Any) -> Any:
    """transformers' model with the same weights."""
    import transformers

    values = family_of(config).write_config(config, None)
    made = getattr(transformers, values.pop("architectures")[0])
    other = made(made.config_class(**{key: value for key, value in values.items() if key != "model_type"}))
    other.load_state_dict(foreign.to_hugging_face(dict(model.state_dict()), ModelShape.of(config)), strict=False)
    other.tie_weights()
    return other.eval()


def uncached(model: Any, prompt: list[int]) -> list[int]:
    """The likeliest tokens, with all of the text read for each."""
    text = list(prompt)
    with torch.no_grad():
        for _ in range(TOKENS):
            text.append(int(model.next_logits(torch.tensor([text]))[0].argmax()))
    return text[len(prompt) :]


def measured(name: str) -> dict[str, Any]:
    """Tokens per second of processor time of each way: what else runs does not count."""
    config = resolve([name, "--device=cpu", "--dropout=0"]).config
    torch.manual_seed(1)
    model = make_model(config).eval()
    other = theirs(config, model)
    prompt = torch.randint(0, config.vocab_size, (PROMPT,), generator=torch.Generator().manual_seed(2)).tolist()
    words: dict[str, Any] = {"temperature": 0, "top_k": 0, "seed": 0, "vocab_size": config.vocab_size}
    idx = torch.tensor([prompt])
    asked: dict[str, Any] = {
        "attention_mask": torch.ones_like(idx), "max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False,
        "eos_token_id": None, "pad_token_id": 0,
    }  # fmt: skip
    ways: dict[str, Callable[[], list[int]]] = {
        "cached": lambda: list(generate(model, prompt, TOKENS, **words)),
        "uncached": lambda: uncached(model, prompt),
        "transformers": lambda: other.generate(idx, **asked)[0, PROMPT:].tolist(),
    }
    best: dict[str, float] = {}
    written: dict[str, list[int]] = {}
    for _ in range(ROUNDS):
        for way, run in ways.items():
            since = time.process_time()
            written[way] = run()
            rate = TOKENS / (time.process_time() - since)
            best[way] = max(rate, best.get(way, 0.0))
    same = {way: written[way] == written["cached"] for way in ways}
    return {"model": name, "same_tokens": same, **{f"{way}_tokens_per_s": round(rate, 1) for way, rate in best.items()}}


def main() -> None:
    """Measure, print and write."""
    out = arguments("generation", str(__doc__)).out
    torch.set_num_threads(1)  # several wait for one another where other programs run
    found = [measured(name) for name in PRESETS]
    setting = {"prompt": PROMPT, "tokens": TOKENS, "rounds": ROUNDS, "threads": torch.get_num_threads()}
    report(out, {**setting, "models": found})


if __name__ == "__main__":
    main()
