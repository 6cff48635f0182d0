"""The harness's own environment, in build/cuda-truth/: PyTorch's CUDA build, what foretrain needs, and the driver.

Nothing of it is in the project's environment: torch's CUDA build takes about 6 GB. It comes from the package index;
PIP_INDEX_URL and the like are obeyed, but no local folder of wheels, which may hold a build without CUDA.
"""

import hashlib
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from typing import Any

from tests.cuda_build.build import DRIVER, BuildError, build
from tests.cuda_build.grid import REPO

HOME = REPO / "build" / "cuda-truth"
TORCH = "2.13.0"
CARD_MEMORY_MIB = 81920  # so that nothing limits a run, whatever the card's own size
EXTRAS = ("train", "data")
# Of fine-tuning: the extra, and what a run needs beside it.
FINETUNE_EXTRA, FINETUNE_PACKAGES = "hf", ("bitsandbytes",)
FREE_BYTES_WANTED = 8 * 10**9
PYTHON = HOME / "venv" / "bin" / "python"
Say = Callable[[str], None]


class EnvironmentError(RuntimeError):
    """The environment cannot be made; the sentence says why."""


def make(say: Say, *, finetuning: bool = False) -> None:
    """Make what is missing, with `finetuning` the packages of fine-tuning, too; nothing where all is there.

    Raises EnvironmentError.
    """
    installed = HOME / "venv" / f".torch-{TORCH}"
    if not installed.exists():
        _install(say)
        installed.touch()
    wanted = finetuning_requirements()
    finetunes = HOME / "venv" / f".finetuning-{hashlib.sha256(' '.join(wanted).encode()).hexdigest()[:16]}"
    if finetuning and not finetunes.exists():
        say("installing the packages of fine-tuning")
        _pip("--constraint", str(REPO / "constraints.txt"), *wanted)
        finetunes.touch()
    folder = HOME / "driver"
    built = folder / f".built-{driver_digest()[:16]}"
    if not built.exists():
        say("building the driver")
        try:
            missing = build(PYTHON, folder)
        except BuildError as error:
            raise EnvironmentError(str(error)) from None
        say(f"driver built; {len(missing)} functions that torch knows are missing and say so when they are called")
        for old in folder.glob(".built-*"):
            old.unlink()
        built.touch()


def driver_digest() -> str:
    digest = hashlib.sha256()
    for path in sorted(DRIVER.iterdir()):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _install(say: Say) -> None:
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        raise EnvironmentError(f"the driver works on Linux x86-64; this is {sys.platform} {os.uname().machine}")
    HOME.mkdir(parents=True, exist_ok=True)
    stats = os.statvfs(HOME)
    free = stats.f_bavail * stats.f_frsize
    if free < FREE_BYTES_WANTED:
        raise EnvironmentError(f"{FREE_BYTES_WANTED / 1e9:.0f} GB are needed in {HOME}; {free / 1e9:.1f} GB are free")
    say(f"installing PyTorch's CUDA build {TORCH}, about 6 GB, into {HOME / 'venv'}")
    _run([sys.executable, "-m", "venv", str(HOME / "venv")])
    _pip(f"torch=={TORCH}", "setuptools")
    _pip("--constraint", str(REPO / "constraints.txt"), *requirements())
    has = subprocess.run(
        [PYTHON, "-c", "import torch; print(torch.version.cuda or '')"], capture_output=True, text=True
    )
    if not has.stdout.strip():
        raise EnvironmentError(f"the package index gave a torch without CUDA: {has.stderr.strip()[-300:]}")


def _pip(*words: str) -> None:
    index_only = {**os.environ, "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""}
    _run([str(PYTHON), "-m", "pip", "install", "--quiet", "--no-cache-dir", *words], index_only)


def _project() -> dict[str, Any]:
    return tomllib.loads((REPO / "pyproject.toml").read_text())["project"]


def finetuning_requirements() -> list[str]:
    """What the libraries of fine-tuning need, as the project asks for it, at constraints.txt's versions."""
    extras = _project()["optional-dependencies"]
    pinned = [each for each in (REPO / "constraints.txt").read_text().splitlines() if "==" in each]
    names = {each.split(">")[0] for each in extras[FINETUNE_EXTRA]} | set(FINETUNE_PACKAGES)
    return sorted(each for each in pinned if each.split("==")[0].replace("_", "-") in names)


def requirements() -> list[str]:
    """What foretrain and its tests need beside torch; foretrain itself is run from this checkout."""
    project = _project()
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(each for name in EXTRAS for each in extras[name])]
    tests = [each for each in extras["dev"] if each.startswith(("pytest", "hypothesis"))]
    return [each for each in [*wanted, *tests] if not each.startswith(("torch", "foretrain"))]


def _run(words: list[str], environment: dict[str, str] | None = None) -> None:
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise EnvironmentError(f"{' '.join(words[:4])} failed: {(done.stderr or done.stdout).strip()[-1500:]}")


def on_the_card(*, memory_mib: int = CARD_MEMORY_MIB, **more: str) -> dict[str, str]:
    """The environment variables of a process that sees the card."""
    folder = HOME / "driver"
    paths = [str(folder), os.environ.get("LD_LIBRARY_PATH", "")]
    return {
        **os.environ,
        "LD_PRELOAD": str(folder / "libfakecuda.so"),
        "LD_LIBRARY_PATH": os.pathsep.join(path for path in paths if path),
        "PYTHONPATH": str(REPO),
        "FAKECUDA_MEMORY_MIB": str(memory_mib),
        "FORETRAIN_CACHE": str(HOME / "cache"),
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(HOME / "inductor"),
        "TRITON_CACHE_DIR": str(HOME / "triton"),
        **more,
    }
