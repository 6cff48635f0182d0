"""Fine-tuning with DeepSpeed's ZeRO: model states against its own formulas, verdicts of a range, files, what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

import foretrain as library
from foretrain.base.errors import UserError
from foretrain.config.finetune.read import read_finetune, settings_of
from foretrain.predict.finetune.plan import FineTunePlan
from foretrain.predict.memory import PhaseMemory
from tests.kit.command import foretrain

MODEL, N = "smollm2-135m", 134_515_008  # parameters, as its card on Hugging Face counts them
CARD = "RTX 4090"


def plan(strategy: str, world: int = 4, **options: Any) -> FineTunePlan:
    return library.plan(MODEL, CARD, **{"method": "full", "world": world, "strategy": strategy, **options})


def states(phase: PhaseMemory) -> int:
    return sum(phase.bytes_of(name) for name in ("weights", "gradients", "optimizer"))


def of_zero2(n: int, world: int) -> int:
    """deepspeed/runtime/zero/stage_1_and_2.py, estimate_zero2_model_states_mem_needs, cpu_offload=False."""
    return 2 * n + int(18 * n / world)


def of_zero3(n: int, largest: int, world: int) -> int:
    """deepspeed/runtime/zero/stage3.py, estimate_zero3_model_states_mem_needs, cpu_offload=False."""
    return 4 * largest + int(18 * n / world)


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_states_of_stage_2_are_deepspeed_s_own_estimate(strategy: str, world: int) -> None:
    """In a step so short that the optimizer's moment is its peak."""
    options = {"method": "full", "seq_len": 64, "world": world, "strategy": strategy}
    phase = library.plan("llama-3.1-8b", CARD, **options).memory.phase("steady_step")
    assert states(phase) == pytest.approx(of_zero2(8_030_261_248, world), rel=0.001)


@pytest.mark.parametrize("world", [2, 8, 64])
def test_deepspeed_s_estimate_of_stage_3_is_in_the_range(world: int) -> None:
    made, embedding = plan("zero3", world, seq_len=64), 49152 * 576
    phase = made.memory.phase("steady_step")
    assert states(phase) == pytest.approx(16 * N / world, rel=0.02)  # 2 + 2 + 4 + 8 bytes, no fp32 gradients
    assert phase.needed_low_bytes < of_zero3(N, embedding, world) + made.memory.context.high_bytes
    assert of_zero3(N, embedding, world) + made.memory.context.low_bytes < phase.needed_high_bytes


def test_each_stage_shares_more() -> None:
    least = [plan(each).memory.neediest.allocated_bytes for each in ("ddp", "zero1", "zero2", "zero3")]
    assert least == sorted(least, reverse=True)
    assert len({plan("zero1", grad_accum=2).memory.neediest.allocated_bytes, least[1]}) == 2  # whole gradients


def test_adapters_cut_only_what_is_trained() -> None:
    one, many = (plan("zero2", world, method="lora") for world in (2, 64))
    assert one.memory.phase("steady_step").bytes_of("weights") == pytest.approx(2 * N, rel=0.01)
    assert many.memory.phase("steady_step").bytes_of("weights") == pytest.approx(2 * N, rel=0.01)
    held = [each.memory.phase("steady_step").bytes_of("optimizer") for each in (one, many)]
    assert held[0] == pytest.approx(12 * one.counts.n_trained / 2, rel=0.03)
    assert held[0] > 16 * held[1]


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_a_verdict_is_sure_at_both_ends_alone(strategy: str) -> None:
    found = plan(strategy).memory.neediest
    low, high = found.needed_low_bytes, found.needed_high_bytes
    size = plan(strategy).available_bytes
    assert size

    def verdict(room_bytes: int) -> str | None:
        asked = {"method": "full", "world": 4, "strategy": strategy}
        return library.plan(MODEL, CARD, used_by_others=size - room_bytes, **asked).verdict

    assert high - low > 10**9
    assert verdict(high + 2**28) == "fits"
    assert verdict((low + high) // 2) in ("tight", "may_not_fit")
    assert verdict(low * 9 // 10) == "does_not_fit"


def test_the_note_says_how_wide_the_range_is() -> None:
    (note,) = [note for note in plan("zero3").notes if note.id == "finetune_zero"]
    assert (note.values["stage"], note.values["world"]) == (3, 4)
    shown = foretrain("plan", MODEL, "--method", "full", "--gpus", "4 x 4090", "--strategy", "zero3").stdout
    assert "ZeRO-3" in shown
    assert "more" in shown


def test_more_is_sent_than_with_ddp_and_nothing_more_computed() -> None:
    slow = {"link": "pcie3x4", "seq_len": 64}
    ddp, zero = (plan(each, **slow).timing for each in ("ddp", "zero2"))
    assert zero.flops_per_step == ddp.flops_per_step
    assert zero.step_s.expected_s > ddp.step_s.expected_s  # weights come back from all cards


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"strategy": "zero3", "method": "qlora"}, "method = qlora"), ({"optim": "adafactor"}, "optim = adafactor"),
        ({"compile": True}, "torch_compile"), ({"unsloth": True, "method": "lora"}, "unsloth"),
        ({"amp": "no"}, "amp = no, dtype = bfloat16"), ({"loop": "torchtune"}, "--loop=torchtune"),
    ],
    ids=str,
)  # fmt: skip
def test_what_zero_is_not_planned_with_is_refused(options: dict[str, Any], what: str) -> None:
    with pytest.raises(UserError, match=what):
        plan(**{"strategy": "zero2", **options})


