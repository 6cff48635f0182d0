"""All rules for several cards: what the files beside this one list as RULES, in the order of their `place`."""

import pkgutil
from collections.abc import Iterator
from importlib import import_module

from foretrain.advice.ranks.rules.base import Rule


def _found() -> Iterator[Rule]:
    for file in pkgutil.iter_modules(__path__):
        yield from getattr(import_module(f"{__name__}.{file.name}"), "RULES", ())


RULES: tuple[Rule, ...] = tuple(sorted(_found(), key=lambda rule: rule.place))
BY_ID = {rule.id: rule for rule in RULES}
ORDER = {rule.id: number for number, rule in enumerate(RULES)}
