"""All techniques: those that the files here list as TECHNIQUES, the smallest change first. No torch."""

import pkgutil
from collections.abc import Iterator
from typing import Any

from foretrain.config.families.family import Rule
from foretrain.config.options import RunConfig
from foretrain.model.techniques.technique import Optimizer, Technique


def _found() -> Iterator[Technique]:
    # The import statement's own function: the estimate replaces it to load these files (predict/abstract).
    for file in pkgutil.iter_modules(__path__):
        yield from getattr(__import__(f"{__name__}.{file.name}", fromlist=["TECHNIQUES"]), "TECHNIQUES", ())


TECHNIQUES: tuple[Technique, ...] = tuple(sorted(_found(), key=lambda technique: technique.place))
RULES: tuple[Rule, ...] = tuple(rule for technique in TECHNIQUES for rule in technique.refuses)
SWITCHES = tuple(name for technique in TECHNIQUES for name in technique.switches)


OPTIMIZERS = {each.options["optimizer"]: each for each in (Optimizer(), *TECHNIQUES) if isinstance(each, Optimizer)}


def optimizer_of(config: RunConfig) -> Optimizer:
    return OPTIMIZERS[config.optimizer]


def change(model: Any, config: RunConfig) -> None:
    for technique in TECHNIQUES:
        technique.change(model, config)
