"""`plan --inference`: counts against engines' logs, PyTorch's caches and transformers' models; speeds against published ones."""

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import foretrain as library
from foretrain.advice.record import Advice
from foretrain.app.finetune import advised
from foretrain.app.generation import model_of_words
from foretrain.app.plan import resolved_of
from foretrain.base.errors import UserError
from foretrain.base.units import GIB, MIB
from foretrain.config.hub.facts import ModelFacts, ModelSource
from foretrain.config.hub.parameters import counts_of, parameter_count
from foretrain.config.hub.source import preset_source
from foretrain.config.inference import FORMATS, Inference, parse_inference
from foretrain.config.presets import PRESETS, models
from foretrain.config.shape import ModelShape, facts_of_run
from foretrain.hardware.catalogue import catalogue, find
from foretrain.model.language_model import make_model
from foretrain.model.writer import Reader
from foretrain.predict.inference.counted import facts_to_generate
from foretrain.predict.inference.plan import InferencePlan
from foretrain.predict.inference.speed import share_at_once, weights_bytes
from foretrain.predict.inference.stored import bits_of
from tests.kit.command import REPO, first_screen, foretrain
from tests.kit.tiny import tiny

sys.path.insert(0, str(REPO / "benchmarks"))
import inference_published

DEEPSEEK: dict[str, Any] = {
    "num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16, "v_head_dim": 24, "q_lora_rank": 32, "n_routed_experts": 8, "moe_intermediate_size": 32,
    "first_k_dense_replace": 1, "intermediate_size": 96, "n_shared_experts": 2, "vocab_size": 320,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "max_position_embeddings": 128,
}  # fmt: skip


def published(name: str) -> ModelFacts:
    source = preset_source(name)
    assert source is not None
    return facts_to_generate(source)


def planned(name: str = "llama-3.1-8b", gpu: str = "RTX 4070", **options: Any) -> InferencePlan:
    return library.plan(name, gpu, **options, inference=True)


# -- counts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", models())
def test_parameters_are_the_published_ones(name: str) -> None:
    """Of models that also see, without what sees."""
    preset, counts = models()[name], counts_of(published(name))
    if preset.config["model_type"] == "gemma3" or "vision_config" in preset.config:
        assert 0.75 * preset.parameters < counts.total < preset.parameters
    else:
        assert counts.total == preset.parameters


LLAMA: dict[str, Any] = {"recipe": "llama", "n_kv_head": 1, "mlp_width": 96}


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("more", [
    {}, {"bias": False}, {"recipe": "modern"}, {"recipe": "nanochat"}, LLAMA, {**LLAMA, "qk_norm": True},
    {**LLAMA, "tied_embeddings": True, "head_dim": 32},
], ids=str)  # fmt: skip
def test_presets_of_ours_are_counted_as_they_train(name: str, more: dict[str, Any]) -> None:
    config = resolved_of({**PRESETS[name], "dropout": 0.0, **more}).config
    facts = facts_of_run(config)
    assert parameter_count(facts) == counts_of(facts).total == ModelShape.of(config).n_params


def test_llama_3_8b_takes_what_llama_cpps_log_says() -> None:
    """ggml-org/llama.cpp#9881: q4_0 at a context of 8192 on an RTX 4070; Q4_K_M and others: tools/quantize/README.md."""
    plan = planned(weights="q4_0", context=8192)
    assert plan.memory.neediest.bytes_of("weights") / MIB == pytest.approx(4155.99, abs=0.5)
    assert plan.memory.neediest.bytes_of("kv_cache") == 1024 * MIB
    assert plan.memory.neediest.bytes_of("prompt") / MIB == pytest.approx(258.5, abs=0.01)


README_BITS = {
    "iq1_s": 2.0042, "iq1_m": 2.1460, "iq2_xxs": 2.3824, "iq2_xs": 2.5882, "iq2_s": 2.7403, "iq2_m": 2.9294,
    "iq3_xxs": 3.2548, "iq3_xs": 3.4977, "iq3_s": 3.6606, "iq3_m": 3.7628, "iq4_xs": 4.4597, "iq4_nl": 4.6818,
    "q2_k_s": 2.9697, "q2_k": 3.1593, "q3_k_s": 3.6429, "q3_k_l": 4.2979, "q4_k_s": 4.6672, "q4_k_m": 4.8944,
    "q5_k_s": 5.5704, "q5_k_m": 5.7036, "q6_k": 6.5633, "q8_0": 8.5008,
}  # fmt: skip


