"""Every test runs in a directory of its own, on one thread, without the user's environment, on a made-up machine."""

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

pytest.register_assert_rewrite(
    "tests.kit.cards", "tests.kit.families", "tests.kit.page", "tests.kit.techniques", "tests.kit.training"
)

from foretrain.predict.trace import service  # noqa: E402
from tests import long_tests, machines  # noqa: E402
from tests.kit import fork_server  # noqa: E402

settings.register_profile("ci", deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
settings.load_profile("ci")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault(machines.VARIABLE, str(machines.FILES[machines.USUAL]))
# Many tests start a Python of their own: each compiled the whole package anew where bytecode may not be kept.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
os.environ["TIKTOKEN_CACHE_DIR"] = "/nonexistent"
os.environ["HF_HUB_OFFLINE"] = "1"  # read when the library is imported; without it a missing file is asked for again
# Inductor starts a pool of processes for its C++ compiler otherwise, each of which imports torch.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
# A shell's background job ignores SIGINT and one of nohup SIGHUP; the runs that tests start would inherit it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores, as tests of children and signals wait; eight at most, half a gigabyte each."""
    return min(8, len(os.sched_getaffinity(0)) + 1) if hasattr(os, "sched_getaffinity") else 2


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What long_tests.txt names is long; what slow_tests.txt names is long and slow."""
    for item in items:
        for name, marks in (("long", ("long",)), ("slow", ("long", "slow"))):
            if item.nodeid in long_tests.listed(name):
                for mark in marks:
                    item.add_marker(mark)


def pytest_collection_finish() -> None:
    """What is imported and collected stays: the garbage collector need not walk it again and again, nor come so often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(autouse=True, scope="module")
def unwalked() -> None:
    """What earlier tests left in caches (hundreds of plans) is not walked again: every run of the trainer collects
    garbage before it measures memory, which took seconds late in a session."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("NO_COLOR", "1")
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):  # stand-ins of NVML show every card
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture(autouse=True)
def own_threads() -> Iterator[None]:
    """A run computes with as many threads as its config or its record says; the next test with one again."""
    yield
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


@pytest.fixture(autouse=True)
def own_weights() -> None:
    """A model that a test builds itself for the estimate has fp32 weights, whatever was planned before."""
    if modules := sys.modules.get("foretrain.predict.abstract.modules"):
        modules.weights.set(sys.modules["foretrain.predict.abstract.tensors"].float32)


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answers and traces of one session are kept together, those of all its workers, and apart from the user's."""
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "cache"
    folder.mkdir(exist_ok=True)
    os.environ["FORETRAIN_CACHE"] = str(folder)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        os.environ.pop(name, None)
    return folder


@pytest.fixture(autouse=True)
def quick_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of traces are forks of one process that has imported torch."""
    if hasattr(os, "fork"):
        monkeypatch.setattr(service, "start_worker", fork_server.start)
