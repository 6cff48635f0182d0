"""Settings that differ between subjects, and what each can change; a side's unknown is not a difference."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from foretrain.base.records import Record
from foretrain.comparison.subject import Curve, Subject
from foretrain.config.finetune.options import FINETUNE_OPTIONS
from foretrain.config.inference import Inference
from foretrain.config.option import COST, EVERYTHING, LEARNING, Effect, options_of
from foretrain.config.options import OPTIONS, RunConfig, unread
from foretrain.data.dataset import BUILT_IN
from foretrain.hardware.catalogue import Gpu
from foretrain.predict.spec import StepName, choose_dtype
from foretrain.runs.formats.log_format import LossUnit

Group = Literal["model", "data", "optimizer", "execution"]
GROUPS: tuple[Group, ...] = ("model", "data", "optimizer", "execution")
GROUP_OF_OPTIONS: dict[str, Group] = {
    "model": "model", "data": "data", "batch": "execution", "optimizer": "optimizer", "evaluation": "execution",
    "system": "execution",
}  # fmt: skip
_OTHERS: dict[str, tuple[Group, tuple[Effect, ...]]] = {
    "parameters": ("model", EVERYTHING), "tokens_per_step": ("optimizer", ("speed", "learning")),
    "batch_size x accumulation": ("execution", COST), "gpu": ("execution", COST), "program": ("execution", COST),
    "ranks": ("execution", COST), "dataset contents": ("data", LEARNING), "model": ("model", EVERYTHING),
    "kv": ("execution", EVERYTHING),
}  # fmt: skip
OF_DATA = ("seq_len", "packing", "padded", "context", "prompt")  # declared with the batch, where forms have them
DECLARED = {**options_of(Inference), **FINETUNE_OPTIONS, **OPTIONS}  # of a name that several have, pretraining's
BATCH, RATE, CONTENTS, RANKS = "batch_size x accumulation", "learning_rate", "dataset contents", "ranks"


class Setting(Record):
    """`values` are in the order of the subjects, None where a subject does not say."""

    name: str
    group: Group
    values: tuple[Any, ...]
    affects: tuple[Effect, ...]

    @property
    def known(self) -> list[Any]:
        return [value for value in self.values if value is not None]

    @property
    def matters(self) -> bool:
        return bool(self.affects)

    @property
    def differs(self) -> bool:
        return any(value != self.known[0] for value in self.known)

    def differs_between(self, one: int, other: int) -> bool:
        a, b = self.values[one], self.values[other]
        return a is not None and b is not None and a != b

    def unknown_between(self, one: int, other: int) -> bool:
        return (self.values[one] is None) != (self.values[other] is None)


def is_compared(name: str) -> bool:
    """Return whether an option matters to the training, unlike file locations or the price of a kWh."""
    option = DECLARED.get(name)
    return option is not None and option.compared and not option.inert and option.group in GROUP_OF_OPTIONS


def of_config(config: RunConfig, gpu: Gpu | None, step: StepName) -> dict[str, Any]:
    known: dict[str, Any] = {name: getattr(config, name) for name in OPTIONS if is_compared(name)}
    if config.dtype == "auto":
        known["dtype"] = choose_dtype(config, gpu, step)[0] if gpu else None
    if config.attention == "auto":  # on a CPU a measurement decides
        known["attention"] = "sdpa" if gpu and gpu.kind != "cpu" else None
    if config.dataset != BUILT_IN:  # its own files tell how it was cut, not this option
        known["tokenizer"] = None
    known["batch_size"] = config.batch_size
    known["gradient_accumulation_steps"] = config.gradient_accumulation_steps
    known["tokens_per_step"] = config.tokens_per_step
    known["eval_sequences"] = config.eval_rows
    known["eval_iters"] = None
    known["program"] = step
    return {name: value for name, value in (known | of_gpu(gpu)).items() if value is not None}


def of_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of fine-tuning under pretraining's names; none of adapters without any."""
    found = {"gradient_accumulation_steps" if name == "grad_accum" else name: each for name, each in options.items()}
    return {name: each for name, each in found.items() if found.get("method") != "full" or not name.startswith("lora_")}


def of_gpu(gpu: Gpu | None) -> dict[str, Any]:
    return {"gpu": gpu.name, "gpu_kind": gpu.kind} if gpu else {}


def between(subjects: Sequence[Subject]) -> tuple[Setting, ...]:
    sides = [_decisions(subject.settings) for subject in subjects]
    _join_rates(sides)
    idle = {name for subject in subjects for name in _idle(subject.settings)}
    if any(side.get(CONTENTS) is None for side in sides):  # most sources cannot tell, and their name is compared
        idle.add(CONTENTS)
    if all(side.get(RANKS, 1) == 1 for side in sides):  # most sources cannot tell, and are of one
        idle.add(RANKS)
    names = dict.fromkeys(name for side in sides for name in side if name not in idle)
    found = []
    for name in names:
        values = tuple(side.get(name) for side in sides)
        group, affects = kind_of(name)
        setting = Setting(name=name, group=group, values=values, affects=affects)
        if setting.differs or None in values:
            found.append(setting)
    return tuple(sorted(found, key=lambda setting: GROUPS.index(setting.group)))


