"""The page of nine answers, before and after: every case is on it, and no command of it ends in a bug."""

import sys

import pytest

from tests.kit.command import REPO

sys.path.insert(0, str(REPO / "docs"))
import before_after

PAGE = (REPO / "docs" / "before-and-after.md").read_text("utf-8")


def test_the_page_shows_every_case_with_what_it_ran() -> None:
    assert [case.id for case in before_after.CASES] == [f"S{n}" for n in range(1, 10)]
    for case in before_after.CASES:
        assert f"## {case.id}. {case.title}" in PAGE
        assert case.before in PAGE
        for command in case.commands:
            assert f"$ {command}" in PAGE
    assert PAGE.startswith(before_after.HEAD)
    assert "bug in foretrain" not in PAGE


@pytest.mark.slow
def test_the_commands_of_the_page_end_without_a_bug() -> None:
    made = before_after.cases()
    assert "bug in foretrain" not in made
    parts = dict(zip((case.id for case in before_after.CASES), made.split("\n## "), strict=True))
    assert "learning_rate" in parts["S1"]
    assert "vocab_size = 65" in parts["S2"]
    assert "Config and log agree" in parts["S3"]
    assert "(exit code 3)" in parts["S6"]
    assert "speed changed when the run was resumed" in parts["S8"]
