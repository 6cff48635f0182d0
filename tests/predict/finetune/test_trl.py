"""Plans of TRL's SFTTrainer: its loss by values against TRL's own function, its memory against traces of it and, through
the callback, against runs of it on a CPU."""

from pathlib import Path
from typing import Any

import pytest
import torch

from foretrain.config.finetune.options import FineTune
from foretrain.config.finetune.read import read_finetune
from foretrain.config.hub.source import find_source
from foretrain.hardware.catalogue import find_gpu
from foretrain.model.hub.experts import balance
from foretrain.model.hub.tiles import TiledLoss, Turn
from foretrain.predict.finetune.plan import plan
from foretrain.predict.finetune.time import StepWork
from foretrain.predict.speed.ops import flops

pytest.importorskip("trl", minversion="1.16")
pytest.importorskip("peft")

import datasets
import peft
import tokenizers
import transformers
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from trl.kernels import ChunkedLogProbFunction
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

import foretrain as library
from foretrain.model.hub import tiles
from tests.kit.finetune_traces import CONFIGS, agree_in_all_phases, built_config, built_config_of
from tests.kit.trainers import BATCH, LENGTH, SIZES, Samples, assert_forecast_of, explained, llama

# peft asks for names that transformers 5.23 calls old.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*checkpointing. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning"),
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning"),
]


@pytest.fixture(autouse=True)
def _quiet() -> None:
    transformers.utils.logging.set_verbosity_error()


