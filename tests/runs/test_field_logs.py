"""Logs and messages as people have them: out of memory in containers, old wordings, other programs' lines."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from foretrain.app.explain import LogExplanation, explain
from foretrain.base import oom_message
from tests.kit.command import REPO, foretrain, said

GIB, MIB = 1 << 30, 1 << 20
FIELD = REPO / "tests" / "data" / "field"
LOGS = FIELD / "logs"

# Written after public threads, each wording as PyTorch prints it.
TWO_PROCESSES = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of 23.64 GiB of "
    "which 500.00 MiB is free. Process 41 has 3.00 GiB memory in use. Process 99 has 20.10 GiB memory in use. Of the "
    "allocated memory 19.00 GiB is allocated by PyTorch, and 800.00 MiB is reserved by PyTorch but unallocated."
)
CAPACTY = (
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 64.00 MiB. GPU 0 has a total capacty of 14.75 GiB "
    "of which 17.06 MiB is free. Process 3053 has 14.73 GiB memory in use. Of the allocated memory 13.90 GiB is allocated "
    "by PyTorch, and 700.00 MiB is reserved by PyTorch but unallocated."
)
WINDOWS = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.53 GiB. GPU 0 has a total capacity of 23.99 GiB of "
    "which 0 bytes is free. Including non-PyTorch memory, this process has 17179869184.00 GiB memory in use. Of the "
    "allocated memory 28.46 GiB is allocated by PyTorch, and 1.11 GiB is reserved by PyTorch but unallocated."
)
CACHED = (
    "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 7.93 GiB total capacity; 6.50 GiB already "
    "allocated; 12.00 MiB free; 30.00 MiB cached)"
)
APPLE = (
    "RuntimeError: MPS backend out of memory (MPS allocated: 17.95 GB, other allocations: 142.69 MB, max allowed: 18.13 "
    "GB). Tried to allocate 91.25 MB on private pool."
)


def explained(path: Path, *, config: Any = None, gpu: str = "auto") -> LogExplanation:
    found = explain(path, config, gpu)
    assert isinstance(found, LogExplanation)
    return found


def shown(capsys: pytest.CaptureFixture[str], name: str, *words: str) -> str:
    return " ".join(said(capsys, "explain", str(LOGS / name), *words).split())


NAN = float("nan")
# File, format, steps, first and last loss, time of a step in seconds, tokens of a step, evaluations, last of them.
CASES = [
    ("autoresearch.log", "autoresearch", range(41), 9.011, 5.0, 0.325, 524_288, 1, 0.995688),
    ("bn-toksec-varies.log", "build-nanogpt", range(61), 9.999999, 9.939999, 8.0, None, 0, None),
    ("megatron.log", "megatron", range(100, 900, 100), 10.8, 10.1, 0.1359, None, 0, None),
    ("mingpt.log", "mingpt", range(0, 1000, 100), 3.9, 3.0, 0.02431, None, 0, None),
    ("nanochat-mid.log", "nanochat", range(0, 210, 10), 1.9, 1.7, 1.42011, 524_305, 0, None),
    ("ng-video.log", "evaluations", range(0, 5000, 500), 4.2, 1.95, None, None, 10, 2.05),
    ("rasbt-simple.log", "LLMs-from-scratch", range(0, 30, 5), 9.781, 9.756, None, None, 6, 9.925),
    ("swift_logging.jsonl", "ms-swift", range(5, 105, 5), 1.49, 1.3, 3.0, None, 0, None),
    ("trainer_log.jsonl", "llama-factory", range(10, 310, 10), 2.28, 1.7, 3.1, None, 1, 1.61),
    ("trl_dpo.log", "trl", range(1, 21), 0.68, 0.49, None, None, 1, 0.61),
    ("llama2c", "llama2.c", range(0, 400, 100), 10.4, 6.1, 0.0712, None, 1, 10.35),
    ("rasbt-speed", "LLMs-from-scratch", range(0, 30, 10), 10.9, 8.3, None, None, 3, 8.6),
    ("swift-console", "ms-swift", range(10, 50, 10), 1.4, 1.1, 361.0, None, 0, None),
    ("megatron-new", "megatron", range(10, 50, 10), 11.0, 10.7, 0.25, None, 1, 9.1),
    ("grpo", "trl", range(1, 4), 0.0, 0.002, None, None, 0, None),
    ("mlx", "mlx-lm", range(10, 50, 10), 2.6, 1.4, 0.5, 50, 1, 2.9),
    ("nemo", "nemo", range(3), 1.3, 1.1, 0.25, None, 0, None),
    ("nanotron", "nanotron", range(1, 4), 9.5, 9.3, 12.5, 250_000, 0, None),
    ("minimind", "minimind", [100, 200, 1100, 1200], 7.4, 6.1, None, None, 0, None),
    ("verl", "verl", range(1, 4), 0.03, 0.01, 96.5, None, 0, None),
    ("composer", "composer", range(1, 4), 11.5, 11.3, 8.0, 524_288, 0, None),
    ("olmo", "olmo", range(1, 4), 11.5, 11.3, 40.0, None, 0, None),
    ("notebook", "notebook", range(1, 4), 1.9, 1.7, None, None, 0, None),
    ("notebook-grpo", "notebook", range(1, 4), 0.0, 0.002, None, None, 0, None),
    ("grpo-times", "trl", range(1, 4), 0.0, 0.002, 12.5, None, 0, None),
    ("ppo", "trl", range(1, 4), 0.03, 0.01, None, None, 0, None),
    ("own-elapsed", "unknown", range(0, 60, 10), 5.0, 4.5, 0.5, None, 0, None),
    ("own-since", "unknown", range(0, 60, 10), 5.0, 4.5, 0.5, None, 0, None),
    ("own-epochs", "unknown", [50, 100, 150, 200], 5.0, 4.7, None, None, 0, None),
    ("own-parts", "unknown", range(1, 4), 2.6, 2.4, 28.5, 1_425_000, 0, None),
    ("own-bar", "progress bar", range(1, 4), 2.6, 2.4, 2.0, None, 0, None),
    ("own-words", "unknown", range(0, 50, 10), 10.5, 9.7, 0.25, 8192, 0, None),
    ("own-json", "unknown", range(5, 30, 5), 3.5, 3.1, 0.5, None, 0, None),
]  # fmt: skip
WRITTEN = {
    "llama2c": "step 0: train loss 10.3, val loss 10.35\n" + "".join(
        f"{n} | loss {loss} | lr 5.000000e-04 | {ms}ms | mfu 27.31%\n"
        for n, loss, ms in ((0, 10.4, 20412.29), (100, 8.1, 71.2), (200, 7.0, 71.2), (300, 6.1, 71.2))
    ),
    "rasbt-speed": "".join(
        f"Ep 1, Step {n:06d}, Train: {loss}, Val: {loss + 0.3}, Step tok/sec: {rate}, Avg tok/sec: {rate}\n"
        for n, loss, rate in ((0, 10.9, 5100), (10, 9.4, 7238), (20, 8.3, 7240))
    ),
    "swift-console": "".join(
        f"{{'loss': {loss}, 'learning_rate': 1e-05, 'epoch': 0.1, 'global_step/max_steps': '{n}/40', 'elapsed_time': "
        f"'{minutes // 60}h {minutes % 60}m 10s', 'memory(GiB)': 70.5, 'train_speed(iter/s)': 0.0028}}\n"
        for n, loss, minutes in ((10, 1.4, 60), (20, 1.3, 120), (30, 1.2, 180), (40, 1.1, 241))
    ),
    "megatron-new": "".join(
        f" [2026-03-01 10:00:{n}] iteration {n:8d}/     400 | consumed samples: {n * 64:12d} | elapsed time per "
        f"iteration (ms): 250.0 | throughput per GPU (TFLOP/s/GPU): 410.2 | learning rate: 1.500000E-04 | global batch "
        f"size:    64 | lm loss: {loss:.6E} | loss scale: 1.0 | grad norm: 1.2 |\n"
        for n, loss in ((10, 11.0), (20, 10.9), (30, 10.8), (40, 10.7))
    ) + " validation loss at iteration 40 | lm loss value: 9.100000E+00 | lm loss PPL: 8.955293E+03 |\n",
    "grpo": "".join(
        f"{{'loss': {loss}, 'grad_norm': 0.4, 'learning_rate': 1e-06, 'reward': 0.4, 'reward_std': 0.1, 'kl': 0.001, "
        f"'epoch': {epoch}}}\n"
        for loss, epoch in ((0.0, 0.01), (0.001, 0.02), (0.002, 0.03))
    ),
    "mlx": "Starting training..., iters: 100\nIter 1: Val loss 2.900, Val took 5.2s\n" + "".join(
        f"Iter {n}: Train loss {loss}, Learning Rate 1.000e-05, It/sec {rate}, Tokens/sec {rate * 25}, Trained Tokens "
        f"{n * 25}, Peak mem 9.707 GB\n"
        for n, loss, rate in ((10, 2.6, 0.4), (20, 2.1, 2.0), (30, 1.7, 2.0), (40, 1.4, 2.0))
    ).replace("Tokens/sec 50.0", "Tokens/sec 100.0"),
    "nemo": "".join(
        f"Training epoch 0, iteration {n}/9 | lr: 3e-05 | consumed_samples: {n + 1} | global_batch_size: 1 | "
        f"global_step: {n} | reduced_train_loss: {loss} | train_step_timing in s: {s} | val_loss: 4.1\n"
        for n, loss, s in ((0, 1.3, 5.0), (1, 1.2, 0.25), (2, 1.1, 0.25))
    ),
    "nanotron": "".join(
        f"10/17/2025 16:31:5{n} [INFO|DP=0|PP=0|TP=0]: iteration: {n} / 9 | consumed_tokens: 85.8G | "
        f"elapsed_time_per_iteration_ms: 12.5K | tokens_per_sec: 20K | tokens_per_sec_per_gpu: 10K | global_batch_size: "
        f"64 | lm_loss: {loss} | lr: 1e-05 | grad_norm: 1.25 | cuda_max_memory_reserved: 34.1G\n"
        for n, loss in ((1, 9.5), (2, 9.4), (3, 9.3))
    ),
    "minimind": "".join(
        f"Epoch:[{epoch}/2]({n}/1000), loss: {loss}, logits_loss: {loss}, aux_loss: 0.0000, lr: 0.0005, epoch_time: 9min\n"
        for epoch, n, loss in ((1, 100, 7.4), (1, 200, 6.9), (2, 100, 6.4), (2, 200, 6.1))
    ),
    "verl": "".join(
        f"(TaskRunner pid=7) step:{n} - actor/kl_loss:0.001 - actor/pg_loss:{loss} - perf/max_memory_reserved_gb:27.5 - "
        f"actor/lr:2e-06 - timing_s/gen:74.0 - timing_s/step:96.5 - perf/throughput:4650.0\n"
        for n, loss in ((1, 0.03), (2, 0.02), (3, 0.01))
    ),
    "composer": "".join(
        f"[batch={n}/9]:\n\t Train time/batch: {n}\n\t Train memory/peak_reserved_mem: 14.6740\n\t Train "
        f"loss/train/total: {loss}\n\t Train throughput/batches_per_sec: 0.125\n\t Train throughput/tokens_per_sec: 65536.0\n"
        for n, loss in ((1, 11.5), (2, 11.4), (3, 11.3))
    ),
    "olmo": "".join(
        f"2026-08-06 09:59:2{n} host:0  olmo.train:908  INFO    [step={n}/9,epoch=0]\n    train/CrossEntropyLoss={loss}\n"
        f"    throughput/device/tokens_per_second=26,668\n    throughput/device/batches_per_second=0.025\n"
        for n, loss in ((1, 11.5), (2, 11.4), (3, 11.3))
    ),
    "notebook": "Total batch size = 8 | Total steps = 60\n[ 3/60 00:06 < 02:00, 0.5 it/s, Epoch 0.36/5]\n"
    "Step\tTraining Loss\n1\t1.900000\n2\t1.800000\n3\t1.700000\n",
    "notebook-grpo": "Step | Training Loss | reward | rewards / style\n-- | -- | -- | --\n"
    "1 | 0.000000 | 1.5 | 0.5\n2 | 0.001000 | 1.6 | 0.5\n3 | 0.002000 | 1.7 | 0.5\n",
    "grpo-times": "".join(
        f"{{'loss': {loss}, 'learning_rate': 1e-06, 'reward': 0.4, 'step_time': {s}, 'epoch': {epoch}}}\n"
        for loss, epoch, s in ((0.0, 0.01, 30.0), (0.001, 0.02, 12.5), (0.002, 0.03, 12.5))
    ),
    "ppo": "".join(
        f"{{'objective/kl': 10.5, 'loss/policy_avg': {loss}, 'loss/value_avg': 0.15, 'lr': 2e-06, 'epoch': {epoch}}}\n"
        for loss, epoch in ((0.03, 0.01), (0.02, 0.02), (0.01, 0.03))
    ),
    "own-elapsed": "".join(f"step={n} loss={5 - n / 100} elapsed={3 + n / 2}s\n" for n in range(0, 60, 10)),
    "own-since": "".join(f"step {n} | loss {5 - n / 100} | time {3 + n / 2}s\n" for n in range(0, 60, 10)),
    "own-epochs": "".join(
        f"Epoch {epoch}/2, Batch {n}/100, Loss: {loss}\n"
        for epoch, n, loss in ((1, 50, 5.0), (1, 100, 4.9), (2, 50, 4.8), (2, 100, 4.7))
    ),
    "own-parts": "".join(
        f"INFO | step 0{n}/09 | step-time {s} sec | load-balance-loss 0.0018 | cross-entropy-loss {loss} | aux_loss: 9.0 | "
        f"tokens-per-second 50,000\n"
        for n, s, loss in ((1, 73.3, 2.6), (2, 28.5, 2.5), (3, 28.5, 2.4))
    ),
    "own-bar": "".join(
        f"Training:  {n}%|#    | {n}/100 [00:0{2 * n}<03:00,  2.00s/it, loss={2.7 - n / 10:.2f}]\r" for n in (1, 2, 3)
    ),
    "own-words": "".join(
        f"[step {n}/100] train loss: {loss} lr: 0.0003 time: {ms}ms (32,768 tok/s)\n"
        for n, loss, ms in ((0, 10.5, 5000.0), (10, 10.2, 250.0), (20, 10.0, 250.0), (30, 9.8, 250.0), (40, 9.7, 250.0))
    ),
    "own-json": "".join(
        f'{{"step": {n}, "train/loss": {loss}, "step_time_s": {s}}}\n'.replace("step_time_s", "step_time(s)")
        for n, loss, s in ((5, 3.5, 4.0), (10, 3.4, 0.5), (15, 3.3, 0.5), (20, 3.2, 0.5), (25, 3.1, 0.5))
    ),
}  # fmt: skip


def path_of(name: str, folder: Path) -> Path:
    """The file of the field, or one with the lines that are written here."""
    if name not in WRITTEN:
        return LOGS / name
    path = folder / f"{name}.log"
    path.write_text(WRITTEN[name])
    return path


@pytest.mark.parametrize(
    ("name", "format", "steps", "first", "last", "step_s", "tokens", "evaluations", "val"), CASES,
    ids=[case[0] for case in CASES],
)  # fmt: skip
def test_each_log_is_read(
    name: str, format: str, steps: range | list[int], first: float, last: float, step_s: float | None, tokens: int | None,
    evaluations: int, val: float | None, tmp_path: Path,
) -> None:  # fmt: skip
    found = explained(path_of(name, tmp_path)).log
    assert (found.format, found.first_step, found.last_step, found.steps) == (format, steps[0], steps[-1], len(steps))
    assert (found.losses.first_loss, found.losses.last_loss) == pytest.approx((first, last))
    assert found.steady_s == (pytest.approx(step_s, rel=0.005) if step_s else None)
    assert found.tokens_per_step == tokens
    assert (found.losses.evaluations, found.losses.last_val_loss) == (evaluations, pytest.approx(val) if val else None)


def test_what_else_the_logs_hold(tmp_path: Path) -> None:
    def log(name: str) -> Any:
        return explained(path_of(name, tmp_path)).log

    assert log("autoresearch.log").memory.allocated_bytes == round(45060.2 * MIB)
    assert log("autoresearch.log").losses.val_unit == "bits a byte"
    assert log("swift_logging.jsonl").memory.reserved_bytes == round(21.3 * GIB)
    assert log("swift-console").remaining.total_steps == 40
    assert log("rasbt-speed").tokens_per_s == 7238
    assert log("megatron-new").remaining.steps == 360
    assert (log("mlx").remaining.total_steps, log("mlx").memory.allocated_bytes) == (100, 9_707_000_000)
    assert (log("notebook").mean_step_s, log("notebook").losses.val_unit) == (2.0, "nats per token")
    assert {log(name).losses.val_unit for name in ("notebook-grpo", "verl", "ppo")} == {"a policy loss"}
    assert (log("olmo").tokens_per_gpu_s, log("verl").tokens_per_gpu_s) == (26_668, 4650)
    assert [log(name).step_time for name in ("own-since", "grpo-times")] == ["difference", "printed"]


def test_constant_rate_with_changing_times_is_no_rate(tmp_path: Path) -> None:
    found = explained(LOGS / "bn-toksec-varies.log").log
    assert (found.tokens_per_step, found.tokens_per_s) == (None, None)
    assert "constant_rate" in [finding.id for finding in found.findings]
    text = (LOGS / "bn-toksec-varies.log").read_text()
    lines = [
        line.replace("524288.00", f"{524288 / (7.9 + 0.03 * i):.2f}").replace(line[line.index("dt:") : line.index("ms")],
            f"dt: {7900 + 30 * i:.2f}")
        for i, line in enumerate(text.splitlines()[:9])
    ]  # fmt: skip
    varying = tmp_path / "varying.log"
    varying.write_text("\n".join(lines))
    right = explained(varying).log
    assert right.tokens_per_step == pytest.approx(524_288, rel=1e-3)


def test_a_preference_or_policy_loss_is_not_nats_per_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, says in (("trl_dpo.log", "one of preferences"), ("grpo", "a policy's")):
        text = " ".join(said(capsys, "explain", str(path_of(name, tmp_path))).split())
        assert says in text
        assert "nats per token, best" not in text
    sft = tmp_path / "sft.log"
    sft.write_text(
        "".join(
            f"{{'loss': {2 - n / 100}, 'num_tokens': {n * 1000}.0, 'mean_token_accuracy': 0.5, 'epoch': {n / 100}}}\n"
            for n in range(1, 21)
        )
    )
    text = " ".join(said(capsys, "compare", str(LOGS / "trl_dpo.log"), str(sft)).split())
    assert "Not comparable: the loss of trl_dpo is for preferences or a policy" in text


def test_explain_reads_the_tables_that_compare_reads(tmp_path: Path) -> None:
    found = explained(FIELD / "csv" / "wandb_one.csv").log
    assert (found.steps, found.last_step, found.log_interval) == (20, 1900, 100)
    assert (found.losses.first_loss, found.losses.last_loss, found.steady_s) == (10.0, 3.6667, None)
    tensorboard = tmp_path / "run-a-tag-train_loss.csv"
    tensorboard.write_text(
        "Wall time,Step,Value\n" + "".join(f"{1.7e9 + 3 * n},{n * 10},{4 - n / 10}\n" for n in range(8))
    )
    found = explained(tensorboard).log
    assert (found.steady_s, found.losses.last_loss) == (pytest.approx(0.3), pytest.approx(3.3))
    own = tmp_path / "own.csv"
    own.write_text("iter,loss,dt_ms,tokens_per_sec\n" + "".join(f"{n},{4 - n / 10},120.0,1000\n" for n in range(8)))
    found = explained(own).log
    assert (found.steady_s, found.losses.last_loss) == (pytest.approx(0.12), pytest.approx(3.3))
    neither = tmp_path / "neither.csv"
    neither.write_text("a,b\n1,2\n")
    assert foretrain("explain", str(neither)).returncode == 7


def test_an_unknown_program_is_said_with_what_was_read_as_what(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = " ".join(said(capsys, "explain", str(path_of("own-words", tmp_path))).split())
    assert "does not know the program" in text
    assert "time 'time: 5000.0ms'" in text
    source = tmp_path / "train.py"
    source.write_text("for step in range(5):\n    print(f'step {step} loss {loss}')  # step 5 loss 3\n")
    assert foretrain("explain", str(source)).returncode == 7


def test_a_progress_bar_alone_has_the_time_of_a_step(tmp_path: Path) -> None:
    log = tmp_path / "bar.log"
    log.write_text(
        "Loading checkpoint shards: 100%|##########| 4/4 [00:05<00:00,  1.30s/it]\n"
        + "".join(
            f"  {n // 5}%|#         | {n}/500 [{n * 4 // 60:02d}:{n * 4 % 60:02d}<35:44,  4.33s/it]\r"
            for n in range(1, 13)
        )
        + "100%|##########| 4/4 [00:02<00:00,  2.00it/s]\n"
    )
    found = explained(log).log
    assert (found.format, found.last_step, found.steady_s) == ("progress bar", 12, pytest.approx(4.33))
    assert found.remaining.total_steps == 500


@pytest.mark.parametrize(
    "text",
    [
        "step 0: train loss 10.9895, val loss 10.9900\niter 0: loss 10.9886, time 41200.00ms, mfu -100.00%\n",
        "iter 0: loss 10.9886, time 41200.00ms, mfu -100.00%\niter 0: loss 10.9886, time 41200.00ms, mfu -100.00%\n",
        "step    1/10 | loss 11.0 (+nanz)| norm 22.1 (+nanz)| lr 8.57e-07 | 2575.63 ms | 39.0% bf16 MFU | 203557 tok/s\n",
    ],
)
def test_a_first_step_alone_is_not_steady(text: str, tmp_path: Path) -> None:
    log = tmp_path / "first.log"
    log.write_text(text)
    found = explained(log, config=["gpt2-124m"], gpu="RTX 3060 12GB").log
    assert found.steady_s is None
    assert (found.remaining, found.utilization, found.tokens_per_s) == (None, None, None)
    assert "only_first" in [finding.id for finding in found.findings]


# -- out of memory -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "process", "others"),
    [
        ("container-t4.log", 13.65 * GIB, (14.74 - 1.08 - 13.65) * GIB),
        ("lf_oom.log", 73.54 * GIB, (79.15 - 5.60 - 73.54) * GIB),
        ("oom_docker.log", 78.85 * GIB, 79.25 * GIB - 401.88 * MIB - 78.85 * GIB),
        (TWO_PROCESSES, 20.10 * GIB, 23.64 * GIB - 500 * MIB - 20.10 * GIB),
        (CAPACTY, 14.73 * GIB, 14.75 * GIB - 17.06 * MIB - 14.73 * GIB),
    ],
)
def test_in_a_container_the_run_is_not_another_program(source: str, process: float, others: float) -> None:
    """It does not know its own number there, so its line reads as another process's."""
    text = (LOGS / source).read_text() if source.endswith(".log") else source
    found = oom_message.parse(text)
    assert found.process_bytes == pytest.approx(process, abs=1)
    # What is left of three figures with two decimals each is their rounding, not another program.
    assert found.used_by_others_bytes == pytest.approx(others if others > 16 * MIB else 0, abs=2)
    assert found.context_bytes == pytest.approx(process - (found.reserved_bytes or 0), abs=2)


