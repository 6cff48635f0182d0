"""A worker's job: the trace of a fine-tuning run, with bitsandbytes imported without Inductor, which takes a second.

On import it asks torch to compile four functions of its default kernels. A trace runs none of them.
"""

import contextlib
from typing import Any

import torch

from foretrain.predict.trace.card.patches import Patches


def _uncompiled(function: Any = None, **options: Any) -> Any:
    return function if function is not None else lambda decorated: decorated


with Patches() as patches, contextlib.suppress(ImportError):
    patches.set(torch, "compile", _uncompiled)
    import bitsandbytes  # noqa: F401

from foretrain.predict.trace.finetune.drive import trace  # noqa: E402  # peft imports bitsandbytes as it is

__all__ = ["trace"]
