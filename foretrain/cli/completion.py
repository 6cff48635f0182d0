"""What a shell offers when Tab is pressed, and how it comes to ask: click's scripts for bash, zsh, fish, PowerShell."""

import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem, get_completion_class

from foretrain.base import messages
from foretrain.base.installation import Later
from foretrain.base.messages import listed, printable, say
from foretrain.base.process_memory import system
from foretrain.cli.common import ERR, wrong_value

finetuning, inference = Later("foretrain.config.finetune.options"), Later("foretrain.config.inference")
presets, pretraining = Later("foretrain.config.presets"), Later("foretrain.config.options")
hardware = Later("foretrain.hardware.catalogue")
VARIABLE = "_FORETRAIN_COMPLETE"
# {shell: (where its script goes, the file that it reads when it starts, what has to stand in that)}
PLACES = {
    "bash": (".bash_completions/foretrain.sh", ".bashrc", "source ~/.bash_completions/foretrain.sh"),
    "zsh": (".zfunc/_foretrain", ".zshrc", "fpath+=~/.zfunc; autoload -Uz compinit; compinit"),
    "fish": (".config/fish/completions/foretrain.fish", "", ""),
}
POWERSHELLS = ("powershell", "pwsh")


def cards(incomplete: str) -> list[str]:
    """Names of cards that begin with this, in a form without blanks; the last one of a list such as 3060,40."""
    before, comma, last = incomplete.rpartition(",")
    names = ["auto", "cpu", *(name.replace(" ", "-") for name in hardware.catalogue())]
    if last[:1].isdigit():
        names = [name.removeprefix("RTX-") for name in names]
    return [before + comma + name for name in names if name.lower().startswith(last.lower())]


def configs(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Files, which are the shell's own, and presets that begin with this."""
    names = (name for name in (*presets.PRESETS, *presets.PRESET_ALIASES) if name.startswith(incomplete))
    return [CompletionItem(incomplete, type="file"), *map(CompletionItem, names)]


def among(words: Callable[[], Sequence[str]]) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """Return what completes one of these words, which are only made when they are needed."""
    return lambda ctx, param, incomplete: [w for w in words() if w.lower().startswith(incomplete.lower())]


def options_of(command: str) -> dict[str, Mapping[str, Any]]:
    """Return the options of each kind of run that a command's config may have."""
    others = {"finetuning": finetuning.FINETUNE_OPTIONS, "inference": inference.WORDS.options}
    return {"pretraining": pretraining.OPTIONS} | (others if command in ("plan", "advise") else {})


def config_options(incomplete: str, command: str = "") -> list[str]:
    """Options of a command's runs that begin with this, in either spelling: --n_layer=, --n-layer=."""
    written = "--" + incomplete.removeprefix("--").replace("-", "_")
    names = dict.fromkeys(name for options in options_of(command).values() for name in options)
    return [f"--{name}=" for name in names if f"--{name}".startswith(written)]


def commands(summaries: dict[str, str], ctx: click.Context, incomplete: str) -> list[CompletionItem]:
    translated, path = messages.texts(messages.current().id), ctx.command_path.split()[1:]
    ids = {name: f"cli_help.{'_'.join([*path, name])}.summary" for name in summaries if name.startswith(incomplete)}
    return [CompletionItem(name, help=translated.get(id, summaries[name])) for name, id in ids.items()]


def show_script(ctx: click.Context, param: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        click.echo(_script(_shell(param), ctx.command))
        ctx.exit()


def install_script(ctx: click.Context, param: click.Parameter, wanted: bool) -> None:
    if not wanted or ctx.resilient_parsing:
        return
    shell = _shell(param)
    if shell in POWERSHELLS:
        path = _profile(shell)
        _add(path, _script(shell, ctx.command))
    else:
        own, start, line = PLACES[shell]
        path = Path.home() / own
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_script(shell, ctx.command), "utf-8")
        if start:
            _add(Path.home() / start, line)
    ERR.print(printable(say("within.written", path=str(path))), soft_wrap=True, markup=False)
    ctx.exit()


def _script(shell: str, program: click.Command) -> str:
    made = get_completion_class("powershell" if shell in POWERSHELLS else shell)
    assert made is not None
    return made(program, {}, "foretrain", VARIABLE).source()


def _shell(param: click.Parameter) -> str:
    """The shell that runs this program. Raises UserError where it is none that can complete."""
    names = [Path(each.name()).stem.lstrip("-").lower() for each in system().Process().parents()]
    known = (*PLACES, *POWERSHELLS)
    found = next((name for name in names if name in known), None)
    if found is None:
        raise wrong_value(param.opts[0], names[0] if names else "", "one_of", choices=listed(known))
    return found


def _profile(shell: str) -> Path:
    asked = [shell, "-NoProfile", "-Command", "echo $profile"]
    return Path(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip())


def _add(path: Path, lines: str) -> None:
    before = path.read_text("utf-8") if path.is_file() else ""
    if lines not in before:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{before.rstrip()}\n{lines}\n".lstrip(), "utf-8")
