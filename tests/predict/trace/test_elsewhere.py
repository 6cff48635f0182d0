"""`foretrain.trace` of code that is named, in a process of its own, and with another environment's torch."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

import foretrain
from foretrain.base.errors import UserError
from foretrain.predict.trace import elsewhere, session  # noqa: F401  the child has torch then
from foretrain.predict.trace.traced import StandInError, Traced
from tests.kit.command import refused

SCRIPT = """
import sys
import torch

assert torch.cuda.is_available()


def main(on):
    on.phase("mine")
    torch.empty(1 << 20, device=on.device)


def broken(on):
    raise ValueError("of its own")


if __name__ == "__main__":
    kept = torch.empty(3 << 20, device="cuda")
    sys.exit(int(sys.argv[1:] != []))
"""


PROCESS = elsewhere.process


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forked child, which has torch already, instead of a new process."""

    def forked(job: dict[str, Any]) -> int:
        if child := os.fork():
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        elsewhere.work(job)
        os._exit(0)

    monkeypatch.setattr(elsewhere, "process", forked)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "their_script.py"
    path.write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return path


def other_python(folder: Path) -> Path:
    """An environment beside this one: the same Python behind another path."""
    program = folder / "env" / "bin" / "python"
    program.parent.mkdir(parents=True)
    program.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    program.chmod(0o755)
    return folder / "env"


def at_module_level(on: object) -> None:
    import torch

    torch.empty(1 << 20, device="cuda")


def test_a_script_its_function_and_a_modules_function_are_traced(script: Path) -> None:
    whole = foretrain.trace("their_script.py")
    assert (whole.peak_allocated_bytes, whole.gpu.name) == (12 << 20, "RTX 4070")
    for name in (f"{script}:main", "their_script:main", script.with_name("their_script.py:main")):
        found = foretrain.trace(name)
        assert found.peak_allocated_bytes == 4 << 20
        assert [phase.phase for phase in found.replay().phases] == ["mine"]


def test_another_environment_traces_a_function_of_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elsewhere, "process", PROCESS)
    found = foretrain.trace(at_module_level, python=other_python(tmp_path))
    assert found.peak_allocated_bytes == 4 << 20


def test_what_the_code_raises_comes_back_with_its_traceback(script: Path) -> None:
    with pytest.raises(elsewhere.CodeFailed, match="raised ValueError: of its own") as caught:
        foretrain.trace("their_script:broken")
    assert "in broken" in "".join(caught.value.__notes__)


def test_a_script_that_ends_badly_is_said(tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text("raise SystemExit(3)")
    with pytest.raises(elsewhere.CodeFailed, match=r"ends\.py ended with sys\.exit\(3\)"):
        foretrain.trace(tmp_path / "ends.py")


def test_a_process_that_is_killed_is_said(tmp_path: Path) -> None:
    (tmp_path / "dies.py").write_text("import os\nos.kill(os.getpid(), 9)")
    with pytest.raises(StandInError, match=r"ended without an answer \(signal SIGKILL\)"):
        foretrain.trace(tmp_path / "dies.py")


@pytest.mark.parametrize(
    ("code", "id"),
    [
        (lambda on: None, "usage.trace_cannot_send"),
        (Traced.fits, "usage.trace_cannot_send"),
        (print, "usage.trace_cannot_send"),
        (3, "usage.trace_cannot_send"),
        ("no such.py", "usage.trace_no_file"),
        ("train", "usage.trace_target"),
        ("train.py:", "usage.trace_target"),
        ("a b:main", "usage.trace_target"),
        ("", "usage.trace_target"),
    ],
)
def test_what_cannot_be_sent_is_one_sentence(code: object, id: str) -> None:
    with refused(id) as caught:
        foretrain.trace(code, python=sys.executable)  # type: ignore[arg-type]
    assert "train.py" in str(caught.value) or "full path" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("their_script:nothing", "their_script has no function nothing"),
        ("no_such_module:main", "finds no module no_such_module"),
    ],
)
def test_name_missing_in_the_other_process_is_one_sentence(name: str, sentence: str, script: Path) -> None:
    with pytest.raises(StandInError, match=sentence):
        foretrain.trace(name)


def test_what_only_the_card_knows_is_a_range_there_too(tmp_path: Path) -> None:
    (tmp_path / "convolves.py").write_text(
        "import torch\n"
        "layer = torch.nn.Conv2d(8, 8, 3, device='cuda')\n"
        "layer(torch.empty(2, 8, 32, 32, device='cuda')).sum().backward()\n"
    )
    found = foretrain.trace(tmp_path / "convolves.py")
    assert found.high.peak_allocated_bytes > found.peak_allocated_bytes


def test_in_process_and_another_process_are_refused_together() -> None:
    with pytest.raises(UserError, match="keep one of the two"):
        foretrain.trace(at_module_level, python=sys.executable, in_process=True)


def test_a_torch_that_is_too_old_is_refused(tmp_path: Path) -> None:
    program = tmp_path / "bin" / "python"
    program.parent.mkdir()
    program.write_text("""#!/bin/sh\necho '{"torch": "2.5.1", "python": [3, 11], "lacks": false}'\n""")
    program.chmod(0o755)
    with pytest.raises(StandInError, match=r"needs torch 2\.6 or newer; this is 2\.5\.1"):
        foretrain.trace(at_module_level, python=tmp_path)
