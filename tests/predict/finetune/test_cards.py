"""Fine-tuning on several cards: DDP's buckets as PyTorch makes them, NCCL's memory, time, energy, and what is refused."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import foretrain as library
from foretrain.base.errors import UserError
from foretrain.config.finetune.options import FineTune
from foretrain.hardware.catalogue import find
from foretrain.predict.estimate.ranks import Buckets
from foretrain.predict.finetune.ranks import waits_s
from foretrain.predict.plan import SCHEMA
from foretrain.predict.speed.ranks import Pace
from foretrain.predict.timeline import Timeline
from tests.kit.command import foretrain

MODEL = "smollm2-135m"
CARD = "RTX 3060"


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of one rank, which makes the buckets that any number makes."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("checkpointing", [False, True], ids=["looks for unused", "does not look"])
def test_buckets_are_those_of_ddp(alone: None, checkpointing: bool) -> None:
    model = nn.Sequential(nn.Embedding(3000, 512), nn.Linear(512, 512), nn.Linear(512, 9000))
    ddp = DistributedDataParallel(model, find_unused_parameters=not checkpointing)
    sizes_bytes = [4 * p.numel() for p in model.parameters()]
    buckets = Buckets(Timeline({}, 1), sizes_bytes, looks_for_unused=not checkpointing)
    buckets.wrap([])
    assert [tensor.size.nbytes for tensor in buckets.there] == sizes(ddp, "bucket_sizes")
    for _ in range(4):
        ddp(torch.zeros(2, 3, dtype=torch.long)).sum().backward()
    buckets.rebuild()
    if checkpointing:
        assert [tensor.size.nbytes for tensor in buckets.there] == sizes(ddp, "rebuilt_bucket_sizes")
    else:
        assert not sizes(ddp, "rebuilt_bucket_sizes")


def sizes(ddp: DistributedDataParallel, name: str) -> list[int]:
    return [int(size) for size in ddp._get_ddp_logging_data().get(name, "").split(", ") if size]


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_card_holds_the_model_and_buckets_of_what_is_trained(method: str) -> None:
    one, two = (library.plan(MODEL, CARD, method=method, world=world) for world in (1, 2))
    grown = two.memory.phase("steady_step").allocated_bytes - one.memory.phase("steady_step").allocated_bytes
    width = 2 if method == "full" else 4  # bfloat16 weights, adapters in fp32
    assert one.counts == two.counts
    buckets = two.memory.phase("steady_step").bytes_of("buckets")
    assert buckets == pytest.approx(width * one.counts.n_trained, rel=0.001)
    assert grown > 0.8 * buckets  # a bucket can take what was left of a block
    nccl = two.memory.context.expected_bytes - one.memory.context.expected_bytes
    assert two.needed_bytes > one.needed_bytes + 0.95 * nccl > one.needed_bytes


def test_tokens_energy_and_steps_are_of_all_cards() -> None:
    one, two = (library.plan(MODEL, CARD, method="lora", world=n, dataset_tokens="1M") for n in (1, 2))
    assert two.tune.tokens_per_step == 2 * one.tune.tokens_per_step
    assert two.timing.steps == -(-one.timing.steps // 2)
    assert one.timing.tokens_per_s < two.timing.tokens_per_s <= 2 * one.timing.tokens_per_s
    assert two.timing.power.expected_w == pytest.approx(2 * one.timing.power.expected_w, rel=0.05)
    assert two.timing.mfu <= one.timing.mfu


def test_step_waits_for_the_last_bucket_longer_on_a_slow_link() -> None:
    gpu, gradients = find(CARD), [4 * 2**20] * 20

    def waits(world: int, seconds: float) -> list[float]:
        return list(waits_s(FineTune(world=world), gpu, gradients, Pace(0, backward_root=seconds)))

    at_once = [max(waits(4, seconds)) for seconds in (0.0, 0.01, 100.0)]
    assert at_once[0] > at_once[1] > 1.1 * at_once[2] > 0
    fast, usual, poor = waits(4, 0.0)
    assert fast < usual < poor
    assert not waits(1, 0.0)


def test_cards_of_the_command_line_are_in_the_next_command() -> None:
    words = ("plan", "qwen3-1.7b", "--method", "full", "--gpus", "2 x 3060")
    shown = foretrain(*words).stdout
    assert "2 x RTX 3060 12GB" in shown
    assert "--gpus '2 x 3060'" in shown.replace("\\\n", "").replace("           ", "")
    found = json.loads(foretrain(*words, "--json").stdout)
    assert (found["schema"], found["tune"]["world"]) == (SCHEMA, 2)
    assert any(note["id"] == "finetune_ddp" for note in found["notes"])
    assert "2 x RTX 3060 12GB" in foretrain("advise", *words[1:]).stdout


@pytest.mark.parametrize(("words", "said"), [
    (("--gpus", "2 x 3060", "--loop", "unsloth"), "--loop=trainer"),
    (("--link", "pcie4x8", "--gpu", "3060"), "--gpus"),
    (("--gpus", "2 x 3060", "--world", "4"), "leave out --world"),
    (("--gpus", "2 x 3060", "--gpu", "4090"), "--gpu"),
    (("--world", "6", "--per-node", "4", "--gpu", "3060"), "--per-node"),
])  # fmt: skip
def test_what_several_cards_cannot_is_refused(words: tuple[str, ...], said: str) -> None:
    foretrain("plan", MODEL, "--method", "lora", *words, code=2, says=said)


def test_a_loop_that_wraps_nothing_is_refused_in_python_too() -> None:
    with pytest.raises(UserError, match="--loop=torchtune"):
        library.plan(MODEL, CARD, method="lora", loop="torchtune", world=2)


def test_a_comparison_sees_how_many_cards_a_plan_is_of(tmp_path: Path) -> None:
    for name, cards in (("one", ("--gpu", "3060")), ("two", ("--gpus", "2 x 3060"))):
        words = ("plan", MODEL, "--method", "lora", *cards, "--price", "0.7/h", "--dataset-tokens", "10M")
        (tmp_path / f"{name}.json").write_text(foretrain(*words, "--json").stdout, "utf-8")
    found = json.loads(foretrain("compare", str(tmp_path / "two.json"), str(tmp_path / "one.json"), "--json").stdout)
    assert [(each["name"], each["values"]) for each in found["differing"]] == [("ranks", [2, 1])]
    assert (found["scalings"][0]["more_cards"], found["scalings"][0]["fewer_cards"]) == (2, 1)
    assert [side["cost_per_hour"] for side in found["sides"]] == [1.4, 0.7]


def test_the_screen_says_what_is_of_each_card() -> None:
    words = ("plan", MODEL, "--method", "lora", "--gpus", "2 x 3060", "--price", "0.7/h", "--dataset-tokens", "10M")
    shown = " ".join(foretrain(*words).stdout.split())
    assert "on each of 2 cards = 4,096 tokens per step" in shown
    assert "per hour for each of 2 cards" in shown
    assert "2 cards alone" in " ".join(foretrain(*words, "--full").stdout.split())
