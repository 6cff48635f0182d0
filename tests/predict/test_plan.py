"""Plans: the real cases, FLOPs, time, verdicts, the command line."""

import json
from pathlib import Path

import pytest

from foretrain.advice.outlook import predict_frontier
from foretrain.base.errors import UserError
from foretrain.base.quantities import parse_bytes, parse_limit
from foretrain.config.families import FAMILIES
from foretrain.config.presets import PRESETS
from foretrain.config.resolve import from_text, resolve
from foretrain.config.shape import ModelShape
from foretrain.hardware.catalogue import catalogue, find
from foretrain.predict.plan import Plan, n_evaluations, plan
from foretrain.predict.pretraining import of_plan
from foretrain.predict.spec import StepSpec
from foretrain.predict.speed.time import step_time
from foretrain.predict.within import within
from foretrain.reports.views import plan as plan_view
from foretrain.web import calls
from tests.kit.command import REPO, foretrain, refused
from tests.kit.tiny import write_dataset

CASES = REPO / "examples" / "real-cases"
GPU = find("RTX 4070")


def case(name: str, *words: str) -> Plan:
    resolved = resolve([str(CASES / f"{name}.py"), *words])
    return plan(resolved.config, GPU, name=name)


def test_parameters_to_the_digit_of_the_log() -> None:
    counts = {name: case(name).counts for name in ("a", "b1", "b2", "c", "d")}
    assert {name: f"{c.n_params_nanogpt / 1e6:.2f}" for name, c in counts.items()} == {
        "a": "29.94", "b1": "40.56", "b2": "123.59", "c": "76.77", "d": "40.56",
    }  # fmt: skip
    assert counts["a"].decayed_tensors == 26
    assert f"{counts['a'].decayed_params / 1e6:.2f}" == "30.13"


def test_case_a_where_the_memory_goes() -> None:
    """nvidia-smi: 4,464 MiB for the process. The logits are the largest part, and weights are fp32."""
    memory = case("a").memory_of("nanogpt")
    assert memory.compiled
    steady = memory.phase("steady_step")
    assert steady.components[0].id == "logits"
    weights = next(c for c in steady.components if c.id == "weights")
    assert weights.size_bytes == pytest.approx(4 * case("a").counts.n_params, rel=1e-3)
    assert steady.needed_low_bytes < 4464 * 2**20 < steady.needed_high_bytes


def test_case_b_what_the_mfu_means() -> None:
    resolved = resolve([str(CASES / "b1.py")])
    timing = plan(resolved.config, GPU, logged_step_s=3.9).timing
    assert timing.mfu == pytest.approx(0.69, abs=0.005)
    assert timing.nanogpt_mfu == pytest.approx(0.129, abs=0.0005)
    assert timing.tokens_per_s == pytest.approx(134_000, rel=0.005)
    assert timing.flop_per_s == pytest.approx(40.3e12, rel=0.005)
    assert timing.source == "measured (log)"


def test_case_b_the_other_way_round() -> None:
    """From what nanoGPT printed to seconds."""
    result = foretrain("plan", str(CASES / "b1.py"), "--gpu", "4070", "--logged-mfu", "12.9", "--json")
    timing = json.loads(result.stdout)["timing"]
    assert timing["step_s"]["expected_s"] == pytest.approx(3.9, rel=0.005)
    assert timing["mfu"] == pytest.approx(0.69, abs=0.005)


def test_case_c_does_not_fit_beside_a_desktop() -> None:
    resolved = resolve([str(CASES / "c.py")])
    beside = plan(resolved.config, GPU, used_by_others_bytes=parse_bytes("2.1GB"))
    assert beside.verdict_of("nanogpt") == "does_not_fit"
    failing = [p.phase for p in beside.memory_of("nanogpt").phases if p.verdict == "does_not_fit"]
    assert failing == ["steady_step"]  # whose tensors alone are more than the 9.6 GiB
    assert plan(resolved.config, GPU).verdict_of("nanogpt") != "does_not_fit"  # the desktop is what breaks it
    assert beside.verdict_of("foretrain") == "fits"
    # In eager mode it would die before the first step: the evaluation holds five copies of the logits.
    eager = resolve([str(CASES / "c.py"), "--compile=False"])
    phases = plan(eager.config, GPU, used_by_others_bytes=parse_bytes("2.1GB")).memory_of("nanogpt")
    assert phases.phase("evaluate_steady").verdict == "does_not_fit"


