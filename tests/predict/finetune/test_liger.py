"""Plans with Liger's kernels: against a package of the test's own that trains with real values on a CPU, and against
traces of the Trainer. Liger itself needs a card."""

from pathlib import Path
from typing import Any

import pytest
import torch

from foretrain.config.finetune.options import FineTune
from foretrain.config.hub.facts import LIGER_FAMILIES, liger_of
from foretrain.config.hub.families import FAMILIES as OURS
from foretrain.config.hub.source import find_source
from foretrain.hardware.catalogue import find_gpu
from foretrain.model.hub.liger import chunk_tokens
from foretrain.predict.finetune.plan import plan
from foretrain.predict.finetune.time import StepWork
from foretrain.predict.speed.ops import flops

pytest.importorskip("transformers", minversion="5")
pytest.importorskip("accelerate")
pytest.importorskip("peft")

import peft
import transformers

import foretrain as library
from tests.kit import finetune_traces as estimates
from tests.kit import liger
from tests.kit.finetune import planned
from tests.kit.trainers import assert_forecast_of, explained, learned, llama, trainer_of

# peft asks for names that transformers 5.23 calls old.
pytestmark = pytest.mark.filterwarnings("ignore:.*checkpointing. is deprecated:FutureWarning")

CONFIGS: dict[str, dict[str, Any]] = {
    **{name: estimates.CONFIGS[name] for name in (
        "llama", "llama tied", "qwen2", "qwen3", "mistral", "smollm3", "gemma3", "gemma3, short window", "phi3", "olmo2",
    )},
    "gemma": {"model_type": "gemma", "head_dim": 32, **estimates.LLAMA},
    "granite": {"model_type": "granite", "residual_multiplier": 0.5, "logits_scaling": 2.0, **estimates.LLAMA},
}  # fmt: skip


def built(name: str) -> Any:
    config = {**CONFIGS[name], "num_hidden_layers": 2, "pad_token_id": 0}
    for key in ("layer_types", "no_rope_layers"):
        if key in config:
            config[key] = config[key][-2:]
    torch.manual_seed(0)
    made = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    return transformers.AutoModelForCausalLM.from_config(made, attn_implementation="sdpa")


QUICK = ("llama", "gemma3", "phi3", "granite")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CONFIGS])
def test_the_package_of_the_test_trains_as_transformers_does(name: str) -> None:
    """So that what it keeps and writes over is all that a step needs."""
    loss, grads = learned(built(name).train())
    with liger.installed():
        model = built(name).train()
        liger.apply(model)
        own_loss, own = learned(model)
    torch.testing.assert_close(own_loss, loss, rtol=1e-5, atol=1e-6)
    assert own.keys() == grads.keys()
    for key, grad in grads.items():
        torch.testing.assert_close(own[key], grad, rtol=1e-3, atol=1e-5)


WAYS: dict[str, dict[str, Any]] = {
    "full": {}, "checkpointing": {"gradient_checkpointing": True}, "lora": {"method": "lora"},
    "lora, checkpointing": {"method": "lora", "gradient_checkpointing": True},
}  # fmt: skip


MODULES = [f"{part}_proj" for part in ("q", "k", "v", "qkv", "o", "gate", "up", "gate_up", "down")]


def assert_forecast_with_liger(model: Any, folder: Path, **changes: Any) -> None:
    """What PyTorch's own allocator did in transformers' Trainer, within 0.3% in each phase."""
    changes = dict(changes)
    if changes.pop("method", "full") == "lora":
        model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=MODULES, task_type="CAUSAL_LM"))
        if changes.get("gradient_checkpointing"):
            model.enable_input_require_grads()
    callback = library.ForetrainCallback(quiet=True)
    with liger.installed():
        trainer_of(model, folder / "run", callback, use_liger_kernel=True, **changes).train()
    assert_forecast_of(explained(folder / "run" / "foretrain"), "first_step", "steady_step", "evaluate")


def test_memory_of_a_real_trainer_with_liger_is_forecast(tmp_path: Path) -> None:
    assert_forecast_with_liger(llama(), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "name", [name for name in CONFIGS if "window" not in name]
)  # a CPU's mask is missed, with or without
def test_of_every_family_and_way(name: str, way: str, tmp_path: Path) -> None:
    assert_forecast_with_liger(built(name), tmp_path, **WAYS[way])


# -- against traces of a card ------------------------------------------------------------------------------


def agree(name: str, **options: Any) -> None:
    estimates.agree_in_all_phases(estimates.built_config_of(CONFIGS[name]), liger=True, **options)


def test_the_estimate_is_that_of_the_trainers_trace() -> None:
    agree("llama")


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_agrees_with_its_trace(name: str, way: str) -> None:
    agree(name, **WAYS[way])


