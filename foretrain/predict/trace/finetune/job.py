"""A worker's job: the trace of a fine-tuning run, with what it needs imported the quick way."""

from foretrain.predict.trace.finetune import bits  # noqa: F401  # before peft imports bitsandbytes as it is
from foretrain.predict.trace.finetune.drive import trace

__all__ = ["trace"]
