"""Advice that can be followed: what is ranked first, what the first screen says, and what --write gives back."""

from foretrain.advise.advice import Advices
from foretrain.advise.advisor import advise, short_list
from foretrain.advise.rules import BY_ID
from foretrain.app.plan import make_plan, targets
from foretrain.configfile import resolve
from foretrain.predict.plan import Plan
from tests.helpers import REPO

FINETUNE = str(REPO / "examples" / "nanogpt" / "config" / "finetune_shakespeare.py")


def planned(*words: str, gpu: str = "4070", others: str = "") -> Plan:
    resolved = resolve(words)
    return make_plan(resolved, targets(gpu, others, resolved.config)[0])


def finetune() -> Advices:
    return advise(planned(FINETUNE), "nanogpt")


def test_a_run_from_gpt2_xl_is_offered_the_largest_smaller_gpt2_that_fits() -> None:
    """As nanoGPT's README says for this very file."""
    found = finetune()
    smaller = next(a for a in found.advised if a.rules == ("pretrained",))
    changed = {s.option: s.after for s in smaller.settings}
    assert changed == {"init_from": "gpt2-medium", "n_layer": 24, "n_head": 16, "n_embd": 1024}
    assert smaller.exactness == "other model"
    assert smaller.step == "nanogpt"
    again = planned(FINETUNE, "--init_from=gpt2-medium")
    assert again.verdict_of("nanogpt") == "fits"
    assert again.memory_of("nanogpt").needed_bytes == smaller.effect.needed_bytes
    assert planned(FINETUNE, "--init_from=gpt2-large").verdict_of("nanogpt") == "does_not_fit"


def test_another_card_is_last_where_something_fits_on_this_one() -> None:
    found = finetune()
    cards = [a.gpu != found.gpu for a in found.advised]
    assert any(cards)
    assert cards == sorted(cards)
    assert not cards[0]


def test_the_short_list_of_a_plan_has_the_smaller_gpt2() -> None:
    found = short_list(planned(FINETUNE), "nanogpt")
    assert found is not None
    assert ("pretrained",) in [a.rules for a in found.advised]


def test_only_a_run_that_starts_from_gpt2_has_smaller_ones() -> None:
    from foretrain.advise.advisor import start_of

    rule = BY_ID["pretrained"]
    names = {word: [c.knobs["init_from"] for c in rule.options(start_of(planned("gpt2-124m", word), "foretrain"))]
             for word in ("--init_from=gpt2-large", "--init_from=gpt2", "--init_from=scratch")}  # fmt: skip
    assert names == {
        "--init_from=gpt2-large": ["gpt2-medium", "gpt2"], "--init_from=gpt2": [], "--init_from=scratch": [],
    }  # fmt: skip
