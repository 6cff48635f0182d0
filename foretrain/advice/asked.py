"""What was typed behind `foretrain plan`, for the command that comes next."""

from foretrain.base.records import Record


class Asked(Record):
    """What was typed: the command, the config's words, the options that name the card; whether it is a nanoGPT file.

    `cards`: --gpus and what belongs to it. `wrote`: the file that --write made. `speed`: the option that gave the time
    of a step. `price`: --price as given; `limits`: what `advise` has not, such as --within 12h.
    """

    command: str = "plan"
    words: tuple[str, ...] = ()
    gpu: str = "auto"
    cards: tuple[str, ...] = ()
    others: str = ""
    nanogpt_file: bool = False
    quiet: bool = False
    wrote: str | None = None
    speed: str = ""
    price: str = ""
    exact: bool = False
    limits: tuple[str, ...] = ()

    def card_options(self) -> tuple[str, ...]:
        gpu = ("--gpu", self.gpu) if self.gpu != "auto" else ()
        return (*gpu, *self.cards, *(("--used-by-others", self.others) if self.others else ()))

    def options(self, command: str = "plan", rent: float | None = None) -> tuple[str, ...]:
        """Return what else this command can have. `rent`: of its one card, where --price names several."""
        price = f"{rent:g}" if "=" in self.price and rent is not None else self.price
        rented = ("--price", price) if price and (rent or "=" not in price) else ()
        exact = ("--exact",) if self.exact else ()
        return (*rented, *exact, *(self.limits if command == "plan" else ()))


QUIET = Asked(quiet=True)