@pytest.mark.parametrize(("weights", "expected"), README_BITS.items())
def test_mixtures_have_the_bits_that_llama_cpp_says(weights: str, expected: float) -> None:
    """Bits a weight of Llama 3.1 8B (ggml-org/llama.cpp, tools/quantize/README.md), to their last digit."""
    assert 8 * file_bytes("llama-3.1-8b", weights) / 8_030_261_248 == pytest.approx(expected, abs=6e-5)
    blocks = bits_of(published("llama-3.1-8b"), weights).block
    assert FORMATS[weights].block == pytest.approx(blocks, abs=6e-4)


def file_bytes(name: str, weights: str) -> float:
    facts = published(name)
    return sum(count * bits for count, bits in zip(counts_of(facts), bits_of(facts, weights), strict=True)) / 8


@pytest.mark.parametrize(("name", "size_gb"), [("llama-2-7b", 6.62), ("llama-3.1-8b", 7.52)])
def test_int8_is_as_large_as_torchao_says(name: str, size_gb: float) -> None:
    """torchao's README counts what quantized layers hold: all but the embedding."""
    model = published(name)
    without = (
        weights_bytes(model, share_at_once(model, Inference(), "pytorch"), "int8") - 2 * counts_of(model).embedding
    )
    assert without / 1e9 == pytest.approx(size_gb, rel=0.01)


@pytest.mark.parametrize(
    "recipe", [{}, {"recipe": "llama", "n_head": 4, "n_embd": 64, "n_kv_head": 1, "mlp_width": 96}]
)
def test_the_cache_of_our_models_is_as_large_as_planned(recipe: dict[str, Any]) -> None:
    config = tiny(**{"dropout": 0.0, "bias": False, **recipe})
    reader = Reader(make_model(config))
    reader.read([1, 2])
    plan = library.plan(config, "RTX 4070", kv="f32", inference=True)
    assert plan.asked.context == config.block_size
    assert plan.memory.neediest.bytes_of("kv_cache") == reader.cache.nbytes
    assert (
        library.plan(config, "RTX 4070", inference=True).memory.neediest.bytes_of("kv_cache") * 2 == reader.cache.nbytes
    )


@pytest.mark.parametrize("changes", [{}, {"q_lora_rank": None}, {"n_routed_experts": 4, "num_experts_per_tok": 3}])
def test_latent_attention_is_counted_as_transformers_has_it(changes: dict[str, Any]) -> None:
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    config = transformers.DeepseekV3Config(**{**DEEPSEEK, **changes})
    with torch.device("meta"):
        model = transformers.DeepseekV3ForCausalLM(config)
    source = ModelSource(name="x", where="x", config={**DEEPSEEK, **changes, "model_type": "deepseek_v3"}, facts=None)
    found = facts_to_generate(source)
    assert parameter_count(found) == sum(p.numel() for p in model.parameters())
    assert found.kv_numbers == 16 + 8


def test_a_window_caps_what_its_layers_keep() -> None:
    model = published("gemma-3-4b")
    assert (model.n_layer, len(model.sliding_layers), model.sliding_window) == (34, 29, 1024)
    assert model.cached_tokens(1000) == 34 * 1000
    assert model.cached_tokens(5000) == 5 * 5000 + 29 * 1024


def fitting(plan: InferencePlan) -> dict[str, Advice]:
    return {change.rules[0]: change for change in advised(plan) if change.effect.verdict == "fits"}


def changed(plan: InferencePlan, change: Advice, **options: Any) -> InferencePlan:
    return library.plan(plan.name, plan.gpu.name, **{**options, **change.options}, inference=True)


# -- answers -----------------------------------------------------------------------------------------------------


