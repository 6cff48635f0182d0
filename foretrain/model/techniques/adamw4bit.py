from collections.abc import Mapping
from typing import Any

from foretrain.model.techniques.adamw8bit import AdamW8bit
from foretrain.model.techniques.low_bits import FOUR


class AdamW4bit(AdamW8bit):
    """1.06 bytes per parameter instead of 8 (model/low_bit_adamw.py)."""

    id = "adamw4bit"
    options: Mapping[str, Any] = {"optimizer": "adamw4bit"}
    saves = "seven eighths of the optimizer's states"
    costs = "the moments are rounded to 16 values a block of 128"
    source = "Li et al. 2023, arXiv:2309.01507"
    place, drop_order, instead_of, milder = 115, 85, ("muon", "adamw8bit"), ("adamw8bit",)
    form = FOUR
    chunk_launches = 23
    chunk_traffic = (91.0, 67.0)
    stronger = ()


TECHNIQUES = (AdamW4bit(),)