@pytest.mark.parametrize("options", [{"method": "qlora"}, {"reentrant": True, "gradient_checkpointing": True}])
def test_what_is_whole_on_each_card_is_planned_with_stage_2(options: dict[str, Any]) -> None:
    for loop in ("trainer", "axolotl", "llama-factory"):
        assert plan("zero2", loop=loop, **options).verdict == "fits"


def ds_json(stage: int, **zero: Any) -> str:
    return json.dumps({"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": stage, **zero}})


AXOLOTL = "base_model: {model}\nadapter: lora\nmicro_batch_size: 1\nsequence_len: 256\nbf16: true\ndeepspeed: {path}\n"
TRAINER = (
    "model_name_or_path: {model}\nper_device_train_batch_size: 1\nbf16: true\nnum_train_epochs: 1\ndeepspeed: {path}\n"
)
LLAMA = "model_name_or_path: {model}\nstage: sft\nfinetuning_type: lora\ncutoff_len: 256\nbf16: true\ntemplate: x\ndeepspeed: {path}\nlearning_rate: 1e-4\n"
REPOSITORY = "HuggingFaceTB/SmolLM2-135M"


def read(tmp_path: Path, text: str, path: str, *words: str) -> tuple[Any, Any]:
    file = tmp_path / "train.yaml"
    file.write_text(text.format(model=REPOSITORY, path=path), "utf-8")
    _, tune, reading = read_finetune(str(file), words)
    return tune, reading


@pytest.mark.parametrize("text", [AXOLOTL, TRAINER, LLAMA], ids=["axolotl", "trainer", "llama-factory"])
@pytest.mark.parametrize(
    ("name", "strategy"),
    [("deepspeed_configs/zero2.json", "zero2"), ("examples/deepspeed/ds_z3_config.json", "zero3"),
     ("zero1.json", "zero1"), ("zero3_bf16.json", "zero3"), ("mine.json", ""), ("zero4.json", "")],
)  # fmt: skip
def test_a_well_known_name_says_the_stage(tmp_path: Path, text: str, name: str, strategy: str) -> None:
    tune, reading = read(tmp_path, text, name, "--world=2")
    assert (tune.strategy, "deepspeed" in reading.unplanned) == (strategy or "ddp", not strategy)
    tune, reading = read(tmp_path, text, name)  # on one card nobody knows what DeepSpeed leaves there
    assert (tune.strategy, reading.unplanned["deepspeed"]) == ("ddp", "unknown")


@pytest.mark.parametrize(
    ("content", "strategy"),
    [
        (ds_json(1), "zero1"), (ds_json(3, overlap_comm=True, reduce_bucket_size="auto"), "zero3"),
        (ds_json(2, reduce_bucket_size=5e8), "zero2"), (ds_json(2, reduce_bucket_size=2e9), ""), (ds_json(0), ""),
        (ds_json(3, zero_quantized_weights=True), ""), ('{"zero_optimization": {"stage": 2}, "compile": {}}', ""),
        ('{"zero_optimization": {"stage": 2}, "optimizer": {"type": "OneBitAdam"}}', ""),
    ],
)  # fmt: skip
def test_the_json_beside_a_file_counts_over_its_name(tmp_path: Path, content: str, strategy: str) -> None:
    (tmp_path / "zero1.json").write_text(content, "utf-8")
    tune, reading = read(tmp_path, TRAINER, "zero1.json", "--world=2")
    assert (tune.strategy, "deepspeed" in reading.unplanned) == (strategy or "ddp", not strategy)


def test_what_is_on_the_host_makes_it_an_upper_bound(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(ds_json(2, offload_optimizer={"device": "cpu"}), "utf-8")
    for name in ("ds.json", "ds_z2_offload_config.json"):
        tune, reading = read(tmp_path, TRAINER, name, "--world=2")
        assert (tune.strategy, list(reading.unplanned.values())) == ("zero2", ["at_most"])


def test_the_command_line_says_what_a_file_does_not(tmp_path: Path) -> None:
    tune, reading = read(tmp_path, TRAINER, "mine.json", "--world=2", "--strategy=zero3")
    assert (tune.strategy, reading.unplanned, reading.sharding) == ("zero3", {}, "")


def test_accelerate_s_file_says_stage_and_cards(tmp_path: Path) -> None:
    path = tmp_path / "accelerate.yaml"
    asked = ["--method=full", "--accelerate", str(path)]
    head = "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nmixed_precision: bf16\nnum_processes: 8\n"
    keys = "  gradient_accumulation_steps: 1\n  zero3_init_flag: true\n  zero_stage: 3\n"
    path.write_text(f"{head}deepspeed_config:\n{keys}  offload_param_device: none\n", "utf-8")
    _, tune, reading = read_finetune("smollm2-135m", asked)
    assert (tune.world, tune.strategy, tune.amp, reading.unplanned) == (8, "zero3", "bf16", {})
    path.write_text(f"{head}deepspeed_config:\n{keys}  offload_param_device: cpu\n", "utf-8")
    assert read_finetune("smollm2-135m", asked)[2].unplanned == {"offload_param = cpu": "at_most"}
    (tmp_path / "ds.json").write_text(ds_json(2), "utf-8")
    path.write_text(f"{head}deepspeed_config:\n  deepspeed_config_file: ds.json\n", "utf-8")
    assert read_finetune("smollm2-135m", asked)[1].strategy == "zero2"


def test_a_pasted_text_opens_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mine.json"
    path.write_text(ds_json(3), "utf-8")
    monkeypatch.chdir(tmp_path)
    found = settings_of(TRAINER.format(model=REPOSITORY, path=path), "pasted.yaml", script=False)
    assert found.sharded_values == {}