def test_case_d_tokens_flops_hours() -> None:
    resolved = resolve([str(CASES / "d.py")])
    made = plan(resolved.config, GPU, logged_step_s=3.9)
    assert made.work.tokens == 10_485_760_000
    assert made.work.epochs == pytest.approx(2.85, abs=0.005)
    assert made.work.flops_6n == pytest.approx(2.55e18, rel=0.002)
    assert made.work.flops == pytest.approx(3.15e18, rel=0.002)
    assert made.timing.step_s.expected_s * made.work.steps / 3600 == pytest.approx(21.7, abs=0.05)
    assert made.timing.energy_expected_j
    assert made.timing.energy_low_j < made.timing.energy_expected_j < made.timing.energy_high_j  # type: ignore[operator]
    kwh = made.timing.energy_expected_j / 3.6e6
    assert made.timing.cost_expected == pytest.approx(kwh * 0.30)


def test_published_runs_are_in_the_stated_range() -> None:
    """Four of five runs of nanoGPT's own step that others logged; benchmarks/time_against_logs.py shows each."""
    logs = json.loads((REPO / "benchmarks" / "published_logs.json").read_text("utf-8"))["logs"]
    inside = []
    for log in logs:
        if log["kind"] == "nanogpt" and not log["doubtful"]:
            config = resolve([f"--{key}={value}" for key, value in log["config"].items()]).config
            predicted = step_time(
                StepSpec.of(config, find(log["gpu"]), "nanogpt", dtype=log["dtype"], compiled=log["compiled"])
            )
            inside.append(predicted.low_s <= config.tokens_per_step / log["tokens_per_s"] <= predicted.high_s)
    assert sum(inside) >= 0.8 * len(inside)


def test_time_is_monotonic() -> None:
    base = resolve(["gpt2-124m"]).config

    def seconds(gpu: str, **changes: object) -> float:
        config = base.model_copy(update=changes)
        found = step_time(StepSpec.of(config, find(gpu), dtype="bfloat16", compiled=bool(changes.get("compile", True))))
        return found.expected_s

    assert seconds("3060") > seconds("4070") > seconds("4090") > seconds("H200")
    assert seconds("4070", compile=False) > seconds("4070")
    assert seconds("4070", activation_checkpointing=True) > 1.1 * seconds("4070")
    assert seconds("4070", gradient_accumulation_steps=128) == pytest.approx(2 * seconds("4070"), rel=0.02)


def test_evaluations_are_counted() -> None:
    for words, count in (
        (["--max_iters=20000", "--eval_interval=500"], 41),
        (["--max_iters=5000", "--eval_interval=2000"], 4),
    ):
        assert n_evaluations(resolve(["gpt2-124m", "--lr_decay_iters=5000", *words]).config) == count


def test_plan_round_trips_through_json() -> None:
    made = case("c", "--activation_checkpointing=true")
    assert Plan.from_json(made.model_dump_json()) == made
    assert Plan.from_json(json.dumps(made.to_json(schema="foretrain.plan/1"))) == made


def test_every_preset_and_every_card_can_be_planned() -> None:
    pairs = [(preset, find("4070")) for preset in PRESETS] + [("gpt2-30m", gpu) for gpu in catalogue().values()]
    untrained: set[str] = set()
    for preset, gpu in pairs:
        try:
            made = plan(resolve([preset]).config, gpu)
        except UserError as error:
            assert error.id == "usage.training_needs_cuda", gpu.name
            untrained.add(gpu.name)
        else:
            assert (made.verdict_of("foretrain") is None) == (gpu.memory_bytes is None)
    assert untrained == {"K80", *(gpu.name for gpu in catalogue().values() if gpu.kind in ("rocm", "xpu"))}


