"""The other rules: what the memory no longer asks for, another model, another card, and what is often said in vain."""

from collections.abc import Sequence
from typing import Any

from foretrain.advice.rules.base import Change, Rule, State
from foretrain.config.families import family_of
from foretrain.config.microbatches import sequences_of
from foretrain.config.options import RunConfig
from foretrain.config.presets import GPT2_SHAPES
from foretrain.model.techniques import TECHNIQUES

ALIGNED = 64


def unneeded(state: State) -> Sequence[Change]:
    """Each technique that costs time switched off, and all of them."""
    c = state.effective
    undone = [found for technique in TECHNIQUES if (found := technique.undone(c))]
    every = [options for found in undone for options in found]
    if len(every) > 1:
        off = {option: value for found in undone for option, value in found[0].items()}
        every.append({option: value for option, value in off.items() if getattr(c, option) != value})
    return [Change(dict(options)) for options in every]


def layers(c: RunConfig, n_layer: int) -> dict[str, Any]:
    """A depth, with what techniques have to do with it."""
    follow = (technique.with_layers(c, n_layer) for technique in TECHNIQUES)
    return {"n_layer": n_layer} | {option: value for options in follow for option, value in options.items()}


def free_to_reshape(state: State) -> bool:
    return state.config.init_from == "scratch"


def shorter_context(state: State) -> Sequence[Change]:
    """Contexts at which as many whole sequences make the tokens of the step."""
    c, found = state.config, []
    unit = 64 if c.block_size >= 256 else 8
    for block in range((c.block_size - 1) // unit * unit, 0, -unit):
        accumulation, rest = divmod(c.gradient_accumulation_steps * c.block_size, block)
        if rest == 0:
            options = {"block_size": block, "gradient_accumulation_steps": accumulation}
            if c.eval_block_size > block:
                options["eval_block_size"] = block
            found.append(Change(options))
    return found


def fewer_layers(state: State) -> Sequence[Change]:
    c = state.config
    if not free_to_reshape(state):
        return []
    return [Change(layers(c, n_layer)) for n_layer in range(c.n_layer - 1, 0, -1)]


def narrower(state: State) -> Sequence[Change]:
    c = state.config
    if not free_to_reshape(state) or c.n_embd % c.n_head:
        return []
    width = c.n_embd // c.n_head
    found = [{"n_head": heads, "n_embd": heads * width} for heads in range(c.n_head - 1, 0, -1)]
    rules = family_of(c).rules
    return [
        Change(options) for options in found if not any(fails(c.model_copy(update=options)) for _, fails, _ in rules)
    ]


def smaller_pretrained(state: State) -> Sequence[Change]:
    """The GPT-2 models below the one whose published weights the run starts from, one after another."""
    c, sizes = state.config, list(GPT2_SHAPES)
    if c.init_from not in sizes:
        return []
    smaller = reversed(sizes[: sizes.index(c.init_from)])
    return [
        Change({"init_from": name, **GPT2_SHAPES[name], **layers(c, GPT2_SHAPES[name]["n_layer"])}) for name in smaller
    ]


def padded_vocabulary(state: State) -> Sequence[Change]:
    """The next multiple of 64, for tensor cores."""
    c = state.config
    if c.vocab_size % 8 == 0 or c.dataset == "python-stdlib" or not state.half:
        return []
    return [Change({"vocab_size": -(-c.vocab_size // ALIGNED) * ALIGNED})]


def fewer_eval_iters(state: State) -> Sequence[Change]:
    c = state.config
    options = {"eval_iters": max(1, c.eval_iters // 4)}
    if c.eval_sequences:
        options["eval_sequences"] = max(1, c.eval_sequences // 4)
    return [Change(options)] if c.eval_rows > c.batch_size else []


def shorter_evaluation(state: State) -> Sequence[Change]:
    c = state.config
    able = state.step == "foretrain" and c.eval_block > 64
    return [Change({"eval_block_size": c.eval_block // 2})] if able else []


def less_accumulation(state: State) -> Sequence[Change]:
    c = state.config
    if sequences_of(c) <= 2 * c.batch_size:
        return []
    return [Change({"gradient_accumulation_steps": c.gradient_accumulation_steps // 2})]


UNNEEDED = Rule("unneeded", "speed", "exact", "docs/techniques.md", unneeded, redraws=True, ours=True, quick=True)
MODEL = (
    Rule(
        "pretrained", "model", "other model", "karpathy/nanoGPT README.md, finetuning; train.py, init_from",
        smaller_pretrained, quick=True,
    ),
    Rule(
        "block_size", "model", "other model", "Vaswani et al. 2017, arXiv:1706.03762; docs/memory.md", shorter_context,
    ),
    Rule("n_layer", "model", "other model", "Kaplan et al. 2020, arXiv:2001.08361; docs/memory.md", fewer_layers),
    Rule("n_embd", "model", "other model", "Kaplan et al. 2020, arXiv:2001.08361; docs/memory.md", narrower),
    Rule(
        "vocab_size", "speed", "other model", "karpathy/nanoGPT model.py: 50257 padded to 50304", padded_vocabulary,
    ),
)  # fmt: skip
FOLKLORE = (
    Rule("eval_iters", "folklore", "exact", "karpathy/nanoGPT train.py, estimate_loss: no_grad", fewer_eval_iters),
    Rule("eval_block_size", "folklore", "exact", "docs/budget.md", shorter_evaluation, ours=True),
    Rule(
        "accumulation", "folklore", "other optimizer", "karpathy/nanoGPT train.py: gradients are summed in place",
        less_accumulation,
    ),
)  # fmt: skip
# Nothing of it is in the config; the advisor goes through the catalogue (advice/cards.py).
CARD = Rule("another_card", "card", "exact", "foretrain gpus: each figure with its source", lambda state: (), toll=1.5)
