"""`foretrain mfu`: what share of a card's peak a speed is, by every convention."""

from collections.abc import Callable

from foretrain.analysis.log_checks import SCHEMA, utilization
from foretrain.app.plan import Cards, with_dataset
from foretrain.base.errors import UserError
from foretrain.base.quantities import parse_clock_ghz, parse_rate, parse_seconds, read
from foretrain.cli.command import OF_CONFIG, command, gpu_option, json_option, option, words_argument
from foretrain.cli.common import print_answer, print_notes
from foretrain.config.resolve import resolve
from foretrain.reports.views.log import utilization_document

EPILOG = """Examples:
foretrain mfu my.py --tokens-per-s 134k --gpu "RTX 4070"
foretrain mfu my.py --step-time 3.9 --gpu 4070 --clock 2.63GHz
foretrain mfu gpt2-124m --tokens-per-s 1.2M --gpu "H100 SXM5 80GB" --dtype bfloat16 --json"""


@command("mfu", EPILOG, **OF_CONFIG)
@words_argument
@option("--tokens-per-s RATE", "Measured tokens per second, such as 134k or 1.2M.", default="")
@option("--step-time TIME", "Or the time of one optimizer step, such as 3.9 or 3900ms.", default="")
@gpu_option
@option(
    "--clock CLOCK",
    "Mean SM clock during the run, such as 2.63GHz (nvidia-smi --query-gpu=clocks.sm). Adds the shares "
    "of the peak at that clock.",
    default="",
)
@json_option
def mfu_command(words: list[str], tokens_per_s: str, step_time: str, gpu: str, clock: str, as_json: bool) -> None:
    """Turn a speed into MFU: with full and causal attention, with recomputation, and as nanoGPT prints it."""

    if bool(tokens_per_s) == bool(step_time):
        raise UserError("usage.speed_twice" if step_time else "usage.speed_missing")
    rate = _value(parse_rate, "--tokens-per-s", tokens_per_s, (1e-3, 1e12), "usage.bad_rate") if tokens_per_s else 0.0
    step_s = _value(parse_seconds, "--step-time", step_time, (1e-6, 1e9), "usage.bad_time") if step_time else 0.0
    clock_ghz = _value(parse_clock_ghz, "--clock", clock, (0.1, 10), "usage.bad_clock") if clock else None
    resolved = resolve(words)
    print_notes(resolved.notes, quiet=as_json)
    config = with_dataset(resolved)
    found = Cards(gpu=gpu).targets(config)
    if len(found) > 1:
        raise UserError("usage.one_speed", option="--tokens-per-s" if tokens_per_s else "--step-time", count=len(found))
    used = utilization(config, found[0].gpu, step_s or config.tokens_per_step / rate, clock_ghz=clock_ghz)
    print_answer(used, SCHEMA, lambda: utilization_document(resolved.name, used), as_json=as_json)


def _value(parse: Callable[[str], float], option: str, text: str, limits: tuple[float, float], error: str) -> float:
    wrong = UserError(error, option=option, value=text[:40])
    value = read(parse, text, wrong)
    if not limits[0] <= value <= limits[1]:
        raise wrong
    return value
