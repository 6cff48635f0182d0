"""Fine-tuning on cards that share it: a rank's estimate against its trace, FSDP2's pieces against PyTorch's, time."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", minversion="5.23")
pytest.importorskip("peft")

import foretrain as library
from foretrain.base.errors import UserError
from foretrain.config.finetune.options import FineTune
from foretrain.config.finetune.read import read_finetune
from foretrain.config.hub.source import facts_of
from foretrain.hardware.catalogue import find, find_gpu
from foretrain.hardware.links import find_link
from foretrain.predict.finetune.memory import FineTuneEstimate
from foretrain.predict.speed.collectives import bus_factor
from foretrain.predict.speed.ranks import Unit, shared_passes_s
from foretrain.predict.trace import service
from foretrain.predict.trace.finetune import drive
from foretrain.predict.trace.finetune.request import FineTuneRequest, answered, requests_for
from tests.kit.command import foretrain
from tests.kit.finetune import source_of
from tests.kit.finetune_traces import CARD, EVALUATED, built_config

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*checkpointing. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning"),
]
MODEL, SEGMENT = "smollm2-135m", 2 << 20


def agrees(name: str, *, but: str = "", **options: Any) -> None:
    """Hold each phase of a rank to what the Trainer's own run allocates there, and to what the allocator reserves."""
    common = {"dtype": "bfloat16", "batch_size": 2, "seq_len": 256, "amp": "no", "world": 2, "strategy": "fsdp"}
    tune, gpu, config = FineTune.model_validate({**common, **EVALUATED, **options}), find_gpu(CARD), built_config(name)
    facts = facts_of(config)
    assert facts is not None
    found = {p.phase: p for p in FineTuneEstimate(facts, tune, gpu).memory.phases}
    (asked, *_) = requests_for(source_of(config), tune, gpu)
    answer = answered([asked.whole(drive.trace(asked.job()))], tune, gpu, gpu.memory_bytes)
    expected = {p.phase: p for p in answer.memory.phases}
    assert answer.memory.verdict == "fits"
    assert (
        answer.memory.context == library.plan(MODEL, gpu, world=tune.world, method="full").memory.context
    )  # and NCCL's
    if not tune.adapters:
        expected.pop("prepare", None)  # nothing is done in it
    assert found.keys() == expected.keys()
    for phase, real in expected.items():
        if phase == but:
            continue
        assert found[phase].allocated_bytes == pytest.approx(real.allocated_bytes, rel=0.003), phase
        assert found[phase].reserved_bytes == pytest.approx(real.reserved_bytes, abs=SEGMENT), phase


def test_a_rank_is_the_trainers_with_bf16_and_accumulation() -> None:
    agrees("llama", amp="bf16", grad_accum=3)


def test_a_rank_is_the_trainers_with_adapters() -> None:
    agrees("llama tied", method="lora", gradient_checkpointing=True)


def test_a_rank_of_ddp_is_the_trainers_with_adapters() -> None:
    agrees("llama", strategy="ddp", method="lora")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {}), ("llama", {"method": "lora"}), ("llama tied", {"amp": "bf16", "world": 3}),
        ("gpt2", {"grad_accum": 2, "world": 3, "gradient_checkpointing": True}),
        ("llama", {"method": "lora", "amp": "bf16", "grad_accum": 3, "dtype": "float32"}),
        ("qwen3", {"strategy": "fsdp_no_reshard", "optim": "adamw_torch", "grad_accum": 2}),
        ("phi", {"method": "dora", "amp": "bf16"}), ("gemma3", {"amp": "fp16", "dtype": "float32"}),
        ("mixtral", {}), ("llama tied", {"loop": "trl"}), ("llama tied", {"loop": "trl", "method": "lora"}),
        ("llama tied", {"keeps_logits": True}), ("llama", {"strategy": "ddp", "grad_accum": 2, "world": 3}),
        ("llama tied", {"strategy": "ddp", "amp": "bf16", "gradient_checkpointing": True, "keeps_logits": True}),
        ("llama", {"strategy": "ddp", "loop": "llama-factory", "method": "lora"}), ("mixtral", {"strategy": "ddp"}),
        ("llama", {"strategy": "ddp", "loop": "trl", "method": "lora", "gradient_checkpointing": True}),
        # DDP has old 4-bit weights while adapters are merged, which the estimate leaves out
        ("qwen3", {"strategy": "ddp", "method": "qlora", "amp": "bf16", "but": "merge"}),
    ],
    ids=str,
)  # fmt: skip
def test_a_rank_takes_what_the_trainer_takes(name: str, options: dict[str, Any]) -> None:
    agrees(name, **options)


