"""What the commands that generate text share: how tokens are drawn, and the sentence on what a model needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from foretrain.base.messages import say
from foretrain.cli.common import ERR, noted, print_said

if TYPE_CHECKING:
    from foretrain.app.generation.opened import Opened

Temperature = Annotated[
    float, typer.Option(help="Sampling temperature; 0 always picks the most likely token.", min=0, max=10)
]
TopK = Annotated[int, typer.Option(help="Sample from this many most likely tokens; 0: all.", min=0)]
TopP = Annotated[
    float,
    typer.Option(
        help="Sample from the fewest most likely tokens with this probability together; 1: all.", min=0, max=1
    ),
]


def say_needs(found: Opened, *, quiet: bool) -> None:
    """What it needs, before its weights are loaded, and what gave way to the memory that is free, on stderr."""
    if quiet:
        return
    fitted = found.fitted
    values = {
        "checkpoint": found.checkpoint, "params": found.model.n_params, "context": fitted.context,
        "weights": fitted.memory.bytes_of("weights"), "cache": fitted.memory.bytes_of("kv_cache"),
        "needed": fitted.memory.needed_expected_bytes, "device": found.device.type,
    }  # fmt: skip
    ERR.print(noted(say("sample.needs", **values)), soft_wrap=True)
    print_said(fitted.notes, quiet=quiet)
