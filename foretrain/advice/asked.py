"""What was typed behind `foretrain plan`, for the command that comes next."""

from foretrain.base.records import Record


class Asked(Record):
    """What was typed: the command, the config's words, the options that name the card; whether it is a
    nanoGPT file.

    `wrote`: the file that --write made. `speed`: the option that gave the time of a step.
    """

    command: str = "plan"
    words: tuple[str, ...] = ()
    gpu: str = "auto"
    others: str = ""
    nanogpt_file: bool = False
    quiet: bool = False
    wrote: str | None = None
    speed: str = ""

    def card_options(self) -> tuple[str, ...]:
        """--gpu and --used-by-others as they were given."""
        gpu = ("--gpu", self.gpu) if self.gpu != "auto" else ()
        return (*gpu, *(("--used-by-others", self.others) if self.others else ()))
