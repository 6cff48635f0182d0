"""The programs whose training logs `read_log` reads: one entry each.

The lines are those that the programs print: karpathy/nanoGPT train.py and model.py, karpathy/nanochat
scripts/base_train.py, karpathy/build-nanogpt train_gpt2.py, karpathy/llm.c train_gpt2.cu, .c and .py. They are found
anywhere in a line, so that time stamps, ranks, colours and progress bars around them do no harm.
"""

import re
from dataclasses import dataclass
from typing import Literal

# A number as programs print it; commas are grouping or, where the locale was another, the decimal point.
NUMBER = r"[-+]?(?:nan|inf|\d(?:[\d.,]{0,30}\d)?(?:e[-+]?\d{1,3})?)"
INT = r"\d{1,12}"


def pattern(*parts: str) -> re.Pattern[str]:
    """The parts one after the other, in any case; digits are 0 to 9 alone."""
    return re.compile("".join(parts), re.IGNORECASE | re.ASCII)


@dataclass(frozen=True, kw_only=True)
class LogFormat:
    """One program's log.

    `step_line` finds the line of a step, with the groups `step`, `loss` and `ms`, and where the program prints them
    `of` (the last step), `mfu` (percent) and `rate` (tokens per second).
    """

    name: str
    step_line: re.Pattern[str]
    title: str = ""  # the program's name as it is written, if that is another one
    has_config: bool = True  # whether a config of foretrain's can describe its model
    val_unit: Literal["nats a token", "bits a byte"] = "nats a token"  # of validation losses
    counts_to_total: bool = False  # the last step has the number of all steps; else that less one
    times_evaluation: bool = False  # evaluations and saves are within the time of their step


_FORMATS = (
    LogFormat(
        name="nanogpt",
        step_line=pattern(
            rf"(?<![a-z])iter\s+(?P<step>{INT}):\s*loss\s+(?P<loss>{NUMBER}),\s*time\s*(?P<ms>{NUMBER})\s*ms",
            rf"(?:,\s*mfu\s+(?P<mfu>{NUMBER})\s*%)?",
        ),
        title="nanoGPT",
        counts_to_total=True,
        times_evaluation=True,
    ),
    LogFormat(
        name="nanochat",
        step_line=pattern(
            rf"(?<![a-z])step\s+(?P<step>{INT})/(?P<of>{INT})\s+\({NUMBER}%\)\s*\|\s*loss:\s*(?P<loss>{NUMBER})\s*\|",
            rf".{{0,200}}?\bdt:\s*(?P<ms>{NUMBER})\s*ms",
            rf"(?:\s*\|\s*tok/sec:\s*(?P<rate>{NUMBER}))?(?:\s*\|\s*(?:bf16_)?mfu:\s*(?P<mfu>{NUMBER}))?",
        ),
        has_config=False,
        val_unit="bits a byte",
    ),
    LogFormat(
        name="build-nanogpt",
        step_line=pattern(
            rf"(?<![a-z])step\s+(?P<step>{INT})\s*[|,]\s*loss:?\s*(?P<loss>{NUMBER})\s*[|,]",
            rf".{{0,200}}?\bdt:\s*(?P<ms>{NUMBER})\s*ms(?:\s*[|,]\s*tok/sec:\s*(?P<rate>{NUMBER}))?",
        ),
    ),
    LogFormat(
        name="llm.c",
        step_line=pattern(
            rf"(?<![a-z])step\s+(?P<step>{INT})(?:/(?P<of>{INT}))?\s*[|:]\s*(?:train )?loss\s+(?P<loss>{NUMBER})",
            rf"[^,]{{0,200}}?(?P<ms>{NUMBER})\s*ms(?:\s*\|\s*(?P<mfu>{NUMBER})%\s*(?:\w+\s+)?MFU)?",
            rf"(?:[\s|,]+(?P<rate>{NUMBER})\s*tok/s)?",
        ),
        counts_to_total=True,
    ),
)
FORMATS = {format.name: format for format in _FORMATS}  # in the order in which they are looked for