def _idle(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield what another option, the device or the dtype makes idle, which is not a difference."""
    yield from (name for name, _, _ in unread(settings))
    here = settings.get("gpu_kind"), settings.get("dtype")
    yield from (name for name, option in OPTIONS.items() if option.idle_on(*here))
    if settings.get(RANKS, 1) == 1:
        yield "strategy"


def kind_of(name: str) -> tuple[Group, tuple[Effect, ...]]:
    if name in _OTHERS:
        return _OTHERS[name]
    return "data" if name in OF_DATA else GROUP_OF_OPTIONS[DECLARED[name].group], DECLARED[name].affects


def _decisions(settings: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: value for name, value in settings.items() if is_compared(name)}
    found |= {name: settings[name] for name in _OTHERS if settings.get(name) is not None}
    micro, accumulation = settings.get("batch_size"), settings.get("gradient_accumulation_steps")
    if micro is not None:
        found[BATCH] = (micro, accumulation)
    return found


def _join_rates(sides: list[dict[str, Any]]) -> None:
    """Count the end of the decay as part of the learning rate where that differs, else as a setting of its own."""
    rates = {side[RATE] for side in sides if RATE in side}
    if len(rates) > 1:
        for side in sides:
            if RATE in side and "min_lr" in side:
                side[RATE] = (side[RATE], side.pop("min_lr"))
            elif RATE in side:
                side[RATE] = (side[RATE], None)
            side.pop("min_lr", None)
    micros = {side[BATCH][0] for side in sides if BATCH in side}
    if len(micros) == 1:
        for side in sides:
            if BATCH in side:
                side[BATCH] = (next(iter(micros)), None)


def differing(settings: Iterable[Setting], one: int, other: int, effect: Effect | None = None) -> tuple[Setting, ...]:
    return tuple(s for s in settings if s.differs_between(one, other) and (effect is None or effect in s.affects))


def changes(setting: Setting, config: RunConfig, value: Any) -> dict[str, Any] | None:
    if setting.name == RATE and isinstance(value, tuple | list):
        rate, end = value
        return {"learning_rate": rate} | ({"min_lr": end} if end is not None else {})
    if setting.name == BATCH:
        micro = value[0]
        steps, rest = divmod(config.tokens_per_step, micro * config.block_size)
        return {"batch_size": micro, "gradient_accumulation_steps": steps} if steps and not rest else None
    if setting.name == "tokens_per_step":
        steps, rest = divmod(value, config.batch_size * config.block_size)
        return {"gradient_accumulation_steps": steps} if steps and not rest else None
    if setting.name == "eval_sequences":
        return {"eval_sequences": value}
    return {setting.name: value} if setting.name in OPTIONS else None


Basis = LossUnit | Literal["not"]
# GPT-2's tokenizer has 50,257 tokens; padded rows are never the answer, so they change no loss.
_GPT2 = {50257, 50304}


def reasons(one: Subject, other: Subject) -> tuple[str, ...]:
    """Return what is known to differ: vocab_size, tokenizer, dataset, unit."""
    found = []
    a, b = one.settings, other.settings
    sizes = {a.get("vocab_size"), b.get("vocab_size")} - {None}
    if len(sizes) > 1 and not sizes <= _GPT2:
        found.append("vocab_size")
    tokenizers = {a.get("tokenizer"), b.get("tokenizer")} - {None}
    if len(tokenizers) > 1:
        found.append("tokenizer")
    if _other_text(a, b):
        found.append("dataset")
    vals = one.val_unit != other.val_unit and len(one.val) and len(other.val)
    # Losses of preferences or of a policy have a scale of their own in each run, by the kind of loss and its beta.
    if one.train_unit != other.train_unit or vals or not (of_text(one) and of_text(other)):
        found.append("unit")
    return tuple(found)


def _other_text(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    for name in (CONTENTS, "dataset"):
        if one.get(name) is not None and other.get(name) is not None:
            return one[name] != other[name]
    return False


def brought_together(one: Subject, other: Subject) -> tuple[Subject, Subject, Basis, tuple[str, ...]]:
    """Return the two with comparable losses, their unit (basis "not": none), and what differs."""
    different = reasons(one, other)
    if not different:
        return one, other, one.val_unit, ()
    first, second = in_bits(one), in_bits(other)
    if first is None or second is None:
        return one, other, "not", different
    return first, second, "bits a byte", different


def of_text(subject: Subject) -> bool:
    """Return whether the losses are those of tokens or bytes, and not of preferences or of a policy."""
    return {subject.train_unit, subject.val_unit} <= {"nats per token", "bits a byte"}


def in_bits(subject: Subject) -> Subject | None:
    per_token = subject.bytes_per_token
    if not of_text(subject):
        return None
    if subject.val_unit == "bits a byte" and not per_token:
        return replace(subject, train=Curve())
    if not per_token:
        return None
    val = subject.val if subject.val_unit == "bits a byte" else _scaled(subject.val, per_token)
    return replace(
        subject, train=_scaled(subject.train, per_token), val=val, val_unit="bits a byte", train_unit="bits a byte"
    )


def _scaled(curve: Curve, per_token: float) -> Curve:
    return curve.model_copy(update={"losses": tuple(loss / math.log(2) / per_token for loss in curve.losses)})
