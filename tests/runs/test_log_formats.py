"""Log formats of other programs: lines that they printed, each against the figures in them or worked out from them."""

import io
import json
import math
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.analysis.log_analysis import analyse
from foretrain.base.errors import UserError
from foretrain.runs import training_log
from foretrain.runs.formats import FORMATS
from foretrain.runs.training_log import TrainingLog, parse_log, read_log, read_stream
from tests.kit.command import REPO, foretrain

# github.com/huggingface/transformers, the console of run_clm.py style scripts before 5.0: numbers as such.
TRAINER = """\
  0%|          | 0/40 [00:00<?, ?it/s]
 25%|██▌       | 10/40 [00:05<00:15,  2.00it/s]
{'loss': 2.5013, 'grad_norm': 1.5, 'learning_rate': 4e-05, 'epoch': 0.25}
 25%|██▌       | 10/40 [00:05<00:15,  2.00it/s]
 50%|█████     | 20/40 [00:10<00:10,  1.90it/s]
{'loss': nan, 'grad_norm': nan, 'learning_rate': 2e-05, 'epoch': 0.5}
100%|██████████| 4/4 [00:01<00:00,  3.00it/s]
{'eval_loss': 2.25, 'eval_runtime': 1.2, 'eval_samples_per_second': 8.0, 'epoch': 0.5}
"""
# An issue of huggingface/trl's users on SkyPilot's guide for gpt-oss-20b (nebius): a bar, its line, and so on.
TRL = """\
  6%|▋         | 1/16 [01:18<19:31, 78.12s/it]
{'loss': 2.2344, 'grad_norm': 17.139, 'learning_rate': 0.0, 'num_tokens': 51486.0, 'mean_token_accuracy': 0.5436, 'epoch': 0.06}

 12%|█▎        | 2/16 [01:23<08:10, 35.06s/it]
{'loss': 2.1689, 'grad_norm': 16.724, 'learning_rate': 0.0002, 'num_tokens': 105023.0, 'mean_token_accuracy': 0.5596, 'epoch': 0.12}

 25%|██▌       | 4/16 [01:34<03:03, 15.26s/it]
{'loss': 2.1548, 'grad_norm': 3.983, 'learning_rate': 0.000192, 'num_tokens': 214557.0, 'mean_token_accuracy': 0.5182, 'epoch': 0.25}
"""
# A run of axolotl on an L4 with transformers 5, every number as text; and the end of another one.
AXOLOTL = """\
{'loss': '0.7157', 'grad_norm': '12.79', 'learning_rate': '0', 'ppl': '2.046', 'memory/max_active (GiB)': '2.98', \
'memory/max_allocated (GiB)': '2.98', 'memory/device_reserved (GiB)': '4.12', 'tokens/trainable': 93, \
'tokens/total': 512, 'epoch': '0.1333'}
{'train_runtime': '158.8', 'train_samples_per_second': '26.2', 'train_steps_per_second': '1.638', \
'train_loss': '1.567', 'memory/max_active (GiB)': '2.42', 'memory/max_allocated (GiB)': '2.42', \
'memory/device_reserved (GiB)': '7.89', 'epoch': '1', 'tokens/train_per_sec_per_gpu': '0'}
"""
# yuanhuanghuang/quality, baselines/lrqa: two entries of a trainer_state.json; its end is by the same Trainer.
STATE = """\
{
  "best_metric": null,
  "epoch": 19.995245641838352,
  "global_step": 3140,
  "log_history": [
    {
      "epoch": 0.32,
      "learning_rate": 7.911392405063292e-06,
      "loss": 1.387,
      "step": 50
    },
    {
      "epoch": 0.32,
      "eval_accuracy": 0.25503355264663696,
      "eval_loss": 1.3863019943237305,
      "eval_runtime": 92.0138,
      "step": 50
    },
    {
      "epoch": 0.63,
      "learning_rate": 1.5822784810126583e-05,
      "loss": 1.3879,
      "step": 100
    },
    {
      "epoch": 20.0,
      "step": 3140,
      "total_flos": 1.0e+18,
      "train_loss": 0.5,
      "train_runtime": 6280.0,
      "train_steps_per_second": 0.5
    }
  ],
  "max_steps": 3140,
  "num_train_epochs": 20
}
"""
# KellerJordan/modded-nanogpt, records/011725_MiscTweaksSub3Min/081087e4-…txt. The script stands before the log.
MODDED = """\
    print0(f"step:{step+1}/{train_steps} train_time:{approx_time:.0f}ms step_avg:{approx_time/timed_steps:.2f}ms")
step:0/1395 val_loss:10.8258 train_time:0ms step_avg:nanms
step:9/1395 train_time:27383ms step_avg:nanms
step:10/1395 train_time:27504ms step_avg:nanms
step:11/1395 train_time:124ms step_avg:nanms
step:12/1395 train_time:246ms step_avg:nanms
step:125/1395 train_time:14090ms step_avg:122.52ms
step:125/1395 val_loss:4.3962 train_time:14212ms step_avg:123.58ms
step:126/1395 train_time:14233ms step_avg:122.70ms
step:1395/1395 train_time:179190ms step_avg:129.38ms
step:1395/1395 val_loss:3.2814 train_time:179325ms step_avg:129.48ms
peak memory allocated: 37653 MiB reserved: 39156 MiB
"""
# openai/parameter-golf, records/track_10min_16mb/2026-03-17_NaiveBaseline/train.log
GOLF = """\
model_params:17059912
train_batch_tokens:524288 train_seq_len:1024 iterations:20000 warmup_steps:20 max_wallclock_seconds:600.000
warmup_step:20/20
step:0/20000 val_loss:6.9370 val_bpb:4.0978 train_time:0ms step_avg:0.01ms
step:1/20000 train_loss:6.9408 train_time:24ms step_avg:23.99ms
step:2/20000 train_loss:16.8763 train_time:67ms step_avg:33.39ms
step:13700/20000 train_loss:2.0323 train_time:596577ms step_avg:43.55ms
step:13750/20000 train_loss:1.9910 train_time:598726ms step_avg:43.54ms
step:13780/20000 val_loss:2.0606 val_bpb:1.2172 train_time:600038ms step_avg:43.54ms
stopping_early: wallclock_cap train_time:600038ms step:13780/20000
peak memory allocated: 10184 MiB reserved: 10200 MiB
final_int8_zlib_roundtrip val_loss:2.0727 val_bpb:1.2244 eval_time:1401ms
"""
# A round of llm.c's descendant llm-kittens on an RTX 5090, as llm.c prints it; the memory is from llm.c's own issue.
LLMC = """\
device memory usage: 3511 MiB / 5930 MiB
val loss 11.033154
step    1/10 | loss 11.032358 (+nanz)| norm 22.1414 (+nanz)| lr 8.57e-07 | 2575.63 ms | 39.0% bf16 MFU | 203557 tok/s
step    2/10 | loss 10.958507 (+nanz)| norm 22.0968 (+nanz)| lr 1.71e-06 | 2536.03 ms | 39.6% bf16 MFU | 206736 tok/s
val loss 10.609911
"""
# KellerJordan/modded-nanogpt, records/track_1_short/2024-06-06_AdamW, which is llm.c's main.log; llmc/logger.h
MAIN_LOG = """\
s:0 tel:10.9865
s:0 trl:10.965596
s:1 trl:10.814037
s:2 trl:10.543272
s:3 trl:10.260427 lr:0.000003 norm:9.16
s:4 trl:10.041298 lr:0.000004 norm:7.02
"""
# pytorch/torchtitan#3393; the two lines before the first step are by torchtitan/train.py, as is `validate`.
TITAN = """\
[rank0]:[titan] 2026-05-18 16:04:30,000 - root - INFO - CUDA capacity: NVIDIA H100 80GB HBM3 with 79.19GiB memory
[rank0]:[titan] 2026-05-18 16:04:31,000 - root - INFO - Trainer is initialized with local batch size 8, \
global batch size 32, gradient accumulation steps 1, sequence length 2048, total steps 1000 (warmup 200)
[rank0]:[titan] 2026-05-18 16:04:46,338 - root - INFO - step: 14  loss:  3.24405  grad_norm:  0.8319  \
memory:  9.46GiB(64.99%)  tps: 7,282  tflops: 0.52  mfu: 0.17%
[rank1]:[titan] 2026-05-18 16:04:46,338 - root - INFO - step: 14  loss:  3.24405  grad_norm:  0.8319  \
memory:  9.46GiB(64.99%)  tps: 7,282  tflops: 0.52  mfu: 0.17%
[rank0]:[titan] 2026-05-18 16:04:47,456 - root - INFO - step: 15  loss:  3.10680  grad_norm:  0.8587  \
memory:  9.46GiB(64.99%)  tps: 7,334  tflops: 0.53  mfu: 0.17%
[rank0]:[titan] 2026-05-18 16:04:47,700 - root - INFO - validate step: 15  loss:  3.2000  \
memory:  9.46GiB(64.99%)  tps: 9,000
[rank0]:[titan] 2026-05-18 16:04:49,702 - root - INFO - step: 17  loss:  3.14459  grad_norm:  0.5303  \
memory:  9.50GiB(65.26%)  tps: 7,282  tflops: 0.52  mfu: 0.17%
"""
# NVIDIA-NeMo/Automodel#3473.
AUTOMODEL = """
2026-08-10 15:55:20 | INFO | root | step 9 | epoch 0 | loss 0.6974 | grad_norm 1.5436 | lr 1.00e-05 | mem 24.90 GiB | tps 11278.56(1409.82/gpu) | num_label_tokens 21541
2026-08-10 15:55:23 | INFO | root | step 10 | epoch 0 | loss 0.8534 | grad_norm 1.5040 | lr 1.00e-05 | mem 29.67 GiB | tps 13746.23(1718.28/gpu) | num_label_tokens 29550
"""
# Lightning-AI/litgpt#1110: a step is one micro-batch.
LITGPT = """\
Epoch 4 | iter 961 step 961 | loss train: 1.062, val: 1.057 | iter time: 529.46 ms (step)
Epoch 4 | iter 962 step 962 | loss train: 0.937, val: 1.057 | iter time: 503.53 ms (step)
Epoch 5 | iter 965 step 965 | loss train: 1.182, val: 1.057 | iter time: 743.31 ms (step)
Training time: 583.36s
Memory used: 14.49 GB
"""
# Lightning-AI/litgpt#689: two micro-batches a step, as older versions printed them.
LIT_GPT = """\
iter 76 step 38: loss 10.8259, iter time: 197.87ms
iter 77 step 39: loss 10.8259, iter time: 214.40ms (optimizer.step)
iter 78 step 39: loss 10.8259, iter time: 198.00ms
iter 79 step 40: loss 10.8259, iter time: 215.31ms (optimizer.step)
iter 80 step 40: loss 10.8259, iter time: 197.59ms
iter 81 step 41: loss 10.8259, iter time: 215.43ms (optimizer.step)
"""
# meta-pytorch/torchtune#1358
TUNE = """\
Step 1 | loss:2.085338592529297 lr:2e-05 tokens_per_second_per_gpu:57.828881833956174
Step 2 | loss:1.8718312978744507 lr:2e-05 tokens_per_second_per_gpu:405.044978758513
Step 3 | loss:1.1732845306396484 lr:2e-05 tokens_per_second_per_gpu:655.9372371931469 peak_memory_reserved:24.5
"""
# By torchtune's recipes/full_finetune_single_device.py, whose bar says epoch, step and loss.
TUNE_BAR = (
    "1|1|Loss: 2.0853:   1%|          | 1/100 [00:02<03:18,  2.00s/it]\r"
    "1|2|Loss: 1.8718:   2%|▏         | 2/100 [00:03<02:27,  1.50s/it]\r"
)
# The end of a tutorial's run with Lightning (MNIST, 860 batches an epoch).
LIGHTNING = (
    "Epoch 9:  50%|███▌   | 430/860 [00:02<00:02, 160.00it/s, v_num=1, train_loss_step=1.500, valid_acc=0.900]\r"
    "Epoch 9: 100%|███████| 860/860 [00:05<00:00, 162.25it/s, v_num=1, train_loss_step=1.460, valid_loss_step=1.460, "
    "valid_loss_epoch=1.520, valid_acc=0.946, train_loss_epoch=1.510]`Trainer.fit` stopped: `max_epochs=10` reached.\n"
    "Epoch 9: 100%|███████| 860/860 [00:05<00:00, 162.07it/s, v_num=1, train_loss_step=1.460, valid_loss_step=1.460, "
    "valid_loss_epoch=1.520, valid_acc=0.946, train_loss_epoch=1.510]\n"
)
# As lightning.pytorch.loggers.CSVLogger writes it, with LearningRateMonitor.
CSV = "epoch,lr-AdamW,step,train_loss,val_loss\n0,0.001,49,2.5,\n0,0.0005,99,2.125,\n0,,99,,2.25\n"

