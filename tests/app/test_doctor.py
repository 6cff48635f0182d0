"""`foretrain doctor` on made-up machines: what is seen, what is missing, and the command that cures it."""

import json
import os
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from foretrain.app import doctor
from foretrain.app.doctor import EXTRAS, Check, Machine, examine
from foretrain.base.messages import say
from foretrain.base.units import GIB
from tests.kit.command import REPO, foretrain
from tests.kit.nvml import FakeNvml

VERSIONS = {name: "2.13.0" for packages, _ in EXTRAS.values() for name in packages} | {"triton": "3.7.0"}


class Nvml(FakeNvml):
    """One card with a desktop and a training run on it, whose driver runs CUDA up to a release."""

    def __init__(self, cuda: int = 13000, name: str = "NVIDIA GeForce RTX 4070", **settings: Any) -> None:
        super().__init__(name, 12, 5888, **settings)
        self.newest = cuda

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return self.newest

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=7), SimpleNamespace(pid=9)]

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: int) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=7)]


def name_of(pid: int) -> str:
    if pid == 9:
        raise RuntimeError("it ended")
    return "Xorg"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setenv("FORETRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    (tmp_path / "Python.h").touch()
    return Machine(
        nvml=Nvml(),
        version=lambda name: VERSIONS.get(name, ""),
        find=lambda name: f"/usr/bin/{name}" if name in ("g++", "apt-get") else None,
        torch_cuda=lambda: (13, 0),
        starts=lambda name: True,
        name_of=name_of,
        free_bytes=lambda path: 100 * GIB,
        memory=lambda: (20 * GIB, 32 * GIB),
        has_bf16=lambda: False,
        headers=tmp_path,
    )


def missing(machine: Machine) -> dict[str, str]:
    return {check.id: check.cure for check in examine(machine) if check.state == "missing"}


def said(check: Check) -> str:
    return say(f"doctor.{check.id}", **check.values)


def test_a_machine_with_everything_misses_nothing(machine: Machine) -> None:
    checks = {check.id: check for check in examine(machine)}
    assert {check.state for check in checks.values()} == {"ok"}
    assert "10.00 GiB of 12.00 GiB free, driver 575.64; used by Xorg (7)" in said(checks["card_used"])
    assert said(checks["torch"]) == "torch 2.13.0 for CUDA 13.0"
    assert "RTX 4070" in said(checks["bf16"])
    assert checks.keys() >= {"program", "compiler", "memory", "disk", "cache", "extra"}


TORCH = "pip install uv && uv pip install --reinstall torch --torch-backend="
CASES: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "no torch": (
        {"version": lambda name: "" if name == "torch" else "1", "torch_cuda": tuple},
        {"no_torch": "pip install 'foretrain[train]'", "no_extra": "pip install 'foretrain[train]'"},
    ),
    "a torch that fails": ({"starts": lambda name: False}, {"torch_broken": "python -c 'import torch'"}),
    "torch for the CPU": ({"torch_cuda": tuple}, {"torch_blind": TORCH + "cu130"}),
    "an older driver": ({"nvml": Nvml(12080)}, {"torch_driver": TORCH + "cu128"}),
    "a driver too old for all": ({"nvml": Nvml(11040)}, {"torch_driver": ""}),
    "a card too new": (
        {"nvml": Nvml(capability=(12, 0)), "torch_cuda": lambda: (12, 6)}, {"torch_kernels": TORCH + "cu130"},
    ),
    "a card too old": ({"nvml": Nvml(capability=(6, 1))}, {"torch_kernels": TORCH + "cu126"}),
    "a card that nobody knows": ({"nvml": Nvml(name="NVIDIA GeForce RTX 9999")}, {"card_unknown": ""}),
    "no compiler": (
        {"find": lambda name: name if name == "apt-get" else None}, {"no_compiler": "sudo apt-get install -y g++"},
    ),
    "no compiler on a Mac": (
        {"nvml": None, "find": lambda name: name if name == "xcode-select" else None},
        {"no_compiler": "xcode-select --install"},
    ),
    "no headers": ({"headers": Path("nowhere")}, {"no_headers": "sudo apt-get install -y python3-dev"}),
    "no triton": (
        {"version": lambda name: "" if name == "triton" else "1"}, {"no_triton": "pip install triton"},
    ),
    "a full disk": ({"free_bytes": lambda path: GIB}, {"disk_low": ""}),
    "one package": (
        {"version": lambda name: "" if name == "pyarrow" else "1"}, {"no_extra": "pip install 'foretrain[data]'"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_is_missing_is_said_with_its_cure(case: str, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # the real machine's
    changed, wanted = CASES[case]
    assert missing(replace(machine, **changed)) == wanted
    assert all("{" not in said(check) for check in examine(replace(machine, **changed)))


def test_a_machine_without_anything_still_plans(
    tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)

    def unread(path: Path) -> int:
        raise OSError(5, "Input/output error")

    bare = replace(
        machine, nvml=None, version=lambda name: "", find=lambda name: None, torch_cuda=tuple, free_bytes=unread
    )
    found = {check.id: check for check in examine(bare)}
    assert found.keys() >= {"no_card", "no_torch", "no_bf16", "no_compiler", "disk_unread", "no_extra"}
    assert "nvidia-ml-py is not installed" in said(found["no_card"])
    assert "float32" in said(found["no_bf16"])
    monkeypatch.setattr(doctor, "Machine", lambda: bare)
    shown = foretrain("doctor", code=0).stdout.splitlines()
    assert "pip install 'foretrain[train]'" in [line.strip() for line in shown]
    assert f"Missing for other commands: {sum(line.startswith('missing') for line in shown)}." in shown[-1]
    listed = json.loads(foretrain("doctor", "--json", code=0).stdout)["checks"]
    assert [each["id"] for each in listed] == [check.id for check in examine(bare)]
    assert all(each["message"] for each in listed)


def test_a_card_that_falls_silent_is_said(machine: Machine) -> None:
    class Silent(Nvml):
        def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
            raise self.NVMLError("GPU is lost")

    assert missing(replace(machine, nvml=Silent())) == {"card_silent": "nvidia-smi"}


def test_the_cuda_release_is_read_from_torch_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('it was imported')")
    code = "from foretrain.app.doctor import torch_cuda; print(torch_cuda())"
    for line, release in (("Optional[str] = '12.8'", "(12, 8)"), ("Optional[str] = None", "()")):
        (tmp_path / "torch" / "version.py").write_text(f"__version__ = '2.13.0'\ncuda: {line}\n")
        path = os.pathsep.join([str(tmp_path), str(REPO)])
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == release


def test_extras_are_those_of_the_package() -> None:
    declared = tomllib.loads((REPO / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    assert EXTRAS.keys() == declared.keys() - {"dev", "docs"}
    for extra, (packages, _) in EXTRAS.items():
        names = {line.split(">")[0] for line in declared[extra]} - {"foretrain[train]"}
        assert set(packages) == names, extra
