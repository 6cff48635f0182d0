"""Advice for several cards: each change is what a plan of the changed run says, numbers of cards, and what is refused."""

import json
from typing import Any

import pytest

import foretrain as library
from foretrain.advice import advisor
from foretrain.advice.advisor import advise
from foretrain.advice.asked import Asked
from foretrain.advice.cluster import options_of
from foretrain.advice.record import SCHEMA, Advice, Advices, Cards
from foretrain.advice.rules import BY_ID, ORDER, RULES
from foretrain.advice.rules.base import Change, Rule, State
from foretrain.advice.rules.cards import counted
from foretrain.app.plan import resolved_of
from foretrain.base.messages import has, say
from foretrain.config.options import RunConfig
from foretrain.config.sharing import Sharing, recut
from foretrain.hardware.catalogue import find
from foretrain.hardware.cluster import cluster
from foretrain.predict.plan import plan
from foretrain.predict.ranks import of_one_rank, share
from foretrain.predict.speed.ranks import rank_time
from foretrain.reports.document import cell_text
from foretrain.reports.views import advice as view
from tests.kit.command import foretrain

SMALL: dict[str, Any] = {
    "n_layer": 3, "n_head": 4, "n_embd": 256, "block_size": 256, "vocab_size": 8192, "batch_size": 4,
    "gradient_accumulation_steps": 8, "compile": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def found() -> Advices:
    return library.advise("gpt2-124m", gpus="2 x RTX 3090", goal="speed", **SMALL)


def shared(change: Advice) -> Cards:
    assert change.shared is not None
    return change.shared


def again(found: Advices, change: Advice, given: dict[str, Any] = SMALL) -> tuple[int, float, str | None]:
    """(bytes that a card needs, seconds of a step, verdict) by a plan of the changed run from the beginning."""
    config: RunConfig = resolved_of("gpt2-124m", given).config
    config = config.model_copy(update={s.option: s.after for s in change.settings})
    cards = cluster(change.shared.text, change.shared.link)
    made = share(plan(config, cards.gpu), cards)
    row = next(rank for rank in made.ranks if rank.id == change.shared.way.id)
    return row.memory.needed_bytes, row.time.step_s.expected_s, row.verdict


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.for_several], ids=lambda rule: rule.id)
def test_every_rule_says_what_it_changes(rule: Rule) -> None:
    """The contract of a rule: a text, a source, changes that change something, or a reason that has a text."""
    assert has(f"rule.{rule.id}.short")
    assert rule.reference
    config = resolved_of("gpt2-124m", SMALL | {"gradient_accumulation_steps": 32}).config
    for cards, way in (("2 x RTX 3090", "ddp"), ("2 nodes x 8 x A100 SXM4 80GB", "fsdp_held")):
        where = cluster(cards)
        state = State(config, where.gpu, "foretrain", 0, where, way=way)
        changes = rule.changes(state)
        for change in changes:
            assert change.applied(state) != state
        if not changes and (reason := rule.idle(state)):
            assert has(f"idle.{reason}")


def test_each_change_is_what_a_new_plan_says(found: Advices) -> None:
    assert len(found.advised) >= 3
    for change in found.advised:
        needed, step_s, verdict = again(found, change)
        assert change.effect.needed_bytes == needed
        assert change.effect.step_s == pytest.approx(step_s, rel=1e-9)
        assert change.effect.verdict == verdict == "fits"
        tokens = found.tokens_per_step
        ratio = (step_s / change.tokens_per_step) / (found.now.step_s / tokens) - 1
        assert change.effect.slower == pytest.approx(ratio, rel=1e-6)


def test_order_and_what_is_learned(found: Advices) -> None:
    """What needs other hardware comes last; more tokens a step is called other learning, all else keeps them."""
    bought = [shared(change).buys for change in found.advised]
    assert bought == sorted(bought)
    rules = {rule: change for change in found.advised for rule in change.rules}
    assert {"more_accumulation", "nvlink", "cards"} <= set(rules)  # small steps wait for the link
    for change in found.advised:
        assert (change.exactness == "other tokens") == (change.tokens_per_step != found.tokens_per_step)
    assert shared(rules["nvlink"]).link == "geforce-bridge"
    assert not shared(rules["more_accumulation"]).buys


def test_numbers_of_cards(found: Advices) -> None:
    """One card is the plan of one card; others keep the tokens of a step."""
    one = plan(resolved_of("gpt2-124m", SMALL).config, find("RTX 3090"))
    alone = found.counts[0]
    assert (alone.cards, alone.way) == (1, None)
    assert alone.effect.needed_bytes == one.memory_of("foretrain").needed_bytes
    assert alone.effect.total_s == one.timing.total_s.expected_s
    assert [each.cards for each in found.counts] == [1, 2, 4, 8]
    for each in found.counts:
        assert each.batch_size * each.accumulation * 256 == found.tokens_per_step
    now = found.counts[1]
    assert now.effect == found.now


