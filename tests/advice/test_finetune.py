"""Advice on fine-tuning runs: what it names fits when it is planned, and the commands that it prints run as they stand.

Compared with plans of the changed runs, and with all single and double changes planned one by one.
"""

import json
import re
import shlex
from itertools import combinations

import pytest

import foretrain as library
from foretrain.advice.asked import Asked
from foretrain.advice.finetune import advise, changes
from foretrain.advice.rules.finetuning import TUNING
from foretrain.app.finetune import plan_question, question
from foretrain.base.errors import UserError
from foretrain.config.finetune.words import changed_words, parse_words
from foretrain.predict.finetune.plan import FineTunePlan
from foretrain.predict.forecast import Probe
from foretrain.predict.largest import Largest
from foretrain.reports.views.advice import change_text, four_bits_more, screen
from foretrain.reports.views.limits import largest_value
from tests.kit.command import foretrain
from tests.kit.finetune import planned

CARD = "RTX 3060 12GB"
MIXTURE = {"method": "lora", "batch_size": 1, "seq_len": 256}


def a_plan(name: str = "smollm2-135m", gpu: str = CARD, **options: object) -> FineTunePlan:
    return library.plan(name, gpu=gpu, **{"method": "lora", "batch_size": 1, **options})  # type: ignore[arg-type]


def next_command(shown: str) -> list[str]:
    found = re.search(r"^  next +(foretrain .*?(?:\\\n.*?)*)$", shown, re.MULTILINE)
    assert found is not None, shown
    return shlex.split(found.group(1).replace("\\\n", " "))[1:]


# -- evaluations -----------------------------------------------------------------------------------------------------


def test_evaluation_that_does_not_fit_gets_smaller_batches() -> None:
    plan = a_plan(seq_len=1024, evaluate=True, eval_batch_size=32)
    assert (plan.verdict, plan.memory.neediest.phase) == ("does_not_fit", "evaluate")
    found = {change.rules: change for change in changes(plan)}
    half, one = found[("half_evaluation",)], found[("evaluation_of_one",)]
    for change in (half, one):
        assert change.effect.verdict == "fits"
        assert not change.learns_otherwise
        again = a_plan(seq_len=1024, evaluate=True, **change.options)
        assert (again.verdict, again.needed_bytes) == ("fits", change.effect.needed_bytes)
        assert again.tune.eval_batch_size * again.tune.eval_batches == 32 * plan.tune.eval_batches
    assert half.effect.needed_bytes > one.effect.needed_bytes


def test_evaluation_logits_go_to_the_host_or_are_not_kept() -> None:
    options = {"seq_len": 512, "evaluate": True, "eval_batch_size": 4, "eval_batches": 64, "keeps_logits": True}
    plan = a_plan(**options)
    assert plan.verdict == "does_not_fit"
    first, second, *_ = changes(plan)
    assert (first.options, second.options) == ({"eval_accumulation_steps": 1}, {"keeps_logits": False})
    for change in (first, second):
        assert a_plan(**{**options, **change.options}).verdict == "fits"
    assert "prediction_loss_only" in foretrain(
        "advise", "smollm2-135m", *words_of({"method": "lora", "batch_size": 1, **options}), "--gpu", CARD
    ).stdout  # fmt: skip


def test_adapters_are_merged_elsewhere_where_a_run_merges() -> None:
    options = [{"merge": True}, {}]
    found = [[change.options for change in TUNING["unmerged"].changes(a_plan(**each))] for each in options]
    assert found == [[{"merge": False}], []]


def words_of(options: dict[str, object]) -> list[str]:
    return [f"--{name.replace('_', '-')}={str(value).lower()}" for name, value in options.items()]


# -- what is offered -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "method", "ids"), [
    ("qwen3-8b", "qlora", ("unsloth",)), ("llama-3.1-8b", "lora", ("unsloth", "qlora")),
    ("qwen3-8b", "full", ("qlora_of_unsloth",)),
])  # fmt: skip
def test_what_unsloth_lets_fit_is_found(name: str, method: str, ids: tuple[str, ...]) -> None:
    plan = library.plan(name, gpu="RTX 3060", method=method)
    assert plan.verdict == "does_not_fit"
    found = changes(plan)
    assert set(ids) in [set(change.rules) for change in found]
    for change in found:
        again = library.plan(name, gpu="RTX 3060", **{"method": method, **change.options})
        assert (again.verdict, again.needed_bytes) == ("fits", change.effect.needed_bytes)


