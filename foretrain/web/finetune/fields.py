"""The form of a fine-tuning run, made from FineTune's options: one that is added to them is on the page by itself."""

from typing import Any

from foretrain.base.messages import format_value, isolated, say
from foretrain.base.records import Record
from foretrain.config.finetune.options import ASKED, FINETUNE_OPTIONS
from foretrain.config.presets import ModelPreset, models
from foretrain.hardware.catalogue import catalogue
from foretrain.hardware.devices import CPU
from foretrain.web.planner import fields as planner_fields


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
    """Every option, as the form of the planner has its own, and prices, which are those of any run."""
    prices = [{**field, "basic": False} for field in planner_fields() if field["group"] == "cost"]
    return [*planner_fields(FINETUNE_OPTIONS, ASKED), *prices]
