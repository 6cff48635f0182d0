"""The FLOPs that a fine-tuning step needs: what MFU is a share of. No torch.

MFU (PaLM, arXiv:2204.02311, appendix B) counts the forward and the backward pass of the model and no recomputation,
however the step runs. HFU counts all that runs: what checkpoints recompute, logits that a loss in tiles makes twice,
and the scores that flash attention makes again in backward. Both count the full T x T square of attention.

With adapters MFU counts what their training needs: the forward pass, gradients of what flows through frozen weights,
and both gradients of an adapter's own. Gradients of frozen weights, which nobody computes, are in neither.
"""

from functools import lru_cache
from typing import Any

from foretrain.config.finetune.options import FineTune
from foretrain.config.hub.facts import ModelFacts
from foretrain.hardware.catalogue import Gpu
from foretrain.predict.finetune.time import StepWork
from foretrain.predict.speed.ops import flops

# Options that change how a step runs and not what it needs: the model's plain code, one sample a row.
PLAIN: dict[str, Any] = {
    "gradient_checkpointing": False, "offload_checkpoints": False, "liger": False, "unsloth": False, "compile": False,
    "packing": False, "padded": False, "attn": "sdpa", "loop": "trainer", "grad_accum": 1, "optim": "sgd",
    "max_grad_norm": 0.0, "lora_dropout": 0.0, "evaluate": False, "keeps_logits": False, "max_steps": 0, "epochs": 0.0,
    "dataset_tokens": 0,
}  # fmt: skip
MOST_KEPT = 128


def model_flops(facts: ModelFacts, tune: FineTune, gpu: Gpu) -> int:
    """FLOPs of one optimizer step of all its micro-batches, a multiply-add counted as two. A dense model that is
    trained whole needs 6·N + 12·L·H·D·T a token, with the N parameters of its matrices, the head among them."""
    plain = tune.model_copy(update=PLAIN)
    return tune.grad_accum * _counted(facts.model_dump_json(), plain.model_dump_json(), gpu.model_dump_json())


@lru_cache(maxsize=MOST_KEPT)
def _counted(facts: str, tune: str, gpu: str) -> int:
    work = StepWork(
        ModelFacts.model_validate_json(facts), FineTune.model_validate_json(tune), Gpu.model_validate_json(gpu)
    )
    # Two of the five products of flash attention's backward pass make what the forward pass made.
    fused = (op for op in work.micro if len(op.shape) == 4 and op.kind.endswith("backward"))
    again = sum(op.runs * op.flops // 5 for op in fused)
    return flops(work.micro) - again
