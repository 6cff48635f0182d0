"""Libraries that look for fake tensors do in a trace what they do with real ones."""

import pytest
import torch
from torch import nn

from foretrain.predict.trace.session import Tracing, trace

masking = pytest.importorskip("transformers.masking_utils")


def test_transformers_sees_real_tensors_and_unpacked_sequences() -> None:
    """It built masks for an export, so a trace took the efficient kernel where a real run takes flash."""

    class Model(nn.Module):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            from transformers.utils.import_utils import is_tracing

            assert not is_tracing(ids)
            positions = torch.arange(ids.shape[1], device=ids.device) + 0
            assert masking.find_packed_sequence_indices(positions.unsqueeze(0)) is None
            return ids

    def code(on: Tracing) -> None:
        Model()(torch.zeros(2, 16, dtype=torch.int64, device=on.device))

    assert trace(code).notes == ()


def test_positions_that_are_not_known_are_noted() -> None:
    def code(on: Tracing) -> None:
        masking.find_packed_sequence_indices(torch.randint(0, 9, (2, 16), device=on.device))

    (note,) = trace(code).notes
    assert "decided on a value" in note
    assert "masking_utils.py" in note
