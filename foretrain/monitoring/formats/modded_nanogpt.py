"""KellerJordan/modded-nanogpt, train_gpt.py: `step:126/1395 train_time:14233ms step_avg:122.70ms`.

The time is that since the start, without validation; older versions set it to zero after the tenth step. Newer
versions print no losses of training. A file of its logs begins with the script's source.
"""

from foretrain.monitoring.formats.log_format import INT, NUMBER, Header, LogFormat, pattern

STEP = pattern(
    rf"(?<![a-z_])step:(?P<step>{INT})/(?P<of>{INT})\s+(?:train_loss:\s*(?P<loss>{NUMBER})\s+)?",
    rf"train_time:(?P<total_ms>{NUMBER})\s*ms",
)
VALIDATION = (
    rf"(?<![a-z_])step:(?P<step>{INT})/{INT}\s+val_loss:\s*(?P<val>{NUMBER})",
    rf"(?:\s+train_time:(?P<total_ms>{NUMBER})\s*ms)?",
)
MEMORY = Header(
    "peak memory",
    pattern(
        rf"peak memory (?:allocated|consumption):\s*(?P<allocated_mib>{NUMBER})\s*MiB",
        rf"(?:\s*reserved:\s*(?P<reserved_mib>{NUMBER})\s*MiB)?",
    ),
)

FORMATS = (
    LogFormat(
        name="modded-nanogpt",
        words=("step:",),
        step_line=STEP,
        val_line=pattern(*VALIDATION),
        headers=(MEMORY,),
        counts_to_total=True,
        step_time="difference",
        mean_times=True,
        own_evaluations=True,
    ),
)
