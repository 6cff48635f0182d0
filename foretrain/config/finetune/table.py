"""`Table`: the keys of a trainer's config, taken one by one, and `FileSettings`: what such a file comes to."""

import re
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from foretrain.base.errors import UserError
from foretrain.config.checks import value_as_written
from foretrain.config.finetune.options import FINETUNE_OPTIONS, Bound
from foretrain.config.words import NotPlanned, converted, flag

_SHORT = re.compile(r"[\w./, -]{1,40}")  # what is shown as it stands; the rest as Python writes it
_MOST_NAMED = 60  # of a key, in characters
# Words in the name of a key that nobody here knows, by which it decides what a run takes.
_DECIDES = re.compile(
    r"quant|bit(s|$|_)|fp8|nvfp|offload|zero|shard|parallel|kernel|attn|attention|optim|checkpointing|recompute|galore"
    r"|lomo|badam|apollo|reward|teacher|distil|critic|ref_model|rollout|vllm|freez|cross_entropy|loss_(fn|type|func)"
)
_NOTHING: Mapping[str, str] = MappingProxyType({})
KINDS: dict[str, Bound] = {"at_least": "at_least", "at_most": "at_most"}
_OF_CARDS = ("_dim", "_size", "_degree")
_TRACKERS = ("wandb", "mlflow", "comet", "trackio", "swanlab", "hub_", "push_to_hub", "hf_", "tensorboard", "neptune")


@cache
def _file() -> Mapping[str, Mapping[str, Any]]:
    return tomllib.loads(Path(__file__).with_name("keys.toml").read_text("utf-8"))


def known_keys(*groups: str) -> dict[str, str]:
    """harmless, at_least, at_most or decisive, by the key; of groups such as "training" and "trl" the last one says."""
    tables = [table for group in groups for table in _file()[group].items()]
    return {key: kind for kind, keys in tables for key in keys.split()}


def rows_of(table: str) -> Mapping[str, Mapping[str, Any]]:
    return _file()[table]


@dataclass
class FileSettings:
    """What a file says of a fine-tuning run. `values`: by FineTune's options; `origins`: the key that each is from.

    `unplanned`: what changes memory or time and is not planned, with what the plan's figures then are of the run's;
    `harmless`: what changes neither; `cards` and `sharding`: what the file wants of several cards.
    """

    format: str
    source: str
    model: str | None = None
    unread_model: str = ""  # what names it, where a script would have to be run for that
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    harmless: list[str] = field(default_factory=list)
    unplanned: dict[str, Bound] = field(default_factory=dict)
    cards: int = 0
    cards_key: str = ""
    sharding: str = ""
    sharded_values: dict[str, Any] = field(default_factory=dict)  # options of a run that is sharded so
    sharded_by: tuple[str, ...] = ()  # the keys that say it
    hosted: tuple[str, ...] = ()  # those that put some of it on the host, which a plan leaves on the card
    folder: Path | None = None  # where the file is, beside which others are read; of a pasted text nothing is
    called: bool = False  # a script makes the calls, so what it leaves out has their defaults
    pattern: tuple[str, str] = ("", "")  # of the modules that get an adapter, with the key that it is from
    peft_targets: bool = False  # the modules that peft chooses by itself for this family