def test_cards_that_cannot_divide_a_step() -> None:
    config = RunConfig(batch_size=3, gradient_accumulation_steps=2)
    assert recut(config, 4) is None
    for world, expected in ((2, (3, 2)), (6, (1, 6))):
        found = recut(config, world)
        assert (found.batch_size, found.gradient_accumulation_steps) == expected


def test_other_numbers_of_the_same_cards() -> None:
    bridged = cluster("2 x RTX 3090", "nvlink")
    assert [(each.per_node, each.link == bridged.link) for each in counted(bridged)] == [(4, False), (8, False)]
    nodes = counted(cluster("2 nodes x 8 x A100 SXM4 80GB"))
    assert [(each.nodes, each.per_node, each.network is None) for each in nodes] == [
        (1, 8, True),
        (4, 8, False),
        (8, 8, False),
    ]


def test_what_does_not_fit_gets_what_makes_it_fit() -> None:
    """The plan with the change has the verdict that was promised; the goal is found by itself."""
    big: dict[str, Any] = {
        "n_layer": 4,
        "n_embd": 1024,
        "n_head": 16,
        "block_size": 1024,
        "batch_size": 64,
        "compile": False,
    }
    big |= {"gradient_accumulation_steps": 4}
    found = library.advise("gpt2-124m", gpus="2 x RTX 3060 12GB", **big)
    assert found.goal == "fit"
    assert not found.goal_given
    assert found.now.verdict == "does_not_fit"
    best = found.advised[0]
    changed = big | {s.option: s.after for s in best.settings}
    made = library.plan("gpt2-124m", gpus="2 x RTX 3060 12GB", **changed)
    assert made.verdict == "fits"
    assert best.effect.verdict == "fits"
    assert best.tokens_per_step == found.tokens_per_step


def test_where_nothing_helps_it_is_said() -> None:
    """Cards that take a model of which not even the weights fit, whatever is done."""
    huge: dict[str, Any] = {
        "n_layer": 2,
        "n_embd": 16384,
        "n_head": 128,
        "batch_size": 1,
        "gradient_accumulation_steps": 2,
    }
    huge |= {"block_size": 64, "compile": False, "activation_checkpointing": True}
    made = library.plan("gpt2-124m", gpus="2 x RTX 3060 12GB", **huge)
    found = advise(made, "foretrain")
    assert found.nothing_fits
    assert not found.advised
    assert found.counts[0].effect.verdict == "does_not_fit"
    said = [cell_text(paragraph.message) for paragraph in view.screen(made, found, Asked()).lead]
    assert say("advice.nothing") in said
    assert any(line.startswith("One RTX 3060 12GB is not enough") for line in said)


def test_asked_strategy_is_kept_unless_another_is_advised() -> None:
    made = library.plan("gpt2-124m", gpus="2 x RTX 3090", strategy="fsdp", **SMALL)
    found = advise(made, "foretrain", "speed")
    assert found.way.strategy == "fsdp"
    ways = {rule: shared(change).way for change in found.advised for rule in change.rules}
    assert ways["strategy"].strategy == "ddp"
    others = {rule: way for rule, way in ways.items() if rule not in ("strategy", "resharding")}
    assert {way.strategy for way in others.values()} <= {"fsdp"}


