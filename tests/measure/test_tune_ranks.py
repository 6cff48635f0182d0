"""`foretrain tune --gpus`: ways to share a step among ranks, timed by real processes."""

import json
import os
import signal
import subprocess
import time
from typing import Any

import pytest

from foretrain.app.planning import plan

pytest.importorskip("torch")

from foretrain.base.errors import UserError
from foretrain.cli.commands.tune import tune_command
from foretrain.config.options import RunConfig
from foretrain.config.sharing import STRATEGIES, Sharing, config_of_rank, sharing_problem
from foretrain.hardware.catalogue import find
from foretrain.measure.pool import Burst, Pool
from foretrain.measure.space import (
    TUNABLE,
    Machine,
    default_options,
    forecast_memory,
    forecast_s,
    learning,
    options,
    settings,
)
from foretrain.measure.trial import Fault
from foretrain.predict.ranks import rank_spec
from tests.kit.command import foretrain
from tests.kit.tiny import tiny

TWO = Machine(cuda=True, can_compile=True, world=2)
BASE = RunConfig(
    n_layer=2, n_head=4, n_embd=128, block_size=64, vocab_size=1024, batch_size=4, gradient_accumulation_steps=8,
    dtype="bfloat16", compile=False,
)  # fmt: skip


def space(base: RunConfig, *knobs: str, machine: Machine = TWO) -> list[Any]:
    return list(settings(base, options(base, base, frozenset(), knobs, machine), machine.world))


def test_every_setting_is_one_that_ranks_can_share() -> None:
    found = space(BASE, "batch_size", "strategy", "hold_gradients")
    assert found[0].config is BASE
    assert len({setting.levels for setting in found}) == len(found)
    assert {setting.config.strategy for setting in found} == set(STRATEGIES) - {"hsdp"}
    for setting in found:
        config = setting.config
        assert config.tokens_per_step == BASE.tokens_per_step
        assert sharing_problem(config, Sharing.of(config, 2, 2)) is None
        assert config_of_rank(config, 2).tokens_per_step * 2 == BASE.tokens_per_step
        assert not config.hold_gradients or config.strategy.startswith("fsdp")
    muon = BASE.model_copy(update={"optimizer": "muon", "recipe": "modern"})
    assert {setting.config.strategy for setting in space(muon, "strategy", "hold_gradients")} == {"ddp"}


def test_one_card_shares_nothing_and_the_config_stays() -> None:
    one = Machine(cuda=True, can_compile=True)
    assert {setting.config.strategy for setting in space(BASE, *TUNABLE, machine=one)} == {"ddp"}
    assert {"strategy", "hold_gradients"} <= set(default_options(BASE, frozenset(), TWO))
    assert not {"strategy", "hold_gradients"} & set(
        default_options(BASE, frozenset({"strategy", "hold_gradients"}), TWO)
    )


def test_gathering_in_half_precision_changes_what_is_learned() -> None:
    sharded = BASE.model_copy(update={"strategy": "fsdp"})
    assert learning(BASE, sharded) == "sharding"
    assert learning(BASE, BASE.model_copy(update={"strategy": "zero1"})) == "exact"
    single = {"dtype": "float32"}
    assert learning(BASE.model_copy(update=single), sharded.model_copy(update=single)) == "exact"


def test_the_forecast_is_that_of_a_plan_for_as_many_cards() -> None:
    made = plan("gpt2-124m", gpus="2 x RTX 3090", compile=False, strategy="fsdp", hold_gradients=True)
    config, gpu, best = made.config, find("RTX 3090"), made.best
    assert best.id == "fsdp_held"
    spec, _ = rank_spec(made.one_card, config, made.cluster, best)
    assert forecast_s(config, gpu, spec.dtype, 2) == best.time.step_s.expected_s
    room = made.one_card.available_bytes
    assert forecast_memory(config, gpu, spec.dtype, room, 2).needed_bytes == best.memory.needed_bytes


def test_ranks_are_timed_together_and_end_together() -> None:
    """The loss on the same rows is that of one process, whatever shares the step; a rank that is killed ends all."""
    config = tiny(dtype="float32", attention="sdpa", batch_size=2, gradient_accumulation_steps=4)
    with Pool(None, None) as pool:
        alone = pool.burst(config, 0.05, 600, None)
    assert isinstance(alone, Burst)
    with Pool(None, None, world=2) as pool:
        for strategy in ("ddp", "fsdp"):
            shared = pool.burst(config.model_copy(update={"strategy": strategy}), 0.05, 600, None)
            assert isinstance(shared, Burst), shared
            assert shared.loss == pytest.approx(alone.loss, rel=1e-5)
            assert shared.peak_bytes > 0
        assert isinstance(pool.evaluate(config, 600, None), int)
        leader = pool._children[config.model_dump_json()].process.pid
        (other,) = [pid for pid in _group(leader) if pid != leader]
        os.kill(other, signal.SIGKILL)
        died = pool.burst(config, 0.05, 600, None)
        assert isinstance(died, Fault)
        assert died.reason == "failed"
        groups = [child.process.pid for child in pool._children.values()]
        assert len(groups) == 1
    assert _ends(leader)
    assert all(_ends(group) for group in groups)


def _ends(leader: int) -> bool:
    """Whether nothing is left of a group; what was killed may take a moment to go."""
    end = time.monotonic() + 20
    while _group(leader) and time.monotonic() < end:
        time.sleep(0.05)
    return not _group(leader)


def _group(leader: int) -> list[int]:
    listed = subprocess.run(["ps", "-eo", "pid=,pgid=,stat="], capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in listed.splitlines()]
    return [int(pid) for pid, group, state in rows if int(group) == leader and not state.startswith("Z")]


@pytest.mark.parametrize(("words", "id"), [
    (["--gradient_accumulation_steps=3"], "config.ranks_indivisible"),
    (["--gradient_accumulation_steps=2", "--optimizer=muon", "--strategy=fsdp"], "config.sharing_optimizer"),
])  # fmt: skip
def test_what_ranks_cannot_share_is_refused_before_timing(words: list[str], id: str) -> None:
    with pytest.raises(UserError) as error:
        tune_command(["baby", "--device=cpu", *words, "--gpus=2"], standalone_mode=False)
    assert error.value.id.startswith(id)


def test_tune_starts_its_ranks_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"starts its ranks by itself.*--gpus 2"):
        tune_command(["baby"], standalone_mode=False)


@pytest.mark.slow
def test_a_search_among_ranks_from_config_to_written_file() -> None:
    sizes = ("--n_layer=1", "--n_head=2", "--n_embd=32", "--block_size=32", "--batch_size=2", "--dtype=float32")
    words = ("tune", "baby", "--device=cpu", "--compile=false", "--gradient_accumulation_steps=4", *sizes)
    result = foretrain(
        *words, "--gpus", "2", "--options", "strategy,hold_gradients", "--budget", "60s", "--trials", "3",
        "--write", "t.toml", "--json", code=0)  # fmt: skip
    answer = json.loads(result.stdout)
    assert answer["world"] == 2
    assert len(answer["trials"]) >= 2
    assert {trial["options"]["strategy"] for trial in answer["trials"]} <= set(STRATEGIES)
    foretrain("train", "t.toml", "--gpus", "2", "--max_iters=2", "--dataset=python-stdlib", apart=True, code=0)