NAN = math.nan
# Log, its format, steps, losses, times of steps in seconds, evaluations, learning rates.
CASES = [
    (TRAINER, "trainer", [10, 20], [2.5013, NAN], [0.5, 1 / 1.9], [(20, 2.25)], [4e-5, 2e-5]),
    (TRL, "trl", [1, 2, 4], [2.2344, 2.1689, 2.1548], [78.12, 35.06, 15.26], [], [0, 2e-4, 1.92e-4]),
    (AXOLOTL, "axolotl", [35], [0.7157], [NAN], [], [0]),
    (STATE, "trainer_state.json", [50, 100], [1.387, 1.3879], [NAN] * 2, [(50, 1.386302)], [7.911392e-6, 1.582278e-5]),
    (
        MODDED, "modded-nanogpt", [9, 10, 11, 12, 125, 126, 1395], [NAN] * 7,
        [27.383 / 9, 0.121, NAN, 0.122, 13.844 / 113, 0.143, 164.957 / 1269],
        [(0, 10.8258), (125, 4.3962), (1395, 3.2814)], [NAN] * 7,
    ),
    (
        GOLF, "parameter-golf", [1, 2, 13700, 13750], [6.9408, 16.8763, 2.0323, 1.9910],
        [0.024, 0.043, 596.510 / 13698, 2.149 / 50], [(0, 6.9370), (13780, 2.0606)], [NAN] * 4,
    ),
    (LLMC, "llm.c", [1, 2], [11.032358, 10.958507], [2.57563, 2.53603], [(0, 11.033154), (2, 10.609911)], [8.57e-7, 1.71e-6]),
    (
        MAIN_LOG, "llm.c main.log", [0, 1, 2, 3, 4], [10.965596, 10.814037, 10.543272, 10.260427, 10.041298],
        [NAN] * 5, [(0, 10.9865)], [NAN, NAN, NAN, 3e-6, 4e-6],
    ),
    (TITAN, "torchtitan", [14, 15, 17], [3.24405, 3.10680, 3.14459], [NAN, 1.118, 2.246 / 2], [(15, 3.2)], [NAN] * 3),
    (LITGPT, "litgpt", [961, 962, 965], [1.062, 0.937, 1.182], [0.52946, 0.50353, 0.74331], [(960, 1.057)], [NAN] * 3),
    (LIT_GPT, "litgpt", [39, 40, 41], [10.8259] * 3, [NAN, 0.41331, 0.41302], [], [NAN] * 3),
    (TUNE, "torchtune", [1, 2, 3], [2.085339, 1.871831, 1.173285], [NAN] * 3, [], [2e-5] * 3),
    (TUNE_BAR, "torchtune", [1, 2], [2.0853, 1.8718], [2.0, 1.5], [], [NAN] * 2),
    (LIGHTNING, "lightning", [8170, 8600], [1.5, 1.46], [1 / 160, 1 / 162.25], [(8600, 1.52)], [NAN] * 2),
    (AUTOMODEL, "nemo-automodel", [9, 10], [0.6974, 0.8534], [NAN] * 2, [], [1e-5] * 2),
    (CSV, "lightning metrics.csv", [49, 99], [2.5, 2.125], [NAN] * 2, [(99, 2.25)], [1e-3, 5e-4]),
]  # fmt: skip
NAMES = [f"{case[1]}-{number}" for number, case in enumerate(CASES)]


