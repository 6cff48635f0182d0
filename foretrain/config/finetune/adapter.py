"""What peft says of an adapter: its adapter_config.json, or the same in memory."""

import re
from collections import defaultdict
from collections.abc import Collection

from foretrain.base.errors import UserError
from foretrain.config.finetune.formats.format import method_of
from foretrain.config.finetune.table import Table
from foretrain.config.hub.facts import ModelFacts

IN_A_LAYER = re.compile(r"(\D*?)\.?(\d+)\.(.+)")  # a path: what comes before the first number, that, and the rest


def put_adapter(table: Table, facts: ModelFacts | None, *, four_bit: bool) -> None:
    """Method, rank, modules and dropout, put into the table's settings. Raises UserError for an adapter that is no
    LoRA."""
    kind = str(table.take("peft_type", "")).rpartition(".")[2].upper()
    if kind != "LORA":
        raise UserError("usage.callback_adapter", kind=kind or "an adapter without a name")
    modules = table.take("target_modules")
    if isinstance(modules, str) and modules != "all-linear":
        raise UserError("usage.callback_adapter", kind="target_modules as a pattern")
    method_of(table, "use_dora", adapters=True, four_bit=four_bit, dora=table.flag("use_dora"))
    table.put("lora_r", "r")
    table.put("lora_dropout", "lora_dropout")
    for option, key, value in (
        ("lora_targets", "target_modules", modules),
        ("lora_saved", "modules_to_save", table.take("modules_to_save")),
    ):
        names = value
        if value and not isinstance(value, str):
            names = sorted(of_all_layers(value, facts.n_layer) if facts else value)
        if names:
            table.give(option, names, key)


def of_all_layers(paths: Collection[str], layers: int) -> set[str]:
    """Names of modules; those that each of so many layers has, without the layer: peft keeps fewer than 20 modules by
    their whole paths (`model.layers.0.self_attn.q_proj`), and more by the ends that they share. What only some layers
    have stays as it is."""
    numbers: dict[tuple[str, str], set[int]] = defaultdict(set)
    matches = {path: found for path in paths if (found := IN_A_LAYER.fullmatch(path))}
    for found in matches.values():
        numbers[found[1], found[3]].add(int(found[2]))
    whole = {path: found for path, found in matches.items() if numbers[found[1], found[3]] == set(range(layers))}
    return {whole[path][3] if path in whole else path for path in paths}
