"""The options of `foretrain plan`, with their help."""

from pathlib import Path
from typing import Annotated

import typer

Gpu = Annotated[str, typer.Option(help="Card or cards to plan for, as 'RTX 4070' or 3060,4070; cpu is this machine.")]
Others = Annotated[
    str,
    typer.Option(
        help="Memory that other programs hold on the card, such as 2GB. On this machine's own card it is measured."
    ),
]
StepTime = Annotated[
    float | None,
    typer.Option(help="Seconds of one iteration in your log: hours, MFU and energy follow from it."),
]
LoggedMfu = Annotated[
    float | None,
    typer.Option(help="The mfu that nanoGPT printed, in percent: the step time follows from it."),
]
Check = Annotated[bool, typer.Option("--check", help="Exit with 3 when the step that the verdict means does not fit.")]
Trainer = Annotated[
    str,
    typer.Option(
        help="Whose step the answers mean: foretrain or nanogpt. By default nanogpt for nanoGPT's own files, "
        "else foretrain.",
        metavar="NAME",
    ),
]
Exact = Annotated[
    bool,
    typer.Option("--exact", help="Trace the real step for this card, compiled or not: seconds, torch, no GPU."),
]
Explain = Annotated[
    bool, typer.Option("--explain", help="Why so much? Every component, the peak by tensor, nvidia-smi.")
]
Observed = Annotated[
    str, typer.Option(help="With --explain: what nvidia-smi shows in use on the card, such as 6582MiB.")
]
Process = Annotated[str, typer.Option(help="With --explain: what nvidia-smi shows for the process, such as 4464MiB.")]
Largest = Annotated[
    str,
    typer.Option(help="Find the largest batch_size, block_size or n_layer that fits, by traces.", metavar="KNOB"),
]
Snapshot = Annotated[
    Path | None,
    typer.Option(help="Write the trace as a memory snapshot that pytorch.org/memory_viz opens.", metavar="FILE"),
]
AllocConf = Annotated[
    str,
    typer.Option(
        help="Allocator settings for traces, such as expandable_segments:True; by default PYTORCH_ALLOC_CONF.",
        metavar="TEXT",
    ),
]
ShowConfig = Annotated[
    bool,
    typer.Option("--show-config", help="Print every knob, its value and where it came from; no plan."),
]
Price = Annotated[
    str | None,
    typer.Option(
        help="What an hour of the card or machine costs to rent, as 0.35/h or '$0.35/h'; for several cards also "
        "'4090=0.35,A100=1.2'. A rented card costs its rent and no electricity.",
        metavar="PRICE",
    ),
]
Co2 = Annotated[
    float | None,
    typer.Option(
        help="Grams of CO2 a kWh of your electricity; ourworldindata.org/grapher/carbon-intensity-electricity."
    ),
]
Within = Annotated[
    str | None,
    typer.Option(help="How many steps fit in 12h, 90m, 1d12h, in 3kWh, or in 5EUR?", metavar="LIMIT"),
]
Tokens = Annotated[str | None, typer.Option(help="How many steps fit in 10B tokens?", metavar="COUNT")]
Best = Annotated[
    bool,
    typer.Option("--best", help="With --within: the GPT of lowest estimated loss that fits the card and the limit."),
]
DataTokens = Annotated[
    str | None,
    typer.Option(help="Tokens in your training data, such as 3.68B; beyond them data repeat.", metavar="COUNT"),
]
Write = Annotated[
    Path | None,
    typer.Option(help="Write the config of the answer of --within, --tokens or --best.", metavar="FILE.toml"),
]