@pytest.mark.long
def test_nothing_together_leaves_four_bits() -> None:
    """Of a model of 12 billion weights that nothing makes fit on 6 GB."""
    found = changes(library.plan("gemma-3-12b", gpu="RTX 2060", method="qlora"))
    assert not [change for change in found if "method" in change.options]
    assert {change.effect.verdict for change in found} == {"does_not_fit"}


def test_unsloth_s_checkpoints_can_go_to_the_host() -> None:
    plan = a_plan("llama-3.2-1b", method="lora", unsloth=True, seq_len=1024)
    change = planned(plan, ("offload",))
    assert change.options == {"offload_checkpoints": True}
    assert planned(a_plan("llama-3.2-1b", seq_len=1024), ("offload",)) is None
    assert planned(a_plan("llama-3.2-1b", unsloth=True, seq_len=256), ("offload",)) is None


@pytest.mark.parametrize(("name", "targets"), [
    ("olmoe-1b-7b", "q_proj,k_proj,v_proj,o_proj"), ("smollm2-135m", "q_proj,v_proj"), ("gpt2", "c_attn"),
])  # fmt: skip
def test_fewer_modules_are_those_of_the_model(name: str, targets: str) -> None:
    plan = a_plan(name, gpu="A100 SXM4 80GB", **MIXTURE)
    change = planned(plan, ("fewer_targets",))
    assert change.options == {"lora_targets": targets}
    assert change.effect.saved_bytes > 0
    copied = [note.id for note in a_plan(name, gpu="A100 SXM4 80GB", **{**MIXTURE, **change.options}).notes]
    assert "experts_copied" not in copied


def test_qlora_that_needs_more_than_lora_says_why() -> None:
    plan = a_plan(method="qlora", batch_size=2, seq_len=2048)
    lora = planned(plan, ("sixteen_bits",))
    said = four_bits_more(plan, [lora])
    assert lora.effect.saved_bytes > 0
    assert "fp32" in said.text()
    assert "four_bits_widened" in {note.id for note in plan.notes}
    large = a_plan("llama-3.1-8b", gpu="RTX 4090", method="qlora", seq_len=512, gradient_checkpointing=True)
    change = planned(large, ("sixteen_bits",))
    assert change.effect.saved_bytes < 0
    assert four_bits_more(large, [change]) is None
    assert "four_bits_widened" not in {note.id for note in large.notes}


def test_what_takes_much_longer_says_how_many_times() -> None:
    change = planned(a_plan(gradient_checkpointing=False), ("checkpointing",))
    assert change is not None

    def said(longer: float) -> str:
        return change_text(
            None, change.model_copy(update={"effect": change.effect.model_copy(update={"slower": longer})})
        )

    assert "1.70 × the time per token" in said(0.7)
    assert "8.00 × the time per token" in said(7.0)
    assert "40.0% more time per token" in said(0.4)


# -- what fits, and what does not ------------------------------------------------------------------------------------


def test_what_fits_only_together_is_the_smallest_combination() -> None:
    """Pairs come first; of three changes each is needed. What is learned stays as it is."""
    plan = a_plan("gpt2", method="full", batch_size=64, evaluate=True, eval_batch_size=64)
    ids = [id for id, rule in TUNING.items() if rule.kind in ("memory", "both")]
    alone = [change for id in ids if (change := planned(plan, (id,)))]
    assert "fits" not in {change.effect.verdict for change in alone}
    found = changes(plan)
    pairs = {
        ids for ids in combinations([change.rules[0] for change in alone if not change.learns_otherwise], 2)
        if (change := planned(plan, ids)) and change.effect.verdict == "fits"
    }  # fmt: skip
    assert pairs
    assert all(change.effect.verdict == "fits" for change in found)
    assert {frozenset(change.rules) for change in found} & {frozenset(ids) for ids in pairs}
    assert [len(change.rules) for change in found] == sorted(len(change.rules) for change in found)
    assert not any(change.learns_otherwise for change in found)
    for change in found:
        for fewer in combinations(change.rules, len(change.rules) - 1):
            less = planned(plan, fewer)
            assert less is None or less.effect.verdict != "fits", (change.rules, fewer)
    assert "No single change is enough" in foretrain(
        "advise", "gpt2", "--method=full", "--batch-size=64", "--evaluate", "--eval-batch-size=64", "--gpu", CARD
    ).stdout  # fmt: skip


