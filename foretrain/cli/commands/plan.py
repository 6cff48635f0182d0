"""`foretrain plan`: what a run will take, before it is started."""

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

answering, printing, reading = (Later(f"foretrain.cli.{name}") for name in ("answering", "printing", "reading"))

EPILOG = """Examples:
foretrain plan gpt2-124m --gpu "RTX 4070" --used-by-others 2GB
foretrain plan config/train_gpt2.py --gpu 4070 --batch_size=8 --compile=false
foretrain plan my.py --gpu 4070 --used-by-others 2GB --largest batch_size
foretrain plan my.py --gpus "2 x RTX 4090"   (does a second card pay?)
foretrain plan qwen3-8b --method qlora --batch-size 1 --gpu 4070   (fine-tuning)
foretrain plan axolotl.yaml --gpu 3090   (also LLaMA-Factory, TRL, torchtune, unsloth)
foretrain plan llama-3.1-8b --inference --weights q4_k_m --gpu 4070   (generating text)

foretrain plan my.toml --gpu 3060,4070,4090 --json
foretrain plan my.toml --gpu 4070 --step-time 3.9   (hours and MFU from your log)
foretrain plan config/train_gpt2.py --gpu 4070 --exact   (traces the real step, without a GPU)
foretrain plan my.py --gpu 4070 --explain --observed 6582MiB --process 4464MiB   (why is it so much?)
foretrain plan my.py --gpu 3060,4070 --batch_size=auto --total_batch_size=524288   (the micro-batch that fits)
foretrain plan my.py --gpu 4070,4090,A100-SXM4-80GB --price "4090=0.35,A100-SXM4-80GB=1.2"   (which card?)
foretrain plan my.py --gpus "2 nodes x 8 x H100 SXM5" --strategy=hsdp --full
foretrain plan my.py --gpu 4070 --within 12h --write shorter.toml   (also 5EUR, 3kWh; --tokens 10B)
foretrain plan --gpu 4070 --best --within 20h --data-tokens 3.68B   (which model?)
foretrain plan llama-3.2-1b --method lora --seq-len 4096 --batch-size 2 --gpu 4070
foretrain plan hf:Qwen/Qwen3-8B --method qlora --gradient-checkpointing --gpu 4090
foretrain plan qwen3-0.6b --method lora --gpu 4070 --write-script train.py
foretrain plan qwen3-8b --method qlora --batch-size 1 --gpu 3090,4090 --within 5EUR --data-tokens 10M
foretrain plan hf:Qwen/Qwen3-8B --inference --weights int8 --batch 8 --gpu A100-SXM4-80GB
foretrain plan qwen3-30b-a3b --inference --weights q4_k_m --n-cpu-moe 30 --gpu 3060   (experts in the computer's memory)
foretrain plan --inference --context 16k --gpu 4070   (which models run there?)"""


@command("plan", EPILOG, **OF_CONFIG)
@words_argument
@gpu_option
@gpus_option
@link_option
@network_option
@others_option
@option("--step-time", "Seconds per iteration from your log, for hours, MFU and energy.", type=float)
@option("--logged-mfu", "The mfu that nanoGPT printed, in percent, for the step time.", type=float)
@flag(
    "--check", "Exit with code 3 if it does not fit. Also if it may not fit, or does not run there.", group="questions"
)
@flag(
    "--inference",
    "Plan generating text instead of training. Memory with the KV cache, tokens per second.",
    group="inference",
)
@option(
    "--trainer NAME",
    "Which step the answers are about: foretrain or nanogpt. Default: nanogpt for nanoGPT's own files, else foretrain.",
    default="",
)
@flag("--exact", "Trace the real step for this card. Takes seconds; needs torch, but no GPU.", group="questions")
@flag(
    "--explain",
    "Show where the memory goes. That is each component, each tensor at the peak, and nvidia-smi's figures.",
    group="questions",
)
@option("--observed", "With --explain: memory in use on the card by nvidia-smi, such as 6582MiB.", default="")
@option("--process", "With --explain: memory of the process by nvidia-smi, such as 4464MiB.", default="")
@option(
    "--largest OPTION",
    "Find the largest batch_size, block_size or n_layer that fits. Fine-tuning: batch_size, seq_len or lora_r. It is "
    "estimated; with --exact traced.",
    default="",
    group="questions",
)
@flag("--smallest-card", "Find the smallest card on which the run fits.", group="questions")
@option("--snapshot FILE", "Write the trace as a memory snapshot for pytorch.org/memory_viz.", type=Path)
@option(
    "--alloc-conf TEXT",
    "Allocator settings for traces, such as expandable_segments:True. Default: PYTORCH_ALLOC_CONF.",
    default="",
)
@option(
    "--python PATH",
    "Trace with the torch of another environment, the one that will train: its Python, or its folder. "
    "torch 2.6 or newer; compiled 2.11 or newer.",
    default="",
)
@flag("--show-config", "Print every option of the config, its value and its source, instead of a plan.")
@price_option
@option(
    "--co2",
    "Grams of CO2 per kWh of your electricity; see ourworldindata.org/grapher/carbon-intensity-electricity.",
    type=float,
)
@option("--within LIMIT", "How many steps fit in 12h, 90m, 1d12h, in 3kWh, or in 5EUR?", group="questions")
@option("--tokens COUNT", "How many steps fit in 10B tokens?")
@flag(
    "--best",
    "With --within: find the GPT that is best to train. It has the lowest estimated loss of those that fit.",
    group="questions",
)
@option("--data-tokens COUNT", "Tokens in your training data, such as 3.68B or 10M; longer runs repeat data.")
@option("--write FILE.toml", "Write the config that --within, --tokens or --best finds.", type=Path)
@option(
    "--write-job KIND",
    "With --gpus: write a job file with what the plan found, for Slurm or SkyPilot: slurm or sky.",
    default="",
)
@option(
    "--write-script FILE.py",
    "Write a script that trains what was planned. It fine-tunes with transformers' Trainer or TRL.",
    type=Path,
    group="output",
)
@flag("--full", "Print everything: phases, formulas, FLOPs, energy, notes.", group="output")
@flag("--oneline", "Print one line, to paste into a forum or a chat.", group="output")
@json_option
@quiet_option
@click.pass_context
def plan_command(context: click.Context, words: list[str], **given: object) -> None:
    """Plan a run: does it fit, how long, what does it cost, what limits it. Needs no GPU and no torch."""
    if given["inference"] and (found := reading.models_asked(context, words)):
        printing.models(found, context.params)
        return
    reading.print_kept(context, words, lambda request: answering.answer(context, request, words))
