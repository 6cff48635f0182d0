"""`plan --smallest-card`: the least memory on which a run of any kind fits, against a plan on each card."""

import json

import pytest

from foretrain.hardware.catalogue import catalogue
from tests.kit.command import foretrain

RUNS = {
    "pretraining": ("gpt2-124m", "--batch_size=8"),
    "fine-tuning": ("smollm2-135m", "--method=lora", "--batch-size=8"),
    "generation": ("llama-3.1-8b", "--inference", "--weights=q4_k_m"),
    "generation on cards": ("llama-3.1-8b", "--inference", "--gpus=2", "--weights=bf16"),
}


@pytest.mark.parametrize("words", RUNS.values(), ids=RUNS)
def test_smallest_card_fits_and_smaller_does_not(words: tuple[str, ...]) -> None:
    found = json.loads(foretrain("plan", *words, "--smallest-card", "--json").stdout)
    for each, fits in ((found["fitting"][0], True), (found["fitting"][-1], True), (found["too_small"], False)):
        name = each["place"].removeprefix("2 x ")
        plan = json.loads(foretrain("plan", *words, "--gpu", name, "--json").stdout)
        assert (plan["verdict"] == "fits") is fits is each["fits"]
        assert (plan["needed_bytes"], plan["available_bytes"]) == (each["needed_bytes"], each["available_bytes"])
        assert each["memory_bytes"] == catalogue()[name].memory_bytes
    assert found["too_small"]["memory_bytes"] < min(card["memory_bytes"] for card in found["fitting"])
    shown = " ".join(foretrain("plan", *words, "--smallest-card").stdout.split())
    assert found["fitting"][0]["place"] in shown
    assert f"{found['too_small']['place']}, is too small" in shown


def test_run_that_fits_nowhere_has_no_card() -> None:
    words = ("plan", "llama-3.3-70b", "--method=full", "--batch-size=64", "--smallest-card")
    found = json.loads(foretrain(*words, "--json").stdout)
    assert found["fitting"] == []
    assert found["too_small"]["needed_bytes"] > max(card.memory_bytes or 0 for card in catalogue().values())
    assert "fits on no card" in foretrain(*words).stdout


@pytest.mark.parametrize("option", ["--exact", "--check", "--within=2h", "--largest=batch_size"])
def test_option_of_one_card_is_refused(option: str) -> None:
    refused = foretrain("plan", "gpt2-124m", "--smallest-card", option)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert f"{option.partition('=')[0]} answers for one" in refused.stderr
