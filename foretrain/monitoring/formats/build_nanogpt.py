"""karpathy/build-nanogpt, train_gpt2.py: `step     3 | loss: 10.955029 | lr 6.0000e-05 | … | dt: 3500.12ms | …`."""

from foretrain.monitoring.formats.log_format import INT, NUMBER, LogFormat, pattern

FORMATS = (
    LogFormat(
        name="build-nanogpt",
        words=("dt:",),
        step_line=pattern(
            rf"(?<![a-z])step\s+(?P<step>{INT})\s*[|,]\s*loss:?\s*(?P<loss>{NUMBER})\s*[|,]",
            rf"(?:\s*lr:?\s*(?P<lr>{NUMBER}))?",
            rf".{{0,200}}?\bdt:\s*(?P<ms>{NUMBER})\s*ms(?:\s*[|,]\s*tok/sec:\s*(?P<rate>{NUMBER}))?",
        ),
        has_config=True,
    ),
)
