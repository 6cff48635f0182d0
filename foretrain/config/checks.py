"""What can be wrong with a config's values: each alone, and several together. Every problem is found, not the first."""

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from pydantic import ValidationError

from foretrain.base.errors import UserError
from foretrain.base.messages import knob_help, listed, say
from foretrain.base.quantities import parse_bytes
from foretrain.config.families import FAMILIES
from foretrain.config.families.family import EXCLUDED, Rule
from foretrain.config.option import Option
from foretrain.config.options import OPTIONS, RunConfig
from foretrain.config.presets import GPT2_SHAPES


@dataclass(frozen=True)
class Setting:
    """A raw value for a knob and where it came from: 'config/a.py:12', '--batch_size=8', 'preset baby'."""

    key: str
    value: Any
    source: str


def _field_problems(values: dict[str, Any], source_of: Callable[[str], str]) -> list[UserError]:
    try:
        RunConfig.model_validate(values)
    except ValidationError as error:
        problems = []
        for detail in error.errors():
            key = str(detail["loc"][0])
            problems.append(bad_value(OPTIONS[key], values[key], shown(values[key]), source_of(key)))
        return problems
    return []


def bad_value(knob: Option, value: Any, text: str, source: str) -> UserError:
    """What a knob must be instead of this value, and what was perhaps meant."""
    near, expects = _meant(knob, value), Expected(knob)
    if near is None:
        return UserError("config.bad_value", key=knob.name, value=text, expects=expects, source=source)
    return UserError("config.bad_value_near", key=knob.name, value=text, expects=expects, source=source, near=near)


_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
_RANGE = re.compile(r"≥ (\S+), ≤ (\S+)")


def _meant(knob: Option, value: Any) -> str | None:
    """A value that looks like this one and would do: bfloat16 for bf16, 0.35 for 0,35."""
    if not isinstance(value, str):
        return None
    if knob.type == "choice":
        choices = knob.limits.removeprefix("one of ").split(", ")
        near = _DTYPES.get(value.lower(), "") if knob.name == "dtype" else ""
        return next(iter([near] if near in choices else difflib.get_close_matches(value.lower(), choices, n=1)), None)
    if knob.type == "int" and re.fullmatch(r"\d{1,3}([,_]\d{3})+", value):
        return re.sub("[,_]", "", value)
    return value.replace(",", ".") if knob.type == "float" and re.fullmatch(r"-?\d+,\d+", value) else None


class Expected:
    """What a knob takes, said in the language of who reads it."""

    def __init__(self, knob: Option) -> None:
        self.knob = knob

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)

    def __str__(self) -> str:
        knob, limits = self.knob, self.knob.limits
        if knob.type == "choice":
            return say("expects.one_of", choices=listed(limits.removeprefix("one of ").split(", ")))
        if knob.type not in ("int", "float"):  # a text is told by the knob's help, which says what it takes
            return (
                knob_help(knob.name, limits)
                if limits
                else say("expects.bool" if knob.type == "bool" else "expects.str")
            )
        whole, limits = knob.type == "int", re.sub(r"\.0(?!\d)", "", limits)
        if found := _RANGE.fullmatch(limits):
            return say("expects.whole_range" if whole else "expects.number_range", low=found[1], high=found[2])
        return say("expects.whole" if whole else "expects.number", limits=limits).rstrip()


def shown(value: Any) -> str:
    """The value as the user wrote it, cut where it is too long to read. A huge int would be slow to print, and a table
    may be too deep for it."""
    if isinstance(value, dict | list):
        return "a table" if isinstance(value, dict) else "a list"
    if isinstance(value, int) and value.bit_length() > 200:
        return f"a whole number of about {int(value.bit_length() * 0.30103)} digits"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


# Rules over several knobs that are neither a technique's (model/techniques) nor a family's (config/families).
_RULES: tuple[Rule, ...] = (
    (("n_embd", "n_head"), lambda c: c.n_embd % c.n_head != 0, "heads_do_not_divide"),
    (
        ("init_optimizer", "init_from"),
        lambda c: c.init_optimizer and c.init_from in ("scratch", *GPT2_SHAPES),
        "init_optimizer_without",
    ),
    (("eval_block_size", "block_size"), lambda c: c.eval_block > c.block_size, "eval_block_beyond"),
    (("compile_mode", "compile"), lambda c: c.compile_mode != "default" and not c.compile, "mode_without_compile"),
    (
        ("cuda_graph", "optimizer", "optimizer_offload", "compile_mode"),
        lambda c: c.cuda_graph == "on" and not (c.is_recordable or c.checkpoint_offload or c.optimizer_in_backward),
        "not_recordable",
    ),
)


def rules_for(config: RunConfig) -> tuple[Rule, ...]:
    """Rules over several knobs: those of every config, of all techniques, and of the config's family.

    Techniques are in a room that this one may not import. It names their package, as a family names its model.
    """
    return (*_RULES, *import_module("foretrain.model.techniques").RULES, *FAMILIES[config.recipe].rules)


# Schedules that are seldom meant, and that nanoGPT runs all the same: notes.
_ODD: tuple[Rule, ...] = (
    (("warmup_iters", "max_iters"), lambda c: c.warmup_iters > c.max_iters, "warmup_beyond_end"),
    (("lr_decay_iters", "warmup_iters"), lambda c: c.lr_decay_iters < c.warmup_iters, "decay_before_warmup"),
    (  # nanoGPT's schedule divides by their difference, at that step
        ("lr_decay_iters", "warmup_iters"),
        lambda c: c.lr_decay_iters == c.warmup_iters <= c.max_iters,
        "decay_at_warmup",
    ),
    (("min_lr", "learning_rate"), lambda c: c.min_lr > c.learning_rate, "min_lr_above"),
)


def odd_schedule(config: RunConfig, sources: dict[str, str]) -> list[UserError]:
    """A note for each thing in the learning rate's schedule that is seldom meant."""
    if not config.decay_lr or config.eval_only:
        return []
    notes = []
    for keys, holds, id in _ODD:
        if holds(config):
            source = "; ".join(f"{key}: {sources.get(key, 'default')}" for key in keys)
            notes.append(UserError(f"config.{id}", **{key: getattr(config, key) for key in keys}, source=source))
    return notes


def _rule_problems(values: dict[str, Any], bad: set[str], source_of: Callable[[str], str]) -> list[UserError]:
    config = RunConfig.model_validate({k: v for k, v in values.items() if k not in bad})
    problems = []
    for keys, fails, id in rules_for(config):
        if bad.isdisjoint(keys) and fails(config):
            given = {key: getattr(config, key) for key in keys}
            sources = "; ".join(f"{key}: {source_of(key)}" for key in keys if key != "decay_lr")
            if id == EXCLUDED:
                given = {"settings": " and ".join(f"{key} = {value}" for key, value in given.items())}
            problems.append(UserError(f"config.{id}", **given, source=sources))
    if "memory_limit" not in bad and config.memory_limit:
        try:
            parse_bytes(config.memory_limit)
        except ValueError:
            source = source_of("memory_limit")
            problems.append(UserError("config.bad_size", key="memory_limit", value=config.memory_limit, source=source))
    return problems


def check(values: dict[str, Any], sources: dict[str, str]) -> tuple[RunConfig | None, list[UserError]]:
    """The config of these values, or every problem with them; never raises for what a user can write."""

    def source_of(key: str) -> str:
        return sources.get(key, "default")

    problems = _field_problems(values, source_of)
    bad = {problem.values["key"] for problem in problems}
    problems += _rule_problems(values, bad, source_of)
    return (None, problems) if problems else (RunConfig.model_validate(values), [])
