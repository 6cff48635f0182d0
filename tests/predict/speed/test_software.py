"""What a version of torch changes in a step's time, against closed forms and published figures."""

import json
import sys
from typing import Any

import pytest

from foretrain.base.units import MIB
from foretrain.config.options import RunConfig
from foretrain.config.shape import ModelShape
from foretrain.hardware.catalogue import find
from foretrain.predict import software
from foretrain.predict.software import ASSUMED, Software, parse
from foretrain.predict.spec import StepSpec
from foretrain.predict.speed.ops import MicroBatchRun, Operation, flops, micro_batch, optimizer, optimizer_launches
from foretrain.predict.speed.rates import FLASH1, CatalogueRates
from foretrain.predict.speed.time import step_time
from tests.kit.command import REPO, foretrain

sys.path.insert(0, str(REPO / "benchmarks"))
from time_against_logs import DOCUMENT, LOOKED_AT, case_of

GPT2 = RunConfig(batch_size=12, gradient_accumulation_steps=1)
A100, V100 = find("A100 SXM4 80GB"), find("V100 SXM2 32GB")


def way(torch: str, *, config: RunConfig = GPT2, dtype: Any = "bfloat16", compiled: bool = True) -> MicroBatchRun:
    found = parse(torch)
    assert found
    return MicroBatchRun(StepSpec.of(config, find("RTX 4070"), "nanogpt", dtype=dtype, compiled=compiled), True, found)


def attention(operations: list[Operation]) -> list[Operation]:
    return [op for op in operations if op.name == "attention"]


@pytest.mark.parametrize(
    ("text", "version"),
    [("2.0.1+cu118", (2, 0)), ("2.13", (2, 13)), ("1.14.0a0+44dac51", (1, 14)), ("2.0 nightly", (2, 0)), ("two", None)],
)
def test_versions_are_read(text: str, version: tuple[int, int] | None) -> None:
    assert parse(text) == version


def test_plan_is_for_the_asked_or_installed_torch_version(monkeypatch: pytest.MonkeyPatch) -> None:
    assert software.of("2.0.1") == (2, 0)
    monkeypatch.setattr(software, "installed", lambda: Software(2, 6))
    assert software.of("") == (2, 6)
    monkeypatch.setattr(software, "installed", lambda: None)
    assert software.of("") == ASSUMED


@pytest.mark.parametrize(
    ("gpu", "torch", "workspace_bytes"),
    [
        ("RTX 5090", "2.11", 2 * 8_519_680), ("RTX 5090", "2.12", 2 * 32 * MIB), ("RTX 5060 Ti 16GB", "2.7", 2 * 8_519_680),
        ("B200", "2.11", 2 * 8_519_680), ("B200", "2.13", 2 * 32 * MIB), ("H100 SXM5 80GB", "2.6", 2 * 32 * MIB),
        ("RTX 4090", "2.13", 2 * 8_519_680),
    ],
)  # fmt: skip
def test_the_workspace_of_matmuls_follows_card_and_version(gpu: str, torch: str, workspace_bytes: int) -> None:
    """Two of them: one for training's stream, one for backward's (aten/src/ATen/cuda/CublasHandlePool.cpp)."""
    made = json.loads(foretrain("plan", "baby", "--gpu", gpu, f"--torch_version={torch}", "--json").stdout)
    phases = made["memory"][0]["phases"]
    assert {
        part["size_bytes"] for phase in phases[1:3] for part in phase["components"] if part["id"] == "workspace"
    } == {workspace_bytes}


def test_written_attention_computes_the_square_and_keeps_it() -> None:
    """Before torch 2.0: 12·B·T²·C FLOPs a block forward and back, and each kernel goes over B·H·T² elements."""
    c, old = GPT2, way("1.13", compiled=False)
    scores = c.batch_size * c.n_head * c.block_size**2
    found = attention(micro_batch(old))
    assert flops(found, causal=True) == 12 * c.batch_size * c.block_size**2 * c.n_embd * c.n_layer
    passes = [op for op in found if not op.flops and op.shape == (scores,)]
    # bf16: scale 4, mask 4, to fp32 6, softmax 8, back 6; and backward 4, 4, 6, 12, 6 bytes an element.
    assert sum(op.runs * op.nbytes for op in passes) == 60 * scores * c.n_layer
    new = attention(micro_batch(way("2.13", compiled=False)))
    assert all(op.shape != (scores,) for op in new)


