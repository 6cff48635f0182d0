"""Run directories with made-up measurements."""

import json
import random
from pathlib import Path

from foretrain.data.dataset import DatasetInfo
from foretrain.hardware.catalogue import find
from foretrain.runs.record import SCHEMA, MeasuredMemory, MeasuredPhase, TrainedRun
from tests.kit.tiny import tiny

GPU = find("RTX 4070")


def write_measured_run(
    path: Path, *, seed: int = 1, step_s: float = 0.1, steps: int = 60, learns: float = 1.0, **knobs: object
) -> Path:
    rng = random.Random(seed)
    config = tiny(max_iters=steps, lr_decay_iters=steps, seed=seed, **knobs)
    path.mkdir()
    gpu = GPU
    info = DatasetInfo(name="toy", path="toy", train_tokens=2000, val_tokens=500, fingerprint="0123456789abcdef")
    memory = MeasuredMemory(
        method="max_memory_allocated",
        phases=(MeasuredPhase(phase="steady_step", allocated_bytes=2**28, reserved_bytes=2**29),),
    )
    record = TrainedRun(
        id=path.name, name="tiny", status="finished", started_at="2026-01-01T00:00:00+00:00", config=config, gpu=gpu,
        dtype="float32", compiled=False, dataset=info, n_params=1000, steps_done=steps, wall_s=steps * step_s,
        memory=memory,
    )  # fmt: skip
    path.joinpath("run.json").write_text(json.dumps(record.to_json(schema=SCHEMA)))
    lines = []
    for i in range(steps):
        loss = 2 + learns * 3 * (i + 3) ** -0.4 * (1 + rng.gauss(0, 0.01))
        time_s = step_s * (1 + rng.gauss(0, 0.005))
        lines.append(
            {"kind": "step", "step": i, "loss": loss, "grad_norm": 1.0, "learning_rate": 1e-3, "step_s": time_s,
             "tokens_per_s": 128 / time_s, "mfu": None, "memory_bytes": None, "elapsed_s": (i + 1) * step_s, "eta_s": 0.0}
        )  # fmt: skip
        if i % 10 == 0:
            lines.append({"kind": "evaluation", "step": i, "train_loss": loss, "val_loss": loss + 0.01, "evaluation_s": 0.1, "best": True})  # fmt: skip
    path.joinpath("metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
