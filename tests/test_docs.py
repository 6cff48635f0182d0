"""README and docs tell the truth: generated parts are current, commands work, links lead somewhere."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from foretrain.config import knobs
from foretrain.errors import ExitCode
from tests.helpers import REPO, foretrain

PAGES = [REPO / "README.md", REPO / "CONTRIBUTING.md", REPO / "CHANGELOG.md", *sorted((REPO / "docs").glob("*.md"))]


def test_generated_parts_are_current() -> None:
    result = subprocess.run(
        [sys.executable, str(REPO / "docs" / "generate.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + "run `make docs`"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text("utf-8")):
        assert (page.parent / target).exists(), target


def commands() -> list[str]:
    """Every `foretrain …` of the README and the docs that can be run as it stands."""
    found = []
    for page in PAGES:
        text = page.read_text("utf-8")
        found += re.findall(r"^\$? ?(foretrain [^#\n]*?)(?:\s{2,}.*)?$", text, re.MULTILINE)
    return sorted({c.strip() for c in found})


TRACED = ("--exact", "--explain", "--largest", "--snapshot")  # a minute of processor time each


def work(listed: list[str]) -> None:
    for command in listed:
        if command.startswith(("foretrain demo", "foretrain serve")):
            continue  # tests/test_demo.py, tests/test_page.py
        result = foretrain(*shlex.split(command)[1:], cwd=REPO, timeout=600)
        assert result.returncode == 0, (command, result.stderr)


def test_commands_of_the_readme_work() -> None:
    listed = [command for command in commands() if not any(option in command for option in TRACED)]
    assert len(listed) >= 4
    work(listed)


@pytest.mark.slow
def test_traced_commands_of_the_readme_work() -> None:
    listed = [command for command in commands() if any(option in command for option in TRACED)]
    assert len(listed) >= 2
    work(listed)


def test_every_command_and_exit_code_is_documented() -> None:
    import typer.main

    from foretrain.cli import app

    text = "".join(page.read_text("utf-8") for page in PAGES)
    for name in typer.main.get_command(app).commands:  # type: ignore[attr-defined]
        assert f"foretrain {name}" in text, name
    runs = (REPO / "docs" / "runs.md").read_text("utf-8")
    for code in ExitCode:
        assert f"| {int(code)} |" in runs
    page = (REPO / "docs" / "knobs.md").read_text("utf-8")
    for knob in knobs():
        assert f"`{knob.name}`" in page


def test_nothing_in_the_repository_names_a_machine() -> None:
    """No paths of a machine, no addresses of registries, in what git tracks."""
    listed = subprocess.run(["git", "ls-files"], cwd=REPO, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    pattern = re.compile(
        r"/(root|home|Users|work|tmp)/[a-z]|https?://(pypi|files\.pythonhosted|registry\.npmjs|download\.pytorch)"
    )
    for name in listed.stdout.splitlines():
        path = REPO / name
        if path.suffix in (".png",) or "vendor" in path.parts or path == Path(__file__):
            continue
        assert not pattern.search(path.read_text("utf-8")), name
