"""The program: its commands, a module each, imported when somebody asks for it, and what errors become exit codes."""

import errno
import os
import sys
from importlib import import_module
from typing import TextIO

import click

from foretrain.base import bugs, messages
from foretrain.base.errors import ExitCode, UserError
from foretrain.base.installation import GPU_FILE_VARIABLE, installed
from foretrain.base.messages import say
from foretrain.base.process_memory import collected_later
from foretrain.base.signals import Terminated, raising_terminated
from foretrain.cli import completion
from foretrain.cli.command import Group, at_once
from foretrain.cli.common import ERR, from_environment, own_words, print_error

# What `foretrain --help` says of each, in its order, without importing any; a command's own help begins with it.
SUMMARIES = {
    "plan": "Plan a run: does it fit, how long, what does it cost, what limits it. Needs no GPU and no torch.",
    "advise": "Find what to change: options and techniques, each planned for your run, ranked by gain and cost.",
    "mfu": "Turn a speed into MFU: with full and causal attention, with recomputation, and as nanoGPT prints it.",
    "gpus": "List the known cards: memory, bandwidth, dense peaks by dtype, power, and the source of each figure.",
    "serve": "Open the planner in your browser: move sliders, watch runs. For this machine only.",
    "mcp": "Offer the planner to coding agents as tools: an MCP server over stdin and stdout.",
    "prepare": "Turn text into verified token shards, on all cores and in constant memory. Resumes after any stop.",
    "data": "Datasets: statistics, checksums, text behind tokens, mixtures.",
    "train": "Train a config, with a live line, evaluation and checkpoints. Ctrl-C saves; --resume auto resumes.",
    "watch": "Measure a training command without changing it: memory, energy, clocks, log. Returns its exit code.",
    "tune": "Measure which settings are fastest here, without changing tokens per step or the result.",
    "runs": "List runs and watched runs: status, steps, loss, speed. Or give a run a name, a note, tags.",
    "top": "Watch this machine's cards and runs: phase, memory against the plan, speed, clocks, what is left.",
    "report": "Write one offline HTML file about a run, a plan, a log or a comparison, with charts and their numbers.",
    "compare": "Compare runs: what differs, which is better beyond noise, and whether one setting explains it.",
    "explain": "Explain a run, a log or a memory snapshot: where memory and time went, why it ran out, what to change.",
    "sample": "Generate text with the newest intact checkpoint of a run.",
    "chat": "Talk to a run's newest checkpoint: it continues each line, and remembers the conversation.",
    "eval": "Measure bits per byte of any text, and run lm-eval's tasks. Results are kept beside the run.",
    "export": "Export a trained model for Hugging Face, llama.cpp or nanoGPT, or as safetensors.",
    "doctor": "Check this machine: cards, driver, torch, compiler, memory, disk. Says what each command misses.",
    "demo": "Run everything in about three minutes on two CPU cores: forecast, training, sample, comparison, report.",
    "calibrate": "Measure this device for one to two minutes; later plans use the result. Keep it idle meanwhile.",
    "verify": "Run 24 short cases on this card and compare them with their predictions: about ten minutes.",
    "languages": "List the languages, and how much of each is translated.",
}
HEADS = {"plan": "plan", "prepare": "train", "runs": "look_back", "sample": "use_model", "doctor": "machine"}