@pytest.mark.parametrize(
    "source", ["container-t4.log", "lf_oom.log", "oom_docker.log", "old-1.13.log", TWO_PROCESSES, CAPACTY, CACHED]
)
def test_the_parts_never_sum_above_the_card(source: str) -> None:
    found = oom_message.parse((LOGS / source).read_text() if source.endswith(".log") else source)
    parts = (
        found.reserved_bytes,
        found.context_bytes,
        found.used_by_others_bytes,
        found.outside_bytes,
        found.free_bytes,
    )
    assert sum(part or 0 for part in parts) <= found.card_bytes + 2


def test_wordings_up_to_2_0_put_the_figure_first() -> None:
    found = oom_message.parse((LOGS / "old-1.13.log").read_text())
    assert found.asked_bytes == 786 * MIB
    assert found.free_bytes == round(620.69 * MIB)
    assert found.card_bytes == round(15.78 * GIB)
    assert found.allocated_bytes == round(14.28 * GIB)
    assert found.reserved_bytes == round(14.32 * GIB)
    assert found.unused_bytes == pytest.approx(0.04 * GIB, abs=2)
    assert found.used_by_others_bytes is None  # the message does not tell them from the context
    assert found.before_2_1
    cached = oom_message.parse(CACHED)
    assert (cached.unused_bytes, cached.reserved_bytes) == (30 * MIB, round(6.5 * GIB) + 30 * MIB)


