"""batch_size = auto and total_batch_size: what they mean in every layer, what is chosen, and that the choice is tried."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from foretrain.advice.micro_batch import NEAR, choose
from foretrain.app import training_session
from foretrain.base.errors import ConfigError, ExitCode, UserError
from foretrain.cli.commands import train as command_line
from foretrain.config.microbatches import divisors, sequences_of, with_micro_batch
from foretrain.config.options import RunConfig
from foretrain.config.resolve import resolve, to_toml
from foretrain.hardware.catalogue import find
from foretrain.hardware.cpu import nominal_cpu
from foretrain.measure import trial
from foretrain.measure.trial import Trial, run_trial
from foretrain.predict.memory import predict
from foretrain.predict.spec import StepSpec
from foretrain.predict.speed.time import step_time
from foretrain.runs.folder import RunDirectory
from foretrain.training.device import place
from tests.kit.command import foretrain, refused
from tests.kit.tiny import TINY, tiny, write_dataset

GIB = 2**30


def split(*words: str) -> tuple[int, int, int, bool]:
    c = resolve(list(words)).config
    return c.batch_size, c.gradient_accumulation_steps, c.eval_rows, c.auto_batch_size


def problem(*words: str) -> UserError:
    with pytest.raises(ConfigError) as caught:
        resolve(list(words))
    (found,) = caught.value.problems
    return found


# -- the words ---------------------------------------------------------------------------------------------


def test_auto_in_every_kind_of_config() -> None:
    Path("a.toml").write_text('[batch]\nbatch_size = "auto"\n')
    Path("a.py").write_text("batch_size = 'auto'\n")
    assert split("--batch_size=auto") == split("--batch-size", "AUTO") == split("a.toml") == split("a.py")
    assert split("a.toml") == (12, 40, 2400, True)
    assert split("gpt2-124m", "a.toml") == (8, 64, 1600, True)  # the sequences of the layer below
    assert split("a.toml", "--batch_size=6") == (6, 40, 1200, False)  # a later word ends it
    assert split("--batch_size=auto", "--batch_size=6") == (6, 40, 1200, False)
    assert split("--batch_size=6", "--batch_size=auto") == (6, 40, 1200, True)
    assert split("a.toml", "--auto_batch_size=false")[3] is False


def test_total_batch_size_decides_the_accumulation() -> None:
    assert split("gpt2-124m", "--total_batch_size=2**18") == (8, 32, 1600, False)
    assert split("--total_batch_size=524288", "--batch_size=auto") == (8, 64, 2400, True)
    assert resolve(["--total_batch_size=524288", "--batch_size=auto"]).config.tokens_per_step == 524288
    # A later layer's accumulation ends it; in one layer they have to agree.
    Path("t.toml").write_text("batch_size = 8\ntotal_batch_size = 524288\n")
    assert split("t.toml") == (8, 64, 1600, False)
    assert split("t.toml", "--gradient_accumulation_steps=4")[:2] == (8, 4)
    assert split("t.toml", "--batch_size=16")[:2] == (16, 32)
    assert split("t.toml", "--block_size=512")[:2] == (8, 128)
    found = problem("--total_batch_size=524288", "--batch_size=8", "--gradient_accumulation_steps=4")
    assert found.id == "config.total_contradicts"
    assert "8 x 4 x 1024 = 32,768" in str(found)


def test_a_total_that_cannot_be_cut_names_the_nearest() -> None:
    found = problem("--total_batch_size=500000")
    assert "batch_size x block_size = 12,288; the nearest are 491,520, 503,808" in str(found)
    found = problem("--total_batch_size=500000", "--batch_size=auto")
    assert "block_size = 1,024; the nearest are 499,712, 500,736" in str(found)
    for total in (491_520, 503_808):
        assert resolve([f"--total_batch_size={total}"]).config.tokens_per_step == total


@pytest.mark.parametrize("words", [["--batch_size=auto"], ["gpt2-124m", "--total_batch_size=2**18"]])
def test_written_configs_read_back(words: list[str]) -> None:
    config = resolve(words).config
    Path("w.toml").write_text(to_toml(config))
    assert resolve(["w.toml"]).config == config
    final = with_micro_batch(config, 4)
    Path("f.toml").write_text(to_toml(final))
    assert resolve(["f.toml"]).config == final
    assert resolve(["f.toml", "--eval_iters=3"]).config.eval_rows == 12


# -- the choice --------------------------------------------------------------------------------------------


@given(
    st.sampled_from([3, 4, 6, 8]), st.sampled_from([1, 2, 12, 30, 64, 480]), st.sampled_from([1, 5, 8]),
    st.integers(1, 24), st.booleans(),
)  # fmt: skip
@hypothesis_settings(max_examples=8)
def test_the_largest_that_fits_a_card(layers: int, batch: int, acc: int, room_gib: int, compile: bool) -> None:
    config = RunConfig(
        n_layer=layers, n_head=6, n_embd=384, batch_size=batch, gradient_accumulation_steps=acc, compile=compile,
        eval_iters=3,
    )  # fmt: skip
    gpu, room = find("RTX 4090"), room_gib * GIB
    choice = choose(config, gpu, "bfloat16", room)

    def fits(size: int) -> bool:
        made = with_micro_batch(config, size)
        memory = predict(StepSpec.of(made, gpu, dtype="bfloat16", compiled=compile), room)
        return memory.verdict == "fits"

    assert (choice.config.tokens_per_step, choice.config.eval_rows) == (config.tokens_per_step, config.eval_rows)
    assert choice.config.auto_batch_size is False
    sizes = divisors(sequences_of(config))
    larger = [size for size in sizes if size > choice.config.batch_size]
    if choice.reason == "auto_smallest":
        assert not fits(1)
    else:
        assert fits(choice.config.batch_size)
        assert choice.reason == ("auto_largest" if larger else "auto_whole")
        assert not larger or not fits(larger[0])


def test_a_laptop_does_not_take_all_sequences_at_once() -> None:
    config = resolve(["baby", "--gradient_accumulation_steps=30"]).config
    cpu = nominal_cpu()
    choice = choose(config, cpu, "float32", 16 * GIB)
    assert choice.reason == "auto_quick"
    assert choice.config.batch_size < 480

    def step_s(size: int) -> float:
        found = step_time(StepSpec.of(with_micro_batch(config, size), cpu, dtype="float32", compiled=False))
        return found.expected_s

    assert step_s(choice.config.batch_size) <= NEAR * step_s(480)
    tight = choose(config, cpu, "float32", 560 * 2**20)
    assert tight.config.batch_size <= choice.config.batch_size


def test_plan_shows_the_choice_and_its_reason() -> None:
    words = ("plan", "gpt2-124m", "--gpu", "4070,4090", "--batch_size=auto", "--json")
    plans = json.loads(foretrain(*words).stdout)["plans"]
    sizes = [made["config"]["batch_size"] for made in plans]
    assert sizes[0] < sizes[1]
    for made in plans:
        assert made["notes"][0]["id"] == "auto_largest"
        assert made["work"]["tokens_per_step"] == 524288
    shown = " ".join(foretrain("plan", "gpt2-124m", "--gpu", "4070", "--batch_size=auto", "--full").stdout.split())
    assert f"{sizes[0]} is the largest micro-batch that fits (× {512 // sizes[0]} = 512 sequences per step)" in shown


# -- the trial ---------------------------------------------------------------------------------------------


def shown_by_train(capsys: pytest.CaptureFixture[str], *words: str, resume: bool = False, trial: bool = True) -> str:
    command_line.train(resolve(list(words)), resume=resume, trial=trial)
    return " ".join(capsys.readouterr().err.split())


def test_train_tries_what_it_chose_once(capsys: pytest.CaptureFixture[str]) -> None:
    write_dataset(Path("data/toy"))
    words = [f"--{k}={v}" for k, v in TINY.items()] + ["--max_iters=2", "--lr_decay_iters=3", "--batch_size=auto"]
    first = shown_by_train(capsys, *words)
    assert "trying micro-batch" in first
    assert "fits: the trial took" in first
    c = RunDirectory(Path("out")).read_record().config
    assert (sequences_of(c), c.eval_rows, c.auto_batch_size) == (8, 8, False)
    assert resolve(["out/config.toml"]).config.batch_size == c.batch_size
    assert RunDirectory(Path("out")).read_lines("events")[0]["values"]["batch_size"] == c.batch_size
    second = shown_by_train(capsys, *words)
    assert "was tried here before" in second
    assert "trying" not in second
    shown_by_train(capsys, *words, "--max_iters=4", resume=True)
    assert RunDirectory(Path("out-2")).read_record().steps_done == 4


@pytest.mark.fault(
    "a micro-batch that was forecast to fit does not", row="B.1",
    sees="a child process tries smaller micro-batches",
    safe="everything: nothing has begun",
)  # fmt: skip
def test_it_shrinks_until_a_trial_lives(own_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def pretend(config: RunConfig, cap_bytes: int | None) -> Trial:
        seen.append(config.batch_size)
        return Trial(batch_size=config.batch_size, lived=config.batch_size <= limit, peak_bytes=GIB)

    monkeypatch.setattr(trial, "run_trial", pretend)
    monkeypatch.setenv("FORETRAIN_CACHE", str(own_directory / "cache"))
    config, placement = tiny(batch_size=30, gradient_accumulation_steps=2), place(tiny())
    limit = 7
    found = training_session.tried(config, placement, 2 * GIB, print)
    assert seen == [30, 15, 6]
    assert (found.batch_size, found.gradient_accumulation_steps, found.eval_rows) == (6, 10, 60)
    limit = 0
    with refused(code=ExitCode.OUT_OF_MEMORY):
        training_session.tried(with_micro_batch(config, 3), placement, 2 * GIB, print)
    # What lived is known, but not in less memory than it took.
    seen.clear()
    assert training_session.tried(with_micro_batch(config, 6), placement, 2 * GIB, print).batch_size == 6
    assert seen == []
    with pytest.raises(UserError):
        training_session.tried(with_micro_batch(config, 6), placement, GIB // 2, print)
    assert seen == [6, 3, 1]


def test_a_trial_is_ended_at_its_cap_and_with_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    found = run_trial(tiny(), 20 * 2**20)  # less than the interpreter with torch
    assert not found.lived
    assert found.peak_bytes > 20 * 2**20
    children: list[trial.StepsChild] = []

    class Interrupted(trial.StepsChild):
        def receive(self, most_s: float | None = None) -> Any:
            children.append(self)
            raise KeyboardInterrupt

    monkeypatch.setattr(trial, "StepsChild", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_trial(tiny(), None)
    assert children[0].process.poll() is not None


def test_no_trial_and_a_limit_that_is_too_small(capsys: pytest.CaptureFixture[str]) -> None:
    write_dataset(Path("data/toy"))
    words = [f"--{k}={v}" for k, v in TINY.items()] + ["--eval_only"]
    shown = shown_by_train(capsys, *words, "--batch_size=auto", trial=False)
    assert "trying" not in shown
    assert "batch_size = auto: " in shown
    assert "need at least" in shown_by_train(capsys, *words, "--memory_limit=100MiB")
