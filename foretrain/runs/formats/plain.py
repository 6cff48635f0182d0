from dataclasses import replace
from functools import partial
from typing import Any

from foretrain.runs.formats import trainer
from foretrain.runs.formats.figures import Blocks
from foretrain.runs.formats.log_format import INT, NUMBER, Header, LogFormat, PatternReader, Reading, pattern

_STEP = rf"(?<![a-z])step\s+(?P<step>{INT})"
_LOSS, _RATE, _MFU = rf"(?P<loss>{NUMBER})", rf"(?P<rate>{NUMBER})", rf"(?P<mfu>{NUMBER})"
_MS, _VAL, _LR = rf"(?P<ms>{NUMBER})\s*ms", rf"(?P<val>{NUMBER})", rf"(?P<lr>{NUMBER})"
_TOTAL_MS = rf"train_time:(?P<total_ms>{NUMBER})\s*ms"
# Of nanochat's lines: `step 00011/21400 (0.05%) | loss: 3.012123 | … | dt: 500.00ms | tok/sec: 1,048,576 | mfu: 48.10`.
_NANOCHAT = (
    rf"{_STEP}(?:/(?P<of>{INT}))?\s+\({NUMBER}%\)\s*\|\s*loss:\s*{_LOSS}\s*\|.{{0,200}}?\bdt:\s*{_MS}",
    rf"(?:\s*\|\s*tok/sec:\s*{_RATE})?(?:\s*\|\s*(?:bf16_)?mfu:\s*{_MFU})?",
)
# modded-nanogpt: times since the start, without validation; older versions reset the clock after the tenth step.
_MODDED = pattern(rf"(?<![a-z_])step:(?P<step>{INT})/(?P<of>{INT})\s+(?:train_loss:\s*{_LOSS}\s+)?{_TOTAL_MS}")
_MODDED_VAL = rf"(?<![a-z_])step:(?P<step>{INT})/{INT}\s+val_loss:\s*{_VAL}"
_PEAK = Header(
    "peak memory",
    pattern(
        rf"peak memory (?:allocated|consumption):\s*(?P<allocated_mib>{NUMBER})\s*MiB",
        rf"(?:\s*reserved:\s*(?P<reserved_mib>{NUMBER})\s*MiB)?",
    ),
)
_SINCE_START: dict[str, Any] = {
    "counts_to_total": True, "step_time": "difference", "mean_times": True, "own_evaluations": True,
}  # fmt: skip


class _ParameterGolf(PatternReader):
    known = False

    def read(self, line: str) -> list[Reading]:
        self.known = self.known or "val_bpb:" in line
        return super().read(line) if self.known else []


def _dictionaries(name: str, title: str, place: int, *keys: str, **more: Any) -> LogFormat:
    reader = partial(trainer.Dictionaries, keys=keys)
    return replace(trainer.FORMATS[0], name=name, title=title, place=place, reader=reader, **more)


