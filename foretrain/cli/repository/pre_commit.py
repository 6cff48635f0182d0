"""The hook of .pre-commit-hooks.yaml: `foretrain plan --check` of each config that is to be committed.

python -P -m foretrain.cli.repository.pre_commit "--gpu=RTX 4070" a.toml b.py

Options come first; `--` may stand between. The exit code is that of the worst: 2 for a config that is wrong, 3 for one
that does not fit.
"""

import os
import sys
from itertools import takewhile
from pathlib import Path

from foretrain.base.errors import ExitCode, UserError
from foretrain.base.messages import printable
from foretrain.cli.repository.answers import asked

BAD = (ExitCode.CHECK_FAILED, ExitCode.USAGE, ExitCode.ENVIRONMENT)  # the later the worse


def main(words: list[str]) -> int:
    """Print a line for each file, and for each problem its sentence; the worst exit code."""
    options = list(takewhile(lambda word: word.startswith("--") and word != "--" and not os.path.lexists(word), words))
    files = words[len(options) + (words[len(options) : len(options) + 1] == ["--"]) :]
    worst = int(ExitCode.DONE)
    for file in files:
        try:
            done = asked(Path(file), options, "--check", "--oneline", "--quiet")
            said, code = f"{done.stdout}{done.stderr}".strip(), done.returncode
        except UserError as error:
            said, code = str(error), int(error.exit_code)
        print(printable(f"{file}: {said}"))
        if code:
            worst = max(worst, code, key=lambda each: (each in BAD, BAD.index(each) if each in BAD else each))
    return worst


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