def test_where_nothing_fits_that_is_said_with_what_comes_nearest() -> None:
    plan = a_plan("llama-3.3-70b", method="full")
    found = changes(plan)
    assert {change.effect.verdict for change in found} == {"does_not_fit"}
    assert [change.effect.needed_bytes for change in found] == sorted(change.effect.needed_bytes for change in found)
    assert len(found[0].rules) > 2  # all of them together
    shown = foretrain("advise", "llama-3.3-70b", "--method=full", "--batch-size=1", "--gpu", CARD).stdout
    assert "No change makes it fit with a safe margin." in shown
    assert "next" not in shown
    planned = foretrain("plan", "llama-3.3-70b", "--method=full", "--batch-size=1", "--gpu", CARD).stdout
    assert "No change makes it fit, alone or together" in planned


def test_phases_of_the_same_need_have_the_same_verdict() -> None:
    for options in ({"batch_size": 8, "seq_len": 2048}, {"batch_size": 2, "seq_len": 2816}):
        phases = a_plan(**options).memory.phases
        after = phases[[phase.phase for phase in phases].index("steady_step") :]
        assert len({phase.needed_expected_bytes for phase in after}) == 1
        assert len({phase.verdict for phase in after}) == 1
    assert phases[0].verdict == "fits"


def test_the_next_larger_value_that_is_too_tight_says_so() -> None:
    plan = a_plan()
    room = plan.available_bytes or 0
    for beyond, tight in ((room - 2**27, True), (room, True), (2 * room, False)):
        probes = (
            Probe(value=64, verdict="fits", needed_expected_bytes=plan.needed_bytes),
            Probe(value=128, verdict="does_not_fit", needed_expected_bytes=beyond),
        )
        made = Largest(option="seq_len", value=64, searched_all=False, available_bytes=room, probes=probes)
        assert ("too tight" in largest_value(plan, made).text()) == tight


# -- the command that comes next -------------------------------------------------------------------------------------


def test_words_are_changed_once_whatever_they_were_spelled_as() -> None:
    words = ["--per_device_train_batch_size", "8", "--lora_r=16", "--lora-r", "32", "--no-packing", "--no-fp16"]
    assert changed_words(words, {"batch_size": 1, "gradient_checkpointing": True, "packing": True}) == [
        "--batch-size", "1", "--lora-r", "32", "--packing", "--no-fp16", "--gradient-checkpointing",
    ]  # fmt: skip
    assert parse_words(changed_words(words, {}))[0] == parse_words(words)[0]
    assert changed_words(["--load-in-4bit", "--method", "lora"], {}) == ["--method", "lora"]
    assert changed_words(["--evaluate", "--keeps-logits"], {"method": "full"}, ["keeps_logits"]) == [
        "--evaluate", "--method", "full",
    ]  # fmt: skip
    with pytest.raises(UserError):
        changed_words(["--no-such-option"], {})


@pytest.mark.parametrize("words", [
    ("--method=lora", "--batch-size", "32", "--batch_size=64", "--seq-len", "2048", "--price", "0.35",
     "--used-by-others", "1GB", "--dataset-tokens=10M"),
    ("--method=lora", "--evaluate", "--eval-batch-size", "8", "--eval-batches", "16", "--keeps-logits", "--price-per-kwh=0.2"),
])  # fmt: skip
def test_the_advised_command_runs_as_printed_and_fits(words: tuple[str, ...]) -> None:
    base = ("smollm2-135m", *words, "--gpu", CARD)
    command = next_command(foretrain("advise", *base).stdout)
    names = [word.partition("=")[0] for word in command if word.startswith("--")]
    assert len(names) == len(set(names))
    assert {"--gpu", *(word.partition("=")[0] for word in words if word.startswith("--price"))} <= set(names)
    first = library.advise(
        "smollm2-135m", CARD, used_by_others="1GB" if "1GB" in words else "",
        **parse_words([word for word in words if word not in ("--price", "0.35", "--used-by-others", "1GB")])[0],
    ).advised[0]  # fmt: skip
    made = foretrain(*command, "--json")
    assert made.returncode == 0, made.stderr
    plan = json.loads(made.stdout)
    assert {phase["verdict"] for phase in plan["memory"]["phases"]} == {"fits"}
    assert max(phase["needed_expected_bytes"] for phase in plan["memory"]["phases"]) == first.effect.needed_bytes
    if "0.35" in words:
        assert plan["timing"]["prices"]["price_per_hour"] == 0.35


