"""--exact for several cards: which ranks are traced, by whom, and what PyTorch's CUDA build took for the same steps."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from foretrain.config.options import RunConfig
from foretrain.config.sharing import STRATEGIES, Sharing
from foretrain.hardware.catalogue import find
from foretrain.predict.allocator.replay import replay
from foretrain.predict.memory import predict
from foretrain.predict.ranks import ClusterPlan
from foretrain.predict.spec import StepSpec
from foretrain.predict.trace import interpreter, service
from foretrain.predict.trace.forecast import ranks_to_trace, requests_for, trace_ranks
from foretrain.predict.trace.service import Request, TraceUnavailable, traces
from tests.cuda_build import ranks as harness
from tests.kit.command import REPO, foretrain

GPU = find("RTX 4070")
SMALL = RunConfig(
    n_layer=2, n_head=2, n_embd=64, block_size=32, vocab_size=256, batch_size=2, gradient_accumulation_steps=2
)
WORDS = [f"--{name}={getattr(SMALL, name)}" for name in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")]


def spec(sharing: Sharing | None, **options: object) -> StepSpec:
    config = SMALL.model_copy(update=options)
    return StepSpec.of(config, GPU, dtype="bfloat16", compiled=False, sharing=sharing)


@pytest.fixture
def own_cache(own_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORETRAIN_CACHE", str(own_directory / "c"))


MEASURED = {
    row["name"]: row
    for row in json.loads((REPO / "benchmarks" / "results" / "cuda_build_ranks.json").read_text())["rows"]
}
# Of each kind one: buckets that are made anew, those that NCCL keeps, and streams of FSDP2's own.
LOOKED_AT = [
    "DDP, GPT-2, bfloat16, accumulation 4, rank 0",
    "DDP, bucket kept, GPT-2, bfloat16, accumulation 1, rank 0",
    "FSDP2, Llama, bfloat16, accumulation 4, rank 0",
    pytest.param("ZeRO-1, GPT-2, bfloat16, accumulation 1, rank 1", marks=pytest.mark.slow),
    pytest.param("HSDP of 2 x 2, GPT-2, bfloat16, accumulation 2, rank 3", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("name", LOOKED_AT)
def test_a_rank_takes_what_it_takes_in_the_cuda_build(name: str, own_cache: None) -> None:
    """Bytes that PyTorch's allocator counted for a real NCCL group, on cards that compute nothing."""
    (case,) = (each for each in harness.cases() if each.name == name)
    found, measured = replay(traces(harness.requests(case)[:1])[0]), MEASURED[name]
    assert found.peak_allocated_bytes == pytest.approx(measured["allocated_bytes"]["real"], rel=0.005)
    assert found.peak_reserved_bytes == pytest.approx(measured["reserved_bytes"]["real"], rel=0.03)


def test_fsdp_gathers_and_reduces_on_streams_of_its_own(own_cache: None) -> None:
    """As torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py has it; DDP allocates on the default one alone."""
    ways = [Request(spec(Sharing(name, 2, 2))) for name in ("fsdp", "ddp")]
    gathered, plain = ({a.stream for a in trace.allocations} for trace in traces(ways))
    assert len(gathered) == 3
    assert plain == {0}


def test_ranks_that_are_unlike_are_traced() -> None:
    found = {name: ranks_to_trace(spec(Sharing(name, 3, 3))) for name in ("ddp", "fsdp")}
    assert found == {"ddp": (0,), "fsdp": (0, 2)}
    assert ranks_to_trace(spec(Sharing("fsdp", 2, 2))) == (0,)  # every weight here has an even number of rows
    assert ranks_to_trace(spec(Sharing("hsdp", 6, 2))) == (0,)
    assert ranks_to_trace(spec(Sharing("hsdp", 6, 3))) == (0, 5)
    # Of ZeRO-1's the one with most: here the embeddings of rank 0, or matrices, of which one rank gets one more.
    assert ranks_to_trace(spec(Sharing("zero1", 3, 3), vocab_size=50304)) == (0,)
    assert len(ranks_to_trace(spec(Sharing("zero1", 3, 3), vocab_size=64, n_layer=3))) in (1, 2)