def log_of(text: str) -> TrainingLog:
    return read_stream(io.BufferedReader(io.BytesIO(text.encode())), "x")  # type: ignore[arg-type]


@pytest.mark.parametrize(("text", "format", "steps", "losses", "times_s", "evaluations", "rates"), CASES, ids=NAMES)
def test_what_the_lines_say(text, format, steps, losses, times_s, evaluations, rates) -> None:
    log = log_of(text)
    assert (log.format, list(log.steps.number), log.last_step) == (format, steps, steps[-1])
    assert not log.unnumbered
    assert list(log.steps.loss) == pytest.approx(losses, nan_ok=True)
    assert list(log.steps.time_s) == pytest.approx(times_s, nan_ok=True)
    assert list(log.steps.learning_rate) == pytest.approx(rates, nan_ok=True)
    assert [(one.step, one.val_loss) for one in log.evaluations] == [(s, pytest.approx(v)) for s, v in evaluations]


def test_a_log_whose_newest_line_is_first_is_turned_round() -> None:
    lines = [f"iter {step}: loss {4 - step / 10:.4f}, time {100 + step}.00ms, mfu 20.00%" for step in range(5)]
    ran, turned = (log_of("\n".join(some)) for some in (lines, lines[::-1]))
    for steps in (ran.steps, turned.steps):
        assert (list(steps.number), steps.loss[0], list(steps.starts)) == ([0, 1, 2, 3, 4], 4.0, [0])
    assert (turned.steps.time_s, turned.last_step) == (ran.steps.time_s, 4)