def test_dtype_is_chosen_from_the_card() -> None:
    config = resolve(["gpt2-124m"]).config
    assert plan(config, find("4070")).dtype == "bfloat16"
    assert plan(config, find("T4")).dtype == "float16"
    assert plan(config.model_copy(update={"dtype": "float16"}), find("4070")).dtype == "float16"


def test_memory_limit_limits() -> None:
    config = resolve(["gpt2-124m", "--memory_limit=4GiB"]).config
    made = plan(config, GPU)
    assert made.available_bytes == 4 * 2**30
    assert made.available_reason == "memory_limit"
    assert made.verdict_of("foretrain") == "does_not_fit"


def test_dataset_on_disk_gives_epochs_and_vocabulary() -> None:
    path = write_dataset(Path("data/toy"), tokens=1000)
    (path / "meta.json").write_text(json.dumps({"dtype": "uint16", "vocab_size": 96, "tokenizer": "byte"}))
    result = foretrain("plan", "--dataset=toy", "--max_iters=10", "--lr_decay_iters=10", "--warmup_iters=1",
                       "--gpu", "4070", "--json")  # fmt: skip
    made = json.loads(result.stdout)
    assert made["config"]["vocab_size"] == 96
    assert made["work"]["epochs"] == pytest.approx(10 * 491_520 / 1000)


# -- the command line ----------------------------------------------------------------------------------------


def test_plan_says_the_verdict_first() -> None:
    result = foretrain("plan", str(CASES / "c.py"), "--gpu", "RTX 4070", "--used-by-others", "2.1GB", "--full", code=0)
    verdict = " ".join(result.stdout.split("Memory by phase")[0].split())
    assert "nanoGPT, compiled: Does not fit. Needs " in verdict
    assert "most in the backward pass" in verdict
    assert "foretrain, compiled: Fits. Peak " in verdict
    assert "Other programs use 1.96 GiB" in verdict


def test_json_is_one_object_with_units_in_its_keys() -> None:
    result = foretrain("plan", "gpt2-124m", "--gpu", "4070", "--json", "--cooldown=0.3")
    made = json.loads(result.stdout)
    assert made["schema"] == "foretrain.plan/1"
    assert made["memory"][0]["phases"][0]["allocated_bytes"] > 0
    assert "note:" in result.stderr  # everything else


def test_several_cards() -> None:
    result = foretrain("plan", "gpt2-124m", "--gpu", "3060,4070,4090")
    for name in ("RTX 3060 12GB", "RTX 4070", "RTX 4090"):
        assert name in result.stdout
    made = json.loads(foretrain("plan", "gpt2-124m", "--gpu", "3060,4090", "--json").stdout)
    assert [p["gpu"]["name"] for p in made["plans"]] == ["RTX 3060 12GB", "RTX 4090"]


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["gpt2-30m", "--batch_size=256", "--gpu", "4070", "--check"], 3, "does not fit the RTX 4070"),
        (["gpt2-30m", "--gpu", "4070", "--check"], 0, ""),
        (["c.py", "--gpu", "4070", "--used-by-others", "2.1GB", "--check", "--trainer", "nanogpt"], 3, "does not fit"),
        (["gpt2-124m", "--gpu", "4071"], 2, "nearest"),
        (["gpt2-124m", "--gpu", "4060 ti"], 2, "more than one card"),
        (["gpt2-124m", "--gpu", "4070", "--used-by-others", "lots"], 2, "--used-by-others"),
        (["gpt2-124m", "--gpu", "4070", "--used-by-others", "13GiB"], 2, "has only 11.56 GiB"),
        (["gpt2-124m", "--gpu", "4070", "--step-time", "0"], 2, "must be from"),
        (["gpt2-124m", "--gpu", "4070", "--step-time", "1", "--logged-mfu", "3"], 2, "one of them"),
        (["gpt2-124m", "--gpu", "4070", "--trainer", "x"], 2, "foretrain, nanogpt"),
        (["gpt2-124m", "--gpu"], 2, "needs a value"),
    ],
)
def test_exit_codes(words: list[str], code: int, says: str) -> None:
    words = [str(CASES / word) if word == "c.py" else word for word in words]
    result = foretrain("plan", *words, code=code)
    assert says in " ".join(result.stderr.replace("│", " ").split())