@settings(max_examples=8, deadline=None)
@given(
    st.sampled_from(sorted(models())), st.sampled_from(sorted(FORMATS)), st.integers(16, 40_000), st.integers(1, 64),
    st.sampled_from(["RTX 3060", "RTX 4090", "A100 SXM4 80GB", "H100 SXM5 80GB"]),
)  # fmt: skip
def test_the_largest_that_fits_is_the_largest(name: str, weights: str, context: int, batch: int, gpu: str) -> None:
    plan = planned(name, gpu, weights=weights, context=context, batch=batch)
    low, needed, high = plan.memory.neediest.needed_span
    parts = sum(part.size_bytes for part in plan.memory.neediest.components)
    assert parts + plan.memory.context.expected_bytes == plan.needed_bytes == needed
    assert low <= needed <= high
    again = {"weights": weights, "gpu": gpu}
    if plan.longest_context:
        assert planned(name, context=plan.longest_context, batch=batch, **again).verdict == "fits"
        if plan.longest_context < max(context, plan.facts.max_positions):
            beyond = planned(name, context=plan.longest_context + 1, batch=batch, **again)
            assert beyond.verdict != "fits"
    if plan.largest_batch:
        assert planned(name, context=context, batch=plan.largest_batch, **again).verdict == "fits"
        beyond = planned(name, context=context, batch=plan.largest_batch + 1, **again)
        assert beyond.verdict != "fits"
    for change in fitting(plan).values():
        made = changed(plan, change, weights=weights, context=context, batch=batch)
        assert (made.verdict, made.needed_bytes) == ("fits", change.effect.needed_bytes)
        assert change.learns_otherwise == bool({"weights", "kv", "context"} & change.options.keys())
    own = [each for each in fitting(plan).values() if "world" not in each.options]
    assert (plan.verdict == "does_not_fit") == bool(own or plan.smallest)
    more = planned(name, context=context, batch=batch + 1, **again).timing
    assert more.step_s.expected_s >= plan.timing.step_s.expected_s
    assert InferencePlan.from_json(json.dumps(plan.to_json(schema="foretrain.plan/1"))) == plan


@pytest.mark.parametrize(
    ("options", "kept", "rule"),
    [
        ({"weights": "q4_k_m", "context": 131_072}, "q4_k_m", "shorter_texts"),
        ({"weights": "q4_k_m", "context": 4096, "batch": 64}, "q4_k_m", "fewer_texts"),
        ({"weights": "f16", "context": 131_072, "batch": 8}, "q8_0", "texts_together"),
        ({"engine": "pytorch"}, "int8", "fewer_bits"),  # and not q8_0, which this engine has not
    ],
)
def test_what_does_not_fit_says_what_would(options: dict[str, Any], kept: str, rule: str) -> None:
    plan = planned(**options)
    change = fitting(plan)[rule]
    made = changed(plan, change, **options)
    assert (made.verdict, made.asked.weights) == ("fits", kept)
    if "context" in change.options:
        assert made.asked.context % 256 == 0
        longer = {**options, "weights": kept, "batch": 1, "context": made.asked.context + 512}
        assert planned(**longer).verdict != "fits"


FILES_GIB = [  # as llama-bench prints them; sources: benchmarks/published_inference.csv
    (row["model"], row["weights"], float(row["gib"]))
    for row in csv.DictReader(inference_published.ROWS.read_text("utf-8").splitlines())
    if row["gib"]
]


@pytest.mark.parametrize(("model", "weights", "size_gib"), FILES_GIB)
def test_published_files_of_other_models_are_as_large(model: str, weights: str, size_gib: float) -> None:
    """To the last digit that is printed. The rules are of llama.cpp's code, and no row chose anything."""
    assert file_bytes(model, weights) / GIB == pytest.approx(size_gib, abs=0.006)


def test_without_weights_the_best_format_that_fits_is_planned() -> None:
    plan = library.plan("qwen3-30b-a3b", "RTX 4060 Ti 16GB", inference=True)
    assert (plan.verdict, plan.asked.weights) == ("fits", "q3_k_m")
    assert plan.formats[0].weights == "bf16"
    for each in plan.formats:
        again = library.plan("qwen3-30b-a3b", "RTX 4060 Ti 16GB", weights=each.weights, inference=True)
        assert (again.needed_bytes, again.longest_context) == (each.needed_bytes, each.longest_context)
    assert next(each.weights for each in plan.formats if each.longest_context >= 4096) == "q3_k_m"
    assert library.plan("qwen3-0.6b", "RTX 4090", inference=True).asked.weights == "bf16"
    none = library.plan("llama-3.3-70b", "RTX 4060", inference=True)
    assert (none.verdict, none.asked.weights) == ("does_not_fit", "bf16")
    assert none.smallest is not None
    said = foretrain("plan", "llama-3.3-70b", "--inference", "--gpu", "4060").stdout
    assert "none of the formats that foretrain knows fits" in " ".join(said.split())


