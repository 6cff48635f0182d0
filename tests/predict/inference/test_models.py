"""`plan --inference` without a model: the table of what runs on a card, each row as the model's own plan has it."""

import json

import foretrain as library
from foretrain.app.generation import runnable_models
from foretrain.app.plan import Cards
from foretrain.config.presets import models
from foretrain.predict.inference.plan import RunnableModels
from tests.kit.command import foretrain


def models_of(*words: str, gpu: str = "4070") -> RunnableModels:
    found = runnable_models(["--inference", *words], Cards("", gpu, "", "", ""))
    assert found is not None
    return found


def test_each_model_is_planned_as_by_its_name() -> None:
    found = models_of("--context", "8k")
    assert len(found.models) + found.left_out + len(found.uncounted) == len(models())
    assert "qwen3-vl-8b" in found.uncounted
    assert [each.parameters for each in found.models] == sorted(
        (each.parameters for each in found.models), reverse=True
    )
    for each in (found.models[0], found.models[9]):
        alone = library.plan(each.model, "4070", context=8192, weights=each.weights, inference=True)
        assert (alone.verdict, alone.needed_bytes, alone.longest_context) == (
            "fits", each.needed_bytes, each.longest_context
        )  # fmt: skip
        assert alone.timing.tokens_per_s == each.tokens_per_s
    assert "gpt2" not in {each.model for each in found.models}  # it has 1,024 positions
    assert {each.weights for each in models_of("--weights", "q4_0").models} == {"q4_0"}


def test_the_table_is_for_one_card_and_every_model() -> None:
    shown = foretrain("plan", "--inference", "--gpu", "4070", "--json")
    found = json.loads(shown.stdout)
    assert (shown.returncode, found["schema"], found["gpu"]["name"]) == (0, "foretrain.plan/1#models", "RTX 4070")
    assert found["models"][0]["tokens_per_s"] > 10
    text = foretrain("plan", "--inference", "--gpu", "3060").stdout
    assert "q4_k_m" in text
    assert foretrain("plan", "--inference", "--gpu", "3060", "--full").stdout.count("\n") > text.count("\n") + 20
    foretrain("plan", "--inference", "--gpu", "4070", "--largest", "context", code=2, says="--largest")
    foretrain("plan", "--inference", "--gpu", "4070,4090", code=2, says="one card")
    foretrain("plan", "--inference", "--n-cpu-moe", "3", "--gpu", "4070", code=2, says="needs a model")