def test_without_a_card_plan_asks_for_one() -> None:
    foretrain("plan", "gpt2-124m", code=2, says="--gpu")
    assert foretrain("plan", "baby", "--device=cpu").returncode == 0


def test_errors_are_json_too() -> None:
    result = foretrain("plan", "--batchsize=3", "--n_head=7", "--gpu", "4070", "--json")
    error = json.loads(result.stdout)
    assert result.returncode == error["exit_code"] == 2
    assert error["schema"] == "foretrain.error/1"
    assert {p["id"] for p in error["problems"]} == {"config.no_such_option_near", "config.heads_do_not_divide"}


def test_did_you_mean() -> None:
    assert "plan" in foretrain("plna").stderr
    assert foretrain("plna").returncode == 2


def test_library_in_four_lines() -> None:
    import foretrain as ft

    forecast = ft.plan(ft.resolve(["gpt2-124m"]).config, ft.find_gpu("RTX 4070"))
    assert forecast.verdict_of("foretrain") == "fits"
    assert ModelShape.of(forecast.config).n_params == forecast.counts.n_params


def test_of_a_card_with_unknown_memory_the_highest_phase_is_told() -> None:
    result = foretrain("plan", "gpt2-124m", "--gpu", "M1 Pro", "--compile=false", "--full")
    first = " ".join(result.stdout.split("Memory by phase")[0].split())
    assert "in the backward pass" in first
    assert "Give --memory_limit" in first


def test_check_with_json_is_one_object() -> None:
    result = foretrain("plan", "gpt2-124m", "--gpu", "4070", "--batch_size=64", "--check", "--json", code=3)
    assert json.loads(result.stdout)["schema"] == "foretrain.plan/1"
    assert "does not fit" in result.stderr


@pytest.mark.parametrize(
    "words", [["gpus", "--bogus"], ["compare"], ["plan", "baby", "--gpu", "4070", "--trainer", "x"]]
)
def test_wrong_options_are_an_object_too(words: list[str]) -> None:
    result = foretrain(*words, "--json", code=2)
    found = json.loads(result.stdout)
    assert found["schema"] == "foretrain.error/1"
    assert found["message"]


@pytest.mark.parametrize(
    ("words", "word"),
    [
        (["--step-time", "3", "--gpu", "3060,4070"], "one device"),
        (["--step-time", "inf", "--gpu", "4070"], "--step-time"),
        (["--used-by-others", "2", "--gpu", "4070"], "2GiB"),
        (["--observed", "2GB", "--gpu", "4070"], "--explain"),
    ],
)
def test_options_that_cannot_be_meant(words: list[str], word: str) -> None:
    foretrain("plan", "gpt2-124m", *words, code=2, says=word)


def test_a_log_faster_than_the_card_is_doubted() -> None:
    found = plan(resolve(["gpt2-124m"]).config, GPU, logged_step_s=0.1)
    assert any(note.id == "mfu_beyond_peak" for note in found.notes)
    assert not any(
        note.id == "mfu_beyond_peak" for note in plan(resolve(["gpt2-124m"]).config, GPU, logged_step_s=60).notes
    )


