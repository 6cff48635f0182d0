"""The options of `foretrain plan`, with their help."""

from pathlib import Path
from typing import Annotated

import typer

Gpu = Annotated[
    str,
    typer.Option(help="The card to plan for, such as 'RTX 4070'; 3060,4070 compares cards; cpu means this machine."),
]
Gpus = Annotated[
    str,
    typer.Option(
        help="Cards that train one model together, such as '2 x RTX 4090' or '2 nodes x 8 x A100'; a count alone is of "
        "the card of --gpu.",
        metavar="CARDS",
    ),
]
Link = Annotated[
    str,
    typer.Option(
        help="With --gpus: what connects the cards of a machine, such as pcie4x8 or nvlink. Default: what such cards "
        "usually have.",
        metavar="NAME",
    ),
]
Network = Annotated[
    str,
    typer.Option(
        help="With --gpus: what connects the machines, such as 10GbE, ib-400 or '8 x ib-200'. Default: what such "
        "machines usually have.",
        metavar="NAME",
    ),
]
WriteJob = Annotated[
    str,
    typer.Option(
        help="With --gpus: write a job file with what the plan found, for Slurm or SkyPilot: slurm or sky.",
        metavar="KIND",
    ),
]
Others = Annotated[
    str,
    typer.Option(
        "--used-by-others",
        help="Memory used by other programs on the card, such as 2GB. On this machine's card foretrain measures it.",
    ),
]
StepTime = Annotated[
    float | None,
    typer.Option(help="Seconds per iteration from your log, for hours, MFU and energy."),
]
LoggedMfu = Annotated[
    float | None,
    typer.Option(help="The mfu that nanoGPT printed, in percent, for the step time."),
]
Check = Annotated[
    bool,
    typer.Option(
        "--check", help="Exit with code 3 if the step of the verdict does not fit, may not fit or does not run there."
    ),
]
Inference = Annotated[
    bool,
    typer.Option(
        "--inference",
        help="Plan generating text instead of training: memory with the KV cache, tokens per second. "
        "Takes --context, --batch, --weights, --kv, --prompt, --engine.",
    ),
]
Trainer = Annotated[
    str,
    typer.Option(
        help="Which step the answers are about: foretrain or nanogpt. Default: nanogpt for nanoGPT's own files, "
        "else foretrain.",
        metavar="NAME",
    ),
]
Exact = Annotated[
    bool,
    typer.Option("--exact", help="Trace the real step for this card. Takes seconds; needs torch, but no GPU."),
]
Explain = Annotated[
    bool,
    typer.Option(
        "--explain",
        help="Show where the memory goes: each component, each tensor at the peak, and nvidia-smi's figures.",
    ),
]
Observed = Annotated[
    str, typer.Option(help="With --explain: memory in use on the card by nvidia-smi, such as 6582MiB.")
]
Process = Annotated[str, typer.Option(help="With --explain: memory of the process by nvidia-smi, such as 4464MiB.")]
Largest = Annotated[
    str,
    typer.Option(
        help="Find the largest batch_size, block_size or n_layer that fits (fine-tuning: batch_size, seq_len or "
        "lora_r): estimated, with --exact traced.",
        metavar="OPTION",
    ),
]
Snapshot = Annotated[
    Path | None,
    typer.Option(help="Write the trace as a memory snapshot for pytorch.org/memory_viz.", metavar="FILE"),
]
Python = Annotated[
    str,
    typer.Option(
        "--python",
        help="Trace with the torch of another environment, the one that will train: its Python, or its folder. "
        "torch 2.6 or newer; compiled 2.11 or newer.",
        metavar="PATH",
    ),
]
AllocConf = Annotated[
    str,
    typer.Option(
        help="Allocator settings for traces, such as expandable_segments:True. Default: PYTORCH_ALLOC_CONF.",
        metavar="TEXT",
    ),
]
Full = Annotated[
    bool, typer.Option("--full", help="Print everything: phases, every byte with its formula, FLOPs, energy, notes.")
]
Oneline = Annotated[bool, typer.Option("--oneline", help="Print one line, to paste into a forum or a chat.")]
ShowConfig = Annotated[
    bool,
    typer.Option(
        "--show-config", help="Print every option of the config, its value and its source, instead of a plan."
    ),
]
Price = Annotated[
    str | None,
    typer.Option(
        help="Rent per hour of the card or machine, such as 0.35/h or '$0.35/h'; for several cards also "
        "'4090=0.35,A100=1.2'; with --gpus of each card. A rented card costs its rent and no electricity.",
        metavar="PRICE",
    ),
]
Co2 = Annotated[
    float | None,
    typer.Option(
        help="Grams of CO2 per kWh of your electricity; see ourworldindata.org/grapher/carbon-intensity-electricity."
    ),
]
Within = Annotated[
    str | None,
    typer.Option(help="How many steps fit in 12h, 90m, 1d12h, in 3kWh, or in 5EUR?", metavar="LIMIT"),
]
Tokens = Annotated[str | None, typer.Option(help="How many steps fit in 10B tokens?", metavar="COUNT")]
Best = Annotated[
    bool,
    typer.Option(
        "--best", help="With --within: find the GPT with the lowest estimated loss that fits the card and the limit."
    ),
]
DataTokens = Annotated[
    str | None,
    typer.Option(help="Tokens in your training data, such as 3.68B or 10M; longer runs repeat data.", metavar="COUNT"),
]
Write = Annotated[
    Path | None,
    typer.Option(help="Write the config that --within, --tokens or --best finds.", metavar="FILE.toml"),
]
