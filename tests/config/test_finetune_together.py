"""Options of a fine-tuning run that contradict each other or do nothing: refused where typed, said of a file.

Compared with the plan itself: what is refused as doing nothing changes no byte of it.
"""

import json
from pathlib import Path
from typing import Any

import pytest

import foretrain as library
from foretrain.base.errors import ExitCode, UserError
from foretrain.config.finetune.options import FineTune
from foretrain.config.finetune.read import read_finetune
from foretrain.config.finetune.together import idle
from foretrain.config.finetune.words import parse_words
from foretrain.config.hub.source import text_source
from foretrain.config.inference import parse_inference
from foretrain.hardware.catalogue import catalogue
from foretrain.predict.finetune.plan import FineTunePlan, plan
from foretrain.predict.finetune.program import has_flash_2
from foretrain.predict.finetuning import of_plan
from foretrain.predict.largest import largest
from foretrain.web.form import Form, line_of
from tests.kit.command import first_screen, foretrain

MODEL = "qwen3-0.6b"
SMALL = {"seq_len": 64, "batch_size": 1}
# (words, the end of the id of the sentence)
REFUSED = [
    ("--method full --lora-r 8", "finetune_idle.adapter"),
    ("--lora-targets q_proj", "finetune_idle.adapter"),
    ("--method full --lora-dropout 0.1", "finetune_idle.adapter"),
    ("--method full --modules-to-save lm_head", "finetune_idle.adapter"),
    ("--method lora --double-quant", "finetune_idle.four_bit"),
    ("--method lora --gradient-checkpointing --offload-checkpoints", "finetune_idle.unsloth"),
    ("--method lora --unsloth --offload-checkpoints --gradient-checkpointing=false", "finetune_idle.checkpointing"),
    ("--method lora --reentrant --gradient-checkpointing=false", "finetune_idle.checkpointing"),
    ("--method lora --packing --padded", "finetune_idle.packing"),
    ("--method lora --eval-batch-size 4", "finetune_idle.evaluate"),
    ("--method lora --keeps-logits", "finetune_idle.evaluate"),
    ("--method lora --evaluate --eval-accumulation-steps 2", "finetune_idle.logits"),
    ("--method lora --max-steps 100 --epochs 2", "finetune_idle.max_steps"),
    ("--method full --merge", "finetune_idle.adapter"),
    ("--method lora --merge --world 2 --strategy fsdp", "finetune_idle.sharded"),
    ("--method lora --epochs 0", "finetune_no_epochs"),
    ("--method lora --unsloth --attn eager", "unsloth_eager"),
    ("--method lora --loop unsloth --unsloth=false", "unsloth_loop"),
    ("--method lora --loop unsloth --no-unsloth", "unsloth_loop"),
    ("--method lora --loop torchtune --unsloth", "unsloth_torchtune"),
    ("--qlora --load-in-4bit=false", "finetune_switch_off"),
    ("--load-in-4bit=false", "finetune_switch_off"),
]


@pytest.mark.parametrize(("words", "id"), REFUSED)
def test_what_contradicts_or_does_nothing_is_refused(words: str, id: str) -> None:
    with pytest.raises(UserError) as refused:
        read_finetune(MODEL, words.split())
    assert refused.value.id.endswith(f".{id}")
    assert refused.value.exit_code == ExitCode.USAGE
    assert "{" not in str(refused.value)


def test_what_is_refused_as_idle_changes_no_byte() -> None:
    """Each rule of `idle`, with a value beside the default: the plan is that of the default."""
    values: dict[str, Any] = {
        "lora_r": 4, "lora_targets": "q_proj", "lora_dropout": 0.5, "lora_saved": "lm_head", "reentrant": True,
        "offload_checkpoints": True, "eval_batch_size": 2, "eval_batches": 3, "keeps_logits": True,
        "eval_accumulation_steps": 2, "double_quant": True, "strategy": "fsdp", "labels": 3, "merge": True, "image_size": 448,
        "completion_len": 5, "num_generations": 2, "steps_per_generation": 4, "num_iterations": 2, "beta": 0.1,
        "vllm": "colocate", "vllm_memory": 0.5, "vllm_sleep": True,
    }  # fmt: skip
    source, _, _ = read_finetune(MODEL)
    card = catalogue()["RTX 4090"]
    base = FineTune.model_validate(SMALL)
    without = plan(source, base, card)
    tune = base.model_copy(update=values)
    assert set(values) == set(idle(tune))
    assert plan(source, tune, card).memory == without.memory
    for padded in (False, True):  # the mask of padding, which packed rows have not
        packed = FineTune.model_validate({**SMALL, "packing": True, "padded": padded})
        assert plan(source, packed, card).memory == without.memory


@pytest.mark.parametrize(("words", "option", "value", "twice"), [
    ("--method lora --lora-r 8", "lora_r", 8, False),
    ("--method lora --load-in-4bit", "method", "qlora", True),
    ("--load-in-4bit --method lora", "method", "lora", True),
    ("--load-in-4bit --qlora", "method", "qlora", False),
    ("--load-in-4bit --use-dora", "method", "dora", True),
    ("--method full --qlora", "method", "qlora", True),
    ("--method lora --load-in-4bit=false", "method", "lora", False),
    ("--bf16 --fp16", "amp", "fp16", True),
    ("--bf16 --bf16 false", "amp", "no", True),
    ("--fp16 --bf16=false", "amp", "fp16", False),
    ("--bf16=false --fp16", "amp", "fp16", False),
    ("--bf16=false", "amp", "no", False),
    ("--no-bf16", "amp", "no", False),
    ("--seq-len 512 --max-length 1024", "seq_len", 1024, True),
    ("--packing --no-packing --padded", "packing", False, True),
    ("--method lora --offload-checkpoints=false", "offload_checkpoints", False, False),
    ("--max-steps 0 --epochs 2", "epochs", 2, False),
    ("--method full --no-flash-attention", "attn", "sdpa", False),
])  # fmt: skip
def test_of_an_option_that_is_typed_twice_the_last_value_counts(
    words: str, option: str, value: object, twice: bool
) -> None:
    _, tune, reading = read_finetune(MODEL, words.split())
    assert getattr(tune, option) == value
    assert [note.values["key"] for note in reading.notes if note.id == "typed_twice"] == [option] * twice