def test_only_the_card_tells_when_the_first_bucket_goes() -> None:
    """A trace for each answer where buckets are made again: not where DDP looks for what a step does not use."""
    source, gpu = source_of(built_config("llama")), find_gpu(CARD)

    def kept(**options: Any) -> list[bool]:
        return [each.keeps for each in requests_for(source, FineTune.model_validate({"world": 2, **options}), gpu)]

    again: dict[str, Any] = {"gradient_checkpointing": True}
    assert kept(**again) == kept(loop="llama-factory", method="lora") == [False, True]
    others: list[dict[str, Any]] = [
        {},
        {**again, "method": "lora"},
        {**again, "strategy": "fsdp"},
        {**again, "world": 1},
    ]
    assert [kept(**other) for other in others] == [[False]] * 4


def test_deepspeeds_step_is_not_traced() -> None:
    tune = FineTune(world=2, strategy="zero2", amp="bf16")
    with pytest.raises(service.TraceUnavailable, match="DeepSpeed's step is not traced"):
        service.traces([FineTuneRequest(source_of(built_config("llama")), tune, find_gpu(CARD))])


@pytest.mark.parametrize("world", [2, 4, 8])
def test_weights_gradients_and_states_are_cut(world: int) -> None:
    """Rajbhandari et al. 2020, arXiv:1910.02054: a rank of ZeRO-3 has 1/N of 2 + 2 + 4 bytes a weight in bfloat16."""
    plan = library.plan(MODEL, "RTX 3060", method="full", world=world, strategy="fsdp")
    phase, n = plan.memory.phase("steady_step"), plan.counts.n_params
    assert phase.bytes_of("weights") == pytest.approx(2 * n / world, rel=0.02)
    assert phase.bytes_of("optimizer") == pytest.approx(4 * n / world, rel=0.03)
    assert not phase.bytes_of("buckets")


def test_what_stays_gathered_takes_more_memory_and_no_more_time() -> None:
    made = {
        strategy: library.plan(MODEL, "RTX 4090", method="full", world=8, strategy=strategy)
        for strategy in ("ddp", "fsdp", "fsdp_no_reshard")
    }
    needed = {strategy: plan.needed_bytes for strategy, plan in made.items()}
    assert needed["fsdp"] < needed["fsdp_no_reshard"] < needed["ddp"]
    times = {strategy: plan.timing.step_s.expected_s for strategy, plan in made.items()}
    assert times["fsdp_no_reshard"] < times["fsdp"]
    assert made["fsdp"].timing.flops_per_step == made["ddp"].timing.flops_per_step


@pytest.mark.parametrize("sent", [0.0, 4.0])
def test_passes_that_nothing_hides_wait_for_all_that_is_sent(sent: float) -> None:
    """Zhao et al. 2023, arXiv:2304.11277: weights are gathered twice, gradients are sent once."""
    units = [Unit(2.0, sent, 0.0, 0.0, reshards=True) for _ in range(3)]
    assert shared_passes_s(units, lambda what, size: size) == 3 * (2 * 2.0 + sent)


def test_passes_that_hide_all_wait_at_both_ends() -> None:
    units = [Unit(2.0, 4.0, 100.0, 200.0, reshards=True) for _ in range(3)]
    waits = shared_passes_s(units, lambda what, size: size) - 900.0
    assert waits == 2.0 + 2.0 + 4.0  # and the last unit's weights once more, before its backward pass


def test_a_slow_link_carries_each_weight_and_each_gradient() -> None:
    asked = {"method": "full", "world": 2, "strategy": "fsdp", "seq_len": 64}
    fast, slow = (library.plan(MODEL, "RTX 3060", link=link, **asked) for link in ("pcie4x16", "pcie3x4"))
    assert fast.timing.step_s.expected_s < slow.timing.step_s.expected_s
    sent = 2 * bus_factor("all_gather", 2) * 2 * slow.counts.n_params
    assert slow.timing.step_s.expected_s > sent / find_link("pcie3x4").bytes_per_s


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"method": "qlora"}, "method = qlora"), ({"optim": "adafactor"}, "optim = adafactor"),
        ({"loop": "axolotl"}, "loop = axolotl"), ({"lora_saved": "lm_head", "method": "lora"}, "modules_to_save"),
        ({"strategy": "hsdp"}, "--strategy=hsdp"),
        ({"compile": True}, "torch_compile"), ({"reentrant": True}, "use_reentrant"), ({"liger": True}, "liger"),
        ({"load_in_8bit": True, "method": "lora"}, "load_in_8bit"),
    ],
    ids=str,
)  # fmt: skip
def test_what_sharding_is_not_planned_with_is_refused(options: dict[str, Any], what: str) -> None:
    with pytest.raises(UserError, match=what):
        library.plan(MODEL, "RTX 4090", **{"world": 2, "strategy": "fsdp", "method": "full", **options})


