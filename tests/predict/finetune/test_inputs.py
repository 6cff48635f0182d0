"""Models that are no decoder of text alone: what their rows are, and what they take beside the real run."""

import json
from pathlib import Path
from typing import Any

import pytest

from foretrain.config.finetune.options import FineTune, asked
from foretrain.config.hub.source import find_source
from tests.kit.command import foretrain
from tests.kit.finetune import source_of

pytest.importorskip("transformers", minversion="5")
pytest.importorskip("peft")
pytest.importorskip("PIL")

from foretrain.predict.trace.finetune.inputs import inputs_of
from tests.kit import finetune_proof as proof

ENCODER = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": 512, "max_position_embeddings": 128,
}  # fmt: skip
BOTH = {
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": 512, "decoder_start_token_id": 0,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
VIT = {**ENCODER, "model_type": "vit", "image_size": 64, "dtype": "bfloat16"}
MODELS: dict[str, dict[str, Any]] = {
    "bert": {**ENCODER, "model_type": "bert"},
    "t5": {
        "model_type": "t5", "d_model": 64, "d_ff": 128, "d_kv": 16, "num_layers": 2, "num_heads": 4, "vocab_size": 512,
        "decoder_start_token_id": 0,
    },
    "bart": {**BOTH, "model_type": "bart", "max_position_embeddings": 128},
    "led": {**BOTH, "model_type": "led", "attention_window": 48},  # which pads rows, and asks for the mask's values
    "vit": VIT,
    "whisper": {
        **BOTH, "model_type": "whisper", "max_target_positions": 128,
        "architectures": ["WhisperForConditionalGeneration"],
    },
}  # fmt: skip
WAV2VEC2 = {
    **ENCODER, "model_type": "wav2vec2", "architectures": ["Wav2Vec2ForCTC"], "vocab_size": 32, "conv_dim": [32] * 7,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
}  # fmt: skip
TEXT = ["input_ids", "attention_mask"]
ROWS = {
    "bert": [*TEXT, "token_type_ids"], "t5": [*TEXT, "decoder_input_ids"], "bart": [*TEXT, "decoder_input_ids"],
    "led": [*TEXT, "decoder_input_ids"],
    "vit": ["pixel_values"], "whisper": ["input_features"],
}  # fmt: skip


def tune_of(**options: Any) -> FineTune:
    return FineTune.model_validate({"batch_size": 2, "seq_len": 64, "optim": "adamw_torch", **options})


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("model_type", MODELS)
def test_trace_of_other_rows_takes_what_the_real_run_does(model_type: str, method: str) -> None:
    truth = proof.compare(MODELS[model_type], tune_of(method=method))
    assert abs(truth.traced_bytes - truth.real_bytes) <= 0.001 * truth.real_bytes


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"method": "full"}, {"method": "lora", "lora_targets": "q_proj,v_proj"}])
def test_trace_of_an_alignment_takes_what_the_real_run_does(options: dict[str, Any]) -> None:
    truth = proof.compare(WAV2VEC2, tune_of(**options))
    assert abs(truth.traced_bytes - truth.real_bytes) <= 0.001 * truth.real_bytes


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["bert", "vit"])
def test_trace_of_classes_takes_what_the_real_run_does(model_type: str) -> None:
    truth = proof.compare(MODELS[model_type], tune_of(method="lora", training="classification", labels=3))
    assert abs(truth.traced_bytes - truth.real_bytes) <= 0.001 * truth.real_bytes


@pytest.mark.parametrize("model_type", MODELS)
def test_rows_have_what_the_types_own_processor_makes(model_type: str) -> None:
    found = inputs_of(MODELS[model_type], tune_of())
    assert [word for word in found.facts()["rows"]["inputs"].replace(",", "").split() if "_" in word] == ROWS[
        model_type
    ]


def test_sound_is_as_long_as_whisper_makes_it() -> None:
    found = inputs_of({**MODELS["whisper"], "num_mel_bins": 128}, tune_of())
    assert found.fields["input_features"].shape == (1, 128, 3000)  # its paper: 30 seconds, 10 ms each


@pytest.mark.parametrize("name", ["preprocessor_config", "processor_config"])
def test_pictures_have_the_size_in_a_file_beside_config(tmp_path: Path, name: str) -> None:
    given: dict[str, Any] = {"size": {"height": 96, "width": 96}}
    (tmp_path / "config.json").write_text(json.dumps(VIT))
    (tmp_path / f"{name}.json").write_text(json.dumps({"image_processor": given} if name[3] == "c" else given))
    found = inputs_of(find_source(str(tmp_path)).config, tune_of())
    assert found.fields["pixel_values"].shape == (1, 3, 96, 96)


def test_broken_preprocessor_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(VIT))
    (tmp_path / "preprocessor_config.json").write_text("[")
    words = ("plan", str(tmp_path), "--method", "lora", "--gpu", "4090")
    assert "preprocessor_config.json" in foretrain(*words, code=2).stderr


@pytest.mark.parametrize(("positions", "seq_len"), [(512, 512), (514, 512), (40_960, 2048)])
def test_sequences_are_no_longer_than_the_positions(positions: int, seq_len: int) -> None:
    model = source_of({"model_type": "roberta", "max_position_embeddings": positions})
    assert asked(model, {}).seq_len == seq_len
