"""ForetrainCallback: a real Trainer's run on a CPU, forecast against what PyTorch's own allocator did; what ends a run.

Runs are small and real: transformers' Trainer, a Llama of four layers, evaluation and checkpoints.
"""

import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import foretrain as library
from foretrain import compare, explain, report
from foretrain.analysis.forecast_check import forecast_in
from foretrain.analysis.run import TrainerRunExplanation
from foretrain.app import trainer_forecast, trainer_session
from foretrain.app.finetune import plan_question, question
from foretrain.base.errors import UserError
from foretrain.comparison.compare import compare as compared_subjects
from foretrain.comparison.sources import load
from foretrain.comparison.sources.request import SourceRequest
from foretrain.comparison.subject import Subject
from foretrain.config.finetune.live import of_all_layers
from foretrain.hardware.catalogue import find
from foretrain.runs.folder import RunDirectory
from foretrain.runs.record import MeasuredMemory, TrainerRun
from foretrain.training import trainer_meter
from foretrain.training.trainer_meter import PhaseMeter
from foretrain.web import routes, runs
from tests.kit.command import REPO, foretrain, refused

pytest.importorskip("transformers", minversion="5")
pytest.importorskip("accelerate")
pytest.importorskip("peft")

import peft
import transformers

from tests.kit.trainers import BATCH, LENGTH, SIZES, STEPS, Samples, assert_forecast_of, explained, llama, trainer_of

ForetrainCallback = library.ForetrainCallback