def test_the_kernel_before_flash_attention_2_takes_twice_as_long() -> None:
    """Release notes of torch 2.2. On a V100 neither runs."""
    op = next(op for op in attention(micro_batch(way("2.13"))) if op.flops)
    new, old = (CatalogueRates(A100, torch).time_s(op) for torch in (Software(2, 2), Software(2, 1)))
    assert old == pytest.approx(new / FLASH1)
    assert old == pytest.approx(2 * new)
    half = next(op for op in attention(micro_batch(way("2.13", dtype="float16"))) if op.flops)
    again = [CatalogueRates(V100, torch).time_s(half) for torch in (Software(2, 13), Software(2, 0))]
    assert again[0] == again[1]


def test_adamw_by_lists_moves_92_bytes_a_parameter_for_28() -> None:
    n = ModelShape.of(GPT2).n_params
    for torch, nbytes, launches in (("2.0", 28, False), ("1.13", 92, True)):
        found = [op for op in optimizer(way(torch)) if op.name == "adamw"]
        assert sum(op.runs * op.nbytes for op in found) == nbytes * n
        assert (optimizer_launches(way(torch)) > 700) == launches


def test_loss_reads_logits_once_where_the_softmax_is_online() -> None:
    logits = GPT2.batch_size * GPT2.block_size * GPT2.vocab_size

    def reads(torch: str) -> int:
        return next(op.read_bytes for op in micro_batch(way(torch)) if op.name == "loss" and op.part == "forward")

    assert reads("2.13") == 2 * logits
    assert reads("2.6") == 4 * logits


def test_odd_vocabulary_is_padded_when_compiled_from_torch_2_1() -> None:
    """FLOPs stay those of the model; the shape that runs is a multiple of 8, at the price of a copy of the gradient."""
    odd = GPT2.model_copy(update={"vocab_size": 50257})
    for torch, padded in (("2.0", False), ("2.1", True)):
        head = [op for op in micro_batch(way(torch, config=odd)) if op.name == "head"]
        products = [op for op in head if op.flops]
        assert all((50257 in op.shape) != padded for op in products)
        assert sum(op.runs * op.flops for op in products) == 6 * 50257 * 768 * 12 * 1024
        copies = sum(op.runs * op.nbytes for op in head if not op.flops and op.name == "head" and op.kind == "fused")
        assert (copies > 4 * 12 * 1024 * 50257) == padded
    eager = [op for op in micro_batch(way("2.13", config=odd, compiled=False)) if op.name == "head" and op.flops]
    assert all(50257 in op.shape for op in eager)


def test_before_torch_2_nanogpt_runs_uncompiled() -> None:
    """torch.compile came with 2.0; both answers are of the same eager step."""
    config = GPT2.model_copy(update={"torch_version": "1.13"})
    times = [
        step_time(StepSpec.of(config, A100, "nanogpt", dtype="bfloat16", compiled=compiled))
        for compiled in (False, True)
    ]
    assert times[0] == times[1]


