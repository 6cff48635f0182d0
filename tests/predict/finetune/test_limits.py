"""Fine-tuning plans: limits, money, several cards, where the memory goes, which reading was taken, bad input.

Compared with closed forms: hours are steps times seconds, money is energy times its price or hours times the rent, a
weight's bytes are those of its shape.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest

import foretrain as library
from foretrain.advice.cards import Candidate, chosen, compared
from foretrain.analysis.explanation import explain
from foretrain.base.errors import ExitCode, UserError
from foretrain.base.quantities import Limit, parse_limit
from foretrain.config.finetune.read import how_chosen, is_asked, read_finetune
from foretrain.config.hub.source import text_source
from foretrain.config.presets import model_named
from foretrain.predict.finetune.plan import FineTunePlan, replanned
from foretrain.predict.finetune.time import with_steps
from foretrain.predict.finetuning import of_plan
from foretrain.predict.largest import largest
from foretrain.predict.search import bisect
from foretrain.predict.within import within
from tests.kit.command import first_screen, foretrain
from tests.kit.finetune import planned

SMALL = ("smollm2-135m", "--method", "lora", "--seq-len", "512", "--batch-size", "2", "--gpu", "RTX 4070")
GIB = 2**30


def small(gpu: str = "RTX 4070", **options: object) -> FineTunePlan:
    given: dict[str, object] = {"method": "lora", "seq_len": 512, "batch_size": 2, **options}
    return library.plan("smollm2-135m", gpu=gpu, **given)  # type: ignore[arg-type]


# -- limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [0, 1, 2, 3, 7, 8, 100])
@pytest.mark.parametrize("fitting", [0, 1, 2, 3, 7, 8, 99, 10**6])
def test_the_largest_count_is_that_of_trying_each(most: int, fitting: int) -> None:
    tried = max((count for count in range(1, most + 1) if count <= fitting), default=0)
    assert bisect(lambda count: count <= fitting, 0, most + 1) == tried


@pytest.mark.parametrize("text", ["2h", "90m", "1kWh", "0.05EUR"])
@pytest.mark.parametrize("costs", [{}, {"price_per_hour": 0.5}])
def test_one_step_more_would_be_beyond_the_limit(text: str, costs: dict[str, Any]) -> None:
    plan, limit = small(**costs), parse_limit(text)
    found = within(of_plan(plan), limit)
    timing = plan.timing
    each = {
        "time": timing.step_s.expected_s,
        "energy": timing.power.expected_w * timing.step_s.expected_s,
        "money": timing.step_s.expected_s / 3600 * 0.5
        if costs
        else timing.power.expected_w * timing.step_s.expected_s / 3.6e6 * timing.prices.price_per_kwh,
    }[limit.kind]
    assert found.steps == math.floor(limit.amount / each * (1 + 1e-12))
    assert found.steps_cautious < found.steps < found.steps_optimistic
    assert found.tokens == found.steps * 2 * 512
    assert found.epochs is None
    assert found.plan.tune.max_steps == found.steps
    assert found.plan.memory == plan.memory


def test_tokens_are_whole_steps_and_passes_over_the_data() -> None:
    plan = small(dataset_tokens="1M", epochs=2)
    found = within(of_plan(plan), Limit(kind="tokens", amount=500_000, text="500k"))
    assert (found.steps, found.steps_cautious, found.steps_optimistic) == (488, 488, 488)
    assert found.epochs == pytest.approx(488 * 1024 / 1e6)
    assert found.asked_steps == math.ceil(2e6 / 1024)


def test_plan_from_python_has_the_steps_that_its_limit_allows() -> None:
    found = library.plan("smollm2-135m", gpu="RTX 4070", method="lora", seq_len=512, batch_size=2, within="2h")
    assert found.tune.max_steps == within(of_plan(small()), parse_limit("2h")).steps
    assert found.timing.total_s.expected_s <= 2 * 3600
    with pytest.raises(UserError):
        small(within="soon")


def test_a_limit_that_no_step_fits_in_says_what_one_takes() -> None:
    plan = small()
    for text, id in (("1ms", "time"), ("0.001Wh", "energy"), ("0.0000001EUR", "money")):
        with pytest.raises(UserError) as error:
            within(of_plan(plan), parse_limit(text))
        assert error.value.id == f"check.finetune_within_{id}"
        assert error.value.exit_code is ExitCode.CHECK_FAILED
    with pytest.raises(UserError, match="EUR"):
        within(of_plan(plan), parse_limit("5USD"))
    with pytest.raises(UserError, match="matmul peak in this dtype or the bandwidth"):
        within(of_plan(plan.model_copy(update={"timing": None})), parse_limit("2h"))


def test_within_with_largest_is_of_the_largest_that_fits() -> None:
    words = ("plan", *SMALL, "--within", "2h", "--largest", "batch_size", "--json")
    shown = json.loads(foretrain(*words).stdout)
    alone = largest(of_plan(small()), "batch_size")
    assert shown["largest"]["value"] == shown["plan"]["tune"]["batch_size"] == alone.value
    assert shown["steps"] == within(of_plan(small(batch_size=alone.value)), parse_limit("2h")).steps


# -- money -----------------------------------------------------------------------------------------------------------


def test_rented_card_costs_hours_and_own_card_electricity() -> None:
    words = ("--dataset-tokens", "20M", "--epochs", "1", "--co2", "400", "--json")
    rented = json.loads(foretrain("plan", *SMALL, *words, "--price", "0.5").stdout)["timing"]
    owned = json.loads(foretrain("plan", *SMALL, *words, "--price-per-kwh", "0.2").stdout)["timing"]
    hours = rented["steps"] * rented["step_s"]["expected_s"] / 3600
    assert rented["rent_expected"] == pytest.approx(0.5 * hours)
    assert rented["cost_expected"] is None
    kwh = owned["energy_expected_j"] / 3.6e6
    assert owned["cost_expected"] == pytest.approx(0.2 * kwh)
    assert owned["co2_expected_g"] == rented["co2_expected_g"] == pytest.approx(400 * kwh)
    assert rented["steps"] == math.ceil(20e6 / 1024)


def test_a_step_time_of_a_log_gives_the_hours() -> None:
    plan = small(dataset_tokens="20M", epochs=1, step_s=2.0)
    assert plan.timing.source == "measured (log)"
    assert plan.timing.total_s.expected_s == plan.timing.total_s.high_s == 2.0 * math.ceil(20e6 / 1024)
    with pytest.raises(UserError) as error:
        small(step_s=1e-5)
    assert error.value.id == "usage.finetune_step_time"


def test_prices_stay_with_a_plan_that_is_changed() -> None:
    found = replanned(small(price_per_hour=2.0, max_steps=100), batch_size=4)
    assert found.timing.prices.price_per_hour == 2.0
    assert found.timing.rent_expected is not None


def test_parameters_are_counted_again_when_the_rank_changes() -> None:
    plan = small()
    assert replanned(plan, lora_r=64).counts.n_trained == 4 * plan.counts.n_trained


# -- cards -----------------------------------------------------------------------------------------------------------


def test_the_cheapest_and_the_fastest_are_of_those_that_fit() -> None:
    cards = [
        Candidate("a", "fits", False, 10.0, 3.0, 5.0),
        Candidate("b", "fits", True, 8.0, 4.0, 6.0),
        Candidate("c", "does_not_fit", False, 1.0, 1.0, 1.0),
        Candidate("d", "fits", False),
    ]
    choice = chosen(cards)
    assert (choice.fastest, choice.cheapest, choice.least_energy, choice.mixed_prices) == ("b", "a", "a", True)
    assert chosen(cards[2:]).fastest is None


def test_cards_show_a_million_tokens_where_the_run_has_no_length() -> None:
    plans = [small(gpu) for gpu in ("RTX 3060 12GB", "RTX 4090")]
    found = compared(plans)
    assert found.of == "million"
    for plan, card in zip(plans, found.cards, strict=True):
        timing = plan.timing
        assert card.duration_s == pytest.approx(1e6 / timing.tokens_per_s)
        assert card.tokens == 1_000_000
    assert found.best.fastest == "RTX 4090"
    whole = compared([small(gpu, max_steps=1000) for gpu in ("RTX 3060 12GB", "RTX 4090")])
    assert (whole.of, whole.best) == ("run", found.best)
    limited = compared(plans, parse_limit("1h"))
    assert limited.of == "limit"
    first, second = limited.cards
    assert first.tokens < second.tokens


def test_each_card_has_its_own_rent_on_one_screen() -> None:
    words = ("smollm2-135m", "--method", "lora", "--seq-len", "512", "--batch-size", "2", "--max-steps", "1000")
    shown = first_screen("plan", *words, "--gpu", "3060,4090", "--price", "4090=0.5", most_lines=13).stdout
    assert "RTX 4090: fastest" in shown
    made = json.loads(foretrain("plan", *words, "--gpu", "3060,4090", "--price", "4090=0.5", "--json").stdout)
    rents = [plan["timing"]["rent_expected"] for plan in made["plans"]]
    assert rents[0] is None
    assert made["cards"][1]["cost"] == rents[1] == pytest.approx(0.5 * made["cards"][1]["duration_s"] / 3600)
    assert made["best"]["mixed_prices"] is True


# -- where the memory goes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{"method": "full"}, {"method": "lora"}, {"method": "qlora", "optim": "adamw_8bit"}]
)
def test_every_byte_of_each_phase_has_a_formula(options: dict[str, str]) -> None:
    plan = small(**options)
    found = explain(plan)
    assert [phase.memory.phase for phase in found.phases] == [phase.phase for phase in plan.memory.phases]
    for phase in found.phases:
        assert sum(row.size_bytes for row in phase.sums) == phase.memory.allocated_bytes
        sizes = [tensor.size_bytes for tensor in phase.tensors]
        assert sizes == sorted(sizes, reverse=True)
        assert sum(sizes) > 0.98 * (phase.memory.allocated_bytes - _rounding(phase.sums))
    steady = found.phases[-1]
    (embedding,) = (t for t in steady.tensors if t.component == "weights" and t.where == "embed_tokens")
    width = 4 if options["method"] == "qlora" else 2  # prepare_model_for_kbit_training casts it to fp32
    assert embedding.size_bytes == width * 49152 * 576
    assert embedding.numbers == f"{width} × 49,152 × 576"
    assert {line.id for line in found.lines} == {"allocated", "slack", "context", "process"}


def _rounding(sums: object) -> int:
    return sum(row.size_bytes for row in sums if row.id == "rounding")  # type: ignore[attr-defined]


def test_nvidia_smi_is_explained_as_for_gpts() -> None:
    plan = small()
    needed = plan.memory.neediest
    assert explain(plan, process_bytes=needed.needed_expected_bytes).conclusion == "explained"
    assert explain(plan, process_bytes=needed.needed_high_bytes + GIB).conclusion == "too_much"
    assert explain(plan, observed_bytes=20 * GIB).conclusion == "no_process"


def test_the_explanation_is_of_what_was_planned() -> None:
    shown = foretrain("plan", *SMALL, "--explain").stdout
    assert "embed_tokens" in shown
    assert "4·B·T·V" in shown
    assert "steady state" in shown
    assert foretrain("plan", *SMALL, "--explain", "--within", "2h").returncode == ExitCode.USAGE


# -- forms and options -----------------------------------------------------------------------------------------------


def test_the_first_screens_are_short() -> None:
    for more in (
        (),
        ("--dataset-tokens", "10M"),
        ("--within", "2h", "--dataset-tokens", "10M"),
        ("--batch-size", "512"),
    ):
        first_screen("plan", *SMALL, *more, most_lines=12)


def test_one_line_has_hours_and_money() -> None:
    shown = foretrain("plan", *SMALL, "--dataset-tokens", "100M", "--price", "0.5", "--oneline").stdout
    assert shown.count("\n") == 1
    assert "EUR" in shown
    assert "tokens/s" in shown
    limited = foretrain("plan", *SMALL, "--within", "2h", "--oneline").stdout
    assert "steps" in limited


def test_check_exits_with_3_where_it_does_not_fit() -> None:
    fits = foretrain("plan", *SMALL, "--check", "--oneline")
    large = foretrain("plan", *SMALL, "--batch-size", "2048", "--check", "--oneline")
    assert (fits.returncode, large.returncode) == (0, ExitCode.CHECK_FAILED)
    assert "--check:" in large.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("--trainer", "nanogpt"), ("--logged-mfu", "30"), ("--best", "--within", "2h"),
        ("--within", "2h", "--write", "x.toml"), ("--observed", "5GiB"), ("--full", "--oneline"),
        ("--within", "2h", "--tokens", "1M"), ("--explain", "--largest", "batch_size"), ("--largest", "n_layer"),
        ("--largest", "batch_size", "--exact"), ("--price", "0.3", "--price-per-kwh", "0.2"),
        ("--price", "3090=0.3"), ("--within", "soon"), ("--lora-targets", "nothing"), ("--price-per-kwh", "-1"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_sentence(words: tuple[str, ...]) -> None:
    result = foretrain("plan", *SMALL, "--quiet", *words)
    assert result.returncode == ExitCode.USAGE
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert "bug" not in result.stderr


def test_show_config_says_where_each_option_is_from(tmp_path: Path) -> None:
    file = tmp_path / "axolotl.yaml"
    file.write_text(
        "base_model: HuggingFaceTB/SmolLM2-135M\nadapter: lora\nlora_r: 32\nsequence_len: 2048\nnothing: 1\n"
    )
    result = foretrain("plan", str(file), "--show-config", "--batch-size", "3", "--json")
    shown = json.loads(result.stdout)
    assert (shown["config"]["lora_r"], shown["sources"]["lora_r"]) == (32, "lora_r")
    assert (shown["config"]["batch_size"], shown["sources"]["batch_size"]) == (3, "--batch-size")
    assert shown["sources"]["optim"] == "default"
    assert "nothing" in result.stderr  # the key that nobody knows, and no traceback


@pytest.mark.parametrize("named", ["qwen3.json", "adapter_config.json", "folder"])
def test_a_model_is_planned_whatever_its_file_is_called(tmp_path: Path, named: str) -> None:
    config, adapter = model_named("qwen3-0.6b"), {"peft_type": "LORA", "base_model_name_or_path": "qwen3-0.6b"}
    assert config is not None
    file = tmp_path / ("adapter_config.json" if named == "folder" else named)
    file.write_text(json.dumps(config.config if named == "qwen3.json" else adapter))
    source = str(tmp_path if named == "folder" else file)
    assert is_asked([source])
    found, _, _ = read_finetune(source, ["--method", "lora"])
    assert found.facts.n_layer == 28


def test_an_adapter_s_file_says_how_it_was_trained(tmp_path: Path) -> None:
    file = tmp_path / "adapter_config.json"
    modules = [f"model.layers.{i}.self_attn.q_proj" for i in range(28)]
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "qwen3-0.6b", "r": 64, "lora_dropout": 0.05}
    file.write_text(json.dumps({**adapter, "target_modules": modules}))
    renamed = tmp_path / "mine.json"
    renamed.write_text(file.read_text())
    for source in (file, tmp_path, renamed):
        _, tune, reading = read_finetune(str(source))
        assert (tune.method, tune.lora_r, tune.lora_dropout) == ("lora", 64, 0.05)
        assert tune.lora_targets == "self_attn.q_proj"
        assert reading.origins["lora_r"] == "r"
    _, tune, _ = read_finetune(str(file), ["--lora-r", "8", "--method", "qlora"])
    assert (tune.method, tune.lora_r) == ("qlora", 8)
    file.write_text(json.dumps({**adapter, "peft_type": "IA3"}))
    with pytest.raises(UserError) as raised:
        read_finetune(str(file))
    assert "IA3" in str(raised.value)


def test_the_screen_names_the_phase_that_needs_most() -> None:
    words = ("qwen3-8b", "--method", "qlora", "--unsloth", "--merge", "--batch-size", "3", "--gpu", "RTX 4090")
    assert "while merging the adapters" in " ".join(foretrain("plan", *words).stdout.split())


def test_limit_gives_no_advice_to_a_run_that_does_not_fit() -> None:
    words = ("qwen3-8b", "--method", "full", "--batch-size", "1", "--gpu", "RTX 4070", "--within", "12h")
    assert "max_steps" not in foretrain("plan", *words).stdout
    ends = foretrain("plan", *SMALL, "--dataset-tokens", "1M", "--within", "100h").stdout
    assert "max_steps" not in ends
    assert "max_steps" in foretrain("plan", *SMALL, "--dataset-tokens", "1B", "--within", "1h").stdout


def test_config_of_too_many_layers_says_how_many() -> None:
    config = model_named("qwen3-0.6b")
    assert config is not None
    with pytest.raises(UserError) as raised:
        text_source(json.dumps({**config.config, "num_hidden_layers": 257}), "config.json")
    assert "num_hidden_layers = 257" in str(raised.value)
    assert "256" in str(raised.value)


# -- which of the two ------------------------------------------------------------------------------------------------


def test_ambiguous_name_says_what_was_planned_and_the_other() -> None:
    for words, asked, said in (
        (["smollm2-135m"], False, "chose_pretraining"),
        (["smollm2-135m", "--batch-size=4"], False, "chose_pretraining"),
        (["smollm2-135m", "--lora-r=8", "--method", "lora"], True, "chose_finetuning"),
        (["gpt2-124m"], False, ""),
        (["qwen3-8b"], True, ""),
    ):
        assert is_asked(words) is asked
        assert "".join(note.id for note in how_chosen(words)) == said
    (note,) = how_chosen(["smollm2-135m", "--lora-r=8", "--method", "lora"])
    assert note.values["options"] == ["--lora-r", "--method"]
    assert "because of --method" in foretrain("plan", *SMALL, "--oneline").stderr
    assert foretrain("plan", *SMALL, "--oneline", "--quiet").stderr == ""


@pytest.mark.parametrize(
    ("word", "said"),
    [("no.yaml", "cannot be read"), ("Owner/Name", "write hf:Owner/Name"), ("qwen3-7b", "did you mean")],
)
def test_what_is_not_there_is_taken_for_what_it_looks_like(
    word: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    foretrain("plan", word, "--method", "lora", "--gpu", "RTX 4070", code=ExitCode.USAGE, says=said)


# -- advice ----------------------------------------------------------------------------------------------------------


def test_advice_for_what_does_not_fit_is_planned_by_change() -> None:
    found = library.advise(
        "smollm2-135m", "RTX 4070", method="lora", seq_len=2048, batch_size=4, gradient_checkpointing=False
    )
    assert found.goal == "fit"
    assert {change.effect.verdict for change in found.advised} == {"fits"}
    for change in found.advised:
        again = library.plan(
            "smollm2-135m",
            gpu="RTX 4070",
            **{"method": "lora", "seq_len": 2048, "batch_size": 4, "gradient_checkpointing": False, **change.options},
        )
        assert (again.needed_bytes, again.verdict) == (change.effect.needed_bytes, change.effect.verdict)
        assert change.effect.saved_bytes == found.now.needed_bytes - again.needed_bytes > 0
    changed = {key for change in found.advised for key in change.options}
    assert changed >= {"batch_size", "grad_accum", "gradient_checkpointing"}


def test_advice_for_a_run_that_fits_makes_it_faster() -> None:
    found = library.advise(
        "smollm2-135m", "RTX 4090", method="lora", seq_len=512, batch_size=1, grad_accum=8, gradient_checkpointing=True
    )
    assert found.goal == "speed"
    assert {"gradient_checkpointing": False} in [change.options for change in found.advised]
    assert all(change.effect.verdict == "fits" and (change.effect.slower or 0) < 0 for change in found.advised)


def test_advice_for_a_cheaper_run_is_ranked_by_planned_cost() -> None:
    options: dict[str, Any] = {"method": "lora", "seq_len": 512, "batch_size": 1, "grad_accum": 8, "max_steps": 100}
    options |= {"gradient_checkpointing": True, "price_per_hour": 0.5}

    def money(**changed: Any) -> float:
        timing = library.plan("smollm2-135m", gpu="RTX 4090", **{**options, **changed}).timing
        spent = timing.money() if timing else None
        return spent[1]

    found = library.advise("smollm2-135m", "RTX 4090", goal="cost", **options)
    same = [change.effect.money for change in found.advised if not change.learns_otherwise]
    assert same == sorted(same)
    assert found.now.money == money()
    for change in found.advised:
        assert change.effect.money == pytest.approx(money(**change.options))
        assert (change.effect.money or 0) < money()


def test_advice_of_a_paged_optimizer_says_nothing_of_its_time() -> None:
    paged, without = (planned(small(method="full"), (id,)) for id in ("paged", "optimizer_8bit"))
    assert (paged.options, paged.effect.slower) == ({"optim": "paged_adamw_8bit"}, None)
    assert without.effect.slower is not None


def test_the_advised_command_is_the_plan_of_the_change() -> None:
    words = ("smollm2-135m", "--method", "lora", "--seq-len", "2048", "--batch-size", "32", "--gpu", "RTX 3060 12GB")
    shown = first_screen("advise", *words, most_lines=15).stdout
    assert "foretrain plan smollm2-135m" in shown
    assert "foretrain plan smollm2-135m" in foretrain("advise", *words, "--apply", "1").stdout


def test_money_of_a_timing_is_that_of_its_steps() -> None:
    plan = small()
    assert plan.timing is not None
    once, often = (with_steps(plan.timing, plan.gpu, count) for count in (1, 250))
    assert often.cost_expected == pytest.approx(250 * (once.cost_expected or 0))
    assert with_steps(often, plan.gpu, None).total_s is None
