"""What each of several cards holds when they generate text: vLLM's and llama.cpp's rules, and a llama.cpp log."""

import json
from typing import Any

import pytest

import foretrain as library
from foretrain.base.errors import UserError
from foretrain.base.units import MIB
from foretrain.config.hub.facts import ModelFacts, ModelSource
from foretrain.config.hub.parameters import counts_of
from foretrain.config.hub.source import preset_source
from foretrain.config.inference import Inference
from foretrain.predict.inference.counted import facts_to_generate
from foretrain.predict.inference.plan import InferencePlan
from foretrain.predict.inference.shares import card_and_host, check_shares, shares_of
from tests.kit.command import first_screen, foretrain


def planned(name: str | dict[str, Any], gpu: str = "A100 SXM4 80GB", **options: Any) -> InferencePlan:
    return library.plan(name, gpu, **options, inference=True)


def facts_of(name: str) -> ModelFacts:
    source = preset_source(name)
    assert source is not None
    return facts_to_generate(source)


def padded(rows: int) -> int:
    return (rows + 63) // 64 * 64


@pytest.mark.parametrize("world", [2, 4, 8, 16])
def test_a_rank_of_llama_holds_what_vllm_gives_it(world: int) -> None:
    """vllm/model_executor/models/llama.py: q, k, v, gate and up by columns, o and down by rows, norms whole."""
    plan = planned("llama-3.1-8b", world=world, split="tensor", weights="bf16", context=8192)
    width, mlp, heads, keys, dim = 4096, 14_336, 32, 8, 128
    own_keys = max(1, keys // world)
    attention = 2 * width * heads // world * dim + 2 * width * own_keys * dim
    layer = attention + 3 * width * mlp // world + 2 * width
    weights = 32 * layer + 2 * padded(128_256) // world * width + width
    assert plan.memory.neediest.bytes_of("weights") == 2 * weights
    assert plan.memory.neediest.bytes_of("kv_cache") == 32 * 8192 * 2 * own_keys * dim * 2


def test_biases_and_positions_of_gpt2_are_divided_as_vllm_does() -> None:
    """vllm/model_executor/models/gpt2.py: biases behind a sum, positions and norms are whole; the vocabulary padded."""
    config = {"n_layer": 12, "n_head": 12, "n_embd": 768, "bias": True, "vocab_size": 50_257, "block_size": 1024}
    plan, width = planned(config, world=4, split="tensor", weights="f16"), 768
    layer = (3 * width * width + 3 * width + width * width + 8 * width * width + 4 * width) // 4 + 2 * width + 4 * width
    weights = 12 * layer + padded(50_257) // 4 * width + 1024 * width + 2 * width
    assert plan.facts.tied
    assert plan.memory.neediest.bytes_of("weights") == 2 * weights


def test_experts_are_divided_and_the_router_is_not() -> None:
    facts, (share,) = facts_of("qwen3-30b-a3b"), shares_of(facts_of("qwen3-30b-a3b"), 4, "tensor", "pytorch")
    whole = counts_of(facts)
    router = facts.n_layer * facts.n_expert * facts.n_embd
    assert share.counts.experts == whole.experts // 4
    assert share.counts.blocks == (whole.blocks - router) // 4 + router
    assert share.kv_numbers == 2 * facts.head_dim  # one of four heads of keys


def test_a_compressed_cache_is_whole_on_each_card() -> None:
    """DeepSeek's vector of a token has no heads to divide (vllm/model_executor/layers/mla.py)."""
    config = {
        "model_type": "deepseek_v3", "num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4,
        "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 24, "q_lora_rank": 32,
        "n_routed_experts": 8, "moe_intermediate_size": 32, "first_k_dense_replace": 3, "intermediate_size": 96,
        "n_shared_experts": 2, "vocab_size": 320, "num_experts_per_tok": 2, "max_position_embeddings": 128,
    }  # fmt: skip
    facts = facts_to_generate(ModelSource(name="x", where="x", config=config, facts=None))
    (share,) = shares_of(facts, 2, "tensor", "pytorch")
    compressed = 32 * 64 + (16 + 8) * 64
    divided = 32 * 4 * (16 + 8) + 16 * 4 * (16 + 24) + 4 * 24 * 64 + 3 * 64 * 96
    assert share.kv_numbers == facts.kv_numbers == 16 + 8
    assert share.counts.blocks == 3 * (compressed + divided // 2)


@pytest.mark.parametrize(("name", "world", "weights", "said"), [
    ("smollm2-135m", 2, "bf16", "9 attention heads cannot be divided among 2 cards"),
    ("llama-3.1-8b", 3, "bf16", "32 attention heads cannot be divided among 3 cards"),
    ("llama-3.1-8b", 3, "bf16", "2 cards can"),
    ("llama-3.1-8b", 32, "w4_g128", "in groups of 128"),
    ("llama-3.1-8b", 2, "q4_k_m", "--split layer"),
])  # fmt: skip
def test_what_vllm_refuses_is_refused_with_what_works(name: str, world: int, weights: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        planned(name, world=world, split="tensor", weights=weights)


def test_heads_of_keys_are_divided_or_copied_alike() -> None:
    """vLLM asserts one of both (vllm/model_executor/models/llama.py)."""
    changed = {"n_head": 24, "n_kv_head": 8, "mlp_width": 9216, "vocab_size": 64 * 3}
    facts = facts_of("llama-3.1-8b").model_copy(update=changed)
    with pytest.raises(UserError, match="8 heads of keys"):
        check_shares(facts, Inference(world=3, split="tensor", weights="bf16"), "pytorch")
    check_shares(facts, Inference(world=24, split="tensor", weights="bf16"), "pytorch")


@pytest.mark.parametrize(("count", "world", "engine", "layers"), [
    (48, 4, "llama.cpp", [13, 12, 12, 11]), (80, 2, "llama.cpp", [41, 39]), (32, 3, "llama.cpp", [11, 11, 10]),
    (80, 3, "pytorch", [27, 27, 26]), (62, 4, "pytorch", [15, 16, 16, 15]), (61, 4, "pytorch", [15, 15, 16, 15]),
])  # fmt: skip
def test_layers_lie_where_each_engine_puts_them(count: int, world: int, engine: Any, layers: list[int]) -> None:
    """llama.cpp: load_tensors with equal cards; vLLM: get_pp_indices."""
    facts = facts_of("llama-3.1-8b").model_copy(update={"n_layer": count})
    shares = shares_of(facts, world, "layer", engine)
    assert [len(share.layers) for share in shares] == layers
    assert sum(len(share.layers) for share in shares) == count
    whole = counts_of(facts)
    for field in ("blocks", "experts", "others", "head"):
        assert sum(getattr(share.counts, field) for share in shares) == getattr(whole, field)
    assert [share.head for share in shares] == [False] * (world - 1) + [True]
    assert [bool(share.counts.embedding) for share in shares] == [engine == "pytorch"] + [False] * (world - 1)


def test_the_cache_of_four_cards_is_what_llama_cpp_logs() -> None:
    """ggml-org/llama.cpp#13661: a context of 30,016 on four cards takes 2,814 MiB, of which the third card has 703.5
    and the fourth 644.88."""
    facts = facts_of("qwen3-30b-a3b")
    shares = shares_of(facts, 4, "layer", "llama.cpp")
    sizes = [30_016 * len(share.layers) * share.kv_numbers * 2 / MIB for share in shares]
    assert sum(sizes) == 2814
    assert sizes[2:] == pytest.approx([703.5, 644.88], abs=0.01)
    plan = planned("qwen3-30b-a3b", "RTX 3090", world=4, weights="q4_0", context=30_016)
    assert plan.memory.neediest.bytes_of("kv_cache") / MIB == pytest.approx(sizes[0])


def test_cards_with_whole_layers_are_no_faster_divided_ones_wait() -> None:
    one = planned("llama-3.1-8b", weights="bf16").timing
    layers = planned("llama-3.1-8b", weights="bf16", world=2).timing
    divided = [planned("llama-3.1-8b", weights="bf16", world=world, split="tensor").timing for world in (2, 4, 8)]
    assert 0.99 * one.tokens_per_s < layers.tokens_per_s < one.tokens_per_s
    assert one.tokens_per_s < divided[0].tokens_per_s < divided[1].tokens_per_s < divided[2].tokens_per_s
    assert divided[2].tokens_per_s < 5 * one.tokens_per_s
    by_network = planned("llama-3.1-8b", weights="bf16", world=2, split="tensor", per_node=1, network="tcp-10").timing
    assert by_network.tokens_per_s < 0.9 * divided[0].tokens_per_s
    assert by_network.step_s.high_s - by_network.step_s.low_s > divided[0].step_s.high_s - divided[0].step_s.low_s


def test_the_first_screen_says_how_cards_share() -> None:
    words = ("plan", "llama-3.3-70b", "--inference")
    shown = " ".join(foretrain(*words, "--gpus", "2 x 3090", "--weights", "q4_k_m").stdout.split())
    assert "whole layers on each of 2 cards" in shown
    assert "41 of 80 layers" in shown
    first_screen(*words, "--gpus", "4 x A100 SXM4 80GB", "--split", "tensor", most_lines=14)
    told = json.loads(foretrain(*words, "--gpus", "2", "--gpu", "3090", "--weights", "q4_k_m", "--json").stdout)
    assert (told["asked"]["world"], told["asked"]["split"], told["verdict"]) == (2, "layer", "fits")
    assert foretrain(*words, "--gpus", "2 x 4060", "--check").returncode == 3
    for wrong in (
        ["--split", "tensor", "--gpu", "3090"],
        ["--link", "nvlink", "--gpu", "3090"],
        ["--gpus", "2 x RX 7900 XTX"],
    ):
        refused = foretrain(*words, *wrong)
        assert (refused.returncode, "--gpu" in refused.stderr) == (2, True)


def test_rent_is_that_of_all_cards() -> None:
    words = ("plan", "llama-3.1-8b", "--inference", "--weights", "bf16", "--price", "2", "--json")
    one, two = (
        json.loads(foretrain(*words, *cards).stdout)["timing"]
        for cards in (["--gpu", "A100 SXM4 80GB"], ["--gpus", "2 x A100 SXM4 80GB"])
    )
    assert two["rent_expected"] / two["step_s"]["expected_s"] == pytest.approx(
        2 * one["rent_expected"] / one["step_s"]["expected_s"]
    )


@pytest.mark.parametrize("options", [{"n_gpu_layers": 20}, {"n_gpu_layers": 0}, {"n_cpu_moe": 30}])
def test_card_and_host_hold_the_whole_model(options: dict[str, int]) -> None:
    facts = facts_of("qwen3-30b-a3b")
    shares = card_and_host(facts, Inference(weights="q4_k_m", **options))
    assert shares is not None
    card, host = shares
    assert len(card.layers) + len(host.layers) == facts.n_layer
    for name in ("blocks", "experts", "embedding", "others"):
        assert getattr(card.counts, name) + getattr(host.counts, name) == getattr(counts_of(facts), name)
    assert card.counts.head + host.counts.head == counts_of(facts).head


def test_what_stays_on_the_host_makes_room_and_takes_time() -> None:
    """llama.cpp counts the head as a layer, and puts the last ones on the card."""
    whole, part = (
        planned("llama-3.3-70b", weights="q4_k_m"),
        planned("llama-3.3-70b", weights="q4_k_m", n_gpu_layers=41),
    )
    weights, cache = (part.memory.neediest.bytes_of(id) for id in ("weights", "kv_cache"))
    assert cache * 2 == whole.memory.neediest.bytes_of("kv_cache")
    assert 0.5 < weights / whole.memory.neediest.bytes_of("weights") < 0.53
    assert part.timing.limited_by == "host"
    assert part.timing.step_s.high_s / part.timing.step_s.low_s > 2
    assert part.timing.step_s.expected_s > 3 * whole.timing.step_s.expected_s
    known = planned("llama-3.3-70b", weights="q4_k_m", n_gpu_layers=41, host_bandwidth=460.0)
    assert known.timing.step_s.high_s < part.timing.step_s.expected_s
    every = planned("llama-3.3-70b", weights="q4_k_m", n_gpu_layers=81)
    assert every.needed_bytes == whole.needed_bytes
    for options in ({"n_gpu_layers": 4, "weights": "bf16"}, {"n_gpu_layers": 4, "weights": "q4_0", "world": 2}):
        with pytest.raises(UserError, match="--n-gpu-layers"):
            planned("llama-3.3-70b", **options)
    with pytest.raises(UserError, match="no experts"):
        planned("llama-3.3-70b", weights="q4_0", n_cpu_moe=3)
