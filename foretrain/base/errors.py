"""User errors as ids with values, and the table of exit codes."""

from enum import IntEnum
from importlib import import_module
from typing import Any

from foretrain.base.messages import say


class ExitCode(IntEnum):
    """The exit codes of the command line; docs/schemas.md is generated from this."""

    DONE = 0
    INTERNAL = 1
    USAGE = 2
    CHECK_FAILED = 3
    ENVIRONMENT = 4
    OUT_OF_MEMORY = 5
    DIVERGED = 6
    DATA = 7
    DISK_FULL = 8
    STOPPED = 75
    INTERRUPTED = 130


# The first part of an error's id decides the exit code, so that no raise site has to know it.
EXIT_CODE_OF = {
    "internal": ExitCode.INTERNAL,
    "config": ExitCode.USAGE,
    "gpu": ExitCode.USAGE,
    "usage": ExitCode.USAGE,
    "page": ExitCode.USAGE,
    "check": ExitCode.CHECK_FAILED,
    "environment": ExitCode.ENVIRONMENT,
    "memory": ExitCode.OUT_OF_MEMORY,
    "diverged": ExitCode.DIVERGED,
    "data": ExitCode.DATA,
    "checkpoint": ExitCode.DATA,
    "disk": ExitCode.DISK_FULL,
}


class UserError(Exception):
    """A fault that the user can fix: an id such as 'data.too_short', and the values of its text."""

    def __init__(self, id: str, /, **values: Any) -> None:
        super().__init__(id, values)
        self.id = id
        self.values = values

    @property
    def exit_code(self) -> ExitCode:
        return EXIT_CODE_OF[self.id.split(".", 1)[0]]

    def __str__(self) -> str:
        return say(f"error.{self.id}", **self.values)


_OF_THE_COMMAND = ("config.no_such_option", "config.no_such_option_near")  # which no configuration has


class ConfigError(UserError):
    def __init__(self, problems: "list[UserError]") -> None:
        super().__init__("config.problems", count=len(problems))
        self.problems = problems

    def __str__(self) -> str:
        if len(self.problems) == 1 and self.problems[0].id in _OF_THE_COMMAND:
            return str(self.problems[0])
        return "\n".join([super().__str__(), *(f"  {problem}" for problem in self.problems)])


def need_extra(module: str, extra: str) -> Any:
    """Import a module that one of our extras installs. Raises UserError 'environment.missing_extra'."""
    try:
        return import_module(module)
    except ImportError:
        package = module.partition(".")[0].replace("_", "-")
        raise UserError("environment.missing_extra", package=package, extra=extra) from None