def test_a_prompt_is_never_cut() -> None:
    """Nor is the context then, so a larger card is named."""
    plan = planned(weights="iq1_s", prompt=100_000, context=120_000)
    assert {*fitting(plan)} <= {"cache", "more_cards", "on_host"}
    assert plan.smallest.weights == "iq1_s"
    assert plan.smallest.card_bytes > plan.smallest.needed_bytes > 12 * GIB
    assert planned(gpu=plan.smallest.card, weights="iq1_s", prompt=100_000, context=120_000).verdict == "fits"
    smaller = [card for card in catalogue().values() if (card.memory_bytes or 0) < plan.smallest.card_bytes]
    verdicts = {library.plan("llama-3.1-8b", card, weights="iq1_s", context=120_000, inference=True).verdict
                for card in smaller if card.kind == "cuda"}  # fmt: skip
    assert verdicts <= {"does_not_fit", "tight"}


def test_what_other_programs_use_is_not_free() -> None:
    shared = foretrain("plan", "qwen3-8b", "--inference", "--gpu", "4070", "--used-by-others", "12GB").stdout
    told = " ".join(shared.split())
    assert "only 393 MiB free" in told
    assert "room for it and the other programs is" in told
    assert (
        "the device has 11.56 GiB"
        in foretrain("plan", "qwen3-32b", "--inference", "--gpu", "4070", "--weights=bf16").stdout
    )
    assert foretrain("plan", "qwen3-8b", "--inference", "--gpu", "3060,3060", "--json").stdout.count('"asked"') == 1
    assert "auto" not in foretrain("plan", "qwen3-8b", "--inference", "--gpu", ",").stdout


def test_a_model_that_is_published_quantized_is_said_to_be() -> None:
    source = preset_source("qwen3-0.6b")
    Path("config.json").write_text(
        json.dumps({**source.config, "quantization_config": {"quant_method": "gptq", "bits": 4}})
    )
    assert [note.values["quantization"] for note in planned(str(Path.cwd())).notes] == ["gptq"]
    assert planned(str(Path.cwd()), weights="int4").notes == ()


def test_what_no_card_holds_is_said() -> None:
    words = ("plan", "llama-3.1-8b", "--inference", "--batch", "200000", "--prompt", "131072", "--context", "131072")
    screen = foretrain(*words, "--gpu", "4070")
    assert "change" in screen.stdout
    assert "--batch" not in screen.stdout.split("change")[1]
    assert "more than any card" in " ".join(screen.stdout.split())
    on_cpu = planned(gpu="cpu", context=2**24, prompt=2**24)
    assert on_cpu.smallest.card == ""


def test_speed_follows_what_is_read() -> None:
    short, long = (planned(weights="q4_0", gpu="4090", context=size).timing for size in (1024, 65_536))
    bf16 = planned(weights="bf16", gpu="4090").timing
    assert short.tokens_per_s > 1.5 * long.tokens_per_s
    assert short.tokens_per_s > 2 * bf16.tokens_per_s
    assert bf16.tokens_per_s < 1008e9 / 15.0e9  # the weights at the whole bandwidth
    assert planned(gpu="cpu", weights="q8_0").timing is None


MISSES = {  # an H100 with few bits; many texts in 16 bits; several with IQ3_XXS in 2024; whole requests on Turing
    "gg-15013-h100-7b-q4_0", "gg-15131-3090-8b-f16-16", "gg-24216-3090-1b-f16-64", "gg-8215-3090-8b-iq3_xxs-4",
    "gg-8215-3090-8b-iq3_xxs-8", "gg-8215-4090-8b-iq3_xxs-2", "gg-8215-4090-8b-iq3_xxs-4", "llmfit-2080-qwen3-4b",
    "llmfit-2080-qwen3-8b", "llmfit-2080-llama-3.2-1b", "llmfit-2080-gemma-2-2b", "llmfit-2080-llama-3.2-3b",
    "llmfit-2080-phi-3.5-mini",
}  # fmt: skip