# -- values ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("turn", [Turn(), Turn(0.125), Turn(1.0, 5.0)], ids=str)
def test_the_loss_is_trls(turn: Turn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss, entropy, likeliest words and gradients, over several tiles of tokens and of words, a bias among them."""
    monkeypatch.setattr(tiles, "TOKENS", 20)
    monkeypatch.setattr(tiles, "WORDS", 32)
    made = torch.Generator().manual_seed(1)
    parts = [torch.randn(shape, generator=made) for shape in ((2, 24, 16), (100, 16), (100,))]
    labels = torch.randint(100, (2, 24), generator=made)
    labels[0, :5] = -100
    ours, theirs = ([part.clone().requires_grad_() for part in parts] for _ in range(2))
    loss, entropy, likeliest = TiledLoss()(*ours, labels, turn)
    loss.backward()
    states, weight, bias = theirs
    mask = labels[:, 1:] != -100
    found = ChunkedLogProbFunction.apply(
        states[:, :-1][mask], weight, bias, labels[:, 1:][mask], 1.0, 32, turn.softcap or None, turn.scale,
        ("log_probs", "entropy", "is_top1"),
    )  # fmt: skip
    expected = -found[0].mean()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(entropy[mask], found[1].detach())
    assert torch.equal(likeliest[mask], found[4])
    for own, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own.grad, their.grad)


@pytest.mark.parametrize("masked", [False, True])
def test_the_loss_that_balances_experts_is_transformers(masked: bool) -> None:
    made = torch.Generator().manual_seed(1)
    logits = [torch.randn((30, 6), generator=made) for _ in range(3)]
    mask = (torch.arange(30) % 7 > 0).long() if masked else None
    ours, theirs = ([each.clone().requires_grad_() for each in logits] for _ in range(2))
    found = balance(ours, 2, None if mask is None else mask.float())
    expected = load_balancing_loss_func(tuple(theirs), 6, 2, None if mask is None else mask.view(2, 15))
    assert isinstance(expected, torch.Tensor)
    for loss in (found, expected):
        loss.backward()
    torch.testing.assert_close(found, expected)
    for own, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own.grad, their.grad)


# -- against the real allocator ----------------------------------------------------------------------------


def a_tokenizer() -> Any:
    words = tokenizers.models.WordLevel({str(i): i for i in range(SIZES["vocab_size"])}, unk_token="0")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(words), pad_token="0", eos_token="1"
    )


def assert_forecast(model: Any, folder: Path, *, lora: bool = False, **changes: Any) -> None:
    """What PyTorch's own allocator did in TRL's SFTTrainer, within 0.3% in each phase."""
    parts = {"seq_lengths": [LENGTH // 2] * 2} if changes.get("packing") else {}
    rows = [{"input_ids": Samples(32)[i]["input_ids"].tolist(), **parts} for i in range(32)]
    given = {
        "max_steps": 3, "per_device_train_batch_size": BATCH, "per_device_eval_batch_size": BATCH, "use_cpu": True,
        "report_to": [], "disable_tqdm": True, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "no",
        "max_length": LENGTH, "bf16": False, "gradient_checkpointing": False,
        "dataset_kwargs": {"skip_prepare_dataset": True},
    }  # fmt: skip
    modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    if hasattr(model.config, "num_local_experts"):
        modules = modules[:4]
    adapter = peft.LoraConfig(r=8, target_modules=modules, task_type="CAUSAL_LM") if lora else None
    trainer = SFTTrainer(
        model=model, args=SFTConfig(output_dir=str(folder), **{**given, **changes}),
        train_dataset=datasets.Dataset.from_list(rows), eval_dataset=datasets.Dataset.from_list(rows[:8]),
        processing_class=a_tokenizer(), peft_config=adapter, callbacks=[library.ForetrainCallback(quiet=True)],
    )  # fmt: skip
    trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
    trainer.train()
    found = explained(folder / "foretrain")
    assert found.forecast is not None, found.record.forecast_problem
    assert found.forecast.tune.loop == "trl"
    assert_forecast_of(found, "load", "first_step", "steady_step", "evaluate")


def test_the_memory_of_a_real_run_is_forecast(tmp_path: Path) -> None:
    assert_forecast(llama(), tmp_path)


REAL: dict[str, dict[str, Any]] = {
    "checkpointing": {"gradient_checkpointing": True}, "more words than a tile": {"vocab_size": 40_000},
    "lora": {"lora": True}, "bf16": {"half": True}, "tied": {"tie_word_embeddings": True},
    "lora, bf16, checkpointing": {"lora": True, "half": True, "gradient_checkpointing": True},
    "accumulated": {"gradient_accumulation_steps": 2}, "packed": {"packing": True},
    "packed, lora, checkpointing": {"packing": True, "lora": True, "gradient_checkpointing": True},
    "without padding": {"padding_free": True, "max_length": None},
}  # fmt: skip
OF_THE_MODEL = ("vocab_size", "tie_word_embeddings")


@pytest.mark.slow
@pytest.mark.parametrize("way", REAL)
def test_the_memory_of_other_real_runs_is_forecast(way: str, tmp_path: Path) -> None:
    changes = dict(REAL[way])
    model = llama(**{key: changes.pop(key) for key in OF_THE_MODEL if key in changes})
    if changes.pop("half", False):
        model.to(torch.bfloat16)
    assert_forecast(model, tmp_path, **changes)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"lora": True, "gradient_checkpointing": True}], ids=str)
def test_the_memory_of_a_real_mixture_is_forecast(changes: dict[str, Any], tmp_path: Path) -> None:
    config = {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}
    assert_forecast(transformers.MixtralForCausalLM(transformers.MixtralConfig(**config)), tmp_path, **changes)


# -- against traces of a card ------------------------------------------------------------------------------


def agree(config: dict[str, Any], **options: Any) -> None:
    if options.get("method") == "qlora":
        pytest.importorskip("bitsandbytes")
    agree_in_all_phases(config, loop="trl", **options)


def test_the_estimate_is_that_of_a_trace() -> None:
    small = {**built_config("llama"), "num_hidden_layers": 2}
    agree(small, method="qlora", amp="bf16", gradient_checkpointing=True)


WAYS: dict[str, dict[str, Any]] = {
    "full": {"amp": "bf16"}, "full, checkpointing": {"amp": "bf16", "gradient_checkpointing": True},
    "lora": {"method": "lora", "amp": "bf16"}, "qlora": {"method": "qlora", "amp": "bf16"},
    "lora, checkpointing": {"method": "lora", "amp": "bf16", "gradient_checkpointing": True},
    "qlora, checkpointing": {"method": "qlora", "amp": "bf16", "gradient_checkpointing": True},
    "packed": {"amp": "bf16", "packing": True},
    "packed, lora, checkpointing": {"method": "lora", "amp": "bf16", "packing": True, "gradient_checkpointing": True},
    "packed, qlora, checkpointing": {"method": "qlora", "amp": "bf16", "packing": True, "gradient_checkpointing": True},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_agrees_with_its_trace(name: str, way: str) -> None:
    agree(built_config(name), **WAYS[way])


MORE: tuple[dict[str, Any], ...] = (
    {}, {"method": "lora"}, {"method": "qlora"}, {"method": "dora"}, {"dtype": "float32"}, {"grad_accum": 3},
    {"dtype": "float32", "amp": "bf16"}, {"dtype": "float32", "amp": "bf16", "gradient_checkpointing": True},
    {"dtype": "float32", "amp": "bf16", "method": "qlora"}, {"dtype": "float32", "amp": "fp16", "seq_len": 100},
    {"keeps_logits": True}, {"keeps_logits": True, "amp": "bf16", "method": "qlora", "eval_batches": 5},
    {"liger": True}, {"liger": True, "method": "lora", "amp": "bf16"}, {"attn": "eager"}, {"padded": True},
    {"gradient_checkpointing": True, "reentrant": True}, {"packing": True}, {"packing": True, "attn": "eager"},
    {"packing": True, "method": "lora", "amp": "bf16"},
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("options", MORE, ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_every_option_agrees_with_its_trace(name: str, options: dict[str, Any]) -> None:
    agree(built_config(name), **options)


@pytest.mark.slow
@pytest.mark.parametrize("options", [
    {"amp": "bf16"}, {"amp": "bf16", "dtype": "float32"}, {"amp": "bf16", "method": "qlora"},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("name", ["llama", "gemma3", "phi"])
def test_several_tiles_agree_with_their_trace(name: str, options: dict[str, Any]) -> None:
    """More tokens than a tile has, and more words; Phi's head has a bias."""
    config = built_config_of({**CONFIGS[name], "vocab_size": 70_000})
    agree(config, batch_size=20, eval_batch_size=20, **options)


# -- plans -------------------------------------------------------------------------------------------------


def a_plan(name: str = "llama-3.2-1b", **options: Any) -> Any:
    given = {"loop": "trl", "batch_size": 4, "evaluate": True, **options}
    return plan(find_source(name), FineTune.model_validate(given), find_gpu("RTX 4090"))


def logits_of(found: Any, phase: str) -> int:
    return sum(row.size_bytes for row in found.memory.phase(phase).components if row.id == "logits")


def test_logits_are_no_larger_than_a_tile() -> None:
    found = a_plan("smollm2-135m", method="lora", gradient_checkpointing=True)
    assert logits_of(found, "first_step") == pytest.approx(2 * 4 * 1023 * tiles.WORDS, rel=0.001)
    assert logits_of(found, "evaluate") == 2 * tiles.TOKENS * tiles.WORDS  # of 8 x 1,023 tokens


def test_a_step_makes_the_products_of_the_head_once_more() -> None:
    source = find_source("llama-3.2-1b")
    tune = FineTune(dtype="bfloat16", batch_size=1)
    tiled, whole = (
        flops(StepWork(source.facts, tune.model_copy(update={"loop": loop}), find_gpu("RTX 4090")).micro)
        for loop in ("trl", "trainer")
    )
    product = 2 * source.facts.n_embd * source.facts.vocab_size  # of a token
    assert tiled == pytest.approx(whole + product * (4 * 1023 - 3 * 1024), rel=1e-9)


def test_qlora_widens_nothing() -> None:
    weights = {
        loop: {row.id: row.size_bytes for row in a_plan(method="qlora", loop=loop).memory.phase("save").components}
        for loop in ("trl", "trainer")
    }
    embedding = 128_256 * 2048
    assert weights["trainer"]["weights"] - weights["trl"]["weights"] == pytest.approx(2 * embedding, rel=0.001)
    assert weights["trainer"]["adapters"] == 2 * weights["trl"]["adapters"]


def test_what_a_file_of_trl_asks_for_is_planned(tmp_path: Path) -> None:
    path = tmp_path / "trl.yaml"
    lines = "model_name_or_path: llama-3.2-1b\nuse_peft: true\ndataset_name: x\ndtype: bfloat16\nmax_length: 512\n"

    def of(more: str) -> FineTune:
        path.write_text(lines + more)
        return read_finetune(str(path))[1]

    assert of("packing: true\n").joined
    assert of("padding_free: true\n").joined
    assert not of("packing: true\npacking_strategy: wrapped\n").joined
    assert not of("").joined


def test_a_plan_says_what_joined_rows_take() -> None:
    masked, flash = (
        a_plan(packing=True, attn=attn, method="lora", seq_len=512) for attn in ("sdpa", "flash_attention_2")
    )
    (note,) = (note for note in masked.notes if note.id == "packed_mask")
    assert note.values == {"tokens": 2048, "size": 2048**2}
    assert "packed_mask" not in [note.id for note in flash.notes]
    assert flash.needed_bytes < masked.needed_bytes - 16 * 2 * 2048**2  # what each layer makes of the mask
