"""What splits a model over cards: FSDP2 and DeepSpeed's ZeRO, as trainers' files and accelerate's say it."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foretrain.config.finetune.table import Table
from foretrain.config.finetune.yaml_file import read_text_of, table_of
from foretrain.config.words import flag

OFF = (None, False, "", [], {})


def shards(
    table: Table, deepspeed: tuple[str, ...] = ("deepspeed",), fsdp: tuple[str, ...] = ("fsdp", "fsdp_config")
) -> None:
    """Name what splits the model, which is planned where it is understood and the run has several cards (read.py)."""
    found = table.found
    for kind, keys in (("deepspeed", deepspeed), ("fsdp", fsdp)):
        for key in keys:
            if table.take(key) not in OFF:
                found.sharding = kind
                table.unplanned(key)
                found.sharded_by = (*found.sharded_by, table.name(key))
    if found.sharding == "fsdp" and found.format in ("trainer", "trl", "accelerate"):
        launcher, config = found.format == "accelerate", table.keys.get("fsdp_config") or {}
        found.sharded_values = _of_fsdp2(table.keys.get("fsdp", launcher), config, launcher=launcher)
    if found.sharding == "deepspeed":
        of_zero(table, table.keys[next(key for key in deepspeed if table.keys.get(key) not in OFF)])


# What FSDP2's settings may be in a planned run; "*": anything. Loading for one rank only lowers what is planned.
_FSDP2: Mapping[str, tuple[Any, ...]] = {
    "version": (2,), "auto_wrap_policy": ("TRANSFORMER_BASED_WRAP",), "offload_params": (False,), "xla": (False,),
    "cpu_offload": (False,), "min_num_params": (0,), "forward_prefetch": (False,),
    "reshard_after_forward": (True, False), "activation_checkpointing": (True, False),
    "state_dict_type": ("FULL_STATE_DICT", "SHARDED_STATE_DICT"), "cpu_ram_efficient_loading": (True, False),
    **dict.fromkeys(("sync_module_states", "use_orig_params", "backward_prefetch"), ("*",)),
}  # fmt: skip


def _of_fsdp2(asked: Any, config: Any, *, launcher: bool) -> dict[str, Any]:
    """The options of a run with FSDP2 where all of its settings are planned; else none. `launcher`: they are
    accelerate's, which has FSDP1 and one group of all weights by default."""
    words = asked.split() if isinstance(asked, str) and flag(asked) is None else asked if type(asked) is list else ()
    if not isinstance(config, Mapping) or not {*words} <= {"full_shard", "auto_wrap"}:
        return {}
    keys = {str(key).removeprefix("fsdp_"): value for key, value in config.items() if value is not None}
    layers = keys.pop("transformer_layer_cls_to_wrap", "DecoderLayer")
    keys = {key: value if (on := flag(value)) is None or key == "version" else on for key, value in keys.items()}
    known = all("*" in (may := _FSDP2.get(key, ())) or value in may for key, value in keys.items())
    known = known and str(layers[0] if type(layers) is list and len(layers) == 1 else layers).endswith("DecoderLayer")
    needed = ("version", "auto_wrap_policy") if launcher else ("version",) if words else ()
    if not known or not (words or flag(asked)) or not {*needed} <= keys.keys():
        return {}
    again = {"gradient_checkpointing": True} if keys.get("activation_checkpointing") else {}
    return {"strategy": "fsdp" if keys.get("reshard_after_forward", True) else "fsdp_no_reshard", **again}


# The stage in the name of an absent file, such as zero3_bf16.json, which trainers come with; with other words none.
_NAMED = re.compile(
    r"(?:ds_?|deepspeed_?|config_?)*(?:z|zero_?|stage_?)+([1-3])(?:_(?:bf16|fp16|config|auto|(cpu)?offload(_\w+)?))*",
    re.I,
)
# Keys of zero_optimization, with the largest number that the range of a plan has; those of other kinds change nothing
# that is planned. Of the rest of DeepSpeed's JSON: batches, which the trainer's file has, precision, reports.
_ALLOWED = (
    "stage overlap_comm contiguous_gradients reduce_scatter allgather_partitions sub_group_size round_robin_gradients "
    "stage3_max_reuse_distance stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save "
    "ignore_unused_parameters"
)
_ZERO: Mapping[str, float] = {
    **dict.fromkeys(("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size"), 5e8),
    **dict.fromkeys(_ALLOWED.split(), float("inf")),
    "stage3_param_persistence_threshold": 1e6,
    "stage3_max_live_parameters": 1e9,
}
_LONGEST = 256  # path, in characters
_HOSTED = ("offload_optimizer", "offload_param")
_ACCELERATE = ("zero_stage", "zero3_", "gradient_", "deepspeed_", *_HOSTED)
_JSON = (
    "zero_optimization bf16 fp16 scheduler gradient_accumulation_steps gradient_clipping train_batch_size "
    "train_micro_batch_size_per_gpu steps_per_print wall_clock_breakdown zero_allow_untested_optimizer "
    "zero_force_ds_cpu_optimizer optimizer"
)


def of_zero(table: Table, asked: Any) -> None:
    """Take the stage of a JSON of DeepSpeed's, of its path, or of accelerate's keys for it. What goes to the host makes
    the figures an upper bound; what is not understood leaves the stage unplanned."""
    config = asked.get("deepspeed_config_file", asked) if isinstance(asked, Mapping) else asked
    if isinstance(config, str):
        path, folder = Path(config), table.found.folder
        places = (path, folder / path, folder / path.name) if folder and len(config) < _LONGEST else ()
        near = [each for each in places if each.is_file()]
        match = _NAMED.fullmatch(path.stem)
        hosted = {"offload_optimizer": "cpu"} if "offload" in path.stem else {}
        stage = {"zero_optimization": {"stage": int(match[1]), **hosted}} if match else {}
        config = table_of(read_text_of(near[0]), str(near[0])) if near else stage
    if not isinstance(config, Mapping):
        return
    if "zero_stage" in config:  # accelerate's own keys
        devices = {key: config.get(f"{key}_device") for key in _HOSTED}
        others = {key: value for key, value in config.items() if not key.startswith(_ACCELERATE)}
        config = {"zero_optimization": {"stage": config["zero_stage"], **devices}, **others}
    zero = config.get("zero_optimization")
    if not isinstance(zero, Mapping) or zero.get("stage") not in (1, 2, 3) or not _is_known(config, zero):
        return
    devices = {key: each.get("device") if isinstance(each := zero.get(key), Mapping) else each for key in _HOSTED}
    table.found.sharded_values = {"strategy": f"zero{zero['stage']}"}
    table.found.hosted = tuple(f"{key} = {value}" for key, value in devices.items() if value not in (None, "none"))


def _is_known(config: Mapping[str, Any], zero: Mapping[str, Any]) -> bool:
    optimizer = config.get("optimizer") or {}
    if not isinstance(optimizer, Mapping) or str(optimizer.get("type", "AdamW")).lower() not in ("adam", "adamw"):
        return False
    numbers = [(key, value) for key, value in zero.items() if type(value) in (int, float)]
    known = config.keys() <= {*_JSON.split()} and zero.keys() <= {*_ZERO, *_HOSTED}
    return known and all(value <= _ZERO.get(key, 0) for key, value in numbers)