def test_held_out_published_speeds_are_met() -> None:
    """All within 15% but for those that are named, of both engines."""
    with inference_published.ROWS.open(encoding="utf-8", newline="") as file:
        rows = inference_published.compared(list(csv.DictReader(file)))
    assert len({row["id"] for row in rows}) == len(rows)
    assert {row["use"] for row in rows} == set(inference_published.USES)
    asked = [tuple(row[key] for key in ("gpu", "model", "weights", "batch", "prompt", "software")) for row in rows]
    tuned = {one for one, row in zip(asked, rows, strict=True) if row["use"] == "tune"}
    assert not any(one in tuned for one, row in zip(asked, rows, strict=True) if row["use"] == "held out")
    held = [row for row in rows if row["use"] == "held out" and "off" in row]
    near = [row for row in held if abs(row["off"]) <= 0.15]
    assert {row["id"] for row in held} - {row["id"] for row in near} == MISSES
    assert {row["engine"] for row in near} == {"llama.cpp", "pytorch"}
    assert len({row["gpu"] for row in near}) >= 10
    assert all(row["source"] and row["software"] for row in rows)
    assert all(find(row["gpu"]) for row in rows if "off" in row)
    written = json.loads((REPO / "benchmarks/results/inference_published.json").read_text("utf-8"))
    assert written["summary"] == inference_published.summary(rows)


