"""Rules for a lower loss in the same time: the schedule, the recipe, the tokens of a step, the shape of the model."""

from collections.abc import Sequence
from typing import Any

from foretrain.advice.rules.base import Change, Rule, State
from foretrain.config.families import FAMILIES
from foretrain.config.shape import ModelShape
from foretrain.predict.scaling import good_tokens_per_step

FAR = 4  # times more or fewer tokens a step than the published fit, before a rule mentions it


def decay_to_end(state: State) -> Sequence[Change]:
    c = state.config
    fixed = not c.decay_lr or c.eval_only or c.lr_decay_iters == c.max_iters or c.warmup_iters >= c.max_iters
    return [] if fixed else [Change({"lr_decay_iters": c.max_iters})]


def modern_recipe(state: State) -> Sequence[Change]:
    """recipe = modern with what it sets. Not where the user starts from weights of another architecture."""
    c = state.config
    if c.recipe != "nanogpt" or c.init_from != "scratch":
        return []
    modern = FAMILIES["modern"]
    options: dict[str, Any] = {"recipe": modern.name, **modern.sets, **modern.rates, "recompute_norm_gelu": False}
    if c.decay_lr:
        options["lr_decay_iters"] = c.max_iters
    return [Change(options, step="foretrain")]


def step_tokens(state: State) -> Sequence[Change]:
    """Tokens a step as the published fit has them, with as many tokens in the whole run."""
    c = state.config
    flops = 6 * ModelShape.of(c).n_params * c.max_iters * c.tokens_per_step
    good = good_tokens_per_step(flops)
    if c.eval_only or 1 / FAR <= c.tokens_per_step / good <= FAR:
        return []
    accumulation = max(1, round(good / (c.batch_size * c.block_size)))
    steps = c.max_iters * c.gradient_accumulation_steps // accumulation
    if accumulation == c.gradient_accumulation_steps or steps <= c.warmup_iters:
        return []
    options = {"gradient_accumulation_steps": accumulation, "max_iters": steps, "total_batch_size": 0}
    if c.decay_lr:
        options["lr_decay_iters"] = steps
    return [Change(options)]


RULES = (
    Rule(
        "decay_to_end", "quality", "other optimizer", "Hoffmann et al. 2022, arXiv:2203.15556, appendix B",
        decay_to_end,
    ),
    Rule(
        "modern_recipe", "quality", "other model", "docs/recipes.md; benchmarks/results/time_to_loss.json",
        modern_recipe,
    ),
    # These two are made in advice/quality.py: one follows from advice for speed, the other is a search of its own.
    Rule("more_steps", "quality", "other optimizer", "Besiroglu et al. 2024, arXiv:2404.10102", lambda state: ()),
    Rule(
        "best_shape", "quality", "other model", "Besiroglu et al. 2024, arXiv:2404.10102; foretrain/advice/best.py",
        lambda state: (),
    ),
    Rule("step_tokens", "quality", "other optimizer", "DeepSeek 2024, arXiv:2401.02954, section 3.1", step_tokens),
)  # fmt: skip
