"""The planner in several threads: every answer is the one that is given when nothing else is asked."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.kit.command import REPO


def start(threads: int, cache: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "FORETRAIN_CACHE": str(cache), "PYTHONPATH": str(REPO)}
    command = [sys.executable, "-m", "tests.kit.many_plans", str(threads)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPO, env=environment)


def test_plans_made_at_once_are_those_made_one_by_one(tmp_path: Path) -> None:
    """In processes of their own, as what one thread has spoilt would be remembered: hence some seconds."""
    made = {threads: start(threads, tmp_path / str(threads)) for threads in (1, 8)}
    answers: dict[int, list[Any]] = {threads: json.loads(process.communicate()[0]) for threads, process in made.items()}
    assert len(answers[1]) == 40
    assert not [answer for answer in answers[1] if isinstance(answer, str)]
    assert [n for n, (alone, at_once) in enumerate(zip(*answers.values(), strict=True)) if alone != at_once] == []