def test_one_file_more_is_one_rule_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that nobody names elsewhere is planned and ranked."""
    rule = Rule(
        "half_the_layers", "both", "other model", "an example",
        lambda state: [Change({"n_layer": state.config.n_layer - 1})], several=True,
    )  # fmt: skip
    monkeypatch.setattr(advisor, "RULES", (*RULES, rule))
    monkeypatch.setitem(BY_ID, rule.id, rule)
    monkeypatch.setitem(ORDER, rule.id, len(RULES))
    made = library.plan("gpt2-124m", gpus="2 x RTX 3090", **SMALL)
    advised = {each.rules: each for each in advise(made, "foretrain", "speed").advised}
    assert advised["half_the_layers",].exactness == "other model"


def test_a_lower_loss_is_what_a_new_plan_of_the_cards_says() -> None:
    options = {**SMALL, "gradient_accumulation_steps": 32, "max_iters": 20000}
    lower = library.advise("gpt2-124m", gpus="2 x RTX 3090", goal="quality", **options)
    assert lower.cluster is not None
    assert {each.rules[-1] for each in lower.advised} >= {"modern_recipe", "best_shape"}
    for change in lower.advised:
        needed, step_s, verdict = again(lower, change, options)
        assert (needed, verdict) == (change.effect.needed_bytes, "fits")
        assert step_s == pytest.approx(change.effect.step_s)
        assert shared(change).cards == 2
        if change.estimate:
            assert (change.effect.total_s or 1e9) <= 1.01 * (lower.now.total_s or 0)


def test_the_command_line() -> None:
    words = ["advise", "gpt2-124m", *(f"--{k}={str(v).lower()}" for k, v in SMALL.items()), "--gpus", "2 x RTX 3090"]
    result = foretrain(*words, "--json")
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout)
    assert answer["schema"] == SCHEMA
    shown = foretrain(*words)
    assert shown.returncode == 0
    assert "One RTX 3090 would do" in shown.stdout
    assert "foretrain plan gpt2-124m" in shown.stdout
    assert len(shown.stdout.splitlines()) <= view.LINES + 4
    for wrong in (["--exact"], ["--trainer", "nanogpt"], ["--goal", "tokens"]):
        refused = foretrain(*words, *wrong)
        assert refused.returncode == 2, wrong
        assert len(refused.stderr.splitlines()) <= 3
    lower = foretrain(*words, "--goal", "quality", "--json")
    assert lower.returncode == 0, lower.stderr
    assert json.loads(lower.stdout)["goal"] == "quality"
    alone = foretrain("advise", "gpt2-124m", "--link", "nvlink")
    assert alone.returncode == 2
    tuned = foretrain("advise", "qwen3-8b", "--method", "lora", "--gpus", "2 x RTX 4090")
    assert (tuned.returncode, "2 x RTX 4090" in tuned.stdout) == (0, True)


def test_buckets_of_ddp_are_told_with_their_figures() -> None:
    """Views save where gradients are what a step needs most and a card has one micro-batch, and at most what gradients
    take; gradients of earlier micro-batches stay beside the buckets in any case. A plan with another size says what it
    saves."""
    few: dict[str, Any] = SMALL | {"batch_size": 1, "block_size": 64}
    several = library.plan("gpt2-124m", gpus="2 x RTX 3090", strategy="ddp", **few)
    assert "bucket_view_same" in {each.reason for each in advise(several, "foretrain", "speed").useless}
    made = library.plan("gpt2-124m", gpus="2 x RTX 3090", strategy="ddp", **{**few, "gradient_accumulation_steps": 2})
    told = {each.rule: each for each in advise(made, "foretrain", "speed").useless if each.values}
    assert 0 < told["bucket_view"].values["more"] <= 4 * made.one_card.counts.n_params
    best = made.best
    assert best.time is not None
    sharing = Sharing("ddp", 2, 2)
    spec = of_one_rank(made.one_card.spec("foretrain"), made.cluster, sharing)
    size = told["bucket_size"].values
    again = rank_time(spec, sharing, made.cluster, size["best"])
    shorter = 1 - again.step_s.expected_s / best.time.step_s.expected_s
    assert size["gain"] == pytest.approx(max(0.0, shorter))


@pytest.mark.parametrize(
    ("options", "goal"),
    [
        ({"total_batch_size": 8192}, "speed"),
        ({}, "fit"),
        ({"strategy": "fsdp"}, "fit"),
        ({"strategy": "fsdp", "hold_gradients": True}, "speed"),
        ({"strategy": "fsdp_no_reshard"}, "speed"),
    ],
    ids=str,
)
def test_the_options_of_a_change_plan_what_it_promised(options: dict[str, Any], goal: Any) -> None:
    """Memory and time of the way that was meant, whatever a plan without them would pick."""
    asked = {**SMALL, **options}
    made = library.plan("gpt2-124m", gpus="2 x RTX 3090", **asked)
    advised = advise(made, "foretrain", goal).advised
    assert advised
    for change in advised:
        changed = {**asked, **options_of(made, change)}
        again = library.plan("gpt2-124m", gpus=shared(change).text, link=shared(change).link, **changed)
        best = again.best or again.least
        assert best.id == shared(change).way.id, change.rules
        assert best.memory.needed_bytes == change.effect.needed_bytes, change.rules
        assert best.timing.step_s.expected_s == change.effect.step_s, change.rules


def test_a_plan_keeps_to_the_options_that_were_given() -> None:
    """Gradients are held back, or not, as was said: of every strategy that can, and of the one that was named."""
    where = "2 x RTX 3090"
    both = library.plan("gpt2-124m", gpus=where, strategy="fsdp", **SMALL)
    assert set(both.ways) == {"fsdp", "fsdp_held"}
    for hold, way in ((True, "fsdp_held"), (False, "fsdp")):
        made = library.plan("gpt2-124m", gpus=where, strategy="fsdp", hold_gradients=hold, **SMALL)
        assert (made.chosen, made.ways) == (way, (way,))
    any_way = library.plan("gpt2-124m", gpus=where, hold_gradients=True, **SMALL)
    assert any_way.ways == ("ddp", "zero1", "fsdp_no_reshard_held", "fsdp_held")
    one = library.plan(
        "gpt2-124m", gpus=where, strategy="fsdp", hold_gradients=True, **{**SMALL, "gradient_accumulation_steps": 2}
    )
    assert one.chosen == "fsdp"  # one micro-batch a card: nothing to hold back