# peft asks for names that transformers 5.23 calls old.
pytestmark = pytest.mark.filterwarnings("ignore:.*checkpointing. is deprecated:FutureWarning")


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    hook = sys.excepthook
    yield
    sys.excepthook = hook


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one whole run with LoRA beside nothing: full fine-tuning, two evaluations, two saves."""
    folder = tmp_path_factory.mktemp("runs") / "small"
    trainer_of(llama(), folder, ForetrainCallback(quiet=True)).train()
    return folder / "foretrain"


def record_in(folder: Path) -> TrainerRun:
    return RunDirectory(folder).record_of(TrainerRun)


def lines_in(folder: Path, kind: str = "") -> list[dict[str, Any]]:
    return [line for line in RunDirectory(folder).read_lines("metrics", whole=False) if kind in ("", line["kind"])]


def assert_forecast_is_right(found: TrainerRunExplanation) -> None:
    """Each phase that a forecast has, within one percent of what the allocator gave out."""
    pieces = {piece.id: piece for piece in found.phases}
    assert list(pieces) == ["load", "first_step", "steady_step", "evaluate", "save"]
    for name in ("load", "first_step", "steady_step", "evaluate"):
        predicted, measured = pieces[name].predicted_bytes, pieces[name].measured_bytes
        assert predicted == pytest.approx(measured, rel=0.01), name


# -- forecast and measurement ------------------------------------------------------------------------------


def test_phase_forecast_is_within_one_percent_of_the_allocator(run: Path) -> None:
    found = explained(run)
    assert_forecast_is_right(found)
    weights = sum(p.numel() for p in llama().parameters()) * 4
    assert found.phases[0].measured_bytes == pytest.approx(weights, abs=1024)  # the buffers of rotary positions
    assert found.phases[4].measured_bytes == pytest.approx(3 * weights, rel=0.01)  # weights and AdamW's moments


@pytest.mark.parametrize("changes", [
    {"method": "lora"},
    pytest.param({"method": "lora", "gradient_checkpointing": True}, marks=pytest.mark.slow),
    pytest.param({"gradient_checkpointing": True, "gradient_accumulation_steps": 2}, marks=pytest.mark.slow),
    pytest.param({"optim": "adamw_torch"}, marks=pytest.mark.slow),
    pytest.param({"dtype": "bfloat16"}, marks=pytest.mark.slow),
])  # fmt: skip
def test_other_ways_to_train_are_forecast_as_well(changes: dict[str, Any], tmp_path: Path) -> None:
    changes = dict(changes)
    model, dtype = llama(), changes.pop("dtype", "float32")
    model.to(getattr(torch, dtype))
    if changes.pop("method", "full") == "lora":
        model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
        if changes.get("gradient_checkpointing"):
            model.enable_input_require_grads()
    trainer_of(model, tmp_path, ForetrainCallback(quiet=True), **changes).train()
    found = explained(tmp_path / "foretrain")
    assert found.record.forecast_problem == ""
    assert_forecast_is_right(found)


@pytest.mark.slow
def test_windows_are_forecast_as_well(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {**SIZES, "head_dim": 32, "bos_token_id": 0, "eos_token_id": 0}
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    config = transformers.Gemma3TextConfig(**sizes, sliding_window=32, layer_types=kinds)
    trainer_of(transformers.Gemma3ForCausalLM(config), tmp_path, ForetrainCallback(quiet=True), length=256).train()
    assert_forecast_is_right(explained(tmp_path / "foretrain"))


@pytest.mark.parametrize("targets", ["all-linear", ["attn.c_proj", "c_attn"]])
def test_adapters_that_peft_keeps_by_whole_paths_are_planned(targets: str | list[str]) -> None:
    """It does so below 20 of them; of GPT-2 two parts of a block have a layer of one name."""
    sizes: dict[str, Any] = {"vocab_size": 64, "n_positions": 1024, "n_embd": 64, "n_layer": 2, "n_head": 4}
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    )
    config = peft.LoraConfig(r=8, target_modules=targets, task_type="CAUSAL_LM", fan_in_fan_out=True)
    adapted: Any = peft.get_peft_model(model, config)
    kept = adapted.peft_config["default"].target_modules
    assert (targets == "all-linear") == any("transformer.h.1." in name for name in kept)
    expected = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert library.plan(adapted, gpu="RTX 4090").counts.n_trained == expected


def test_paths_of_some_layers_alone_stay_as_they_are() -> None:
    paths = {"model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.up_proj"}
    assert of_all_layers(paths, 2) == {"self_attn.q_proj", "model.layers.1.mlp.up_proj"}
    assert of_all_layers(paths, 3) == paths


def test_the_record_says_what_the_trainer_did(run: Path) -> None:
    record = record_in(run)
    assert (record.status, record.steps_done, record.max_steps) == ("finished", STEPS, STEPS)
    assert (record.seq_len, record.tokens, record.trainer) == (LENGTH, STEPS * BATCH * LENGTH, "Trainer")
    assert record.n_params == record.n_trained == sum(p.numel() for p in llama().parameters())
    states = json.loads((run.parent / "checkpoint-5" / "trainer_state.json").read_text())["log_history"]
    losses = [line["loss"] for line in states if "loss" in line]
    assert [line["loss"] for line in lines_in(run, "log")] == losses
    assert [line["step"] for line in lines_in(run, "step")] == list(range(1, STEPS + 1))
    evaluations = [line["val_loss"] for line in lines_in(run, "evaluation")]
    assert evaluations == [line["eval_loss"] for line in states if "eval_loss" in line]
    parts = sum(line["step_s"] for line in lines_in(run, "step"))
    assert 0 < parts < record.wall_s
    written = json.loads((run / "run.json").read_text())
    assert TrainerRun.from_json(json.dumps(written)) == record


def test_training_is_the_same_with_and_without(tmp_path: Path) -> None:
    weights = []
    for name, callbacks in (("with", [ForetrainCallback(quiet=True)]), ("without", [])):
        trainer = trainer_of(llama(attention_dropout=0.1), tmp_path / name, *callbacks)
        trainer.train()
        assert "training_step" not in vars(trainer)
        weights.append(trainer.model.state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1])


def test_the_forecast_is_told_before_the_first_step(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    seen = []

    class Looks(transformers.Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            seen.append(capfd.readouterr().err)
            return super().compute_loss(*args, **kwargs)

    trainer_of(llama(), tmp_path, ForetrainCallback(), kind=Looks, max_steps=2, eval_strategy="no").train()
    assert "Forecast" in seen[0]
    assert f"{BATCH} × {LENGTH} tokens" in seen[0]
    after = capfd.readouterr().err
    assert "forecast against measured" in after
    assert f"foretrain explain {tmp_path / 'foretrain'}" in after.replace("\n", "")


def test_a_longer_sequence_than_the_first_is_forecast_afterwards(tmp_path: Path) -> None:
    lengths = iter(range(32, LENGTH, 8))

    def cut(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        length = next(lengths)
        return {name: torch.stack([row[name][:length] for row in rows]) for name in rows[0]}

    trainer = trainer_of(llama(), tmp_path, ForetrainCallback(quiet=True), max_steps=3, eval_strategy="no")
    trainer.data_collator = cut
    trainer.train()
    found = explained(tmp_path / "foretrain")
    assert found.forecast_seq_len == 32
    assert found.forecast.tune.seq_len == found.record.seq_len == 48
    assert found.phases[2].predicted_bytes == pytest.approx(found.phases[2].measured_bytes, rel=0.01)


def test_on_a_card_the_forecast_has_a_verdict_and_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trainer_forecast, "device_of", lambda device: (find("RTX 4090"), 20 * 2**30))
    trainer_of(llama(), tmp_path, ForetrainCallback(seq_len=128), max_steps=2, eval_strategy="no").train()
    told = capfd.readouterr().err
    assert "Fits." in told
    assert "2 steps of" in told
    plan = forecast_in(tmp_path / "foretrain")
    assert plan.timing is not None
    words = ["--batch-size", str(BATCH), "--seq-len", "128", "--max-steps", "2", "--dtype", "float32"]
    words += ["--gradient-checkpointing=false"]
    (tmp_path / "config.json").write_text(json.dumps(llama().config.to_dict()))
    asked = question(str(tmp_path / "config.json"), words)
    typed = plan_question(asked, "RTX 4090", used_by_others="20GiB")
    assert plan.memory == typed.memory
    assert plan.timing == typed.timing


@pytest.mark.slow
def test_an_exact_forecast_is_traced_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_forecast, "device_of", lambda device: (find("RTX 4090"), 0))
    trainer_of(llama(), tmp_path / "one", ForetrainCallback(exact=True, quiet=True), max_steps=1).train()
    plan = forecast_in(tmp_path / "one" / "foretrain")
    assert plan.memory.source == "traced"
    assert {"prepare", "save"} <= {phase.phase for phase in plan.memory.phases}

    def cannot(*args: Any) -> Any:
        raise UserError("environment.no_trace", reason="a reason")

    monkeypatch.setattr(trainer_forecast, "traced", cannot)
    trainer_of(llama(), tmp_path / "two", ForetrainCallback(exact=True, quiet=True), max_steps=1).train()
    plan = forecast_in(tmp_path / "two" / "foretrain")
    assert plan.memory.source == "estimated"
    assert "callback_not_traced" in [note.id for note in plan.notes]


class Card:
    """What torch.cuda says of a card's allocator: `held` now and the peaks since they were reset."""

    def __init__(self) -> None:
        self.held, self.peak, self.resets = 0, 0, 0

    def take(self, held: int) -> None:
        self.held, self.peak = held, max(self.peak, held)

    def reset(self, device: Any) -> None:
        self.peak, self.resets = self.held, self.resets + 1


