"""accelerate's config (`accelerate config`): how many processes, what splits the model, and the precision.

It trains nothing by itself; it goes with another file, or with a model and options of the command line.
"""

from foretrain.config.finetune.formats.format import Format, known_keys, shards
from foretrain.config.finetune.table import Table


def read(table: Table, text: str) -> None:
    """Settings of an accelerate config."""
    amp = table.word("mixed_precision", "no")
    table.give("amp", amp, "mixed_precision")
    table.cards("num_processes")
    shards(table, deepspeed=("deepspeed_config",), fsdp=("fsdp_config",))
    table.rest(known=known_keys("accelerate"))


FORMAT = Format(
    "accelerate", frozenset(("compute_environment", "distributed_type", "num_processes", "machine_rank")), read,
    lambda table: "compute_environment" in table and "distributed_type" in table,
)  # fmt: skip