def test_words_and_models() -> None:
    asked, _, _, left, _ = parse_inference(
        ["my.toml", "--context=32k", "--n_layer=2", "--weights", "Q4-K-M", "--batch", "1_0"]
    )
    assert (asked.context, asked.weights, asked.batch, left) == (32_768, "Q4-K-M", 10, ["my.toml", "--n_layer=2"])
    assert facts_to_generate(model_of_words(["gpt2-124m", "--n_layer=2"])).n_layer == 2
    assert library.plan({"n_layer": 3}, "RTX 4070", inference=True).facts.n_layer == 3
    assert planned(weights="fp16").asked.weights == "f16"
    assert planned(gpu="V100 SXM2 32GB").asked.weights == "f16"  # the published bf16, which this card has not
    assert planned("gpt2", context=4096).notes[0].id == "inference_beyond"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--weights", "q9"], "q9"), (["--kv", "x"], "q8_0"), (["--context", "-1"], "from 0 to"), (["--batch", "many"], "many"),
        (["--context"], "--context"), (["--engine", "vllm"], "llama.cpp"), (["--context", "9" * 30], "134,217,728"),
        (["--weights", "q4_0", "--engine", "pytorch"], "llama.cpp"), (["--prompt", "9000"], "9,000"),
        (["--n_layer=3"], "--n_layer=3"), (["--exact"], "--exact"), (["--within", "3h"], "--within"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_is_one_sentence(words: list[str], said: str) -> None:
    result = foretrain("plan", "llama-3.1-8b", "--inference", "--gpu", "4070", *words, code=2)
    assert said in result.stderr
    assert ("foretrain.error/1" in result.stdout) == ("--json" in words)


def test_a_name_that_is_nothing_and_a_file_of_weights_are_told() -> None:
    with pytest.raises(UserError, match=r"did you mean .*llama-3\.1-8b"):
        planned("llama-3.1-70b")
    Path("model.gguf").write_bytes(b"GGUF")
    told = foretrain("plan", "model.gguf", "--inference", "--gpu", "4070", code=2)
    assert "config.json" in told.stderr
    assert "rename" not in told.stderr


def test_a_folder_and_a_run_are_models_too() -> None:
    folder = Path("model")
    folder.mkdir()
    source = preset_source("qwen3-0.6b")
    (folder / "config.json").write_text(json.dumps(source.config), "utf-8")
    made, preset = planned("model"), planned("qwen3-0.6b")
    assert (made.name, made.where) == ("model", "model/config.json")
    assert (made.memory, made.timing) == (preset.memory, preset.timing)
    (folder / "config.json").write_text('{"model_type": "qwen3", "hidden_size": -3}', "utf-8")
    foretrain("plan", "model", "--inference", "--gpu", "4070", code=2, says="hidden_size")
    Path("run").mkdir()
    Path("run/run.json").write_text("{}", "utf-8")
    assert foretrain("plan", "run", "--inference", "--gpu", "4070").returncode == 7
    assert foretrain("plan", "nowhere/", "--inference", "--gpu", "4070").returncode == 2
    assert foretrain("plan", "baby", "--inference", "--gpu", "4070", "--n_layer=2").returncode == 0


def test_unknown_families_and_cards() -> None:
    source = ModelSource(name="x", where="x", config={"model_type": "nosuch"}, facts=None)
    with pytest.raises(UserError, match="nosuch"):
        facts_to_generate(source)
    assert planned(gpu="Apple M1 Max").timing is None
    with pytest.raises(UserError, match="contex"):
        planned(contex=3)


# -- the command -------------------------------------------------------------------------------------------------


SCREENS = [
    ("--weights", "q4_k_m", "--context", "16k"), ("--weights", "bf16"), ("--batch", "4"), ("--context", "99k"),
    ("--context", "128k", "--prompt", "128k"),
]  # fmt: skip


@pytest.mark.parametrize("words", SCREENS)
def test_the_first_screen_is_short(words: tuple[str, ...]) -> None:
    first_screen("plan", "llama-3.1-8b", "--inference", "--gpu", "4070", *words, most_lines=12)


@pytest.mark.parametrize("lang", ["ar", "hi"])
def test_it_is_short_in_other_languages(lang: str) -> None:
    for words in SCREENS:
        found = foretrain("plan", "llama-3.1-8b", "--inference", "--gpu", "4070", *words, "--lang", lang, code=0)
        assert 4 <= len(found.stdout.splitlines()) <= 12


def test_forms_and_exit_codes() -> None:
    words = ("plan", "llama-3.1-8b", "--inference", "--gpu", "4070", "--weights")
    screen = foretrain(*words, "bf16")
    assert "Does not fit" in screen.stdout
    assert "--weights q8_0 *: fits" in screen.stdout
    assert foretrain(*words, "bf16", "--check").returncode == 3
    assert foretrain(*words, "q4_k_m", "--check").returncode == 0
    line = foretrain(*words, "q4_k_m", "--oneline")
    assert len(line.stdout.splitlines()) == 1
    assert "tokens/s" in line.stdout
    full = foretrain(*words, "q4_k_m", "--full").stdout
    assert "1 · 32 · 4,096 · 2 · 8 · 128 · 16 / 8" in full
    several = json.loads(foretrain(*words[:3], "--gpu", "3060,4090", "--json").stdout)
    assert [plan["gpu"]["name"] for plan in several["plans"]] == ["RTX 3060 12GB", "RTX 4090"]
    found = json.loads(foretrain(*words, "q4_k_m", "--json").stdout)
    assert found["schema"] == "foretrain.plan/1"
    assert found["kind"] == "generation"
    assert found["timing"]["source"] == "estimated"
    assert found["longest_context"] * 32 * 2 * 8 * 128 * 2 < 12 * GIB


def test_printed_in_python_it_is_what_the_command_shows() -> None:
    made = planned(weights="q4_k_m")
    shown = foretrain("plan", "llama-3.1-8b", "--inference", "--gpu", "4070", "--weights", "q4_k_m", "--full").stdout
    assert str(made).split() == shown.split()
    assert "KV cache" in (made._repr_html_() or "")


def test_the_rent_of_a_million_tokens_is_that_of_their_hours() -> None:
    words = (
        "plan",
        "llama-3.1-8b",
        "--inference",
        "--weights",
        "q4_k_m",
        "--batch",
        "4",
        "--price",
        "4070=0.36,4090=0.72",
    )
    shown = json.loads(foretrain(*words, "--gpu", "4070,4090", "--json").stdout)["plans"]
    for plan, rent in zip(shown, (0.36, 0.72), strict=True):
        timing = plan["timing"]
        assert timing["rent_expected"] == pytest.approx(timing["step_s"]["expected_s"] / 3600 * rent)
        assert timing["step_s"]["low_s"] == pytest.approx(4 / timing["tokens_per_s_high"])
    hours = 1e6 / shown[0]["timing"]["tokens_per_s"] / 3600
    said = foretrain(*words[:-1], "0.36", "--gpu", "4070").stdout
    assert f"{0.36 * hours:.2f} EUR" in said.replace("\n", " ")
    assert "a million tokens" in " ".join(said.split())


def test_largest_batch_and_context_are_asked_as_in_training() -> None:
    words = ("plan", "llama-3.1-8b", "--inference", "--gpu", "4070", "--weights", "q4_k_m")
    plan = planned(weights="q4_k_m")
    for option, largest in (("batch", plan.largest_batch), ("context", plan.longest_context)):
        said = foretrain(*words, "--largest", option.replace("batch", "batch_size")).stdout
        assert f"{option} = {largest:,} is the largest that fits" in said
    assert json.loads(foretrain(*words, "--largest", "batch", "--json").stdout)["value"] == plan.largest_batch
    wrong = foretrain(*words, "--largest", "n_layer")
    assert (wrong.returncode, "give `batch` or `context`" in wrong.stderr) == (2, True)


@pytest.mark.parametrize(("words", "said"), [
    (("advise", "--inference", "--gpu", "4070"), "foretrain knows smollm2-135m"),
    (("plan", "qwen3-8b", "--inference", "--gpu", "2 x 3090"), "--gpus '2 x 3090'"),
    (("advise", "qwen3-8b", "--inference", "--gpu", "4070", "--exact"), "--exact"),
])  # fmt: skip
def test_what_is_refused_says_what_works(words: tuple[str, ...], said: str) -> None:
    foretrain(*words, code=2, says=said)


def test_the_next_command_is_whole() -> None:
    shown = foretrain(
        "plan", "qwen3-32b", "--inference", "--gpu", "4090", "--weights", "bf16", "--context", "8k"
    ).stdout
    command = shown.partition("next")[2].partition("note")[0].replace("\\\n", " ").split("'")
    words = [*command[0].split(), *command[1:2]]
    assert words[:4] == ["foretrain", "plan", "qwen3-32b", "--inference"]
    again = json.loads(foretrain(*words[1:], "--json").stdout)
    assert (again["verdict"], again["asked"]["context"]) == ("fits", 8192)


def test_what_nvidia_smi_shows_is_explained() -> None:
    words = ("plan", "qwen3-0.6b", "--inference", "--gpu", "4090")
    found = json.loads(foretrain(*words, "--explain", "--observed", "3GiB", "--json").stdout)
    made = json.loads(foretrain(*words, "--json").stdout)
    (phase,) = found["phases"]
    assert sum(each["size_bytes"] for each in phase["sums"]) == phase["memory"]["allocated_bytes"]
    process = next(line for line in found["lines"] if line["id"] == "process")
    assert process["low_bytes"] <= made["needed_bytes"] <= process["high_bytes"]
    assert "KV cache" in foretrain(*words, "--explain").stdout
    refused = foretrain(*words, "--observed", "3GiB")
    assert (refused.returncode, "--explain" in refused.stderr) == (2, True)


def test_options_of_generating_text_say_where_they_come_from() -> None:
    words = ("llama-3.2-1b", "--inference", "--ctx", "8k", "--gpus", "2 x 3060")
    shown = json.loads(foretrain("plan", *words, "--show-config", "--json").stdout)
    assert (shown["config"]["context"], shown["config"]["world"]) == (8192, 2)
    assert (shown["sources"]["context"], shown["sources"]["kv"]) == ("--ctx", "default")


def test_report_of_generating_text_has_the_figures_of_plan(tmp_path: Path) -> None:
    words = ("llama-3.2-1b", "--inference", "--context=8k")
    foretrain("report", *words, "--gpu", "3060", "--out", str(tmp_path / "text.html"))
    plan = json.loads(foretrain("plan", *words, "--gpu", "3060", "--json").stdout)
    assert f"{plan['needed_bytes'] / 2**30:.2f} GiB" in (tmp_path / "text.html").read_text("utf-8")
    refused = foretrain("report", *words, "--gpu", "3060", "--exact", "--out", str(tmp_path / "traced.html"))
    assert (refused.returncode, "--exact is about training" in refused.stderr) == (2, True)


def test_the_model_that_a_trainers_file_names_generates_text(tmp_path: Path) -> None:
    file = tmp_path / "train.yaml"
    file.write_text("base_model: Qwen/Qwen3-0.6B\nadapter: lora\nmicro_batch_size: 1\nsequence_len: 512\n")
    assert library.plan(file, "RTX 4070", inference=True).name == "qwen3-0.6b"