@pytest.mark.parametrize("limit", [("--within", "5EUR"), ("--tokens", "1M"), ()])
def test_command_for_the_best_card_has_its_rent_and_limit(limit: tuple[str, ...]) -> None:
    words = ("smollm2-135m", "--method=lora", "--seq-len=512", "--gpu", "3090,4090", *limit)
    command = next_command(foretrain("plan", *words, "--price", "3090=0.2,4090=0.35").stdout)
    assert command[command.index("--price") + 1] == {"RTX 3090": "0.2", "RTX 4090": "0.35"}[
        command[command.index("--gpu") + 1]
    ]  # fmt: skip
    assert all(word in command for word in limit)
    assert foretrain(*command).returncode == 0


def test_a_limit_of_a_run_that_does_not_fit_leads_to_advice() -> None:
    words = ("smollm2-135m", "--method=lora", "--seq-len=2048", "--batch-size=32", "--gpu", CARD)
    command = next_command(foretrain("plan", *words, "--within", "2h", "--price", "0.35").stdout)
    assert command[0] == "advise"
    assert "0.35" in command
    assert foretrain(*command).returncode == 0


@pytest.mark.parametrize(("id", "typed"), [
    ("loss_alone", ("--method=lora", "--evaluate", "--keeps-logits", "--eval-accumulation-steps=4")),
    ("sixteen_bits", ("--method=qlora", "--double-quant")), ("packing", ("--method=lora", "--padded")),
])  # fmt: skip
def test_advised_command_leaves_out_options_without_effect(id: str, typed: tuple[str, ...]) -> None:
    """A terminal refuses options that do nothing, such as how often logits go to the host that are not kept."""
    words = ("smollm2-135m", *typed, "--batch-size=1")
    plan = plan_question(question(words[0], words[1:]), CARD)
    change = planned(plan, (id,))
    assert change is not None
    found = advise(plan, "fit").model_copy(update={"advised": (change,), "partial": ()})
    _, *command = next(row.command for row in screen(plan, found, Asked(words=words, gpu=CARD)).rows if row.command)
    made = foretrain(*command, "--json")
    assert made.returncode == 0, made.stderr
    phases = json.loads(made.stdout)["memory"]["phases"]
    assert max(phase["needed_expected_bytes"] for phase in phases) == change.effect.needed_bytes


def test_quality_lists_what_fits_and_names_its_sources() -> None:
    run = ("llama-3.2-1b", "--method=qlora", "--lora-targets", "q_proj,v_proj", "--gpu", "4090")
    asked = ("advise", *run, "--goal", "quality")
    found = json.loads(foretrain(*asked, "--json").stdout)
    assert [each["rules"] for each in found["advised"]] == [["all_linear"], ["higher_rank"], ["full"]]
    assert foretrain(*asked, "--full").stdout.count("arXiv:2405.09673") == 3
    none = foretrain("advise", "llama-3.1-8b", "--method=qlora", "--gpu", "RTX 3050 6GB", "--goal", "quality")
    assert "Nothing that is known to learn more fits" in none.stdout


def test_quality_of_full_fine_tuning_is_weights_in_fp32() -> None:
    found = library.advise("llama-3.2-1b", "4090", method="full", goal="quality")
    assert [(each.rules, each.exactness) for each in found.advised] == [(("fp32_weights",), "exact")]
    with pytest.raises(UserError, match="fit, speed or cost"):
        library.advise("llama-3.2-1b", "4090", goal="quality", inference=True)
