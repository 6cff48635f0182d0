"""karpathy/nanoGPT, train.py and model.py: `iter 10: loss 4.2031, time 135.21ms, mfu 12.90%`."""

from foretrain.monitoring.formats.log_format import INT, NUMBER, LogFormat, pattern

FORMATS = (
    LogFormat(
        name="nanogpt",
        title="nanoGPT",
        words=("iter",),
        step_line=pattern(
            rf"(?<![a-z])iter\s+(?P<step>{INT}):\s*loss\s+(?P<loss>{NUMBER}),\s*time\s*(?P<ms>{NUMBER})\s*ms",
            rf"(?:,\s*mfu\s+(?P<mfu>{NUMBER})\s*%)?",
        ),
        has_config=True,
        counts_to_total=True,
        times_evaluation=True,
    ),
)
