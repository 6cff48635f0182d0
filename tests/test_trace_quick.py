"""What makes traces quicker changes none of their bytes."""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
from torch._subclasses.fake_tensor import FakeTensorMode

from foretrain.config import RunConfig
from foretrain.hardware import find
from foretrain.predict.exact import session, worker
from foretrain.predict.exact.service import Request, traces
from foretrain.predict.exact.tracer import Tracer

TINY = {"n_layer": 2, "n_head": 2, "n_embd": 64, "block_size": 32, "vocab_size": 520, "batch_size": 2,
        "gradient_accumulation_steps": 3}  # fmt: skip
WAYS: dict[str, tuple[dict[str, object], str, str]] = {
    "foretrain": ({}, "bfloat16", "foretrain"), "nanoGPT": ({"dropout": 0.1}, "float16", "nanogpt"),
    "fp32, bias": ({"bias": True}, "float32", "foretrain"),
    "checkpointing": ({"activation_checkpointing": True, "loss_chunk_size": 24}, "bfloat16", "foretrain"),
    "8 bits": ({"optimizer": "adamw8bit", "matmul": "int8"}, "bfloat16", "foretrain"),
    "offload": ({"optimizer_offload": True, "master_weights": True}, "bfloat16", "foretrain"),
    "muon": ({"recipe": "modern", "optimizer": "muon", "bias": False}, "bfloat16", "foretrain"),
}  # fmt: skip


def same_without_haste(config: RunConfig, dtype: str, step: str, *, compiled: bool) -> None:
    """The worker's trace (forked, without garbage collection, with quick.py), and one in this process without them."""
    request = Request(config, find("RTX 4070"), dtype, step, compiled)  # type: ignore[arg-type]
    (quick,) = traces([request])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "quick", lambda *, compiled: nullcontext())
        plain = worker.trace(request.job())
    del quick.facts["peak_rss_bytes"]
    assert json.loads(json.dumps(quick.to_json())) == json.loads(json.dumps(plain.to_json()))


@pytest.mark.parametrize("way", WAYS)
def test_what_makes_a_trace_quicker_changes_no_byte(
    way: str, own_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORETRAIN_CACHE", str(own_directory / "c"))
    knobs, dtype, step = WAYS[way]
    same_without_haste(RunConfig.model_validate({**TINY, **knobs}), dtype, step, compiled=False)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_what_makes_a_compiled_trace_quicker_changes_no_byte(
    way: str, own_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORETRAIN_CACHE", str(own_directory / "c"))
    knobs, dtype, step = WAYS[way]
    same_without_haste(RunConfig.model_validate({**TINY, **knobs}), dtype, step, compiled=True)


def test_quick_keys_are_made_and_taken_back() -> None:
    before = FakeTensorMode._prep_args_for_hash, Tracer.__torch_dispatch__
    with session.quick(compiled=False):
        assert FakeTensorMode._prep_args_for_hash is not before[0]
        assert Tracer.__torch_dispatch__ is not before[1]
    assert (FakeTensorMode._prep_args_for_hash, Tracer.__torch_dispatch__) == before
