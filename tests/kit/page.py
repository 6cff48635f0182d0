"""The page's server: its addresses, its token, requests and runs to show."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from foretrain.data.dataset import DatasetInfo
from foretrain.hardware.catalogue import find
from foretrain.predict.plan import plan
from foretrain.runs.folder import RunDirectory
from foretrain.runs.record import TrainedRun
from foretrain.web import guard, routes
from tests.kit.command import REPO
from tests.kit.tiny import tiny


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(routes, "WAIT_S", 600.0)  # a busy machine changes no answer
    write_run(tmp_path / "runs" / "baby")
    with TestClient(routes.create_app(PORT, TOKEN, [tmp_path / "runs"]), base_url=ORIGIN) as made:
        yield made


def post(client: TestClient, path: str, body: dict[str, Any], status: int = 200) -> dict[str, Any]:
    answer = client.post(path, headers={**GOOD, **POSTED}, json=body)
    assert answer.status_code == status, answer.text[:500]
    return answer.json()


def get(client: TestClient, path: str, status: int = 200) -> dict[str, Any]:
    answer = client.get(path, headers=GOOD)
    assert answer.status_code == status, answer.text[:500]
    return answer.json()


NANOGPT = """import time
out_dir = 'out-mine'
n_layer = 6
n_head = 6
n_embd = 64 * 6
block_size = 256 # context
batch_size = 64
dropout = 0.2
learning_rate = 1e-3
"""


@contextlib.contextmanager
def serving(folder: Path, *words: str) -> Iterator[tuple[dict[str, Any], subprocess.Popen[str]]]:
    code = "from foretrain.cli import main; main()"
    path = os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH", "")]))
    process = subprocess.Popen(
        [sys.executable, "-c", code, "serve", "--json", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        cwd=folder, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    try:
        yield json.loads(process.stdout.readline()), process
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=600)


PORT, TOKEN = 8765, "the-token"

ORIGIN = f"http://127.0.0.1:{PORT}"

GOOD = {"host": f"127.0.0.1:{PORT}", guard.TOKEN_HEADER: TOKEN}

POSTED = {"origin": ORIGIN, "sec-fetch-site": "same-origin", "content-type": "application/json"}

EVIL_NAME = "<img src=x onerror=alert(1)>\x1b[31m"


def write_run(path: Path, name: str = "baby", **changes: Any) -> RunDirectory:
    path.mkdir(parents=True)
    directory, config, gpu = RunDirectory(path), tiny(), find("RTX 4070")
    dataset = DatasetInfo(name="toy", path="data/toy", train_tokens=2000, val_tokens=500)
    record = TrainedRun(
        id=path.name, name=name, status="finished", started_at="2026-01-01T00:00:00+00:00", config=config, gpu=gpu,
        dtype="float32", compiled=False, dataset=dataset, n_params=1000, steps_done=12, step_s=0.5, val_loss=3.5,
        first_val_loss=4.5, tokens_per_s=100.0, wall_s=9.0,
    ).model_copy(update=changes)  # fmt: skip
    directory.write_record(record)
    (path / "plan.json").write_text(json.dumps(plan(config, gpu, name=name).to_json(schema="foretrain.plan/1")))
    directory.append(
        "metrics",
        {"kind": "evaluation", "step": 0, "train_loss": 4.4, "val_loss": 4.5, "evaluation_s": 1.0, "best": True},
    )
    for step in (0, 10):
        directory.append(
            "metrics", {"kind": "step", "step": step, "loss": 4.0 - step / 10, "step_s": 0.5, "tokens_per_s": 9.0}
        )
    directory.event("saved", name=name)
    return directory


def traversals() -> list[str]:
    """Ways to write a path that leaves its folder, each in several encodings."""
    targets = ("etc/passwd", "run.json", "windows/win.ini", "proc/self/environ", "runs/evil/run.json")
    ups = ("../", "..\\", "%2e%2e/", "%2e%2e%2f", "..%2f", "..%5c", "%252e%252e%252f", "..%c0%af", "..%ef%bc%8f",
           "....//", "..;/", ".%00./", "%2e%2e%5c")  # fmt: skip
    found = [up * depth + target for target in targets for up in ups for depth in (1, 3, 8)]
    found += ["/etc/passwd", "//etc/passwd", "C:\\windows\\win.ini", "\\\\host\\share", "file:///etc/passwd", "~",
              "%00", "evil%00", "evil#", "evil%23", "evil?", "evil%3f", "%0d%0aset-cookie:a=b", "a" * 3000, ".", "..",
              "%2e", "%2e%2e", "*", "evil", "evil/run.json", "0" * 16, "-1", "NaN", "constructor", "__proto__"]  # fmt: skip
    assert len(found) > 200
    return found


def write_curve(path: Path, *, steps: int = 300, seed: int = 1, rate: float = 1e-3, **changes: Any) -> RunDirectory:
    """A run with so many logged steps, an evaluation at every tenth; a higher rate learns quicker and steps slower."""
    knobs = {"learning_rate": rate, "max_iters": steps, "lr_decay_iters": steps, **changes.pop("knobs", {})}
    directory = write_run(path, config=tiny(**knobs), **{"steps_done": steps, "name": path.name, **changes})
    (path / "metrics.jsonl").unlink()
    scatter, elapsed_s, lines = random.Random(seed), 0.0, []
    for step in range(steps):
        loss = 2 + 2 / (1 + step * rate * 20)
        if step % 10 == 0:
            lines.append({"kind": "evaluation", "step": step, "train_loss": loss, "val_loss": loss + 0.1,
                          "evaluation_s": 0.5, "best": True})  # fmt: skip
        step_s = (0.1 + 5 * rate) * (1 + 0.01 * scatter.random())
        elapsed_s += step_s
        lines.append({"kind": "step", "step": step, "loss": loss + 0.05 * scatter.random(), "grad_norm": 1.0,
                      "learning_rate": rate, "step_s": step_s, "tokens_per_s": 9000.0, "mfu": 0.3,
                      "memory_bytes": 2**30, "elapsed_s": elapsed_s, "eta_s": 1.0})  # fmt: skip
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory
