"""axolotl on the console: the Trainer's dictionaries, with memory in GiB and tokens, every number as text.

`{'loss': '0.7157', …, 'memory/max_active (GiB)': '2.98', 'memory/max_allocated (GiB)': '2.98',
'memory/device_reserved (GiB)': '4.12', 'tokens/trainable': 93, 'tokens/total': 512, 'epoch': '0.1333'}`. Its tokens per
second are one card's.
"""

from dataclasses import replace
from functools import partial

from foretrain.monitoring.formats import trainer

_KEYS = (
    "memory/max_active (GiB)", "memory/max_mem_active(gib)", "tokens/trainable", "tokens/total",
    "tokens/train_per_sec_per_gpu",
)  # fmt: skip
FORMATS = (
    replace(
        trainer.FORMATS[0], name="axolotl", place=52, reader=partial(trainer.Dictionaries, keys=_KEYS),
        title="", rate_per_gpu=True,
    ),
)  # fmt: skip