def test_half_of_the_cache_is_found_again() -> None:
    """An RTX 4090 has 72 MiB: of 36 MiB read and written everything that is read, of twice that half of it."""
    gpu = find("RTX 4090")
    rates = CatalogueRates(gpu)

    def kernel(nbytes: int, kind: Any = "fused") -> Operation:
        return Operation("x", kind, "forward", 1, (nbytes,), "bfloat16", 0, nbytes // 2, nbytes // 2)

    small, large = 36 * 2**20, 72 * 2**20
    assert rates.time_s(kernel(small)) == pytest.approx(small / 2 / rates.bandwidth)
    assert rates.time_s(kernel(large)) == pytest.approx((large - large // 4) / rates.bandwidth)
    assert rates.time_s(kernel(small, "adamw")) == pytest.approx(small / rates.bandwidth)  # long since gone
    half, a100 = 20 * 2**20, CatalogueRates(A100)  # 40 MiB in two partitions with the same in each
    assert a100.time_s(kernel(half)) == pytest.approx((half - half // 4) / a100.bandwidth)
    unknown = CatalogueRates(gpu.model_copy(update={"l2_mib": None}))
    assert unknown.time_s(kernel(small)) == pytest.approx(small / unknown.bandwidth)


def seconds(torch: str, **changes: Any) -> float:
    config = GPT2.model_copy(update={"torch_version": torch, **changes})
    found = step_time(StepSpec.of(config, A100, "nanogpt", dtype="bfloat16", compiled=True))
    return found.expected_s


def test_published_steps_of_two_torch_versions_are_met() -> None:
    """87 ms with torch 2.0 (pytorch.org), 2,509 ms for 8 x 64 rows with 2.8: 39 ms for twelve (GPU comparison)."""
    assert seconds("2.0") == pytest.approx(0.087, rel=0.15)
    assert seconds("2.8", batch_size=64, gradient_accumulation_steps=8, bias=True) == pytest.approx(2.509, rel=0.10)
    assert 1.1 < seconds("2.0") / seconds("2.8") < 1.5


def test_geforce_ranges_are_narrow_and_hold_nine_of_ten() -> None:
    """Steps like nanoGPT's on GeForce cards, of all origins and of those that are only judged."""
    inside: dict[bool, list[bool]] = {False: [], True: []}
    for log in DOCUMENT["logs"]:
        if log["kind"] == "other" or log["doubtful"] or not find(log["gpu"]).is_geforce:
            continue
        case = case_of(log)
        assert case["predicted"]["low_s"] >= 0.75 * case["predicted"]["expected_s"] * (1 - 1e-9)
        assert case["predicted"]["high_s"] <= 1.25 * case["predicted"]["expected_s"] * (1 + 1e-9)
        inside[log["origin"] in LOOKED_AT].append(case["inside"])
    assert len(inside[False]) >= 10
    assert len(inside[True]) >= 30
    for found in (*inside.values(), inside[False] + inside[True]):
        assert sum(found) >= 0.9 * len(found)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_program_that_differs_in_nothing_is_nanogpts_step(compiled: bool) -> None:
    """FLOPs and bytes of benchmarks/other_steps.py, which plans what `plan` has no option for, against the plan's."""
    import other_steps

    own = way("2.13", compiled=compiled)
    ops, plans = other_steps.micro_batch(own, other_steps.Program()), micro_batch(own)
    assert flops(ops) == flops(plans)
    nbytes, expected = (sum(op.runs * op.nbytes for op in found) for found in (ops, plans))
    assert nbytes == pytest.approx(expected, rel=0.001)


def test_two_hundred_published_runs() -> None:
    """The median error, and how many lie in the stated range; benchmarks/time_against_logs.py shows each."""
    cases = [case_of(log) for log in DOCUMENT["logs"]]
    assert len(cases) >= 200
    for found in (cases, [case for case in cases if case["origin"] not in LOOKED_AT]):
        errors = sorted(abs(case["error"]) for case in found)
        assert errors[len(errors) // 2] <= 0.10
        assert sum(case["inside"] for case in found) >= 0.90 * len(found)


def test_the_answer_says_its_torch() -> None:
    done = foretrain("plan", "--gpu", "RTX 4070", "--torch_version", "2.0", "--json")
    assert json.loads(done.stdout)["timing"]["torch"] == "2.0"
    full = " ".join(foretrain("plan", "--gpu", "RTX 4070", "--torch_version", "2.0", "--full").stdout.split())
    assert "from the catalogue for torch 2.0, uncalibrated" in full
    wrong = foretrain("plan", "--gpu", "RTX 4070", "--torch_version", "new", code=2)
    assert "torch_version" in wrong.stderr
