"""Figures with names, as dictionaries, JSON, tables and `name: value` print them, and what each name means."""

import math
import re
from collections.abc import Iterable, Mapping

from foretrain.runs.formats.log_format import NUMBER, LineReader, LogFormat, LossUnit, Reading, number, pattern

_QUOTED = re.compile(r"(['\"])([^'\"]{1,80})\1:\s*['\"]?([-+]?[\w.]{1,40}(?:[-+]\d{1,3})?)['\"]?(?=\s*[,}])")
_PLAIN = pattern(rf"(?<!\S)(?P<key>[a-z][\w/@.()-]{{0,80}})\s?[:=]\s?(?P<value>{NUMBER})(?![^\s,|])")
# Role -> its names in any program, the most certain first.
NAMES: dict[str, tuple[str, ...]] = {
    "loss": ("loss", "train/CrossEntropyLoss", "loss/train/total", "actor/pg_loss"),
    "val": ("eval_loss", "val_loss", "metrics/eval/LanguageCrossEntropy"),
    "step_s": ("step_time", "timing_s/step"),
    "steps_per_s": ("throughput/batches_per_sec", "throughput/device/batches_per_second", "throughput/device/BPS"),
    "tokens_per_s": (
        "step_tokens_per_second",
        "tokens/train_per_sec_per_gpu",
        "train_tokens_per_second",
        "throughput",
        "tokens_per_second_per_gpu",
        "perf/throughput",
        "throughput/tokens_per_sec",
        "throughput/device/TPS",
        "throughput/device/tokens_per_second",
    ),
    "lr": ("learning_rate", "lr", "actor/lr", "optim/learning_rate_group0"),
}
# What a figure of memory counts and its unit: of axolotl, Liger-Kernel's example, verl, Composer, ms-swift, torchtune.
_MEMORY = {
    **{f"memory/max_{name}": ("active", 2**30) for name in ("active (GiB)", "mem_active(gib)")},
    **{f"memory/max_{name}": ("allocated", 2**30) for name in ("allocated (GiB)", "mem_allocated(gib)")},
    "memory/device_reserved (GiB)": ("reserved", 2**30),
    "memory/device_mem_reserved(gib)": ("reserved", 2**30),
    "memory/device_mem_reserved (gib)": ("reserved", 2**30),
    **{f"total_peak_memory_{kind}_MB": (kind, 2**20) for kind in ("allocated", "reserved")},
    **{f"{by}perf/max_memory_{kind}_gb": (kind, 2**30) for by in ("", "actor/") for kind in ("allocated", "reserved")},
    **{f"memory/peak_{kind}_mem": (kind, 10**9) for kind in ("allocated", "active", "reserved")},
    "memory/reserved_mem": ("reserved", 10**9),
    "memory(GiB)": ("reserved", 2**30),
    "peak_memory_active": ("active", 2**30),
    "peak_memory_alloc": ("allocated", 2**30),
    "peak_memory_reserved": ("reserved", 2**30),
}
_PREFERENCES = {"rewards/chosen", "rewards/margins", "logps/chosen", "min_reward"}
_POLICY = {
    "reward",
    "reward_std",
    "kl",
    "completion_length",
    "completions/mean_length",
    "actor/pg_loss",
    "objective/kl",
}


_PREFIX = re.compile(r"^(?:.* - )?(?:(?:train|eval|val)[/_])?")  # of an export's columns: "run - train/reward"


def figures(text: str) -> dict[str, float]:
    """Return {key: value} of a printed dictionary; NaN for nan, inf and None."""
    found = {}
    for _, key, value in _QUOTED.findall(text):
        known = number(value, grouped_thousands=False)
        if math.isfinite(known) or value.lower().lstrip("+-") in ("nan", "inf", "infinity", "none", "null"):
            found[key] = known
    return found


def pairs(text: str) -> dict[str, float]:
    """Return {key: value} of `key: value` and `key=value`; a key is the last word before its value."""
    return {match["key"]: number(match["value"]) for match in _PLAIN.finditer(text)}


def loss_unit(keys: Iterable[str]) -> LossUnit | None:
    """Return the unit of the loss that these figures stand beside, where they tell it."""
    names = {_PREFIX.sub("", key) for key in keys}
    return "a preference loss" if names & _PREFERENCES else "a policy loss" if names & _POLICY else None


def readings_of(values: Mapping[str, float], step: int | None, at: int = 0) -> list[Reading]:
    """Return the training step and the evaluation that figures of one step hold."""
    if "train_runtime" in values and "loss" not in values:
        return []
    named = {role: next((values[name] for name in names if name in values), None) for role, names in NAMES.items()}
    loss, val, step_s, per_s = (named[role] for role in ("loss", "val", "step_s", "steps_per_s"))
    found = []
    if loss is not None:
        memory = {
            _MEMORY[key][0]: round(value * _MEMORY[key][1])
            for key, value in values.items()
            if key in _MEMORY and 0 < value * _MEMORY[key][1] < 2**60
        }
        rate = named["tokens_per_s"] or None
        step_s = 1 / per_s if step_s is None and per_s else step_s
        found.append(Reading(at, step, loss, step_s, rate, named["lr"], memory_bytes=memory or None))
    if val is not None:
        found.append(Reading(at, step, evaluated=True, val_loss=val))
    return found


class Blocks(LineReader):
    """Reads the figures after the head of a line, which has the step, and in the lines below it, in any order."""

    def __init__(self, format: LogFormat) -> None:
        super().__init__(format)
        self.step, self.of = -1, None
        self.values: dict[str, float] = {}

    def read(self, line: str) -> list[Reading]:
        assert self.format.step_line is not None
        head = self.format.step_line.search(line)
        values = pairs(line[head.end() :] if head else line) if head or self.step >= 0 else {}
        found = self.flush() if head or not values else []
        if head:
            self.words = ()  # the lines below have none
            self.step, self.of = int(head["step"]), int(head["of"]) if "of" in head.groupdict() else None
        self.values |= values
        return found

    def flush(self) -> list[Reading]:
        found = readings_of(self.values, self.step)
        self.refine(loss_unit(self.values))
        for reading in found:
            reading.of = self.of
        self.step, self.values, self.words = -1, {}, self.format.words
        return found
