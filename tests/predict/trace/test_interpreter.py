"""`--python PATH`: another environment's torch traces."""

import json
import sys
from pathlib import Path

import pytest

from foretrain.app import exact, planning
from foretrain.base.installation import installed_torch
from foretrain.config.options import RunConfig
from foretrain.hardware.catalogue import find
from foretrain.predict import software
from foretrain.predict.allocator.blocks import Falling, Rising, usual
from foretrain.predict.allocator.replay import replay
from foretrain.predict.memory import predict
from foretrain.predict.pretraining import of_cluster
from foretrain.predict.spec import StepSpec
from foretrain.predict.trace import interpreter, service
from foretrain.predict.trace.service import Request, TraceUnavailable, traces
from tests.kit.command import foretrain, refused

START = service.start_worker  # other tests start their workers in a quicker way (conftest.py)
REQUEST = Request(StepSpec.of(RunConfig(n_layer=1, n_head=1, n_embd=32, block_size=32, vocab_size=64, batch_size=2, gradient_accumulation_steps=1), find("RTX 4070"), "nanogpt", dtype="float32", compiled=False))  # fmt: skip


def environment(folder: Path, script: str) -> str:
    """A folder with a bin/python that does this."""
    program = folder / "bin" / "python"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return str(folder)


def test_another_environment_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here it is this Python behind another name, so the answer is the same; its packages are borrowed as one that
    lacks pydantic would borrow them."""
    monkeypatch.setattr(service, "start_worker", START)
    log = tmp_path / "calls"
    path = environment(tmp_path / "env", f'echo "$@" >> {log}; exec {sys.executable} "$@"')
    mine = replay(traces([REQUEST])[0])
    there = interpreter.find_interpreter(path)
    assert (there.torch, there.python, there.borrows) == (installed_torch(), sys.version_info[:2], False)
    monkeypatch.setattr(
        interpreter, "find_interpreter", lambda path: there._replace(borrows=True, torch=f"{there.torch}.other")
    )
    with interpreter.use_interpreter(path):
        assert interpreter.now().torch.endswith(".other")
        assert replay(traces([REQUEST])[0]) == mine
    assert "trace.worker" in log.read_text()
    assert interpreter.now().path == sys.executable


@pytest.mark.parametrize(
    ("script", "id"),
    [
        (None, "usage.python_missing"),
        ("echo not json", "usage.python_broken"),
        ("exit 1", "usage.python_broken"),
        (f'exec {sys.executable} -I -S "$@"', "usage.python_without_torch"),
        (
            "echo '" + json.dumps({"torch": "2.9.1", "python": [3, 9], "lacks": True}) + "'",
            "usage.python_needs_pydantic",
        ),
    ],
)
def test_what_cannot_trace_is_one_sentence(script: str | None, id: str, tmp_path: Path) -> None:
    path = environment(tmp_path / "env", script) if script else str(tmp_path / "env")
    with refused(id) as caught:
        interpreter.find_interpreter(path)
    assert path in str(caught.value)


def test_a_torch_that_is_too_old_is_told(tmp_path: Path) -> None:
    answer = json.dumps({"torch": "2.5.1", "python": list(sys.version_info[:2]), "lacks": False})
    path = environment(tmp_path / "env", f"echo '{answer}'")
    with (
        interpreter.use_interpreter(path),
        pytest.raises(TraceUnavailable, match=r"needs torch 2\.6 or newer; this is 2\.5\.1"),
    ):
        traces([REQUEST])


def test_the_key_of_a_trace_knows_the_torch_that_made_it(tmp_path: Path) -> None:
    answer = json.dumps({"torch": "2.9.1", "python": list(sys.version_info[:2]), "lacks": False})
    path = environment(tmp_path / "env", f"echo '{answer}'")
    before = REQUEST.key()
    with interpreter.use_interpreter(path):
        assert REQUEST.key() != before
    assert REQUEST.key() == before
    assert service.OLDEST_TORCH == (2, 6)


def test_on_the_command_line(tmp_path: Path) -> None:
    done = foretrain("plan", "gpt2-124m", "--gpu", "4070", "--python", str(tmp_path / "nothing"), code=2)
    assert "there is no Python at" in done.stderr


def test_plans_are_for_the_torch_of_the_training_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which of two free blocks PyTorch takes changed with 2.12."""
    there = interpreter.Interpreter("/somewhere/python", (3, 11), "2.11.0+cu130")
    monkeypatch.setattr(interpreter, "find_interpreter", lambda path: there)
    config = RunConfig(batch_size=8, gradient_accumulation_steps=2)

    def step(torch_version: str = "") -> StepSpec:
        asked = config.model_copy(update={"torch_version": torch_version})
        return StepSpec.of(asked, find("RTX 4070"), "nanogpt", dtype="float16", compiled=False)

    here = predict(step()).worst.allocated_bytes
    with interpreter.use_interpreter("/somewhere"):
        assert software.of("") == (2, 11)
        assert isinstance(usual(), Falling)
        elsewhere = predict(step()).worst.allocated_bytes
    assert isinstance(usual(), Rising)
    assert elsewhere != here == predict(step()).worst.allocated_bytes
    assert elsewhere == predict(step("2.11")).worst.allocated_bytes


def test_several_cards_are_traced_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    there = interpreter.Interpreter("/somewhere/python", (3, 11), "2.11.0+cu130")
    monkeypatch.setattr(interpreter, "find_interpreter", lambda path: there)
    seen = []
    monkeypatch.setattr(exact, "trace_cluster", lambda plan, settings, listen: seen.append(interpreter.now()) or plan)
    with interpreter.use_interpreter("/somewhere"):
        made = planning.plan("baby", gpus="2 x RTX 4070", batch_size=8, gradient_accumulation_steps=2)
        exact.traced(of_cluster(made), print)
    assert seen == [there]
