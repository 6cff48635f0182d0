"""Where QLoRA can need more memory than LoRA, and why. No torch."""

import math

from foretrain.base.records import Note
from foretrain.config.finetune.options import FineTune
from foretrain.predict.finetune.memory import FineTuneLedger
from foretrain.predict.finetune.outside import BLOCK
from foretrain.predict.finetune.program import DTYPES


def four_bit_notes(ledger: FineTuneLedger, tune: FineTune) -> list[Note]:
    """A note where what peft makes fp32 for QLoRA can be more than 4 bits save. That is so at most where half of what a
    step has beside weights is more: the numbers between layers are twice as wide, others are not."""
    itemsize = DTYPES[tune.dtype].itemsize
    wide = sum(4 * p.numel() for name, p in ledger.weights.items() if ".lora_" not in name and p.dtype.itemsize == 4)
    if tune.method != "qlora" or itemsize == 4 or not wide:
        return []
    scale_bytes = 1 if tune.double_quant else 4
    packed = sum(math.prod(shape) for shape in ledger.packed.values())
    saved = round(packed * (itemsize - 0.5 - scale_bytes / BLOCK))
    worst = ledger.memory.worst
    beside = worst.tensors_bytes - sum(row.size_bytes for row in worst.components if row.id == "weights")
    if saved - wide // 2 >= beside / 2:
        return []
    return [Note(id="four_bits_widened", values={"wide": wide, "saved": saved})]