def test_a_card_s_peaks_are_told_apart_by_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card()
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: card.peak)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 2 * card.peak)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: card.held)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", card.reset)

    def measured(**options: Any) -> dict[str, tuple[int | None, int | None]]:
        meter = PhaseMeter(torch.nn.Linear(2, 2), torch.device("cuda"), **options)
        card.held = card.peak = 0
        for held in (30, 10):  # a peak of loading
            card.take(held)
        meter.load()
        for phase, levels in (
            ("first_step", (50, 20)), ("steady_step", (40, 20)), ("evaluate", (25, 20)), ("steady_step", (45, 20)),
        ):  # fmt: skip
            meter.begin(phase)
            for held in levels:
                card.take(held)
            meter.done()
        found = meter.memory(MeasuredMemory(method="none"))
        assert found.method == "cuda allocator"
        return {phase.phase: (phase.allocated_bytes, phase.reserved_bytes) for phase in found.phases}

    apart = {"load": (30, 60), "first_step": (50, 100), "steady_step": (45, 90), "evaluate": (25, 50)}
    assert measured() == apart
    assert card.resets == 4
    assert measured(resets=False) == {"load": (30, 60), "first_step": (50, 100)}  # the rest stayed below
    assert card.resets == 4


# -- what reads the folder ---------------------------------------------------------------------------------


