"""A shell script that starts a trainer, read as data and never run: the options of its command are a config."""

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from foretrain.base.errors import UserError
from foretrain.config.nanogpt_file import parse_expression

SHELL = ".sh"
# Characters of a command, of what a name stands for, and of all commands with their names filled in.
_LONGEST, _LONGEST_VALUE, _MOST = 2**14, 2**10, 2**18
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_NAME = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
_SUM = re.compile(r"\$\(\(([\w\s()*/+-]{1,99})\)\)|\$\(expr ([\w\s()*/+-]{1,99})\)")
_LAUNCHERS = re.compile(r"(?:.*/)?(python[\d.]*|torchrun|accelerate|deepspeed|uv)")
_PROCESSES = ("nproc_per_node", "num_processes", "num_gpus")  # of torchrun, accelerate and deepspeed
_OF_PROCESSES = ("nnodes", "node_", "machine_rank", "num_machines", "master_", "main_process", "rdzv_", "standalone")
_SCRIPT = re.compile(r"(?:.*/)?(\w+)\.py")
_TRL = ("sft", "dpo", "kto", "grpo", "rloo", "reward")  # of `trl sft` and of its examples/scripts


class ShellCommand(NamedTuple):
    """`format`: of the trainer it starts; "" where the options must tell. `unread`: a script whose own code decides,
    and options of what launches it."""

    keys: dict[str, Any]
    format: str
    unread: tuple[str, ...]
    cards: int


def command_of(text: str, source: str) -> ShellCommand:
    """Return the first command that trains. Raises UserError where none is known."""
    names: dict[str, str] = {}
    left = _MOST
    for line in re.sub(r"\\\r?\n", " ", text).splitlines():
        line = _filled(line, names) if len(line) <= _LONGEST else ""
        left -= len(line)
        if left < 0:
            break
        words = _words(line)
        words = words[1:] if words[:1] in (["export"], ["local"]) else words
        while words and (assigned := _ASSIGNED.fullmatch(words[0])):
            names[assigned[1]] = assigned[2][:_LONGEST_VALUE]
            words = words[1:]
        if found := _command(words, names):
            return found
    raise UserError("config.finetune_shell", path=source)


def _filled(line: str, names: dict[str, str]) -> str:
    """A line with what was assigned before in the place of its names, and sums done."""
    line = _NAME.sub(lambda name: names.get(name[1] or name[2], name[0]), line)
    return _SUM.sub(lambda part: str(parse_expression((part[1] or part[2]).replace("/", "//"))), line)


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError:  # a quotation that goes on
        return []


def _command(words: Sequence[str], names: dict[str, str]) -> ShellCommand | None:
    launches = words and _LAUNCHERS.fullmatch(words[0])
    scripts = [place + 1 for place, word in enumerate(words) if launches and _SCRIPT.fullmatch(word)]
    first = next(iter(scripts), next((place for place, word in enumerate(words) if word[:2] == "--"), 0))
    start, own = words[:first], dict(_options(words[first:]))
    if not own or not start:
        return None
    script = _SCRIPT.fullmatch(start[-1])
    launched = dict(_options(start[:-1] if script else start))
    counts = [launched.pop(key, 0) for key in _PROCESSES] + [_value(names.get("NPROC_PER_NODE", ""))]
    cards = next((count for count in counts if type(count) is int and count), 0)
    unread = tuple(f"{key} = {value}"[:60] for key, value in launched.items() if not key.startswith(_OF_PROCESSES))
    named, format = [part for part in start if part[:2] != "--"], ""
    match script[0].removesuffix(".py").split("/")[-2:] if script else named[-2:]:
        case ["swift" | "cli", "sft" | "pt" | "rlhf"]:
            format = "ms-swift"
        case ["llamafactory-cli", "train"]:
            format = "llama-factory"
        case ["trl" | "scripts", kind] if kind in _TRL:
            format, own = "trl", {"training": kind, **own}
        case _ if script and {"stage", "finetuning_type"} <= own.keys():
            format = "llama-factory"
        case _ if script and {"per_device_train_batch_size", "model_name_or_path"} & own.keys():
            unread = (script[0], *unread)
        case _:
            return None
    return ShellCommand(own, format, unread, cards)


def _options(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """--key value, --key=value, --key of a flag, or --key with several values."""
    key, values = "", list[Any]()
    for word in [*words, "--"]:
        if word[:2] != "--":
            values.append(_value(word))
            continue
        if key:
            yield key, True if not values else values[0] if len(values) == 1 else values
        name, given, value = word[2:].partition("=")
        key, values = name.replace("-", "_"), [_value(value)] if given else []


def _value(word: str) -> Any:
    for kind in (int, float, json.loads) if word[:1] == "{" else (int, float):
        try:
            return kind(word)
        except (ValueError, RecursionError):
            continue
    return {"true": True, "false": False, "none": None, "null": None}.get(word.lower(), word)
