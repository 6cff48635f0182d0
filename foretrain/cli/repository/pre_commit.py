"""The hook of .pre-commit-hooks.yaml: `foretrain plan --check` of each config that is to be committed.

    python -m foretrain.cli.repository.pre_commit "--gpu=RTX 4070" a.toml b.py

Options of `foretrain plan` are written with =, all other words are files. The exit code is that of the worst: 2 for a
config that is wrong, 3 for one that does not fit. Nothing of a config is run, and no GPU is needed.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from foretrain.base.errors import ExitCode, UserError
from foretrain.cli.repository.answers import asked

BAD = (ExitCode.CHECK_FAILED, ExitCode.USAGE, ExitCode.ENVIRONMENT)  # the later the worse


def main(words: Sequence[str]) -> int:
    """Print a line for each file, and for each problem its sentence; the worst exit code."""
    options = [word for word in words if word.startswith("--")]
    worst = int(ExitCode.DONE)
    for file in (word for word in words if not word.startswith("--")):
        try:
            done = asked(Path(file), options, "--check", "--oneline", "--quiet")
            said, code = f"{done.stdout}{done.stderr}".strip(), done.returncode
        except UserError as error:
            said, code = str(error), int(error.exit_code)
        print(f"{file}: {said}")
        if code:
            worst = max(worst, code, key=lambda each: (each in BAD, BAD.index(each) if each in BAD else each))
    return worst


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
