"""openai/parameter-golf, train_gpt.py: modded-nanogpt's lines, with losses of training and bits per byte.

`step:200/20000 train_loss:2.8041 train_time:8677ms step_avg:43.38ms`, and
`step:200/20000 val_loss:2.8397 val_bpb:1.6774 train_time:8699ms step_avg:43.49ms`.
"""

from foretrain.monitoring.formats.log_format import INT, NUMBER, Header, LogFormat, PatternReader, Reading, pattern
from foretrain.monitoring.formats.modded_nanogpt import MEMORY, STEP


class _Lines(PatternReader):
    """modded-nanogpt's lines, once one of them has bits per byte in it."""

    def __init__(self, format: LogFormat) -> None:
        super().__init__(format)
        self.known = False

    def read(self, line: str) -> list[Reading]:
        """The steps and evaluations in the line."""
        self.known = self.known or "val_bpb:" in line
        return super().read(line) if self.known else []


FORMATS = (
    LogFormat(
        name="parameter-golf",
        place=40,
        words=("step:",),
        reader=_Lines,
        step_line=STEP,
        val_line=pattern(
            rf"(?<![a-z_])step:(?P<step>{INT})/{INT}\s+val_loss:\s*(?P<val>{NUMBER})\s+val_bpb:\s*{NUMBER}",
            rf"(?:\s+train_time:(?P<total_ms>{NUMBER})\s*ms)?",
        ),
        headers=(
            MEMORY,
            Header("train_batch_tokens", pattern(rf"\btrain_batch_tokens:(?P<tokens_per_step>{INT})\b")),
            Header("model_params", pattern(rf"\bmodel_params:(?P<n_params>{INT})\b")),
        ),
        counts_to_total=True,
        step_time="difference",
        mean_times=True,
        own_evaluations=True,
    ),
)
