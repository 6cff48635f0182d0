"""The form of a fine-tuning run, made from FineTune's options: one that is added to them is on the page by itself."""

from typing import Any

from foretrain.base.messages import format_value, isolated, option_help, option_unit, say
from foretrain.base.records import Record
from foretrain.config.finetune.options import ASKED, FINETUNE_OPTIONS, FineTune, FineTuneOption
from foretrain.config.option import GROUPS
from foretrain.config.presets import ModelPreset, models
from foretrain.hardware.catalogue import catalogue
from foretrain.hardware.devices import CPU
from foretrain.web.planner import fields as planner_fields
from foretrain.web.planner import stops_of


class Nothing(Record):
    """The question for the form."""


def form() -> dict[str, Any]:
    """What the form needs once: its fields, the models with where their sizes are from, devices without such plans."""
    other = [device.name for device in catalogue().values() if device.kind != "cuda"]
    return {
        "fields": fields(), "models": [_model(model) for model in models().values()], "without": [*other, CPU],
    }  # fmt: skip


def _model(model: ModelPreset) -> dict[str, str]:
    text = f"{isolated(model.name)} · {format_value(model.parameters, 'count')}"
    return {"id": model.name, "text": text, "source": say("page.finetune.source", repository=model.repository)}


def fields() -> list[dict[str, Any]]:
    """Every option, as the form of the planner has its own (web/planner.py): the basic ones first, then by group."""
    shown = sorted(FINETUNE_OPTIONS.values(), key=lambda option: (not option.basic, _place(option)))
    prices = [{**field, "basic": False} for field in planner_fields() if field["group"] == "cost"]  # those of any run
    return [*(_field(option) for option in shown), *prices]


def _place(option: FineTuneOption) -> int:
    return 0 if option.basic else GROUPS.index(option.group)


def _field(option: FineTuneOption) -> dict[str, Any]:
    return {
        "name": option.name, "group": option.group, "help": option_help(option.name, option.help, "finetune_knob"),
        "unit": option_unit(option.unit), "type": option.type, "default": ASKED.get(option.name, option.default),
        "limits": _limits(option.name),
        "choices": list(option.choices), "basic": option.basic,
        "stops": stops_of(*option.slider, whole=True) if option.slider else [],
    }  # fmt: skip


def _limits(name: str) -> str:
    rules = FineTune.model_fields[name].metadata
    signs = (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))
    return ", ".join(f"{sign} {getattr(rule, at):,}" for at, sign in signs for rule in rules if hasattr(rule, at))
