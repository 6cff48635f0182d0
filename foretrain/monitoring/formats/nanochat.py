"""karpathy/nanochat, scripts/base_train.py: `step 00011/21400 (0.05%) | loss: 3.012123 | … | dt: 500.00ms | …`."""

from foretrain.monitoring.formats.log_format import INT, NUMBER, LogFormat, pattern

FORMATS = (
    LogFormat(
        name="nanochat",
        words=("step",),
        step_line=pattern(
            rf"(?<![a-z])step\s+(?P<step>{INT})/(?P<of>{INT})\s+\({NUMBER}%\)\s*\|\s*loss:\s*(?P<loss>{NUMBER})\s*\|",
            rf".{{0,200}}?\bdt:\s*(?P<ms>{NUMBER})\s*ms",
            rf"(?:\s*\|\s*tok/sec:\s*(?P<rate>{NUMBER}))?(?:\s*\|\s*(?:bf16_)?mfu:\s*(?P<mfu>{NUMBER}))?",
        ),
        val_unit="bits a byte",
    ),
)
