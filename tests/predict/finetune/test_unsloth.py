"""Plans with unsloth's functions: against a package of the test's own that trains with real values on a CPU, and against
traces of the Trainer with them. unsloth itself needs a card."""

from pathlib import Path
from typing import Any

import pytest
import torch

from foretrain.config.finetune.options import FineTune
from foretrain.config.hub.facts import UNSLOTH_FAMILIES, table_rows
from foretrain.config.hub.families import FAMILIES as OURS
from foretrain.config.hub.source import find_source
from foretrain.hardware.catalogue import find_gpu
from foretrain.model.hub.unsloth_loss import chunk_rows, tile
from foretrain.predict.finetune.plan import plan

pytest.importorskip("transformers", minversion="5")
pytest.importorskip("accelerate")
pytest.importorskip("peft")

import peft
import transformers

import foretrain as library
from tests.kit import finetune_traces as estimates
from tests.kit import unsloth
from tests.kit.finetune import planned, small
from tests.kit.trainers import assert_forecast_of, explained, learned, trainer_of

# peft asks for names that transformers 5.23 calls old.
pytestmark = pytest.mark.filterwarnings("ignore:.*checkpointing. is deprecated:FutureWarning")

CONFIGS: dict[str, dict[str, Any]] = {
    **{name: estimates.CONFIGS[name] for name in ("llama", "llama tied", "qwen2", "qwen3", "mistral")},
    "gemma": {"model_type": "gemma", "head_dim": 32, **estimates.LLAMA},
}
PROJECTIONS = [f"{part}_proj" for part in ("q", "k", "v", "o", "gate", "up", "down")]


def built(name: str, **changes: Any) -> Any:
    config = {**CONFIGS[name], "num_hidden_layers": 4, "pad_token_id": 0, **changes}
    torch.manual_seed(0)
    made = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    return transformers.AutoModelForCausalLM.from_config(made, attn_implementation="sdpa")


def with_adapters(model: Any) -> Any:
    """Adapters whose B is not zero, so that each of them has gradients."""
    found = peft.get_peft_model(
        model, peft.LoraConfig(r=8, lora_alpha=12, target_modules=PROJECTIONS, task_type="CAUSAL_LM")
    )
    generator = torch.Generator().manual_seed(2)
    for parameter_name, parameter in found.named_parameters():
        if "lora_B" in parameter_name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
    return found


QUICK = ("llama", "qwen3")


@pytest.mark.parametrize("adapters", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CONFIGS])
def test_the_package_of_the_test_trains_as_transformers_does(name: str, adapters: bool) -> None:
    """So that what it keeps and writes over is all that a step needs."""
    plain, fast = (with_adapters(built(name)) if adapters else built(name) for _ in range(2))
    loss, grads = learned(plain.train())
    unsloth.apply(fast, fused_adapters=True)
    own_loss, own = learned(fast.train())
    torch.testing.assert_close(own_loss, loss, rtol=1e-5, atol=1e-6)
    assert own.keys() == grads.keys()
    for key, grad in grads.items():
        torch.testing.assert_close(own[key], grad, rtol=1e-3, atol=1e-5)


def assert_forecast(name: str, folder: Path, *, adapters: bool = True, to_host: bool = False, **changes: Any) -> None:
    """What PyTorch's own allocator did in transformers' Trainer, within 0.3% in each phase."""
    length = changes.pop("length", 64)
    model = built(name, **changes.pop("sizes", {})).to(torch.bfloat16)
    model = with_adapters(model) if adapters else model
    unsloth.apply(model, fused_adapters=True, checkpoints="unsloth" if to_host else "")
    callback = library.ForetrainCallback(quiet=True)
    if to_host:
        changes |= {"gradient_checkpointing": True}
        with unsloth.checkpoints_on_the_host():
            trainer_of(model, folder / "run", callback, length=length, **changes).train()
    else:
        trainer_of(model, folder / "run", callback, length=length, **changes).train()
    assert_forecast_of(explained(folder / "run" / "foretrain"), "first_step", "steady_step", "evaluate")