def test_apple_and_windows_and_llm_c_are_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    apple = oom_message.parse(APPLE)
    assert (apple.allocated_bytes, apple.asked_bytes) == (round(17.95 * GIB), round(91.25 * MIB))
    assert apple.free_bytes == pytest.approx(18.13 * GIB - 17.95 * GIB - 142.69 * MIB, abs=2)
    log = tmp_path / "windows.log"
    log.write_text(WINDOWS)
    (failure,) = explained(log).out_of_memory
    assert failure.used_by_others_bytes is None
    assert "reserved more than the card has" in said(capsys, "explain", str(log)).replace("\n  ", " ")
    text = shown(capsys, "llmc.log", "--config", str(LOGS / "container-t4-config.py"), "--gpu", "T4")
    assert "no figures of PyTorch's" in text
    assert "Give the run's" not in text
    assert oom_message.parse("[CUDA ERROR] at file llmc/x.cuh:12:\nout of memory\n") is not None
    assert oom_message.parse("we have a CUDA error handler; step 3 of memory") is None


@pytest.mark.parametrize(
    ("words", "says"),
    [((), "Give the run's config and card"), (("--gpu", "T4"), "Give the run's config (--config my.py)")],
)
def test_what_was_given_is_not_asked_for(words: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert says in shown(capsys, "container-t4.log", *words)
    both = ("--config", str(LOGS / "container-t4-config.py"), "--gpu", "T4", "--compile=False")
    assert "Give the run's" not in shown(capsys, "container-t4.log", *both)


def test_the_card_has_what_the_message_states(capsys: pytest.CaptureFixture[str]) -> None:
    """The T4's box says 16 GiB, and the message 14.74: no remedy needs more than was there."""
    config = ["--compile=False", "--dtype=float16", str(LOGS / "container-t4-config.py")]
    found = explained(LOGS / "container-t4.log", config=config, gpu="T4")
    assert not found.doubts
    assert found.remedies
    assert all(remedy.effect.needed_bytes < 14.74 * GIB for remedy in found.remedies)
    words = ("--config", config[-1], *config[:-1], "--gpu", "T4")
    text = shown(capsys, "container-t4.log", *words)
    assert "--batch_size=" in text
    assert "--loss_chunk_size" not in text.replace("foretrain train … --loss_chunk_size", "")


def test_a_log_that_cannot_be_this_config_s_run_is_said_first(capsys: pytest.CaptureFixture[str]) -> None:
    config = str(LOGS / "container-t4-config.py")
    text = shown(capsys, "container-t4.log", "--config", config, "--gpu", "T4", "--dtype=float16")
    assert text.index("cannot be that config's run") < text.index("It asked for 2.35 GiB")
    assert "With --compile=False it needs" in text
    high = re.search(r"compile=False it needs .*? at most ([\d.]+) GiB", text)
    assert float(high[1]) >= 15.06  # what the message says the run held and asked for
    assert "What would have prevented it" not in text
    other = explained(LOGS / "oom_docker.log", config=[config], gpu="H100 SXM5 80GB")
    assert [doubt.id for doubt in other.doubts] == ["program"]
    small = explained(LOGS / "container-t4.log", config=[config, "--compile=False", "--dtype=float16"], gpu="RTX 4090")
    assert [doubt.id for doubt in small.doubts] == ["card"]
    assert not small.remedies


def test_expandable_segments_are_not_advised_to_old_torch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, log = ["gpt2-124m", "--batch_size=10", "--compile=False", "--dtype=float16"], tmp_path / "new.log"
    log.write_text((LOGS / "container-t4.log").read_text().replace("2.35 GiB", "1.20 GiB"))
    assert any("allocator_settings" in one.options for one in explained(log, config=words, gpu="T4").remedies)
    old = tmp_path / "old.log"
    old.write_text(
        CACHED.replace("7.93", "14.74").replace("30.00 MiB cached", "14.40 GiB reserved in total by PyTorch")
    )
    assert "max_split_size_mb" in said(capsys, "explain", str(old))
    found = explained(old, config=words, gpu="T4")
    assert not found.doubts
    assert not any("allocator_settings" in remedy.options for remedy in found.remedies)


def test_json_has_the_doubts() -> None:
    config = str(LOGS / "container-t4-config.py")
    result = foretrain("explain", str(LOGS / "container-t4.log"), "--config", config, "--gpu", "RTX 4090", "--json")
    found = json.loads(result.stdout)
    assert found["doubts"][0]["id"] == "card"
    assert found["remedies"] == []


# -- fine-tuning runs --------------------------------------------------------------------------------------

SCRIPT = """
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from peft import LoraConfig, get_peft_model
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B", torch_dtype="bfloat16")
model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))
args = TrainingArguments("out", per_device_train_batch_size=16, bf16=True, max_steps=500)
Trainer(model=model, args=args, train_dataset=data).train()
"""
LLAMA_FACTORY = """
model_name_or_path: Qwen/Qwen3-0.6B
stage: sft
finetuning_type: lora
lora_target: all
dataset: mine
cutoff_len: 1024
per_device_train_batch_size: 16
bf16: true
output_dir: out
"""
TRAINER_LOG = (
    "{'loss': 1.2, 'grad_norm': 0.5, 'learning_rate': 0.0001, 'epoch': 0.01}\n"
    "  1%|          | 3/500 [00:13<35:00,  4.33s/it]\n  1%|          | 4/500 [00:17<35:00,  4.33s/it]\n"
    "  1%|          | 5/500 [00:21<35:00,  4.33s/it]\n"
    "{'loss': 1.1, 'grad_norm': 0.5, 'learning_rate': 0.0001, 'epoch': 0.02}\n"
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4.64 GiB. GPU 0 has a total capacity of 23.64 GiB of "
    "which 1.50 GiB is free. Process 99 has 22.10 GiB memory in use. Of the allocated memory 21.30 GiB is allocated by "
    "PyTorch, and 300.00 MiB is reserved by PyTorch but unallocated.\n"
)


@pytest.mark.parametrize(("name", "text"), [("my_trainer.py", SCRIPT), ("sft.yaml", LLAMA_FACTORY)])
def test_a_fine_tuning_config_gives_fine_tuning_changes(name: str, text: str, tmp_path: Path) -> None:
    config, log = tmp_path / name, tmp_path / "hf.log"
    config.write_text(text)
    log.write_text(TRAINER_LOG)
    found = explained(log, config=[str(config)], gpu="RTX 4090")
    assert found.log.steady_s == pytest.approx(4.33)
    assert (found.unknown, found.doubts, found.remedies) == ("", (), ())
    first = found.changes[0]
    assert first.effect.needed_bytes <= 23.64 * GIB
    assert first.effect.saved_bytes > 0
    small = explained(log, config=[str(config)], gpu="T4")
    assert [doubt.id for doubt in small.doubts] == ["card", "held", "longer"][: len(small.doubts)]
    assert small.changes is None


def test_a_nanogpt_log_is_not_a_fine_tuning_config_s(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, log = tmp_path / "sft.yaml", tmp_path / "ng.log"
    config.write_text(LLAMA_FACTORY)
    log.write_text((LOGS / "old-1.13.log").read_text())
    assert "config is one of fine-tuning" in said(
        capsys, "explain", str(log), "--config", str(config), "--gpu", "V100"
    ).replace("\n  ", " ")
    config.write_text(LLAMA_FACTORY.replace("stage: sft", "stage: dpo\npref_beta: 0.1"))
    log.write_text(TRAINER_LOG)
    assert explained(log, config=[str(config)], gpu="RTX 4090").unknown == "not_planned"
    log.write_text(TRAINER_LOG.replace("allocated memory 21.30", "allocated memory 22.90"))
    longer = explained(log, config=["qwen3-0.6b", "--method=qlora", "--batch-size=1"], gpu="RTX 4090")
    assert [doubt.id for doubt in longer.doubts] == ["held", "longer"]


# -- logs side by side -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "unit"),
    [
        (("../csv/wandb_one.csv", "mingpt.log"), "nats per token"),
        (("trainer_log.jsonl", "swift_logging.jsonl"), "nats per token"),
        (("bn-toksec-varies.log", "autoresearch.log"), "nats per token"),  # bits per byte is what it evaluates in
        (("megatron.log", "mingpt.log"), "nats per token"),
    ],
)
def test_what_no_source_says_is_no_cause(names: tuple[str, str], unit: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Two logs say nothing of models, texts and vocabularies: a lower loss is then no finding about a setting."""
    text = " ".join(said(capsys, "compare", *(str(LOGS / name) for name in names)).split())
    assert "are unknown, so the cause is unknown too" in text
    assert "same text and vocabulary" in text
    assert f"loss, {unit}, " in text
    assert "that can cause this" not in text
    assert "has no" not in text  # of two: "are known of a and b"


# -- the next command of a nanoGPT run ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (("gpt2-124m",), "python train.py --batch_size=8 --gradient_accumulation_steps=64 --max_iters=19073"
                         " --warmup_iters=700 --lr_decay_iters=19073"),
        (("FILE", "--batch-size", "4", "--compile=false"), "python train.py FILE --batch_size=4 --compile=False"),
        (("FILE", "--loss_chunk_size=4096"), "python train.py FILE"),
        (("FILE", "--total_batch_size=65536", "--no-compile"),
         "python train.py FILE --batch_size=16 --gradient_accumulation_steps=8 --compile=False"),
        (("FILE", "--allocator_settings=expandable_segments:True"),
         "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True python train.py FILE"),
    ],
)  # fmt: skip
def test_the_next_command_is_one_that_nanogpt_takes(
    words: tuple[str, ...], command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It refuses keys that it does not have, and knows neither presets nor true; the environment sets its allocator."""
    monkeypatch.chdir(FIELD / "configs" / "config")
    words = tuple("base_tiny.py" if word == "FILE" else word for word in words)
    text = said(capsys, "plan", *words, "--trainer", "nanogpt", "--gpu", "4090")
    following = re.search(r"^  next +(.*?)\n  [a-z]", text, re.DOTALL | re.MULTILINE)
    assert following[1].replace("\\\n", " ").split() == command.replace("FILE", "base_tiny.py").split()