def test_a_trace_of_a_rank_is_kept_under_all_that_decides_it() -> None:
    asked = [
        *(
            Request(spec(sharing))
            for sharing in (None, Sharing("ddp", 2, 2), Sharing("ddp", 4, 4), Sharing("fsdp", 2, 2))
        ),
        Request(spec(Sharing("fsdp", 2, 2)), rank=1),
        Request(spec(Sharing("fsdp", 2, 2, syncs_each=False))),
        Request(spec(Sharing("ddp", 2, 2)), keeps=True),
    ]
    assert len({request.key() for request in asked}) == len(asked)


def test_the_need_of_ddp_is_a_range_over_what_nccl_keeps(own_cache: None) -> None:
    """Two traces, which differ by the first bucket: fp32 gradients of all parameters."""
    step = spec(Sharing("ddp", 2, 2), n_embd=256, n_layer=3)
    assert [request.keeps for request in requests_for(step)] == [False, True]
    let_go, kept = (max(peak for peak, _ in trace.peaks().values()) for trace in traces(requests_for(step)))
    parameters = (
        256 * 256 + 32 * 256 + 256 + 3 * (12 * 256 * 256 + 2 * 256)
    )  # embeddings, ln_f; of a block matrices, norms
    assert kept - let_go == 4 * parameters
    (found,) = trace_ranks([(step, predict(step))], GPU.memory_bytes)
    low, expected, _ = found.worst.memory.neediest.needed_span
    assert expected - low >= 4 * parameters
    assert not found.worst.pads_unknown


def test_what_cannot_be_traced_says_why_and_the_others_stand(own_cache: None) -> None:
    """Muon works on whole matrices: DDP gives it such, FSDP2 does not."""
    asked = [spec(Sharing(name, 2, 2), optimizer="muon") for name in ("ddp", "fsdp")]
    ddp, fsdp = trace_ranks([(each, predict(spec(None))) for each in asked], GPU.memory_bytes)
    assert ddp.worst is not None
    assert ddp.reason == ""
    assert fsdp.worst is None
    assert fsdp.reason


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (replace(spec(Sharing("ddp", 2, 2)), step="nanogpt"), "nanogpt's step is traced on one card only"),
        (spec(Sharing("fsdp", 2, 2), master_weights=True), "master_weights"),
    ],
)
def test_steps_that_ranks_do_not_share_are_refused(asked: StepSpec, reason: str, own_cache: None) -> None:
    with pytest.raises(TraceUnavailable, match=reason):
        traces([Request(asked)])


def test_a_torch_that_cannot_run_fsdp_on_a_cpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "now", lambda: interpreter.Interpreter("python", (3, 11), "2.6.0+cu124"))
    assert Request(spec(Sharing("ddp", 2, 2))).why_not() == ""
    assert "torch 2.7 or newer" in Request(spec(Sharing("fsdp", 2, 2))).why_not()


def test_plan_for_several_cards_is_traced(own_cache: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    words = ["plan", *WORDS, "--batch_size=2", "--gradient_accumulation_steps=4", "--compile=false"]
    words += ["--gpus", "2 x RTX 4070", "--json"]
    guessed = ClusterPlan.from_json(foretrain(*words).stdout)
    text = foretrain(*words, "--exact").stdout
    found = ClusterPlan.from_json(text)
    assert {rank.memory.source for rank in guessed.ranks} == {"estimated"}
    assert {rank.memory.source for rank in found.ranks} == {"traced"}
    assert {rank.traced_ranks for rank in found.ranks} == {(0,)}  # two ranks have alike shares of such weights
    assert {rank.strategy for rank in found.ranks} == set(STRATEGIES) - {"hsdp"}
    for before, after in zip(guessed.ranks, found.ranks, strict=True):
        assert (after.nccl, after.time) == (before.nccl, before.time)
        needed, reserved = after.memory.neediest.needed_span, after.memory.neediest.reserved_bytes
        context = after.memory.context
        assert needed[1] - reserved == context.expected_bytes + after.nccl.expected_bytes
    monkeypatch.setattr(service, "start_worker", None)  # all of it is kept
    assert foretrain(*words, "--exact").stdout == text
    path = tmp_path / "rank.pickle"
    shared = [*words[:-1], "--strategy=fsdp", "--snapshot", str(path), "--explain", "--json"]
    told = json.loads(foretrain(*shared).stdout)
    assert told["source"] == "traced"
    (phase,) = told["phases"]
    tensors = sum(each["size_bytes"] for each in phase["tensors"])
    assert 0 <= phase["memory"]["allocated_bytes"] - tensors < 1 << 16  # blocks of 512 bytes
    assert json.loads(foretrain("explain", str(path), "--json").stdout)["peak"]["allocated_bytes"] == tensors