def test_memory_of_a_real_trainer_with_unsloth_is_forecast(tmp_path: Path) -> None:
    assert_forecast("llama", tmp_path)


# Wide where tokens have to be few: ids, of which the Trainer reads a batch ahead, and states of random numbers, which
# checkpoints keep, are on a CPU, too.
WIDE = {"hidden_size": 1024, "intermediate_size": 1536, "max_position_embeddings": 1024}
WAYS: dict[str, dict[str, Any]] = {
    "full": {"adapters": False}, "full, checkpointing": {"adapters": False, "gradient_checkpointing": True},
    "lora": {}, "lora, checkpointing": {"gradient_checkpointing": True, "sizes": WIDE},
    "lora, on the host": {
        "to_host": True, "length": 512, "per_device_train_batch_size": 3, "per_device_eval_batch_size": 1, "sizes": WIDE,
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CONFIGS)
def test_of_every_family_and_way(name: str, way: str, tmp_path: Path) -> None:
    assert_forecast(name, tmp_path, **WAYS[way])


# -- against traces of a card ------------------------------------------------------------------------------


def agree(name: str, **options: Any) -> None:
    config = estimates.built_config_of({**CONFIGS[name], **options.pop("sizes", {})})
    given = {"method": "lora", "amp": "bf16", "unsloth": True, **options}
    estimates.agree_in_all_phases(config, **given)


def test_the_estimate_is_that_of_a_trace_with_these_functions() -> None:
    agree("llama")


CARD_WAYS: dict[str, dict[str, Any]] = {
    "full": {"method": "full"}, "full, checkpointing": {"method": "full", "gradient_checkpointing": True}, "lora": {},
    "lora, checkpointing": {"gradient_checkpointing": True}, "qlora": {"method": "qlora"},
    "qlora, checkpointing": {"method": "qlora", "gradient_checkpointing": True},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("way", CARD_WAYS)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_agrees_with_its_trace(name: str, way: str) -> None:
    agree(name, **CARD_WAYS[way])


LARGE_HEAD = {"vocab_size": 50_000, "num_hidden_layers": 2}
# Of so many tokens ids count in a small model, of which the Trainer reads a batch ahead: in the steps it is there anyway.
ON_THE_HOST = {"gradient_checkpointing": True, "offload_checkpoints": True, "seq_len": 1024, "batch_size": 8,
               "only": ("first_step", "steady_step")}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("options", [
    {"lora_dropout": 0.1}, {"method": "dora"}, {"lora_targets": "q_proj,v_proj"}, {"padded": True}, {"attn": "eager"},
    {"dtype": "float32"}, {"amp": "no"}, {"gradient_checkpointing": True, "reentrant": True}, {"grad_accum": 3},
    {"method": "qlora", "double_quant": False}, {"batch_size": 3, "seq_len": 100}, {"sizes": LARGE_HEAD},
    {"sizes": LARGE_HEAD, "method": "full"},
    ON_THE_HOST, {**ON_THE_HOST, "method": "qlora", "grad_accum": 2}, {**ON_THE_HOST, "method": "full"},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_every_option_agrees_with_its_trace(name: str, options: dict[str, Any]) -> None:
    agree(name, **options)


# -- plans -------------------------------------------------------------------------------------------------


def a_plan(name: str = "llama-3.2-1b", **options: Any) -> Any:
    return plan(find_source(name), FineTune.model_validate({"unsloth": True, **options}), find_gpu("RTX 4090"))


def noted(found: Any) -> dict[str, Any]:
    return {note.id: note.values for note in found.notes}


def test_a_plan_names_the_functions_that_it_is_with() -> None:
    assert noted(a_plan(method="lora"))["finetune_unsloth"]["functions"] == (
        "Fast_RMS_Layernorm, Fast_RoPE_Embedding_QK_Positions, LoRA_QKV, LoRA_W, LoRA_MLP, fused_linear_cross_entropy"
    )
    biased = noted(a_plan("qwen2.5-0.5b", method="lora"))
    assert "LoRA_QKV" not in biased["finetune_unsloth"]["functions"]
    assert "finetune_unsloth_peft" in biased
    full = noted(a_plan(method="full"))
    assert full["finetune_unsloth"]["functions"] == "fused_linear_cross_entropy"
    assert "finetune_unsloth_compiled" in full
    assert "finetune_unsloth_host" not in full
    host = a_plan(method="lora", gradient_checkpointing=True, offload_checkpoints=True)
    assert "finetune_unsloth_host" in noted(host)


def test_its_loop_has_its_functions() -> None:
    by_loop, by_option = a_plan(method="qlora", unsloth=False, loop="unsloth"), a_plan(method="qlora")
    assert by_loop.memory == by_option.memory
    assert by_loop.tune.unsloth


def test_xformers_keeps_no_scores_before_flash_attention() -> None:
    asked = FineTune(method="qlora", unsloth=True, gradient_checkpointing=True, batch_size=2)
    needs = [
        plan(find_source("llama-3.1-8b"), asked.model_copy(update={"seq_len": length}), find_gpu("T4")).needed_bytes
        for length in (1024, 2048, 4096)
    ]
    assert needs[2] - needs[1] < 2.2 * (needs[1] - needs[0])  # with scores of T x T it is four times as much


def test_of_another_family_only_the_loss_is_unsloths() -> None:
    without, asked = (a_plan("smollm3-3b", method="lora", amp="bf16", unsloth=given) for given in (False, True))
    logits_bytes = 8 * 1024 * 128_256 * 4
    assert asked.needed_bytes < without.needed_bytes - logits_bytes
    assert noted(asked)["finetune_unsloth"]["functions"] == "fused_linear_cross_entropy"
    assert noted(asked)["finetune_unsloth_compiled"]["model"] == "smollm3"


@pytest.mark.parametrize("name", ["smollm3-3b", "gemma-3-1b"])
def test_another_family_agrees_with_its_trace(name: str) -> None:
    config = estimates.built_config_of(small(name))
    estimates.agree_in_all_phases(config, method="lora", amp="bf16", unsloth=True)


def test_qlora_leaves_what_is_not_in_4_bits_as_it_is() -> None:
    rows = {
        given: {row.id: row.size_bytes for row in a_plan(method="qlora", unsloth=given).memory.worst.components}
        for given in (False, True)
    }
    assert rows[True]["weights"] < rows[False]["weights"]


def test_liger_is_not_put_beside_it() -> None:
    both = a_plan(method="lora", liger=True)
    assert both.memory == a_plan(method="lora").memory
    assert noted(both)["finetune_liger_none"]["what"] == "unsloth"
    assert planned(a_plan(method="lora", batch_size=64), ("liger",)) is None


def test_chunks_and_tiles_are_those_of_unsloth() -> None:
    """fused_linear_rows and _tiled_layout of unsloth_zoo 2026.10.9, with 2 GiB free for logits, called by hand."""
    assert chunk_rows(8190, 4096, 128_256, 4) == 512
    assert chunk_rows(16_380, 4096, 32_000, 4) == 2048
    assert chunk_rows(100, 4096, 32_000, 2) == 100
    assert tile(8190, 128_256, small=True) == (4096, 16_384)
    assert tile(1000, 128_256, small=False) == (1000, 65_536)


def test_tables_have_rows_for_the_positions_that_they_are_for() -> None:
    assert [table_rows(*each) for each in ((131_072, 2048), (8192, 2048), (131_072, 40_000))] == [32_768, 8192, 40_960]


def test_every_family_that_has_functions_is_one_of_ours() -> None:
    assert {*UNSLOTH_FAMILIES} < {*OURS}
    assert {config["model_type"] for config in CONFIGS.values()} == {*UNSLOTH_FAMILIES}
