"""karpathy/llm.c on the console: train_gpt2.cu, .c and .py; and the main.log that train_gpt2.cu writes.

`step   42/74 | loss 3.364718 (+nanz)| norm 1.5494 (+nanz)| lr 3.00e-04 | 168.70 ms | 39.0% bf16 MFU | 24333 tok/s`.
In main.log, `s:10 trl:10.0437 lr:0.000009 norm:9.16` is a step, `tel:` a validation loss; times are not in it.
The first logs of modded-nanogpt have the same lines.
"""

from foretrain.monitoring.formats.log_format import INT, NUMBER, Header, LogFormat, pattern

_MEMORY = rf"device memory usage:\s*(?P<device_mib>{NUMBER})\s*MiB"

FORMATS = (
    LogFormat(
        name="llm.c",
        words=("step",),
        step_line=pattern(
            rf"(?<![a-z])step\s+(?P<step>{INT})(?:/\s*(?P<of>{INT}))?\s*[|:]\s*(?:train )?loss\s+(?P<loss>{NUMBER})",
            rf"(?:[^,]{{0,100}}?\blr\s+(?P<lr>{NUMBER}))?",
            rf"[^,]{{0,200}}?(?P<ms>{NUMBER})\s*ms(?:\s*\|\s*(?P<mfu>{NUMBER})%\s*(?:\w+\s+)?MFU)?",
            rf"(?:[\s|,]+(?P<rate>{NUMBER})\s*tok/s)?",
        ),
        headers=(
            Header("device memory usage", pattern(_MEMORY)),
            Header("total_batch_size", pattern(rf"\btotal_batch_size=(?P<tokens_per_step>{INT})")),
        ),
        has_config=True,
        counts_to_total=True,
    ),
    LogFormat(
        name="llm.c main.log",
        words=("s:",),
        step_line=pattern(
            rf"^\s*s:(?P<step>{INT})\s+trl:(?P<loss>{NUMBER})(?:\s+lr:(?P<lr>{NUMBER}))?(?:\s+norm:{NUMBER})?"
        ),
        val_line=pattern(rf"^\s*s:(?P<step>{INT})\s+tel:(?P<val>{NUMBER})"),
        step_time="none",
        own_evaluations=True,
    ),
)
