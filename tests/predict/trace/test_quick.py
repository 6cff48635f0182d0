"""What makes traces quicker changes none of their bytes."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp._fully_shard import _fsdp_common

from foretrain.config.finetune.options import FineTune
from foretrain.config.options import RunConfig, StrategyName
from foretrain.config.sharing import Sharing
from foretrain.hardware.catalogue import find
from foretrain.predict.spec import StepSpec
from foretrain.predict.trace import session
from foretrain.predict.trace.finetune.request import FineTuneRequest
from foretrain.predict.trace.quick import Chunks
from foretrain.predict.trace.service import Request, Traceable, traces
from foretrain.predict.trace.tracer import Tracer
from tests.kit.command import REPO
from tests.kit.finetune import small, source_of

TINY = {"n_layer": 1, "n_head": 2, "n_embd": 64, "block_size": 32, "vocab_size": 520, "batch_size": 2,
        "gradient_accumulation_steps": 2}  # fmt: skip
WAYS: dict[str, tuple[dict[str, object], str, str]] = {
    "foretrain": ({}, "bfloat16", "foretrain"), "nanoGPT": ({"dropout": 0.1}, "float16", "nanogpt"),
    "fp32, bias": ({"bias": True}, "float32", "foretrain"),
    "checkpointing": ({"activation_checkpointing": True, "loss_chunk_size": 24}, "bfloat16", "foretrain"),
    "8 bits": ({"optimizer": "adamw8bit", "matmul": "int8"}, "bfloat16", "foretrain"),
    "offload": ({"optimizer_offload": True, "master_weights": True}, "bfloat16", "foretrain"),
    "muon": ({"recipe": "modern", "optimizer": "muon", "bias": False}, "bfloat16", "foretrain"),
}  # fmt: skip


FINE_TUNED = {"seq_len": 64, "batch_size": 2, "lora_r": 8}
TUNED: tuple[dict[str, object], ...] = (
    {"method": "full", "amp": "fp16", "optim": "adamw_8bit"},
    {"method": "lora", "amp": "bf16", "gradient_checkpointing": True, "grad_accum": 2, "lora_dropout": 0.1},
    {"method": "qlora", "amp": "bf16", "gradient_checkpointing": True, "evaluate": True, "keeps_logits": True,
     "eval_batch_size": 2, "eval_batches": 3},
)  # fmt: skip


# In a process of its own: after a trace in this one, autograd would not let others fork (test_any_code.py).
PLAIN = """
import importlib, json, os, sys
from contextlib import nullcontext
from foretrain.predict.trace import session
session.quick = lambda *, compiled: nullcontext()
for job in json.load(sys.stdin):
    if child := os.fork():
        os.waitpid(child, 0)
    else:
        print(json.dumps(importlib.import_module(job["by"]).trace(job).to_json()), flush=True)
        os._exit(0)
"""


def same_without_haste(asked: dict[str, Traceable]) -> None:
    """The workers' traces (forked, without garbage collection, with quick.py), and plain ones without all that."""
    quick = traces(list(asked.values()))
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PLAIN], input=json.dumps([each.job() for each in asked.values()]),
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True, cwd=REPO,
    )  # fmt: skip
    for way, one, plain in zip(asked, quick, map(json.loads, ended.stdout.splitlines()), strict=True):
        del one.facts["peak_rss_bytes"]
        assert json.loads(json.dumps(one.to_json())) == plain, way


def config_of(knobs: dict[str, object]) -> RunConfig:
    return RunConfig.model_validate({**TINY, **knobs})


def of_ranks() -> dict[str, Traceable]:
    """Ways to share a step; by two ranks no weight here has an empty part."""
    ways: tuple[StrategyName, ...] = ("ddp", "zero1", "fsdp")
    config = config_of({})
    spec = StepSpec.of(config, find("RTX 4070"), dtype="bfloat16", compiled=False)
    return {way: Request(replace(spec, sharing=Sharing(way, 2, 2)), rank=1) for way in ways}


def requests(compiled: bool) -> dict[str, Traceable]:
    return {
        way: Request(StepSpec.of(config_of(knobs), find("RTX 4070"), step, dtype=dtype, compiled=compiled))  # type: ignore[arg-type]
        for way, (knobs, dtype, step) in WAYS.items()
    }


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_makes_a_trace_quicker_changes_no_byte(
    compiled: bool, own_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORETRAIN_CACHE", str(own_directory / "c"))
    same_without_haste(requests(compiled) | ({} if compiled else of_ranks()))


@pytest.mark.slow
def test_quick_trace_of_fine_tuning_has_the_same_bytes(own_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("transformers", "accelerate", "peft", "bitsandbytes"):
        pytest.importorskip(package)
    monkeypatch.setenv("FORETRAIN_CACHE", str(own_directory / "c"))
    same_without_haste(
        {
            f"{name}, {changes}": FineTuneRequest(
                source_of(small(name)), FineTune.model_validate({**FINE_TUNED, **changes}), find("RTX 4090")
            )
            for name in ("gemma-3-270m", "gpt2")
            for changes in TUNED
        }
    )


@pytest.mark.parametrize("rows", [1, 3, 8, 1000, 50257])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 1024])
def test_parts_of_a_weight_are_those_that_torch_cuts(rows: int, ranks: int) -> None:
    weight = torch.arange(2 * rows).view(rows, 2)
    cut, lazy = _fsdp_common._chunk_with_empty(weight, ranks, 0), Chunks(weight, ranks, 0)
    for rank in {0, 1 % ranks, ranks // 2, ranks - 1}:
        assert torch.equal(lazy[rank], cut[rank])
        assert lazy[rank].shape == cut[rank].shape
        assert lazy[rank].storage_offset() == cut[rank].storage_offset()


def test_quick_keys_are_made_and_taken_back() -> None:
    before = FakeTensorMode._prep_args_for_hash, Tracer.__torch_dispatch__
    with session.faster_fake_ops(compiled=False):
        assert FakeTensorMode._prep_args_for_hash is not before[0]
        assert Tracer.__torch_dispatch__ is not before[1]
    assert (FakeTensorMode._prep_args_for_hash, Tracer.__torch_dispatch__) == before
