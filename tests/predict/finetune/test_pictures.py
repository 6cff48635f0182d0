"""Pictures in the rows of a fine-tuning run: their tokens, and what their batch takes beside the real one."""

from typing import Any

import pytest

from foretrain.base.errors import UserError
from foretrain.config.finetune.options import FineTune
from foretrain.config.presets import models
from foretrain.hardware.catalogue import find
from foretrain.predict.finetune.plan import plan
from tests.kit.command import foretrain
from tests.kit.finetune import source_of

pytest.importorskip("transformers", minversion="5")
pytest.importorskip("peft")
pytest.importorskip("PIL")

from foretrain.predict.trace.finetune.inputs import inputs_of
from tests.kit import finetune_proof as proof

TEXT = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 4096, "head_dim": 16,
}  # fmt: skip
MROPE = {**TEXT, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}}
LLAMA = {"model_type": "llama", **TEXT}
TOWER = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 2, "patch_size": 14}
SIGLIP = {**TOWER, "image_size": 56, "vision_use_head": False}
GRID = {"depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "out_hidden_size": 64}
CLIP = {**TOWER, "model_type": "clip_vision_model", "image_size": 336, "projection_dim": 64}
IMAGE = {"image_token_id": 500, "video_token_id": 501}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {**IMAGE, "text_config": MROPE, "vision_config": {**GRID, "fullatt_block_indexes": [1]}},
    "qwen3_vl": {
        **IMAGE, "text_config": MROPE,
        "vision_config": {**GRID, "patch_size": 16, "deepstack_visual_indexes": [0], "num_position_embeddings": 144},
    },
    "gemma3": {
        "image_token_index": 500, "boi_token_index": 501, "eoi_token_index": 502, "mm_tokens_per_image": 4,
        "text_config": {**TEXT, "sliding_window": 32}, "vision_config": SIGLIP,
    },
    "smolvlm": {
        **IMAGE, "scale_factor": 4, "pad_token_id": 0, "text_config": LLAMA,
        "vision_config": {**TOWER, "image_size": 512, "patch_size": 16},
    },
    "mistral3": {
        "image_token_index": 500, "spatial_merge_size": 2, "vision_feature_layer": -1,
        "text_config": {**TEXT, "model_type": "mistral"},
        "vision_config": {**TOWER, "model_type": "pixtral", "image_size": 1540},
    },
    "llava": {"image_token_index": 500, "text_config": LLAMA, "vision_config": CLIP},
    "llava_next": {
        "image_token_index": 500, "text_config": LLAMA, "vision_config": CLIP,
        "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
    },
}  # fmt: skip
CONFIGS = {name: {"model_type": name, "dtype": "bfloat16", **config} for name, config in MODELS.items()}


def tune_of(**options: Any) -> FineTune:
    return FineTune.model_validate({"images": 1, "batch_size": 2, "seq_len": 512, "optim": "adamw_torch", **options})


# As the papers and model cards have them: patches of the picture over those that are merged, with the tiles of
# SmolVLM (16 and the whole), the tiles and line ends of LLaVA-NeXT.
@pytest.mark.parametrize(("model_type", "tokens"), [
    ("qwen2_5_vl", 35 * 35), ("qwen3_vl", 31 * 31), ("gemma3", 4), ("smolvlm", 17 * 64), ("mistral3", 37 * 37),
    ("llava", 576), ("llava_next", 576 + 48 * 48 + 48),
])  # fmt: skip
def test_tokens_of_a_picture_are_counted_as_the_model_does(model_type: str, tokens: int) -> None:
    tune = tune_of(image_size=1024, seq_len=10_000)
    with proof.fresh():
        found = inputs_of(CONFIGS[model_type], tune)
        assert found.tokens == tokens
        more = inputs_of(CONFIGS[model_type], tune.model_copy(update={"images": 3}))
        assert more.tokens == 3 * tokens


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("model_type", CONFIGS)
def test_trace_with_pictures_takes_what_the_real_run_does(model_type: str, method: str) -> None:
    length = {"smolvlm": 1152, "llava_next": 2048}.get(model_type, 640)
    truth = proof.compare(CONFIGS[model_type], tune_of(method=method, image_size=112, seq_len=length, padded=True))
    assert abs(truth.traced_bytes - truth.real_bytes) <= 0.001 * truth.real_bytes


@pytest.mark.slow
def test_plan_says_what_its_pictures_are(tmp_path: Any) -> None:
    import json

    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["qwen2_5_vl"]))
    words = ("plan", str(tmp_path), "--method", "lora", "--seq-len", "128", "--gpu", "4090")
    pictures = ("--images", "2", "--image-size", "112")
    said = foretrain(*words, *pictures, "--full", code=0).stdout
    assert "Each row has 2 pictures" in said
    assert "Qwen2VLImageProcessor" in said
    assert "are text alone" in foretrain(*words, "--full", code=0).stdout
    refused = foretrain(*words, "--images", "2", code=2).stderr
    assert "2450 tokens, and --seq-len is 128" in " ".join(refused.split())


@pytest.mark.slow
def test_pictures_of_a_model_of_text_are_refused() -> None:
    with pytest.raises(UserError) as caught:
        plan(source_of(dict(models()["qwen3-0.6b"].config)), tune_of(method="lora"), find("RTX 4090"))
    assert caught.value.id == "usage.pictures_unknown"
    assert "no pictures" in str(caught.value)


def test_known_model_of_text_refuses_pictures_before_a_trace() -> None:
    words = ("plan", "qwen3-0.6b", "--method", "lora", "--images", "1", "--gpu", "4090")
    assert "reads text alone: leave --images out" in foretrain(*words, code=2).stderr


@pytest.mark.parametrize("options", [
    {"loop": "trl", "training": "dpo"}, {"packing": True}, {"compile": True},
], ids=["pairs", "packing", "compiled"])  # fmt: skip
def test_runs_without_a_batch_of_pictures_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="SFT"):
        plan(source_of(CONFIGS["llava"]), tune_of(method="lora", **options), find("RTX 4090"))


def test_size_of_pictures_without_any_is_refused() -> None:
    words = ("plan", "qwen3-0.6b", "--method", "lora", "--image-size", "448", "--gpu", "4090")
    assert "give --images, the number of pictures" in foretrain(*words, code=2).stderr