def test_trl_that_reads_a_head_which_nobody_gathers_is_refused() -> None:
    with pytest.raises(UserError, match="loop = trl, method = lora"):
        library.plan("llama-3.1-8b", "RTX 4090", method="lora", world=2, strategy="fsdp", loop="trl")


def test_the_command_line_takes_the_word_of_pretraining() -> None:
    words = ("plan", MODEL, "--method", "full", "--gpus", "2 x 3060", "--strategy", "fsdp")
    found = json.loads(foretrain(*words, "--json").stdout)
    assert found["tune"]["strategy"] == "fsdp"
    assert any(note["id"] == "finetune_fsdp" for note in found["notes"])
    assert "FSDP2" in foretrain(*words).stdout
    refused = foretrain("plan", MODEL, "--method", "full", "--gpu", "3060", "--strategy", "fsdp")
    assert (refused.returncode, "--gpus" in refused.stderr) == (2, True)


def test_nccl_takes_what_it_takes_with_ddp() -> None:
    made = [library.plan(MODEL, find("RTX 3060"), world=2, strategy=each, method="full") for each in ("ddp", "fsdp")]
    assert made[0].memory.context == made[1].memory.context


FILE = "model_name_or_path: Qwen/Qwen3-0.6B\nper_device_train_batch_size: 2\noutput_dir: out\nlearning_rate: 1.0e-4\n"
LEGACY = "fsdp: full_shard auto_wrap\nfsdp_config:\n  fsdp_transformer_layer_cls_to_wrap: Qwen3DecoderLayer\n"
ACCELERATE = """compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
num_processes: 4
fsdp_config:
  fsdp_version: 2
  fsdp_activation_checkpointing: true
  fsdp_cpu_ram_efficient_loading: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
"""


@pytest.mark.parametrize(
    ("keys", "strategy"),
    [
        ("fsdp: true\n", "fsdp"), (f"{LEGACY}  version: 2\n", "fsdp"),
        (f"{LEGACY}  version: 2\n  reshard_after_forward: false\n", "fsdp_no_reshard"),
        (LEGACY, ""), (f"{LEGACY}  version: 1\n", ""), ("fsdp: true\nfsdp_config:\n  offload_params: true\n", ""),
        ("fsdp: hybrid_shard\nfsdp_config:\n  version: 2\n", ""), ("fsdp: true\nfsdp_config:\n  new_key: 1\n", ""),
        ("fsdp: true\nfsdp_config:\n  transformer_layer_cls_to_wrap: Qwen3MLP\n", ""),
    ],
)  # fmt: skip
def test_a_file_with_fsdp2_is_planned_where_its_keys_are(tmp_path: Path, keys: str, strategy: str) -> None:
    path = tmp_path / "train.yaml"
    path.write_text(FILE + keys, "utf-8")
    _, tune, reading = read_finetune(str(path), ["--world=2"])
    assert (tune.strategy, "fsdp" in reading.unplanned) == (strategy or "ddp", not strategy)
    _, tune, reading = read_finetune(str(path))  # on one card nobody knows what FSDP leaves there
    assert (tune.strategy, reading.unplanned["fsdp"]) == ("ddp", "unknown")


def test_accelerates_file_says_how_many_cards_share_the_weights(tmp_path: Path) -> None:
    path = tmp_path / "accelerate.yaml"
    path.write_text(ACCELERATE, "utf-8")
    _, tune, reading = read_finetune("qwen3-0.6b", ["--method=full", "--accelerate", str(path)])
    assert (tune.world, tune.strategy, tune.amp, tune.gradient_checkpointing) == (4, "fsdp", "bf16", True)
    assert not reading.unplanned
    path.write_text(ACCELERATE.replace("  fsdp_version: 2\n", ""), "utf-8")  # FSDP1
    _, tune, reading = read_finetune("qwen3-0.6b", ["--method=full", "--accelerate", str(path)])
    assert (tune.world, reading.unplanned) == (1, {"fsdp_config": "unknown", "num_processes = 4": "at_least"})


@pytest.mark.slow
def test_command_line_traces_one_of_several_cards(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(built_config("llama tied")), "utf-8")
    words = ("plan", str(tmp_path), "--method", "lora", "--seq-len", "64", "--gpus", "2 x 3060")
    found, estimate = (json.loads(foretrain(*words, *more, "--json").stdout) for more in (("--exact",), ()))
    traced, estimated = found["memory"], estimate["memory"]
    assert (traced["source"], traced["context"]) == ("traced", estimated["context"])
    assert found["timing"] == estimate["timing"]
    shown = foretrain(*words, "--exact", "--explain", "--snapshot", str(tmp_path / "snapshot.pickle")).stdout
    assert all(said in shown for said in ("2 x RTX 3060 12GB", "memory traced", "DDP's buckets of gradients"))
    assert (tmp_path / "snapshot.pickle").stat().st_size