def test_a_record_with_two_values_of_a_key_is_left_out() -> None:
    record = '{"current_steps": 1, "total_steps": 9, "loss": 2.0, "elapsed_time": "0:00:05"}'
    twice = record.replace('"loss"', '"current_steps": 3, "loss"')
    assert list(log_of(f"{record}\n{twice}\n{record.replace(': 1,', ': 2,')}\n").steps.number) == [1, 2]


def test_every_format_of_these_programs_has_a_log_here() -> None:
    elsewhere = {"nanogpt", "nanochat", "build-nanogpt"}  # tests/runs/test_training_log.py
    elsewhere |= {  # tests/runs/test_field_logs.py
        "LLMs-from-scratch", "autoresearch", "evaluations", "llama-factory", "llama2.c", "megatron", "mingpt",
        "ms-swift", "composer", "minimind", "mlx-lm", "nanotron", "nemo", "notebook", "olmo", "verl",
    }  # fmt: skip
    assert {case[1] for case in CASES} | elsewhere == {name for name, format in FORMATS.items() if format.printed}


@pytest.mark.parametrize(("text", "format"), [case[:2] for case in CASES], ids=NAMES)
def test_each_log_is_one_format_s_alone(text: str, format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its own format, no other one takes a log; the Trainer reads those that build on it, and modded-nanogpt
    the lines that parameter-golf kept."""
    kin = {"trl": "trainer", "axolotl": "trainer", "parameter-golf": "modded-nanogpt"}
    monkeypatch.setattr(training_log, "FORMATS", {name: one for name, one in FORMATS.items() if name != format})
    if format in kin:
        assert log_of(text).format == kin[format]
        return
    try:
        log = log_of(text)
    except UserError as error:
        assert "no training step" in str(error)
    else:
        assert log.program.fallback


def test_what_the_logs_say_of_the_whole_run() -> None:
    by = {case[1]: log_of(case[0]).header for case in CASES[::-1]}
    assert (by["trainer"].total_steps, by["trl"].total_steps, by["modded-nanogpt"].total_steps) == (40, 16, 1395)
    assert by["trl"].tokens_per_step == round((214557 - 51486) / 3)
    assert (by["axolotl"].run_s, by["axolotl"].run_steps) == (158.8, 260)  # 158.8 s at 1.638 steps/s
    assert by["axolotl"].reserved_peak_bytes == round(4.12 * 2**30)
    assert by["axolotl"].active_peak_bytes == round(2.98 * 2**30)
    assert (by["trainer_state.json"].run_s, by["trainer_state.json"].total_steps) == (6280.0, 3140)
    assert by["modded-nanogpt"].reserved_peak_bytes == 39156 * 2**20
    assert (by["parameter-golf"].tokens_per_step, by["parameter-golf"].n_params) == (524_288, 17_059_912)
    assert by["parameter-golf"].allocated_peak_bytes == 10184 * 2**20
    assert by["llm.c"].device_peak_bytes == 3511 * 2**20
    assert (by["torchtitan"].tokens_per_step, by["torchtitan"].total_steps) == (32 * 2048, 1000)
    assert by["torchtitan"].gpu_name == "NVIDIA H100 80GB HBM3"
    assert by["torchtitan"].reserved_peak_bytes == round(9.50 * 2**30)
    assert by["litgpt"].allocated_peak_bytes == 14_490_000_000
    assert by["torchtune"].reserved_peak_bytes == round(24.5 * 2**30)


def test_what_a_log_does_not_say_is_not_made_up() -> None:
    found = analyse(log_of(TUNE))
    assert (found.steady_s, found.step_time, found.tokens_per_s, found.tokens_per_step) == (None, "none", None, None)
    assert found.tokens_per_gpu_s == pytest.approx(405.044978758513)
    assert {"no_times", "rate_per_gpu"} <= {finding.id for finding in found.findings}
    silent = analyse(log_of(MODDED))  # it prints no losses of training; that is no loss which is not finite
    assert silent.losses.first_loss is None
    assert "loss_not_finite" not in {finding.id for finding in silent.findings}
    assert "loss_not_finite" in {finding.id for finding in analyse(log_of(TRAINER)).findings}
    titan = analyse(log_of(TITAN))
    assert titan.tokens_per_s == pytest.approx(32 * 2048 / titan.steady_s)  # type: ignore[operator]
    assert titan.tokens_per_gpu_s == 7282
    state = analyse(log_of(STATE))
    assert (state.steady_s, state.mean_step_s) == (None, 2.0)


# -- the Trainer's steps, which its lines do not name ------------------------------------------------------------


def trainer(steps: int, every: int, per_epoch: int, *, digits: int = 4, style: str = "'%s'") -> list[str]:
    """Dictionaries as transformers 5 prints them (PrinterCallback, ProgressCallback), without a bar."""
    lines = []
    for step in range(every, steps + 1, every):
        values = {"loss": 3 - step / 1e3, "grad_norm": 1.0, "learning_rate": 1e-5, "epoch": step / per_epoch}
        lines.append("{" + ", ".join(f"'{k}': " + style % f"{v:.{digits}g}" for k, v in values.items()) + "}")
    return lines


def end_of(steps: int, per_epoch: int, run_s: float = 100.0) -> str:
    rate = f"{steps / run_s:.4g}"
    return f"{{'train_runtime': '{run_s}', 'train_steps_per_second': '{rate}', 'train_loss': '2', 'epoch': '{steps / per_epoch:.4g}'}}"


def bar_of(step: int, steps: int, step_s: float) -> str:
    clock = f"{int(step * step_s) // 60:02d}:{int(step * step_s) % 60:02d}"
    return f"{step * 100 // steps:3d}%|███  | {step}/{steps} [{clock}<00:09, {1 / step_s:.2f}it/s]"


def test_steps_by_the_epochs_and_the_end() -> None:
    log = parse_log([*trainer(600, 20, 300), end_of(600, 300)])
    assert list(log.steps.number) == list(range(20, 601, 20))
    assert not log.unnumbered


def test_steps_by_the_bar_in_any_order() -> None:
    """In the order in which they happened; the bar drawn after each line alone; all bars first, as two files that were
    put together; and as a pipe that kept back the lines."""
    lines, bars = trainer(60, 10, 37), [bar_of(step, 60, 0.5) for step in range(1, 61)]
    happened = [one for k in range(6) for one in (*bars[10 * k : 10 * k + 10], lines[k], bars[10 * k + 9])]
    late = [one for k in range(6) for one in (lines[k], bars[10 * k + 9])]
    buffered = [*bars, *lines, end_of(60, 37)]
    for order in (happened, late, buffered):
        log = parse_log([f"{one}\r" for one in order])
        assert list(log.steps.number) == [10, 20, 30, 40, 50, 60]
        assert list(log.steps.time_s) == pytest.approx([0.5] * 6)


def test_lines_are_counted_where_nothing_says_their_steps() -> None:
    log = parse_log(trainer(60, 10, 37))
    assert (list(log.steps.number), log.unnumbered) == ([1, 2, 3, 4, 5, 6], True)
    assert "unnumbered" in {finding.id for finding in analyse(log).findings}


def test_several_processes_that_print_the_same_count_once() -> None:
    lines = trainer(60, 10, 37)
    assert len(parse_log([one for line in lines for one in (line, line)]).steps) == 6
    tagged = [one for line in lines for one in (f"[rank0]: {line}", f"[rank1]: {line}")]
    assert len(parse_log(tagged).steps) == 6


# -- what stands around them, and what is broken -------------------------------------------------------------------


ON_A_CONSOLE = [(case[0], case[2]) for case in CASES if case[0] is not STATE]


@pytest.mark.parametrize(("text", "steps"), ON_A_CONSOLE)
def test_colours_and_other_bars_around_the_lines(text: str, steps: list[int]) -> None:
    dressed = "".join(
        f"Map: 40%|███  | 4/10 [00:01<00:02, 3.00it/s]\r\x1b[32m\x1b[1m{line}\x1b[0m\r\n" for line in text.splitlines()
    )
    assert list(log_of(dressed).steps.number) == steps


def test_colours_that_lost_their_escape_character() -> None:
    """As they are pasted into issues of pytorch/torchtitan."""
    line = "[31mstep:  1  [32mloss:  8.18630  [38;2;180;60;0mgrad_norm:  1.4459  [36mmemory:  0.77GiB(0.81%)"
    plain = line.replace("[38;2;180;60;0m", "[39m") + "  [34mtps: 4,536  [36mtflops: 0.32  [35mmfu: 0.03%[39m"
    log = log_of(plain)
    assert (log.steps.number[0], log.steps.loss[0]) == (1, 8.1863)
    assert log.steps.tokens_per_s[0] == 4536
    assert log.header.reserved_peak_bytes == round(0.77 * 2**30)


PIECES = [line for case in CASES for line in case[0].splitlines()]


@given(st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=40)), max_size=40), st.integers(0, 300))
def test_any_mixture_of_lines_is_read_or_refused_with_a_sentence(lines: list[str], cut: int) -> None:
    try:
        found = analyse(parse_log([line[: cut or None] for line in lines]))
    except UserError as error:
        assert str(error)
    else:
        json.dumps(found.to_json(), allow_nan=False)


@pytest.mark.parametrize("text", [case[0] for case in CASES], ids=NAMES)
def test_a_log_that_ends_anywhere(text: str) -> None:
    for end in range(0, len(text), 17):
        try:
            found = analyse(log_of(text[:end]))
        except UserError as error:
            assert error.exit_code == 7
        else:
            json.dumps(found.to_json(), allow_nan=False)


@pytest.mark.parametrize(
    "line",
    [
        "{'loss': 1e999, 'epoch': -1, 'learning_rate': None}", "{'loss': 2.0, 'epoch': 0.1, 'num_tokens': 1e300}",
        "{'train_runtime': 1e300, 'train_steps_per_second': 1e300, 'epoch': 1e-300}",
        "{'train_runtime': 0, 'train_steps_per_second': 0.0, 'epoch': 0}",
        " 50%|███| 999999999999/999999999999 [99999:99:99<?, 0.00it/s]", " 50%|███| 5/10 [1:2:3<4, 999999999s/it]",
        "step: 99999999999  loss: nan  memory: 1e300GiB(1%)  tps: 0  mfu: -1%", "step:1/0 train_time:nanms",
        "2026-99-99 99:99:99,999 step: 3  loss: 3  memory: 1GiB", '"log_history": [ {"step": 1e300, "loss": 1} ]',
        "peak memory allocated: 99999999999999999999 MiB", "iter 0 step 0: loss nan, iter time: nan ms (step)",
        "global batch size 999999999999, sequence length 999999999999, total steps 0",
    ],
)  # fmt: skip
def test_figures_that_cannot_be(line: str) -> None:
    for text in (TRAINER, TITAN, STATE, GOLF, LIT_GPT):
        try:
            found = analyse(parse_log([line, *text.splitlines(), line, line]))
        except UserError as error:
            assert error.id in ("data.log_no_times", "data.log_unknown")
        else:
            json.dumps(found.to_json(), allow_nan=False)


def test_a_state_of_any_size_is_read_as_it_comes(tmp_path: Path) -> None:
    entries = [{"epoch": i / 100, "loss": 3 - i / 1e5, "step": i} for i in range(1, 20_001)]
    path = tmp_path / "anything.txt"
    path.write_text(json.dumps({"global_step": 20_000, "log_history": entries, "max_steps": 20_000}, indent=2))
    log = read_log(path)
    assert (log.format, len(log.steps), log.last_step, log.header.total_steps) == (
        "trainer_state.json", 20_000, 20_000, 20_000,
    )  # fmt: skip


# -- the command line ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "format"), [case[:2] for case in CASES], ids=NAMES)
def test_explain_by_content_not_by_name(tmp_path: Path, text: str, format: str) -> None:
    path = tmp_path / "some.thing"
    path.write_text(text, "utf-8")
    found = json.loads(foretrain("explain", str(path), "--json").stdout)
    assert (found["schema"], found["format"]) == ("foretrain.explain/1#log", format)


def test_explain_says_what_is_not_in_a_log(tmp_path: Path) -> None:
    for name, text, says in (
        ("titan", TITAN, ("torchtitan · 3 steps, 14 to 17", "7,282 tokens/s on each GPU", "9.50 GiB reserved",
                          "from the time stamps", "tokens/s of one GPU")),
        ("main.log", MAIN_LOG, ("steady step not in the log", "10.9656 → 10.0413", "4e-06 in the last line")),
        ("axo", AXOLOTL, ("mean step 611 ms", "4.12 GiB reserved", "0.7157")),
        ("golf", GOLF, ("parameter-golf", "524,288 tokens per step (from the log)", "9.95 GiB allocated")),
    ):  # fmt: skip
        path = tmp_path / name
        path.write_text(text, "utf-8")
        shown = " ".join(foretrain("explain", str(path)).stdout.split())
        for one in says:
            assert one in shown, (name, one, shown)


def test_a_config_of_another_program_is_not_used(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_text(TRL, "utf-8")
    shown = foretrain("explain", str(path), "--config", "gpt2-124m", "--gpu", "4070", code=0)
    assert "No config here describes the models of TRL" in " ".join(shown.stdout.split())


def test_two_logs_are_compared_by_what_both_say(tmp_path: Path) -> None:
    lines = "".join(f"{line}\n" for line in trainer(600, 20, 300))
    (tmp_path / "a.log").write_text(lines + end_of(600, 300, 100.0) + "\n")
    (tmp_path / "trainer_state.json").write_text(
        json.dumps(
            {
                "log_history": [
                    *({"loss": 2.9 - s / 1e3, "epoch": s / 300, "step": s} for s in range(20, 601, 20)),
                    {"train_runtime": 200.0, "train_steps_per_second": 3.0, "epoch": 2.0, "step": 600},
                ],
                "max_steps": 600,
            },
            indent=2,
        )
    )
    ended = foretrain("compare", str(tmp_path / "a.log"), str(tmp_path / "trainer_state.json"), "--json", code=0)
    sides = json.loads(ended.stdout)["sides"]
    assert [side["step_s"] for side in sides] == pytest.approx([100 / 600, 200 / 600], rel=1e-3)
    assert [side["train_loss"] for side in sides] == pytest.approx([2.4, 2.3], abs=1e-3)


def test_a_watched_trainer(tmp_path: Path) -> None:
    """Lines on one stream and the bar on the other, as transformers writes them."""
    code = (
        "import sys\n"
        f"for line, bar in {list(zip(trainer(60, 10, 37), [bar_of(s, 60, 0.5) for s in range(10, 61, 10)], strict=True))!r}:\n"
        "    sys.stderr.write(bar + '\\r'); sys.stderr.flush(); print(line); sys.stderr.write(bar + '\\r')\n"
        f"print({end_of(60, 37)!r})\n"
    )
    ended = foretrain("watch", "--json", "--out", str(tmp_path / "w"), "--", sys.executable, "-c", code)
    record = json.loads(ended.stdout)
    assert (record["log_format"], record["steps_done"], record["last_step"]) == ("trainer", 6, 60)
    assert record["step_s"] == pytest.approx(0.5)
    lines = [json.loads(line) for line in (tmp_path / "w" / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == pytest.approx([3 - s / 1e3 for s in range(10, 61, 10)], abs=1e-3)
    assert {line["step"] for line in lines} == {None}  # no line says its step; the whole log does
    explained = json.loads(foretrain("explain", str(tmp_path / "w"), "--json").stdout)
    assert (explained["format"], explained["last_step"]) == ("trainer", 60)


def test_the_guide_names_every_format() -> None:
    text = (REPO / "docs" / "explain.md").read_text("utf-8")
    for format in (each for each in FORMATS.values() if each.printed):
        assert format.shown.removeprefix("the ") in text.replace("the Trainer's", "Trainer's"), format.shown