@pytest.mark.slow
@pytest.mark.parametrize("options", [
    {"dtype": "float32"}, {"dtype": "float32", "amp": "bf16"}, {"dtype": "float32", "amp": "fp16"},
    {"grad_accum": 3, "dtype": "float32", "amp": "bf16"}, {"method": "qlora"}, {"method": "qlora", "amp": "bf16"},
    {"keeps_logits": True}, {"method": "dora"}, {"gradient_checkpointing": True, "reentrant": True},
    {"attn": "eager"}, {"batch_size": 3, "seq_len": 100},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_every_option_agrees_with_its_trace(name: str, options: dict[str, Any]) -> None:
    agree(name, **options)


# -- plans -------------------------------------------------------------------------------------------------


def a_plan(name: str = "llama-3.2-1b", **options: Any) -> Any:
    return plan(find_source(name), FineTune.model_validate(options), find_gpu("RTX 4090"))


def test_a_plan_names_the_kernels_that_it_is_with() -> None:
    found = {note.id: note.values for note in a_plan(liger=True).notes}
    assert found["finetune_liger"]["kernels"] == (
        "LigerRMSNormFunction, LigerSiLUMulFunction, LigerRopeFunction, LigerFusedLinearCrossEntropyFunction"
    )
    assert "LigerGELUMulFunction" in str(a_plan("gemma-3-270m", liger=True).notes)
    assert [note.id for note in a_plan(liger=True, loop="trl").notes][-1] == "finetune_liger_trl"
    assert not [note for note in a_plan().notes if "liger" in note.id]


@pytest.mark.parametrize(("name", "loop", "note"), [
    ("gpt2", "trainer", "none"), ("llama-3.2-1b", "torchtune", "none"), ("mixtral-8x7b", "trainer", "unknown"),
])  # fmt: skip
def test_without_known_kernels_a_run_is_what_it_is_without_liger(name: str, loop: str, note: str) -> None:
    without, asked = (a_plan(name, loop=loop, liger=liger, seq_len=256) for liger in (False, True))
    assert asked.memory == without.memory
    assert asked.timing == without.timing
    assert f"finetune_liger_{note}" in [each.id for each in asked.notes]
    assert planned(without, ("liger",)) is None


def test_advice_offers_liger_with_what_its_plan_says() -> None:
    found = a_plan(batch_size=8)
    assert found.verdict == "does_not_fit"
    change = planned(found, ("liger",))
    again = a_plan(batch_size=8, liger=True)
    assert (change.effect.verdict, change.effect.needed_bytes) == (again.verdict, again.needed_bytes)
    assert not change.learns_otherwise
    large = plan(find_source("qwen3-8b"), FineTune(seq_len=4096), find_gpu("A100 SXM4 80GB"))
    assert large.verdict == "does_not_fit"
    together = planned(large, ("checkpointing", "liger"))
    assert together.effect.verdict == "fits"


def test_a_chunk_has_as_many_tokens_as_liger_gives_it() -> None:
    """The example in its source (ops/fused_linear_cross_entropy.py), and tokens that a power of two does not divide."""
    assert chunk_tokens(4096 * 4, 4096, 32_000) == 2048
    assert chunk_tokens(300, 256, 1024) == 128
    assert chunk_tokens(1, 4096, 32_000) == 1


def test_evaluation_has_whole_logits_only_where_collected() -> None:
    options = {"liger": True, "evaluate": True, "eval_batches": 1}
    kept, not_kept = (
        {row.id: row.size_bytes for row in a_plan(keeps_logits=keeps, **options).memory.phase("evaluate").components}
        for keeps in (True, False)
    )
    whole = 2 * 8 * 1024 * 128_256
    assert kept["logits"] > whole
    assert not_kept.get("logits", 0) < whole / 10


def test_flops_are_those_of_the_same_products() -> None:
    """A head's three products, in chunks; what is fused around them counts nothing."""
    source = find_source("llama-3.2-1b")
    assert source.facts is not None
    for method in ("full", "lora"):
        tune = FineTune.model_validate({"method": method, "dtype": "bfloat16"})
        counted = [
            flops(StepWork(source.facts, tune.model_copy(update={"liger": liger}), find_gpu("RTX 4090")).micro)
            for liger in (False, True)
        ]
        assert counted[0] == counted[1]


def test_head_norms_are_replaced_by_axolotl_not_the_trainer() -> None:
    of = {loop: liger_of("qwen3", loop) for loop in ("trainer", "axolotl")}
    assert [own.heads for own in of.values() if own] == [False, True]
    needed = [a_plan("qwen3-0.6b", liger=True, loop=loop).needed_bytes for loop in of]
    assert needed[1] < needed[0]


def test_every_family_that_has_kernels_is_one_of_ours() -> None:
    assert {*LIGER_FAMILIES} < {*OURS}
    assert {config["model_type"] for config in CONFIGS.values()} == {*LIGER_FAMILIES} - {"gemma2", "gemma3", "olmo3"}