def test_the_last_value_of_an_option_of_generating_text_counts() -> None:
    typed = parse_inference(["--context=4k", "--ctx", "8,192", "--kv=q8_0", "--kv=q8_0"])
    assert (typed.asked.context, typed.asked.kv) == (8192, "q8_0")
    assert [note.values for note in typed.notes] == [{"key": "context", "first": "--context", "source": "--ctx"}]


def test_valid_file_is_taken_and_its_idle_keys_are_named(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("base_model: NousResearch/Llama-3.2-1B\nsequence_len: 512\nmicro_batch_size: 1\nlora_r: 8\n")
    _, tune, reading = read_finetune(str(file), ["--model", "llama-3.2-1b"])
    assert tune.method == "full"
    notes = {note.id: note.values for note in reading.notes}
    assert notes["finetune_idle"]["keys"] == ["lora_r"]
    adapter = read_finetune(str(file), ["--model", "llama-3.2-1b", "--method", "lora"])
    assert adapter[1].lora_r == 8
    with pytest.raises(UserError, match="--lora-r"):  # typed over the file
        read_finetune(str(file), ["--model", "llama-3.2-1b", "--lora-r", "4"])


def test_unsloths_loop_runs_unsloths_functions_and_says_so() -> None:
    _, tune, reading = read_finetune(MODEL, ["--method", "lora", "--loop", "unsloth"])
    assert tune.unsloth
    assert reading.origins["unsloth"] == "--loop"


def test_flash_attention_2_runs_from_ampere_on() -> None:
    """flash-attn: "FlashAttention only supports Ampere GPUs or newer"."""
    older = {"Kepler", "Maxwell", "Pascal", "Volta", "Turing"}
    for gpu in catalogue().values():
        if gpu.kind == "cuda":
            assert has_flash_2(gpu) == (gpu.architecture not in older), gpu.name
    for name in ("T4", "V100 PCIe 16GB"):
        with pytest.raises(UserError, match="flash_attention_2"):
            library.plan(MODEL, name, method="lora", attn="flash_attention_2")


@pytest.mark.parametrize(("word", "said"), [
    ("--lora-targts", "--lora-targets"), ("--lora-alpha", "--lora-alpha"), ("--lora-aplha", "--lora-alpha"),
    ("--padding-free", "--padding-free"), ("--paddin-free", "--padding-free"), ("--learning-rate", "neither"),
])  # fmt: skip
def test_an_unknown_word_names_the_nearest_known_one(word: str, said: str) -> None:
    with pytest.raises(UserError) as refused:
        parse_words([word, "1"])
    assert said in str(refused.value).partition(" ")[2]


# -- longer than the model ----------------------------------------------------------------------------------------------


TINY: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
LLAMA = {"model_type": "llama", "vocab_size": 512, "max_position_embeddings": 256, **TINY}
GPT2 = {"model_type": "gpt2", "vocab_size": 512, "n_positions": 100, "n_embd": 64, "n_layer": 2, "n_head": 4}


def tiny(config: dict[str, Any], room: int = 20 * 2**30) -> FineTunePlan:
    source = text_source(json.dumps(config), "config.json", "tiny")
    card = catalogue()["RTX 4090"]
    return plan(source, FineTune(seq_len=64, batch_size=1), card, used_by_others_bytes=24 * 2**30 - room)


def test_the_largest_sequence_is_not_beyond_the_models_positions() -> None:
    learned, turned = (largest(of_plan(tiny(family)), "seq_len") for family in (GPT2, LLAMA))
    assert (learned.value, learned.searched_all, learned.beyond) == (100, True, None)
    assert (turned.value, turned.searched_all) == (256, True)
    assert turned.beyond.fits
    few = largest(of_plan(tiny(LLAMA | {"max_position_embeddings": 48})), "seq_len")
    assert (few.value, few.searched_all) == (48, True)
    full = largest(of_plan(tiny(LLAMA | {"max_position_embeddings": 10**6}, room=2**31)), "seq_len")
    assert not full.searched_all
    assert full.value
    assert full.value < full.beyond.value <= full.value + 64


def test_the_first_screen_says_what_is_beyond() -> None:
    words = ("smollm2-135m", "--method", "lora", "--batch-size", "1", "--gpu", "RTX 4090")
    said = first_screen("plan", *words, "--seq-len", "9000", most_lines=14).stdout
    assert "8,192 positions" in " ".join(said.split())
    assert "positions" not in first_screen("plan", *words, "--seq-len", "8192", most_lines=14).stdout
    said = " ".join(foretrain("plan", "gpt2", *words[1:], "--largest", "seq_len").stdout.split())
    assert "seq_len = 1,024 fits" in said
    assert "1,024 positions" in said


def test_the_pages_command_has_no_option_that_does_nothing() -> None:
    form = Form(kind="fine-tuning", model=MODEL, values={"method": "full", "lora_r": 8, "seq_len": 64})
    words = line_of(form).command().split()
    assert "--seq_len=64" in words
    assert not [word for word in words if "lora" in word]
