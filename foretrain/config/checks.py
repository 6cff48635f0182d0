"""What can be wrong with a config's values, each alone and several together. Every problem is found, not the first."""

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

from pydantic import ValidationError

from foretrain.base.errors import UserError
from foretrain.base.messages import listed, option_help, say
from foretrain.base.quantities import parse_bytes
from foretrain.config.families import FAMILIES
from foretrain.config.families.family import EXCLUDED, Rule
from foretrain.config.option import Option
from foretrain.config.options import OPTIONS, RunConfig, named
from foretrain.config.presets import GPT2_SHAPES
from foretrain.hardware.catalogue import Dtype, Gpu, MatmulMode

SHORT_BLOCK_S = 0.5e-3  # at the card's peak, which kernels reach half of
# A recorded kernel takes memory outside of PyTorch's (hardware/devices.py): at most that of 12 blocks in a step of 40
# micro-batches, some 40 MiB.
MOST_BLOCKS = 480
UNKNOWN_PEAK = 30e12  # FLOP per second of a card whose data sheet nobody has read


def is_one_graph(config: RunConfig, gpu: Gpu, dtype: Dtype) -> bool:
    """Return whether a step is one graph, and an evaluation another, on one card of this kind in this dtype."""
    if gpu.kind != "cuda" or config.eval_only or config.cuda_graph == "off":
        return False
    return config.cuda_graph == "on" or (config.is_recordable and _is_short(config, gpu, dtype))


def _is_short(config: RunConfig, gpu: Gpu, dtype: Dtype) -> bool:
    """Judge by the matmuls of a block with its 12 C² weights: 6 FLOP each for a token, forward and backward."""
    flop = 6 * 12 * config.n_embd**2 * config.batch_size * config.block_size
    blocks = config.n_layer * config.gradient_accumulation_steps
    return blocks <= MOST_BLOCKS and flop <= SHORT_BLOCK_S * (gpu.peak_flop_per_s(dtype) or UNKNOWN_PEAK)


def launched(options: Mapping[str, Any]) -> RunConfig:
    return RunConfig.model_validate({"cuda_graph": "off", **options})


# Which matmul arithmetic a device can do: the conditions of `matmul`. FP8 tensor cores came with Ada
# (compute capability 8.9); INT8 ones that torch._int_mm uses are asked for from Ampere on; sums in fp16 came with
# Volta. A CPU has none but computes the same numbers, so that the modes can be tried there.

REFUSED = named(lambda option: bool(option.refused))


def idle(config: RunConfig, gpu: Gpu, dtype: Dtype) -> Iterator[tuple[str, str]]:
    for name, option in OPTIONS.items():
        if (why := option.idle_on(gpu.kind, dtype)) and getattr(config, name) != option.default:
            yield name, why


def check_refused(config: RunConfig, gpu: Gpu) -> None:
    for name in REFUSED:
        if (why := OPTIONS[name].refused_on(gpu.kind)) and getattr(config, name) != OPTIONS[name].default:
            raise UserError("config.refused_here", option=name, gpu=gpu.name, reason=why)


MULTIPLE = 16  # cuBLAS's FP8 matmuls want every side to be one of 16; INT8 would be content with 8
LEAST_CAPABILITY: dict[MatmulMode, tuple[int, int]] = {"fp8": (8, 9), "int8": (8, 0), "fp16_accumulation": (7, 0)}
LACKING: dict[MatmulMode, str] = {
    "fp8": "gpu.no_fp8", "int8": "gpu.no_int8", "fp16_accumulation": "gpu.no_fp16_accumulation",
}  # fmt: skip
EIGHT_BITS = ("fp8", "int8")


def check_precision(config: RunConfig, gpu: Gpu, dtype: Dtype) -> None:
    """Raise UserError where a device, or the dtype that it leads to, does not allow what the config asks for."""
    check_refused(config, gpu)
    if config.optimizer_in_backward and dtype == "float16":  # gradients are unscaled when all are there
        raise UserError("config.in_backward_dtype", gpu=gpu.name)
    check_matmul(config, gpu, dtype)


def check_matmul(config: RunConfig, gpu: Gpu, dtype: Dtype) -> None:
    mode = config.matmul
    if mode == "dtype":
        return
    if gpu.kind == "mps" or (gpu.kind == "cpu" and mode == "fp16_accumulation"):
        raise UserError("gpu.no_matmul_mode", mode=mode, gpu=gpu.name)
    if gpu.kind == "cuda" and gpu.capability < LEAST_CAPABILITY[mode]:
        raise UserError(LACKING[mode], gpu=gpu.name, capability=gpu.compute_capability or "unknown")
    if mode == "fp16_accumulation" and dtype != "float16":
        raise UserError("config.fp16_accumulation_dtype", dtype=dtype)
    if mode in EIGHT_BITS:
        if config.n_embd % MULTIPLE:
            raise UserError("config.matmul_width", mode=mode, n_embd=config.n_embd, multiple=MULTIPLE)
        for tokens, what in (
            (config.batch_size * config.block_size, "batch_size x block_size"),
            (config.eval_batch * config.eval_block, "eval_batch_size x eval_block_size"),
        ):
            if tokens % MULTIPLE or tokens == MULTIPLE:  # torch._int_mm wants more than 16 rows
                raise UserError("config.matmul_rows", mode=mode, what=what, tokens=tokens, multiple=MULTIPLE)