class Table:
    """The keys of one table of a file; `found` is filled as they are taken."""

    def __init__(self, keys: Mapping[str, Any], found: FileSettings, inside: str = "") -> None:
        self.keys, self.found, self.inside = keys, found, inside
        self.taken: set[str] = set()

    def take(self, key: str, default: Any = None) -> Any:
        """The value of a key, which is then taken; the default where it is missing or null."""
        self.taken.add(key)
        value = self.keys.get(key)
        return default if value is None else value

    def table(self, key: str) -> "Table":
        """The table that a key holds; an empty one where it is missing."""
        value = self.take(key, {})
        if not isinstance(value, Mapping):
            raise UserError("config.finetune_not_table", key=self.name(key), source=self.found.source)
        return Table({str(name): each for name, each in value.items()}, self.found, f"{self.inside}{key}.")

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.take(key)
        if value is None:
            return default
        result = flag(value)
        if result is None:
            id, written = "config.finetune_flag", value_as_written(value)
            raise UserError(id, key=self.name(key), value=written, source=self.found.source)
        return result

    def word(self, key: str, default: str = "") -> str:
        """A text; the default where it is missing or null."""
        value = self.take(key)
        if value is None:
            return default
        if not isinstance(value, str):
            id, written = "config.finetune_text", value_as_written(value)
            raise UserError(id, key=self.name(key), value=written, source=self.found.source)
        return value

    def put(self, option: str, *keys: str) -> bool:
        """Give an option of FineTune the value of the first of these keys that is there; whether one was."""
        given = [(key, value) for key in keys if (value := self.take(key)) is not None]
        return self.give(option, given[0][1], given[0][0]) if given else False

    def give(self, option: str, value: Any, key: str) -> bool:
        """Give an option this value, which comes from this key; whether foretrain plans it."""
        try:
            self.found.values[option] = converted(FINETUNE_OPTIONS[option], value, self.name(key), self.found.source)
        except NotPlanned as other:
            if option == "lora_targets" and isinstance(value, str):
                self.found.pattern = (value, self.name(key))
            self.unplanned(key, value, str(other), "at_most" if str(other) else "unknown")
            if not str(other):
                return False
            self.found.values[option] = str(other)
        stated = key in self.keys or "." in key or self.inside
        self.found.origins[option] = self.name(key) if stated else f"{self.found.format}'s default"
        return True

    def cards(self, key: str) -> None:
        """How many cards the file wants."""
        count = self.take(key)
        if isinstance(count, int) and count > 1:
            self.found.cards, self.found.cards_key = count, self.name(key)

    def unplanned(self, key: str, value: Any = None, instead: str = "", bound: Bound = "unknown") -> None:
        """Name a key that changes memory or time in a way that is not planned, and what is planned instead. `bound`:
        what the plan's figures are of the run's."""
        self.taken.add(key)
        text = self.name(key)
        if isinstance(value, str | int | float | bool):
            plain = isinstance(value, str) and _SHORT.fullmatch(value)
            text = f"{text} = {value if plain else value_as_written(value)}"
        if instead:
            text = f"{text} (planned as {instead})"
        before = self.found.unplanned.get(text, bound)
        self.found.unplanned[text] = bound if before == bound else "unknown"

    def name(self, key: str) -> str:
        """How a key is named: with the tables that it is in."""
        text = f"{self.inside}{key}"
        return text if _SHORT.fullmatch(text) else value_as_written(text)[:_MOST_NAMED]

    def rest(
        self, harmless: Collection[str] = (), decisive: Collection[str] = (), known: Mapping[str, str] = _NOTHING
    ) -> None:
        """Sort the keys that were not taken: what changes nothing (null, false, 0, empty, a size of one card, a
        tracker's), is not planned, is not known. `known`: by known_keys."""
        known = {**known, **dict.fromkeys(harmless, "harmless"), **dict.fromkeys(decisive, "decisive")}
        for key, value in self.keys.items():
            if key in self.taken:
                continue
            self.taken.add(key)
            of_one = value in (1, -1) and key.endswith(_OF_CARDS)
            kind, off = known.get(key), of_one or value in (None, False, 0, "", [], {}, "no", "none")
            if kind == "harmless" or key.startswith(_TRACKERS) or (off and (kind or _DECIDES.search(key))):
                self.found.harmless.append(self.name(key))
            elif kind or _DECIDES.search(key):
                self.unplanned(key, value, bound=KINDS.get(kind or "", "unknown"))
            else:
                self.found.unknown.append(self.name(key))