FORMATS = (
    LogFormat(  # iter 10: loss 4.2031, time 135.21ms, mfu 12.90%
        name="nanogpt", title="nanoGPT", words=("iter",),
        step_line=pattern(
            rf"(?<![a-z])iter\s+(?P<step>{INT}):\s*loss\s+{_LOSS},\s*time\s*{_MS}(?:,\s*mfu\s+{_MFU}\s*%)?"
        ),
        has_config=True, counts_to_total=True, times_evaluation=True,
    ),
    LogFormat(  # iter_dt 24.31ms; iter 100: train loss 3.80
        name="mingpt", title="minGPT", words=("iter_dt",),
        step_line=pattern(rf"\biter_dt\s*{_MS};\s*iter\s+(?P<step>{INT}):\s*train loss\s+{_LOSS}"),
    ),
    LogFormat(  # 100 | loss 6.1234 | lr 5.000000e-05 | 71.20ms | mfu 27.31%
        name="llama2.c", words=("| loss",),
        step_line=pattern(
            rf"^\s*(?P<step>{INT})\s*\|\s*loss\s+{_LOSS}\s*\|\s*lr\s+{_LR}\s*\|\s*{_MS}(?:\s*\|\s*mfu\s+{_MFU}\s*%)?"
        ),
        counts_to_total=True, times_evaluation=True,
    ),
    LogFormat(  # step     3 | loss: 10.955029 | lr 6.0000e-05 | norm: 15.3659 | dt: 3500.12ms | tok/sec: 149796.22
        name="build-nanogpt", words=("dt:",),
        step_line=pattern(
            rf"{_STEP}\s*[|,]\s*loss:?\s*{_LOSS}\s*[|,](?:\s*lr:?\s*{_LR})?",
            rf".{{0,200}}?\bdt:\s*{_MS}(?:\s*[|,]\s*tok/sec:\s*{_RATE})?",
        ),
        has_config=True,
    ),
    LogFormat(  # … | mfu: 39.8% | epoch: 1 | remaining: 297s, and at the end val_bpb: 0.9979 and peak_vram_mb: 45060.2
        name="autoresearch", place=45, words=("step", "val_bpb"), h100_mfu=True,
        step_line=pattern(*_NANOCHAT, rf"%\s*\|\s*epoch:\s*{INT}\s*\|\s*remaining:"),
        val_line=pattern(rf"^val_bpb:\s*{_VAL}"), val_unit="bits a byte", own_evaluations=True,
        headers=(Header("peak_vram_mb", pattern(rf"^peak_vram_mb:\s*(?P<allocated_mib>{NUMBER})")),),
    ),
    LogFormat(
        name="nanochat", words=("step",), step_line=pattern(*_NANOCHAT), val_unit="bits a byte", h100_mfu=True,
    ),
    LogFormat(
        name="llm.c", words=("step",),
        # step   42/74 | loss 3.364718 (+nanz)| norm 1.5494 (+nanz)| lr 3.00e-04 | 168.70 ms | 39.0% MFU | 24333 tok/s
        step_line=pattern(
            rf"{_STEP}(?:/\s*(?P<of>{INT}))?\s*[|:]\s*(?:train )?loss\s+{_LOSS}(?:[^,]{{0,100}}?\blr\s+{_LR})?",
            rf"[^,]{{0,200}}?{_MS}(?:\s*\|\s*{_MFU}%\s*(?:\w+\s+)?MFU)?(?:[\s|,]+{_RATE}\s*tok(?:ens)?/s)?",
        ),
        headers=(
            Header("device memory usage", pattern(rf"device memory usage:\s*(?P<device_mib>{NUMBER})\s*MiB")),
            Header("total_batch_size", pattern(rf"\btotal_batch_size=(?P<tokens_per_step>{INT})")),
        ),
        has_config=True, counts_to_total=True,
    ),
    LogFormat(  # s:10 trl:10.0437 lr:0.000009 norm:9.16, and a validation loss as s:10 tel:10.02
        name="llm.c main.log", words=("s:",),
        step_line=pattern(rf"^\s*s:(?P<step>{INT})\s+trl:{_LOSS}(?:\s+lr:{_LR})?(?:\s+norm:{NUMBER})?"),
        val_line=pattern(rf"^\s*s:(?P<step>{INT})\s+tel:{_VAL}"),
        step_time="none", own_evaluations=True,
    ),
    # … | step 10 | epoch 0 | loss 0.8534 | grad_norm 1.5 | lr 1.00e-05 | mem 29.67 GiB | tps 13746.23(1718.28/gpu) | …
    LogFormat(
        name="nemo-automodel", title="NeMo AutoModel", words=("| step ",), step_time="none", own_evaluations=True,
        step_line=pattern(
            rf"\|\s*step\s+(?P<step>{INT})\s*\|\s*epoch\s+{INT}\s*\|\s*loss\s+{_LOSS}\s*\|",
            rf"(?:\s*grad_norm\s+{NUMBER}\s*\|)?\s*lr\s+{_LR}\s*\|\s*mem\s+(?P<allocated_gib>{NUMBER})\s*GiB",
            rf"\s*\|\s*tps\s+{_RATE}",
        ),
    ),
    LogFormat(  # step:126/1395 train_time:14233ms step_avg:122.70ms; newer versions print no losses of training
        name="modded-nanogpt", words=("step:",), step_line=_MODDED,
        val_line=pattern(_MODDED_VAL, rf"(?:\s+{_TOTAL_MS})?"),
        headers=(_PEAK,), **_SINCE_START,
    ),
    LogFormat(  # step:200/20000 val_loss:2.8397 val_bpb:1.6774 train_time:8699ms step_avg:43.49ms
        name="parameter-golf", place=40, words=("step:",), reader=_ParameterGolf, step_line=_MODDED,
        val_line=pattern(_MODDED_VAL, rf"\s+val_bpb:\s*{NUMBER}(?:\s+{_TOTAL_MS})?"),
        headers=(
            _PEAK,
            Header("train_batch_tokens", pattern(rf"\btrain_batch_tokens:(?P<tokens_per_step>{INT})\b")),
            Header("model_params", pattern(rf"\bmodel_params:(?P<n_params>{INT})\b")),
        ),
        **_SINCE_START,
    ),
    LogFormat(  # iteration 100/ 500000 | … | elapsed time per iteration (ms): 135.9 | … | lm loss: 1.08E+01
        name="megatron", title="Megatron-LM", words=("elapsed time per iteration", "validation loss at iteration"),
        step_line=pattern(
            rf"\biteration\s+(?P<step>{INT})/\s*(?P<of>{INT})\s*\|.{{0,200}}?elapsed time per iteration \(ms\):\s*",
            rf"(?P<ms>{NUMBER})(?:.{{0,200}}?\blearning rate:\s*{_LR})?.{{0,200}}?\blm loss:\s*{_LOSS}",
        ),
        val_line=pattern(rf"validation loss at iteration\s+(?P<step>{INT})[^|]*\|\s*lm loss value:\s*{_VAL}"),
        counts_to_total=True, mean_times=True, own_evaluations=True,
    ),
    # Ep 1 (Step 000005): Train loss 9.776, Val loss 9.95; Ep 1, Step 000010, Train: 9.1, Val: 9.3, Step tok/sec: 7238
    LogFormat(
        name="LLMs-from-scratch", words=("Ep ",), step_time="none", own_evaluations=True,
        step_line=pattern(
            rf"\bEp\s+{INT}(?:,| \()\s*Step\s+(?P<step>{INT})(?:\):|,)\s*Train(?: loss|:)\s+{_LOSS},",
            rf"(?:\s*Val:\s*{NUMBER},\s*Step tok/sec:\s*{_RATE})?",
        ),
        val_line=pattern(
            rf"\bEp\s+{INT}(?:,| \()\s*Step\s+(?P<step>{INT})(?:\):|,)\s*Train(?: loss|:)\s+{NUMBER},",
            rf"\s*Val(?: loss|:)\s+{_VAL}",
        ),
    ),
    LogFormat(  # Iter 20: Train loss 2.101, Learning Rate 1e-05, It/sec 13.9, Tokens/sec 4560.7, …, Peak mem 10.6 GB
        name="mlx-lm", words=("Iter ",),
        step_line=pattern(
            rf"\bIter\s+(?P<step>{INT}):\s*Train loss\s+{_LOSS}(?:,\s*Learning Rate\s+{_LR})?,\s*It/sec\s+",
            rf"(?P<per_s>{NUMBER})(?:,\s*Tokens/sec\s+{_RATE}(?:,\s*Trained Tokens\s+{NUMBER})?)?",
            rf"(?:,\s*Peak mem\s+(?P<allocated_gb>{NUMBER})\s*GB)?",
        ),
        val_line=pattern(rf"\bIter\s+(?P<step>{INT}):\s*Val loss\s+{_VAL}"),
        headers=(Header("starting training", pattern(rf"Starting training\.\.\., iters:\s*(?P<total_steps>{INT})")),),
        counts_to_total=True, mean_times=True, own_evaluations=True,
    ),
    LogFormat(  # Training epoch 0, iteration 1/9 | lr: 3e-05 | … | reduced_train_loss: 1 | train_step_timing in s: 0.03
        name="nemo", title="NeMo", words=("Training epoch",), counts_to_total=True, own_evaluations=True,
        step_line=pattern(
            rf"Training epoch {INT}, iteration {INT}/(?P<of>{INT})\s*\|\s*lr:\s*{_LR}.{{0,100}}?\bglobal_step:\s*",
            rf"(?P<step>{INT}).{{0,200}}?\breduced_train_loss:\s*{_LOSS}\s*\|\s*train_step_timing in s:\s*",
            rf"(?P<s>{NUMBER})",
        ),
    ),
    LogFormat(  # iteration: 1 / 9 | … | elapsed_time_per_iteration_ms: 11.5K | tokens_per_sec: 22.8K | … | lm_loss: 2
        name="nanotron", words=("elapsed_time_per_iteration_ms",), counts_to_total=True, own_evaluations=True,
        step_line=pattern(
            rf"\biteration:\s*(?P<step>{INT})\s*/\s*(?P<of>{INT})\s*\|.{{0,100}}?elapsed_time_per_iteration_ms:\s*",
            rf"(?P<ms>{NUMBER}[KMG]?)\s*\|\s*tokens_per_sec:\s*(?P<rate>{NUMBER}[KMG]?).{{0,200}}?\blm_loss:\s*{_LOSS}",
            rf"\s*\|\s*lr:\s*{_LR}(?:.{{0,200}}?cuda_max_memory_reserved:\s*(?P<reserved_bytes>{NUMBER}[KMG]?))?",
        ),
    ),
    LogFormat(  # Epoch:[1/2](100/44160), loss: 7.4568, logits_loss: 7.4568, …, lr: 0.00049999, epoch_time: 85.0min
        name="minimind", words=("Epoch:[",), step_time="none", own_evaluations=True,  # the printed time is what remains
        step_line=pattern(
            rf"Epoch:\[(?P<epoch>{INT})/{INT}\]\((?P<step>{INT})/(?P<in_epoch>{INT})\),?\s*loss:\s*{_LOSS}",
            rf"(?:.{{0,200}}?\blr:\s*{_LR})?",
        ),
    ),
    LogFormat(  # step:34 - actor/pg_loss:0.042 - perf/throughput:4653.6 - timing_s/step:98.551, in any order
        name="verl", words=("actor/",), reader=Blocks, rate_per_gpu=True, own_evaluations=True,
        step_line=pattern(rf"(?<![a-z])step:(?P<step>{INT}) - (?=.{{0,12000}}?\bactor/pg_loss:)"),
    ),
    LogFormat(  # [batch=2/4800]: and a line for each figure, Train loss/train/total: 11.6025
        name="composer", title="Composer", words=("[batch=",), reader=Blocks, mean_times=True, own_evaluations=True,
        step_line=pattern(rf"\[batch=(?P<step>{INT})/(?P<of>{INT})\]:\s*$"), counts_to_total=True,
    ),
    LogFormat(  # [step=2/739328,epoch=0] and a line for each figure, train/CrossEntropyLoss=3.1
        name="olmo", title="OLMo", words=("[step=",), reader=Blocks, mean_times=True, own_evaluations=True,
        step_line=pattern(rf"\[step=(?P<step>{INT})/(?P<of>{INT})(?:,\s*epoch=[\d/]+)?[^\]]{{0,40}}\]\s*$"),
        counts_to_total=True, rate_per_gpu=True,
    ),
    # {'loss': 2.2344, …, 'num_tokens': 51486.0, …}; DPO, KTO, ORPO, CPO, reward models; GRPO, RLOO, PPO and others
    _dictionaries(
        "trl", "TRL", 55, "num_tokens", "mean_token_accuracy", "entropy", "rewards/margins", "rewards/chosen",
        "logps/chosen", "min_reward", "reward", "reward_std", "kl", "completion_length", "completions/mean_length",
        "objective/kl",
    ),
    # {'loss': '0.7157', …, 'memory/max_active (GiB)': '2.98', …, 'tokens/total': 512, …}: every number as text
    _dictionaries(
        "axolotl", "", 52, "memory/max_active (GiB)", "memory/max_mem_active(gib)", "tokens/trainable", "tokens/total",
        "tokens/train_per_sec_per_gpu", rate_per_gpu=True,
    ),
)  # fmt: skip