# What each option does when a stopped run is resumed with another value of it (`on_resume`): free, warns or refuses.

ROUNDING = frozenset(named(lambda option: option.on_resume == "rounding"))
EVALUATION = frozenset(named(lambda option: option.on_resume == "evaluation"))
SPLIT = ("batch_size", "gradient_accumulation_steps")  # only their product decides what is learned
# Sums round otherwise where the value of one of these is another; of the others what they come to counts.
BY_VALUE = ROUNDING.difference(SPLIT, {"compile", "cpu_threads", "cuda_graph"})

Effect = Literal["free", "warns", "refuses"]


def effect_of(key: str) -> Effect:
    kind = OPTIONS[key].on_resume
    return "warns" if kind in ("rounding", "evaluation") else kind


def decides(key: str) -> bool:
    return effect_of(key) == "refuses"


def resolved_cuda_graph(config: RunConfig, gpu: Gpu, dtype: Dtype, world: int) -> str:
    return "on" if world == 1 and is_one_graph(config, gpu, dtype) else "off"


@dataclass(frozen=True)
class Setting:
    """A raw value of an option and where it came from: 'config/a.py:12', '--batch_size=8', 'preset baby'."""

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
            problems.append(bad_value(OPTIONS[key], values[key], value_as_written(values[key]), source_of(key)))
        return problems
    return []


def bad_value(option: Option, value: Any, text: str, source: str, key: str = "") -> UserError:
    """Return what is wrong with a value; `key`: how the option is called there."""
    near, given = _meant(option, value), {"key": key or option.name, "value": text, "source": source}
    if near is None:
        return UserError("config.bad_value", **given, expects=Expected(option))
    return UserError("config.bad_value_near", **given, expects=Expected(option), near=near)


_RANGE = re.compile(r"≥ (\S+), ≤ (\S+)")


def _meant(option: Option, value: Any) -> str | None:
    """Return a similar value that would do: bfloat16 for bf16, 0.35 for 0,35."""
    if not isinstance(value, str):
        return None
    if option.type == "choice":
        choices = option.limits.removeprefix("one of ").split(", ")
        near = option.choice_names.get(value.lower(), "")
        return next(iter([near] if near in choices else difflib.get_close_matches(value.lower(), choices, n=1)), None)
    if option.type == "int" and re.fullmatch(r"\d{1,3}([,_]\d{3})+", value):
        return re.sub("[,_]", "", value)
    return value.replace(",", ".") if option.type == "float" and re.fullmatch(r"-?\d+,\d+", value) else None


class Expected:
    def __init__(self, option: Option) -> None:
        self.option = option

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)

    def __str__(self) -> str:
        option, limits = self.option, self.option.limits
        if option.type == "choice":
            return say("expects.one_of", choices=listed([each for each in option.choices if each]))
        if option.type not in ("int", "float"):  # the option's help says what a text may be
            return (
                option_help(option.name, limits, option.texts)
                if limits
                else say("expects.bool" if option.type == "bool" else "expects.str")
            )
        whole, limits = option.type == "int", re.sub(r"\.0(?!\d)", "", limits)
        if found := _RANGE.fullmatch(limits):
            return say("expects.whole_range" if whole else "expects.number_range", low=found[1], high=found[2])
        return say("expects.whole" if whole else "expects.number", limits=limits).rstrip()


def value_as_written(value: Any) -> str:
    """Return the value as the user wrote it, cut where it is too long to read, a huge int or a deep table."""
    if isinstance(value, dict | list):
        return "a table" if isinstance(value, dict) else "a list"
    if isinstance(value, int) and value.bit_length() > 200:
        return f"a whole number of about {int(value.bit_length() * 0.30103)} digits"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


# Rules over several options that are neither a technique's (model/techniques) nor a family's (config/families).
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
    """Return the config of these values, or every problem with them; never raise for what a user can write."""

    def source_of(key: str) -> str:
        return sources.get(key, "default")

    problems = _field_problems(values, source_of)
    bad = {problem.values["key"] for problem in problems}
    problems += _rule_problems(values, bad, source_of)
    return (None, problems) if problems else (RunConfig.model_validate(values), [])
