"""What to change when a model generates text: every change is planned, and what it says is what a plan of it says."""

import json
from typing import Any

import pytest

import foretrain as library
from foretrain.advice.record import Advice
from foretrain.advice.rules.finetuning import TUNING
from foretrain.advice.rules.generation import GENERATING
from foretrain.base.errors import UserError
from tests.kit.command import foretrain

BEFORE: dict[str, Any] = {"weights": "bf16", "context": 8192}


def advised(gpu: str = "RTX 4070", goal: Any = None, **options: Any) -> dict[str, Advice]:
    found = library.advise("llama-3.1-8b", gpu, goal=goal, **{**BEFORE, **options}, inference=True)
    return {change.rules[0]: change for change in found.advised}


def again(change: Advice, **options: Any) -> Any:
    return library.plan("llama-3.1-8b", change.gpu, **{**BEFORE, **options, **change.options}, inference=True)


@pytest.mark.parametrize("options", [{}, {"batch": 40, "weights": "q8_0"}, {"world": 2, "batch": 64}], ids=str)
def test_each_change_is_what_its_plan_says(options: dict[str, Any]) -> None:
    now = library.plan("llama-3.1-8b", "RTX 4070", **{**BEFORE, **options}, inference=True)
    found = advised(**options)
    assert now.verdict == "does_not_fit"
    assert found
    for change in found.values():
        made = again(change, **options)
        assert made.verdict == "fits"
        assert made.needed_bytes == change.effect.needed_bytes == now.needed_bytes - change.effect.saved_bytes
        times = made.timing.step_s.expected_s / now.timing.step_s.expected_s
        assert 1 + change.effect.slower == pytest.approx(times)
        assert change.learns_otherwise == bool({"weights", "kv", "context"} & change.options.keys())


def test_more_cards_come_last_and_are_the_fewest_that_fit() -> None:
    found = list(advised().values())
    needs_cards = ["world" in change.options for change in found]
    assert needs_cards == sorted(needs_cards)
    cards = next(change for change in found if change.rules == ("more_cards",))
    assert cards.options == {"world": 2}
    divided = next(change for change in found if change.rules == ("divided",))
    assert divided.options == {"world": 2, "split": "tensor"}
    assert divided.effect.slower < cards.effect.slower
    assert "divided" not in advised(weights="q8_0", batch=40)  # which no engine divides


def test_faster_leads_and_cheaper_serves_more_texts() -> None:
    fast = list(advised("RTX 4090", "speed").values())
    assert fast == sorted(fast, key=lambda change: ("world" in change.options, change.learns_otherwise))
    assert "world" in fast[-1].options
    assert all(change.effect.slower < -0.01 for change in fast)
    with pytest.raises(UserError, match="price"):
        advised("RTX 4090", "cost")
    words = ("advise", "llama-3.1-8b", "--inference", "--weights", "bf16", "--context", "8k", "--gpu", "4090")
    found = json.loads(foretrain(*words, "--goal", "cost", "--price", "0.4", "--json").stdout)
    first = found["advised"][0]
    assert first["rules"] == ["more_texts"]
    made = library.plan("llama-3.1-8b", "RTX 4090", **BEFORE, batch=first["settings"][0]["after"], inference=True)
    assert made.verdict == "fits"
    assert first["effect"]["money"] == pytest.approx(0.4 / 3600 * 1e6 / made.timing.tokens_per_s)


def test_the_command_shows_them_and_what_to_type() -> None:
    words = ("advise", "llama-3.3-70b", "--inference", "--weights", "q8_0", "--gpus", "2 x 3090")
    shown = " ".join(foretrain(*words).stdout.replace("\\\n", " ").split())
    assert "--weights q4_k_m" in shown
    assert "--gpus 4 x RTX 3090" in shown
    assert "next foretrain plan llama-3.3-70b --inference --weights q4_k_m --gpus" in shown
    assert "different" in shown
    for wrong in (["--goal", "quality"], ["--write", "x.toml", "--apply", "1"], ["--exact"], ["--gpu", "4090,3090"]):
        refused = foretrain("advise", "qwen3-8b", "--inference", "--weights", "bf16", *wrong)
        assert (refused.returncode, "Traceback" in refused.stderr) == (2, False)


def test_changes_of_both_kinds_of_run_have_names_of_their_own() -> None:
    """Texts of a change are looked up by its name alone."""
    assert not TUNING.keys() & GENERATING.keys()