class Program(Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(SUMMARIES)

    def summaries(self) -> dict[str, str]:
        return SUMMARIES

    def heads(self) -> dict[str, str]:
        return HEADS

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in SUMMARIES and cmd_name not in self.commands:
            with collected_later(stays=True):
                module = import_module(f"foretrain.cli.commands.{'sample' if cmd_name == 'chat' else cmd_name}")
            self.add_command(getattr(module, f"{cmd_name}_command"))
        return super().get_command(ctx, cmd_name)


EPILOG = """Examples:
foretrain plan gpt2-124m --gpu "RTX 4070"
foretrain plan qwen3-8b --method qlora --gpu 4070   (fine-tuning)
foretrain plan axolotl.yaml --gpu 3090   (also LLaMA-Factory, TRL, torchtune, unsloth)
foretrain demo   (shows everything in three minutes)"""


def _print_version(ctx: click.Context, param: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        click.echo(f"foretrain {installed('foretrain')}")
        ctx.exit()


app = Program(
    "foretrain",
    params=[
        at_once("--version", _print_version, "Print the version and exit."),
        at_once("--install-completion", completion.install_script, "Install completion for the current shell."),
        at_once(
            "--show-completion",
            completion.show_script,
            "Show completion for the current shell, to copy it or customize the installation.",
        ),
    ],
    context_settings={"color": True},  # rich has left the colours out where they go nowhere
    help="Know what training or fine-tuning a model needs before you start it. Run it within those limits. See where "
    "the forecast was off, and why.",
    epilog=EPILOG,
)


def run() -> int:
    """Run what the command line says; return its exit code."""
    bugs.watch_threads()
    try:
        with raising_terminated():
            code = answered()
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader of our output went away, as `head` does
        _silence(sys.stdout)
        return int(ExitCode.DONE)
    except OSError as error:
        _silence(sys.stdout)
        if error.errno != errno.ENOSPC and not _is_limit(error):
            return _bug(error)
        found = UserError("disk.full_output" if error.errno == errno.ENOSPC else "disk.limit_output")
        print_error(found, as_json=False)
        return int(found.exit_code)


def answered() -> int:
    before, cards = messages.current().id, os.environ.get(GPU_FILE_VARIABLE)
    try:
        from_environment()
        if completion.VARIABLE in os.environ:
            app.main(prog_name="foretrain")
        with app.make_context("foretrain", sys.argv[1:]) as context:  # click's main makes a 1 of a reader that left
            code = app.invoke(context)
        return code if isinstance(code, int) else int(ExitCode.DONE)
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.exceptions.NoArgsIsHelpError as nothing:
        click.echo(nothing.message, color=True)
        return int(ExitCode.USAGE)
    except click.Abort as end:  # which click makes of a KeyboardInterrupt
        _tell_signal(end)
        return int(ExitCode.INTERRUPTED)
    except UserError as error:
        print_error(error, as_json="--json" in own_words())
        if error.id == "environment.card_failed":  # what Python does at its end would call the card once more
            sys.stdout.flush()
            os._exit(int(error.exit_code))
        return int(error.exit_code)
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # rich makes an exit code 1 of it; `main` says it
            raise end.__context__ from None
        _tell_signal(end)
        return end.code if isinstance(end.code, int) else 0
    except KeyboardInterrupt as end:
        _tell_signal(end)
        return int(ExitCode.INTERRUPTED)
    except OSError as error:
        # Of our own output: `main` says it.
        if error.errno == errno.ENOSPC or isinstance(error, BrokenPipeError) or _is_limit(error):
            raise
        if (found := _of_a_file(error)) is None:
            return _bug(error)
        print_error(found, as_json="--json" in own_words())
        return int(found.exit_code)
    except Exception as error:
        return _bug(error)
    finally:  # for who calls this in a process that goes on
        messages.set_language(before)
        if cards is None:
            os.environ.pop(GPU_FILE_VARIABLE, None)
        else:
            os.environ[GPU_FILE_VARIABLE] = cards


def _tell_signal(end: BaseException | None) -> None:
    while end is not None and not isinstance(end, Terminated):
        end = end.__context__
    if end is not None:
        ERR.print(say("train.stopped_by", signal=str(end)), soft_wrap=True)


def _is_limit(error: OSError) -> bool:
    """Whether the system takes no more of an output: a quota, or `ulimit -f`. safe_read has words of its own."""
    limits = (errno.EDQUOT, errno.EFBIG)
    return error.errno in limits and error.filename is None and error.strerror == os.strerror(error.errno)


def _of_a_file(error: OSError) -> UserError | None:
    """What the system refuses of a file that a user named, or of one in a folder that he named; None for all else."""
    if error.filename is None:
        return None
    named = os.fsdecode(error.filename) if isinstance(error.filename, bytes) else str(error.filename)
    if error.errno == errno.ENAMETOOLONG:
        return UserError("usage.name_too_long", path=named[:60], length=len(named))
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return UserError("environment.no_rights", path=named, reason=error.strerror or "")
    return None


def _bug(error: Exception) -> int:
    if bugs.wants_traceback():
        raise error
    found = bugs.unexpected_error(error)
    print_error(found, as_json="--json" in own_words())
    return int(found.exit_code)


def _silence(stream: TextIO) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
