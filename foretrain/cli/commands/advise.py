"""`foretrain advise`: what to change, each change planned for the user's own run and card."""

from pathlib import Path

import click

from foretrain.base.installation import Later
from foretrain.cli.command import (
    OF_CONFIG,
    command,
    flag,
    gpu_option,
    gpus_option,
    json_option,
    link_option,
    network_option,
    option,
    others_option,
    price_option,
    quiet_option,
    words_argument,
)

advising, reading = Later("foretrain.cli.advising"), Later("foretrain.cli.reading")

EPILOG = """Examples:
foretrain advise config/train_gpt2.py --gpu "RTX 4070" --used-by-others 2.1GB   (what makes nanoGPT fit?)
foretrain advise my.toml --gpu 4070 --goal speed
foretrain advise my.toml --gpu 4070 --used-by-others 2GB --apply 1 --write smaller.toml
foretrain advise gpt2-774m --gpu 3060 --goal cost --price "3060=0.08,4090=0.35,A100-SXM4-80GB=1.2"
foretrain advise my.py --gpus "2 x RTX 4090"   (would one card do, what would four give, sharding, accumulation)
foretrain advise my.py --gpu 4070 --exact --top 2   (traces each and replays it at the card's limit)
foretrain advise my.toml --gpu 4070 --goal quality   (a lower loss in the same hours)
foretrain advise qwen3-8b --method lora --batch-size 1 --gpu 4070   (fine-tuning)
foretrain advise llama-3.3-70b --inference --weights q4_k_m --gpu 3090   (generating text)"""


@command("advise", EPILOG, **OF_CONFIG)
@words_argument
@gpu_option
@gpus_option
@link_option
@network_option
@others_option
@option(
    "--goal GOAL",
    "fit, speed, cost or quality (a lower loss in the same time). Default: fit if it does not fit, else speed.",
    default="",
    group="questions",
)
@option(
    "--trainer NAME",
    "Which step runs now: foretrain or nanogpt. Default: nanogpt for nanoGPT's own files, else foretrain.",
    default="",
)
@flag(
    "--exact",
    "Check each listed change with a trace of the real step. Takes seconds to minutes; needs torch.",
    group="questions",
)
@option("--top N", "How many changes to list, and to trace with --exact.", type=int, low=1, high=100, group="output")
@flag("--full", "Print everything: what is not enough, what does not help, and the sources.", group="output")
@option("--apply N", "Show change N in full, with the diff of the config.", default=0, low=0, group="questions")
@option(
    "--write FILE",
    "With --apply: write the changed config. A nanoGPT .py file can stay one.",
    type=Path,
    group="questions",
)
@price_option
@json_option
@quiet_option
@click.pass_context
def advise_command(context: click.Context, words: list[str], **given: object) -> None:
    """Find what to change: options and techniques, each planned for your run, ranked by gain and cost."""
    asked = reading.asked_of
    reading.print_kept(context, words, lambda found: advising.answer(context, found, asked(context, found, words)))