def test_narrow_terminals_get_fewer_columns_not_broken_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for words in (["gpus"], ["plan", "gpt2-124m", "--gpu", "3060,4070,4090", "--full"]):
        result = foretrain(*words, code=0)
        lines = [line for line in result.stdout.splitlines() if "RTX 4070  " in line or "RTX 4070 " in line]
        assert any("12.00 GiB" in line or "GiB" in line for line in lines)
        assert max(len(line) for line in result.stdout.splitlines()) <= 80


def test_what_is_not_known_of_a_family_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """No time where the operations of its step are not known."""
    family = type(FAMILIES["modern"])
    # Of sizes that no other test plans, as estimates are kept.
    config = resolve(["baby", "--recipe=modern", "--compile=true", "--n_layer=3", "--batch_size=7"]).config
    assert plan(config.model_copy(update={"n_layer": 5}), find("RTX 4070")).timing is not None
    monkeypatch.setattr(family, "is_timed", lambda self, compiled: not compiled)
    found = plan(config, find("RTX 4070"))
    assert "time_of_recipe_unknown" in {note.id for note in found.notes}
    assert found.timing is None
    assert found.nanogpt_timing is not None
    assert "plan.no_time_of_recipe" in repr(plan_view.document(found))
    with refused("usage.no_time_of_recipe"):
        within(of_plan(found), parse_limit("12h"))
    uncompiled = plan(config.model_copy(update={"compile": False}), find("RTX 4070"))
    assert uncompiled.timing is not None
    assert "time_of_recipe_unknown" not in {note.id for note in uncompiled.notes}


@pytest.mark.parametrize("words", [(), ("--dtype=float32",), ("--compile=false",)])
def test_the_frontiers_own_point_is_the_plan(words: tuple[str, ...]) -> None:
    made = plan(resolve(["gpt2-30m", *words]).config, find("4070"))
    for step in ("foretrain", "nanogpt"):
        found, timing = predict_frontier(made, step), made.timing_of(step)
        assert [point.tokens_per_s for point in found.points if point.given] == [timing.tokens_per_s]


# karpathy/nanoGPT config/eval_gpt2.py
EVAL_GPT2 = "batch_size = 8\neval_iters = 500\neval_only = True\nwandb_log = False\ninit_from = 'gpt2'\n"


@pytest.fixture
def config(own_directory: Path) -> str:
    path = own_directory / "eval_gpt2.py"
    path.write_text(EVAL_GPT2)
    return str(path)


def test_batches_seconds_and_memory(config: str) -> None:
    result = foretrain("plan", config, "--gpu", "4070", "--full")
    shown = " ".join(result.stdout.split())
    assert "1,000 batches of 8 x 1,024 tokens" in shown
    assert "fits" in shown
    for nonsense in ("0.00e0", "all 0 steps", "FLOPs", "tokens/s", "MFU", "epochs", "checkpoint"):
        assert nonsense not in shown, nonsense
    short = foretrain("plan", config, "--gpu", "4070").stdout
    assert "0 steps" not in short
    assert "FLOPs" not in short
    made = json.loads(foretrain("plan", config, "--gpu", "4070", "--json").stdout)
    evaluation = made["nanogpt_timing"]["evaluation_s"]["expected_s"]
    assert 20 < evaluation < made["nanogpt_timing"]["total_s"]["expected_s"] < 200
    assert [phase["phase"] for phase in made["memory"][0]["phases"]] == ["evaluate_first"]


def test_foretrains_batches_are_its_own() -> None:
    found = from_text(EVAL_GPT2 + "eval_batch_size = 16\n", "eval_gpt2.py").config
    asked = {
        "values": {name: getattr(found, name) for name in ("eval_iters", "eval_only", "batch_size", "eval_batch_size")}
    }
    status, answer = calls.POSTED["/api/plan"](json.dumps({**asked, "gpu": "RTX 4070"}))
    assert status == 200
    assert "500 batches of 16 x 1,024 tokens" in json.dumps(answer, ensure_ascii=False)
    assert not {"step", "speed", "mfu"} & {figure["id"] for figure in answer["figures"]}