def test_commands_read_the_folder(run: Path, own_directory: Path) -> None:
    shown = foretrain("explain", str(run), code=0)
    assert "steady state" in shown.stdout
    told = json.loads(foretrain("explain", str(run), "--json").stdout)
    assert told["schema"] == "foretrain.explain/1"
    assert {piece["id"] for piece in told["phases"]} >= {"load", "first_step", "evaluate"}
    listed = json.loads(foretrain("runs", str(run.parent), "--json").stdout)
    assert [one["steps_done"] for one in listed["runs"]] == [STEPS]
    page = report(run, out=own_directory / "report.html").read_text()
    assert "steady state" in page
    with refused("usage.compare_trainer"):
        compare(run)


def test_two_runs_are_compared(run: Path, tmp_path: Path) -> None:
    trainer_of(llama(), tmp_path / "other", ForetrainCallback(quiet=True), learning_rate=1e-3).train()
    found: Any = compare(run, tmp_path / "other" / "foretrain")
    assert [side.label for side in found.sides] == ["small", "other"]
    assert [setting.name for setting in found.differing] == ["learning_rate"]


def test_runs_that_hardly_overlap_in_time_are_compared(run: Path, tmp_path: Path) -> None:
    """Steps of very unlike times: seen from one run the losses meet in time, and from the other they may not."""
    record, chance = record_in(run), random.Random(1)
    directory = RunDirectory(tmp_path)
    directory.write_record(record)

    def subject(name: str) -> Subject:
        lines, elapsed_s = [], 0.0
        for step in range(1, 6):
            step_s = chance.choice([0.03, 0.05, 0.3])
            elapsed_s += step_s
            lines.append({"kind": "step", "step": step, "step_s": step_s, "tokens": 256, "elapsed_s": elapsed_s})
            loss = 7 - 0.01 * step * chance.random()
            lines.append({"kind": "log", "step": step, "loss": loss, "elapsed_s": elapsed_s + 0.001})
            if step in (3, 5):
                elapsed_s, val = elapsed_s + 0.05, 6.9 + 0.01 * chance.random()
                lines.append({"kind": "evaluation", "step": step, "val_loss": val, "elapsed_s": elapsed_s})
        (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        return load(SourceRequest(path=str(tmp_path), label=name))

    for _ in range(40):
        found = compared_subjects([subject("a"), subject("b")]).verdict("hours")
        assert (found.pair is None) == (found.outcome == "not_comparable")


def test_the_page_shows_the_run(run: Path, tmp_path: Path) -> None:
    known = runs.Runs([run.parent])
    (shown,) = known.listed()["runs"]
    assert (shown["name"], shown["status"], shown["steps"], shown["of"]) == ("small", "finished", STEPS, STEPS)
    seen = known.get(shown["id"])
    assert seen is not None
    page = runs.page(shown["id"], seen, known.curve(shown["id"], seen))
    rows = page["pictures"][0]["numbers"]["rows"]
    losses = [line["loss"] for line in lines_in(run, "log")]
    assert [row[1] for row in rows] == ["1", "2", "3", "4", "5", "3", "5"]
    assert [float(row[2]) for row in rows[:5]] == pytest.approx(losses, rel=1e-3)
    assert runs.live_answer(seen, known.curve(shown["id"], seen), page["next"])["pictures"] is None
    assert [event["text"] for event in page["events"]] == [
        "saved checkpoint-3",
        "saved checkpoint-5",
        "ended after 5 steps",
    ]
    assert runs.report(seen)["document"]["sections"]
    (against,) = runs.comparisons(known)["runs"]
    assert [row["error"] for row in against["rows"]] == ["0.0%"]
    other = tmp_path / "other"
    shutil.copytree(run, other)
    made = routes.made([("a", runs.ObservedRun(run)), ("b", runs.ObservedRun(other))])
    assert [one["problem"] for one in made["runs"]] == ["", ""]


def test_a_damaged_folder_is_said(run: Path, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text((run / "run.json").read_text())
    assert explained(tmp_path).forecast is None
    (tmp_path / "plan.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text('{"kind": "step"}\nnonsense\n')
    assert lines_in(tmp_path) == []
    with refused("data.bad_run"):
        explain(tmp_path)
    (tmp_path / "run.json").write_text("[]")
    with refused("data.bad_run"):
        explain(tmp_path)


# -- what ends a run ---------------------------------------------------------------------------------------


MESSAGE = (
    "CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total capacity of 23.64 GiB of which 12.00 MiB is "
    "free. Including non-PyTorch memory, this process has 22.00 GiB memory in use. Of the allocated memory 21.00 GiB "
    "is allocated by PyTorch, and 600.00 MiB is reserved by PyTorch but unallocated."
)


class RunsOut(transformers.Trainer):
    """Memory runs out in the third step, as a card's allocator says it."""

    error: BaseException = torch.OutOfMemoryError(MESSAGE)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step == 2:
            raise self.error
        return super().training_step(*args, **kwargs)


def test_memory_that_runs_out_is_explained_and_goes_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trainer = trainer_of(llama(), tmp_path, ForetrainCallback(), kind=RunsOut)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        trainer.train()
    assert caught.value is RunsOut.error
    told = capfd.readouterr().err
    assert "512 MiB" in told
    assert "Out of memory" in told
    assert "--gradient-checkpointing" in told
    assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in told
    found = explained(tmp_path / "foretrain")
    assert found.record.status == "failed"
    assert found.record.reason.startswith("OutOfMemoryError: CUDA out of memory")
    (failure,) = found.failures
    assert failure.fatal
    assert (failure.phase, failure.step, failure.asked_bytes) == ("steady_step", 2, 512 * 2**20)
    assert failure.weights_bytes == sum(p.numel() for p in llama().parameters()) * 4
    assert found.changes[0].effect.saved_bytes > 0
    assert foretrain("explain", str(tmp_path / "foretrain")).returncode == 0


def test_memory_can_run_out_in_the_optimizer(tmp_path: Path) -> None:
    class Fails(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise torch.OutOfMemoryError(MESSAGE)

    model = llama()
    trainer = trainer_of(model, tmp_path, ForetrainCallback(quiet=True))
    trainer.optimizer = Fails(model.parameters(), lr=0.1)
    with pytest.raises(torch.OutOfMemoryError):
        trainer.train()
    (failure,) = explained(tmp_path / "foretrain").failures
    assert (failure.phase, failure.moment) == ("first_step", "optimizer")


def test_a_run_that_tries_again_with_less_goes_on_in_its_folder(tmp_path: Path) -> None:
    class Once(transformers.Trainer):
        failed = False

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            if not self.failed:
                self.failed = True
                raise torch.OutOfMemoryError(MESSAGE)
            return super().training_step(*args, **kwargs)

    trainer = trainer_of(llama(), tmp_path, ForetrainCallback(quiet=True), kind=Once, auto_find_batch_size=True)
    trainer.train()
    found = explained(tmp_path / "foretrain")
    assert [failure.fatal for failure in found.failures] == [False]
    assert found.record.status == "finished"
    assert not (tmp_path / "foretrain-2").exists()
    assert found.forecast.tune.batch_size < BATCH


def test_an_interrupted_run_keeps_what_it_had(tmp_path: Path) -> None:
    class Stops(RunsOut):
        error = KeyboardInterrupt()

    trainer = trainer_of(llama(), tmp_path, ForetrainCallback(quiet=True), kind=Stops)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    record = record_in(tmp_path / "foretrain")
    assert (record.status, record.reason, record.steps_done) == ("stopped", "KeyboardInterrupt", 2)
    assert [line["step"] for line in lines_in(tmp_path / "foretrain", "step")] == [1, 2]


def test_resumed_run_keeps_its_folder_and_another_gets_its_own(tmp_path: Path) -> None:
    trainer_of(llama(), tmp_path, ForetrainCallback(quiet=True)).train()
    trainer_of(llama(), tmp_path, ForetrainCallback(quiet=True), max_steps=7).train(
        resume_from_checkpoint=str(tmp_path / "checkpoint-3")
    )
    record = record_in(tmp_path / "foretrain")
    assert record.resumed_from == (3,)
    assert record.steps_done == 7
    assert [line["step"] for line in lines_in(tmp_path / "foretrain", "step")] == list(range(1, 8))
    assert_forecast_is_right(explained(tmp_path / "foretrain"))
    trainer_of(llama(), tmp_path, ForetrainCallback(quiet=True), max_steps=1).train()
    assert record_in(tmp_path / "foretrain-2").steps_done == 1


SCRIPT = """
import os, sys
sys.path.insert(0, {repo!r})
from tests.app.test_callback import *
calls = []
def collate(rows):
    calls.append(0)
    if len(calls) > 3:
        {ends}
    return {{name: torch.stack([row[name] for row in rows]) for name in rows[0]}}
trainer = trainer_of(llama(), Path({folder!r}), ForetrainCallback(), eval_strategy="no")
trainer.data_collator = collate
trainer.train()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("ends", "status"), [
    ("raise ValueError('a bad row')", "failed"), ("sys.exit(3)", "stopped"), ("os.kill(os.getpid(), 9)", "killed"),
])  # fmt: skip
def test_however_the_program_ends_its_steps_stay(ends: str, status: str, tmp_path: Path) -> None:
    script = SCRIPT.format(repo=str(REPO), ends=ends, folder=str(tmp_path / "out"))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode
    record = record_in(tmp_path / "out" / "foretrain")
    assert (record.status, record.steps_done) == (status, 2)
    assert "ValueError: a bad row" in done.stderr or status != "failed"
    assert record.reason == ("ValueError: a bad row" if status == "failed" else "")
    assert [line["step"] for line in lines_in(tmp_path / "out" / "foretrain", "step")] == [1, 2]


# -- what must not happen ----------------------------------------------------------------------------------


def test_a_failure_of_ours_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def breaks(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("a bug of ours\nwith a second line")

    monkeypatch.setattr(trainer_session.trainer_forecast, "live_run", breaks)
    trainer = trainer_of(llama(), tmp_path, ForetrainCallback())
    trainer.train()
    assert trainer.state.global_step == STEPS
    told = [line for line in capfd.readouterr().err.splitlines() if "foretrain" in line]
    assert told == ["foretrain: RuntimeError: a bug of ours. The training continues without it."]
    assert "training_step" not in vars(trainer)


def test_a_model_without_a_forecast_is_measured(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = transformers.LlamaConfig(**SIZES, num_labels=2)

    class Labelled(Samples):
        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            return {**super().__getitem__(index), "labels": super().__getitem__(index)["labels"] % 2}

    trainer = trainer_of(
        transformers.LlamaForTokenClassification(config), tmp_path, ForetrainCallback(), eval_strategy="no"
    )
    trainer.train_dataset = Labelled(64)
    trainer.train()
    told = capfd.readouterr().err
    assert "No forecast: the forecast is for models that predict the next token" in told
    found = explained(tmp_path / "foretrain")
    assert found.forecast is None
    assert {piece.id for piece in found.phases} == {"load", "first_step", "steady_step", "save"}
    assert all(piece.measured_bytes and piece.predicted_bytes is None for piece in found.phases)


def test_frozen_weights_are_another_run_than_the_forecast(tmp_path: Path) -> None:
    model = llama()
    model.model.embed_tokens.weight.requires_grad = False
    trainer = trainer_of(model, tmp_path, max_steps=1, eval_strategy="no")
    trainer.add_callback(ForetrainCallback)  # the class, as the Trainer takes it too
    trainer.train()
    assert "parameters" in record_in(tmp_path / "foretrain").forecast_problem


def test_a_folder_that_cannot_be_is_said_and_the_run_goes_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    trainer = trainer_of(llama(), tmp_path, ForetrainCallback(folder=tmp_path / "file"), max_steps=2)
    trainer.train()
    assert trainer.state.global_step == 2
    assert "Forecast" in capfd.readouterr().err


def test_only_the_first_process_writes(tmp_path: Path) -> None:
    trainer = trainer_of(llama(), tmp_path, callback := ForetrainCallback(quiet=True))
    trainer.state.is_world_process_zero = False
    callback.on_train_begin(trainer.args, trainer.state, trainer.control, model=trainer.model)
    callback.on_step_end(trainer.args, trainer.state, trainer.control)
    callback.on_train_end(trainer.args, trainer.state, trainer.control)
    assert not (tmp_path / "foretrain").exists()


def test_what_ends_the_program_between_two_parts_is_heard() -> None:
    heard: list[tuple[str, str]] = []

    class Hears:
        def entered(self, part: str, args: tuple[Any, ...]) -> None: ...

        def left(self, part: str) -> None: ...

        def failed(self, part: str, error: BaseException) -> None:
            heard.append((part, str(error)))

    before = sys.excepthook
    hooks = trainer_meter.Hooks(None, None, Hears())
    error = ValueError("in a collator")
    sys.excepthook(ValueError, error, None)
    assert heard == [("", "in a collator")]
    hooks.remove()
    assert sys.excepthook is before


@pytest.mark.slow
def test_the_example_prints_what_the_docs_show(tmp_path: Path) -> None:
    script = str(REPO / "examples" / "trainer_callback.py")
    environment = {**os.environ, "PYTHONPATH": str(REPO), "COLUMNS": "80"}
    done = subprocess.run(
        [sys.executable, script, str(tmp_path / "out")], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    docs = (REPO / "docs" / "fine-tuning.md").read_text("utf-8")
    shown = docs[docs.index("Memory, forecast against measured") :].partition("```")[0]
    rows = re.findall(r"^  (loading|first step|steady state|evaluation) +([\d.]+ MiB)", shown, re.MULTILINE)
    assert len(rows) == 4
    for name, predicted in rows:
        assert re.search(rf"^  {name} +{predicted} ", done.stderr, re.MULTILINE), name


@pytest.mark.slow
def test_trl_trains_with_it(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    rows = [{name: row.tolist() for name, row in Samples(32)[i].items() if name != "labels"} for i in range(32)]
    args = trl.SFTConfig(
        output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=BATCH, use_cpu=True, report_to=[],
        max_length=LENGTH, bf16=False, gradient_checkpointing=False, dataset_kwargs={"skip_prepare_dataset": True},
    )  # fmt: skip
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=_tokenizer(), pad_token="0", eos_token="1")
    trainer = trl.SFTTrainer(
        model=llama(), args=args, train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer,
        callbacks=[ForetrainCallback(quiet=True)],
    )  # fmt: skip
    trainer.train()
    found = explained(tmp_path / "foretrain")
    assert found.record.trainer == "SFTTrainer"
    assert found.forecast.tune.loop == "trl"
    assert_forecast_of(found, "load", "first_step", "steady_step")
    pieces = {piece.id: piece for piece in found.phases}
    logits = BATCH * LENGTH * 32_768 * 4  # its piece of a vocabulary, which is larger than this one
    assert pieces["steady_step"].measured_bytes > logits


def _tokenizer() -> Any:
    tokenizers = pytest.importorskip("tokenizers")
    words = {str(i): i for i in range(SIZES["vocab_size"])}
    return tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="0"))


def test_the_forecast_is_kept_as_it_was(run: Path) -> None:
    plan = forecast_in(run)
    assert (plan.tune.seq_len, plan.tune.batch_size, plan.tune.max_steps) == (LENGTH, BATCH, STEPS)
    assert plan.gpu.kind == "cpu"
    assert plan.timing is None
