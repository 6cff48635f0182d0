"""The harness around PyTorch's CUDA build (tests/cuda_build), as far as it needs neither that build nor a card."""

import gzip
import json
from pathlib import Path

import pytest
import torch

from foretrain.config.checks import launched
from foretrain.config.families import FAMILIES
from tests.cuda_build import __main__ as truth
from tests.cuda_build import branches, build, compare, diff, environment, grid
from tests.cuda_build.branches import Branches


def test_cases_are_the_same_each_time_and_tiers_share_them() -> None:
    default, large = grid.cases("default"), grid.cases("large")
    assert default == grid.cases("default")
    names = [case.name for case in large]
    assert len(set(names)) == len(names)
    assert {case.name for case in default} <= set(names)
    assert sum(not case.compiled for case in large) >= 200
    assert sum(case.compiled for case in large) >= 80


def test_the_large_tier_covers_what_changes_allocation() -> None:
    large = grid.cases("large")
    configs = [launched(case.settings) for case in large]
    assert {case.dtype for case in large} == {"float32", "bfloat16", "float16"}
    assert {c.gradient_accumulation_steps for c in configs} >= {1, 2, 3, 4, 5, 8}
    assert {c.vocab_size for c in configs} >= {256, 1013, 4096, 50257, 50304}
    assert {c.recipe for c in configs} == FAMILIES.keys()
    assert {c.optimizer for c in configs} == {"adamw", "adamw8bit", "adamw4bit", "muon"}
    for knob in ("optimizer_offload", "master_weights", "recompute_norm_gelu", "bias", "eval_only", "auto_chunker"):
        assert {getattr(c, knob) for c in configs} == {True, False}, knob
    for knob in ("eval_batch_size", "eval_block_size", "loss_chunk_size", "checkpointed_blocks", "dropout"):
        assert len({getattr(c, knob) for c in configs}) > 1, knob


def test_a_shrunk_case_is_the_same_program() -> None:
    for case in grid.cases("large"):
        small = grid.shrunk(case.settings)
        assert small.keys() >= case.settings.keys()
        options = case.settings.keys() - grid.SIZES.keys() - {"n_embd"}
        for knob in options:
            assert bool(small[knob]) == bool(case.settings[knob]), knob
        launched(small)


# -- the branches of a real step -------------------------------------------------------------------------------


def asked(found_inf: float) -> branches.Record:
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.Adam([weight])
    with Branches() as seen:
        weight.grad = torch.ones(4)
        if bool(torch.tensor(found_inf) == 0):
            optimizer.step()
        torch.tensor(2.5).item()
    return seen.record()


def test_a_step_that_was_left_out_is_told() -> None:
    real = asked(0.0)
    assert real["optimizer_steps"] == 1
    assert "exp_avg" in real["states"]
    assert branches.differences(asked(0.0), real) == []
    found = branches.differences(asked(1.0), real)
    assert any("the card answered False, a CPU True" in sentence for sentence in found)
    assert any(sentence.startswith("optimizer steps: 0 on the card, 1 on a CPU") for sentence in found)


def test_tensors_are_as_they_were_afterwards() -> None:
    before = torch.Tensor.__bool__, torch.Tensor.item
    asked(0.0)
    assert (torch.Tensor.__bool__, torch.Tensor.item) == before


# -- the driver's stubs ----------------------------------------------------------------------------------------


def test_function_is_defined_or_a_stub_or_says_its_name() -> None:
    wanted = {"cudaMalloc", "cublasSgemm", "cuNew", "cuMemAlloc", "cudaStreamQuery"}
    source, missing = build.stubs(
        wanted, {"cudaMalloc", "cuMemAlloc_v2"}, ["cudaStreamQuery", "cuCtxSynchronize", "cublas*"]
    )
    assert missing == ["cuNew"]
    assert 'fakecuda_missing("cuNew", 801)' in source
    for name in ("cublasSgemm", "cudaStreamQuery", "cuCtxSynchronize"):
        assert f"int {name}(void) {{ return 0; }}" in source
    for name in ("cudaMalloc", "cuMemAlloc("):
        assert f"int {name}" not in source


def test_stub_table_has_no_duplicates_and_nothing_defined() -> None:
    patterns = build.stub_patterns()
    assert len(set(patterns)) == len(patterns)
    code = "".join(path.read_text() for path in build.DRIVER.glob("*.c"))
    for name in patterns:
        assert f" {name}(" not in code, name


def test_environment_has_what_foretrain_needs_but_no_torch() -> None:
    names = environment.requirements()
    assert any(name.startswith("pydantic") for name in names)
    assert any(name.startswith("pytest") for name in names)
    assert not any(name.startswith("torch") for name in names)


# -- results ---------------------------------------------------------------------------------------------------


def test_a_damaged_result_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(truth, "HOME", tmp_path)
    (tmp_path / "measured").mkdir()
    case = grid.cases("default")[0]
    assert truth.read(case) is None
    truth.kept(case).write_bytes(gzip.compress(json.dumps({"phases": {}}).encode()))
    assert truth.read(case) == {"phases": {}}
    for damaged in (b"", b"\x1f\x8bnot gzip", gzip.compress(b"{"), gzip.compress(b'{"a": 1}')[:-6]):
        truth.kept(case).write_bytes(damaged)
        assert truth.read(case) is None


def test_another_option_is_another_result() -> None:
    one, two = grid.cases("default")[0], grid.cases("default")[0]._replace(dtype="bfloat16")
    assert truth.kept(one) != truth.kept(two)


def test_spread_of_errors() -> None:
    found = compare.spread([0.0] * 97 + [0.002, -0.01, 0.003])
    assert (found["median"], found["p99"], found["worst"], found["lowest"]) == (0.0, 0.003, -0.01, -0.01)


def row(name: str, allocated: float, reserved: float, *, compiled: bool = False) -> compare.Row:
    error = {"real": 2**20, "predicted": 2**20}
    return {
        "name": name, "compiled": compiled, "allocated_bytes": {**error, "error": allocated},
        "reserved_bytes": {**error, "error": reserved}, "estimate_allocated": {"error": 0.004},
        "estimate_reserved": {"error": 0.02},
    }  # fmt: skip


def test_cases_that_are_furthest_off_come_last() -> None:
    rows = [row("good", 0.0, 0.0), row("low", -0.002, -0.03), {"name": "dead", "compiled": True, "error": "it ended"}]
    found = compare.summary(rows)
    assert found["eager"]["reserved_to_the_byte"] == 0.5
    assert found["eager"]["allocated_within_0.1_percent"] == 0.5
    assert found["compiled"] == {"cases": 1, "failed": 1}
    names = [line.partition(":")[0] for line in compare.table(rows).splitlines()]
    assert names[:3] == ["good", "low", "dead"]


def test_deaths_that_follow_each_other_have_no_order() -> None:
    one = [(0, 512), (1, 1024), (2, -512), (3, -1024), (4, 2048)]
    two = [(0, 512), (1, 1024), (2, -1024), (3, -512), (4, 2048)]
    assert [size for _, size in diff.settled(one)] == [size for _, size in diff.settled(two)]
    found = diff.differences([512, 1024, -512], [512, 4096, 1024, -512])
    assert found == [(1, 1, [], [4096])]
