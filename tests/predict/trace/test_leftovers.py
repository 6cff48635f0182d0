"""A trace leaves torch as it found it."""

import subprocess
import sys

PROGRAM = """
import torch
from foretrain.predict.trace.card.patches import Patches

real = torch.tensor
with Patches() as patches:
    patches.set(torch, "tensor", lambda *args, **named: real(*args, **named))
    with torch.device("meta"):  # the first in this process
        torch.tensor([])
with torch.device("meta"):
    print(torch.tensor([]).device.type, torch.ones(2).device.type)
"""


def test_device_context_holds_for_new_tensors_after_a_trace() -> None:
    """transformers asks torch.tensor([]) which device it is loading a model on."""
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert ended.stdout.split() == ["meta", "meta"], ended.stderr
