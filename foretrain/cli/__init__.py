"""The command line. `main` is the only place that turns errors into exit codes."""

import errno
import io
import os
import sys
from collections.abc import Callable
from typing import TextIO

from foretrain.base.process_memory import collected_later

# pydantic looks for plugins in all packages that are installed, which takes a tenth of a plan's time. Ours has none.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
with collected_later(stays=True):  # a fifth of what importing takes
    import click

    from foretrain.base import bugs, messages
    from foretrain.base.errors import ExitCode, UserError
    from foretrain.base.installation import GPU_FILE_VARIABLE, installed
    from foretrain.base.messages import say
    from foretrain.base.signals import Terminated, raising_terminated
    from foretrain.cli import completion
    from foretrain.cli.commands import Program
    from foretrain.cli.common import ERR, from_environment, own_words, print_error

EPILOG = """Examples:
foretrain plan gpt2-124m --gpu "RTX 4070"
foretrain demo   (shows everything in three minutes)"""


def _print_version(ctx: click.Context, param: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        click.echo(f"foretrain {installed('foretrain')}")
        ctx.exit()


def _at_once(spelling: str, callback: Callable[..., None], help: str) -> click.Option:
    return click.Option([spelling], is_flag=True, expose_value=False, is_eager=True, callback=callback, help=help)


app = Program(
    "foretrain",
    params=[
        _at_once("--version", _print_version, "Print the version and exit."),
        _at_once("--install-completion", completion.install_script, "Install completion for the current shell."),
        _at_once(
            "--show-completion",
            completion.show_script,
            "Show completion for the current shell, to copy it or customize the installation.",
        ),
    ],
    context_settings={"color": True},  # rich has left the colours out where they go nowhere
    help="Know what a GPT training run needs before you start it. Run it within those limits. See where the forecast "
    "was off, and why.",
    epilog=EPILOG,
)


def main() -> None:
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller, as >&- does
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal of another encoding shows ? for what it lacks
            stream.reconfigure(errors="replace")
    bugs.watch_threads()
    try:
        with raising_terminated():
            code = _run()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output went away, as `head` does
        _silence(sys.stdout)
        code = int(ExitCode.DONE)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            found = UserError("disk.full_output")
        elif _is_limit(error):
            found = UserError("disk.limit_output")
        elif bugs.wants_traceback():
            raise
        else:
            found = bugs.unexpected_error(error)
        _silence(sys.stdout)
        print_error(found, as_json=False)
        code = int(found.exit_code)
    sys.exit(code)


def _run() -> int:
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
