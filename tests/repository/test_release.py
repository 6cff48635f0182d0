"""What a release is made of: workflows, recipe, image, manual page, and the scripts that check a build."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from foretrain.base.errors import ExitCode
from tests.kit.command import REPO

sys.path.insert(0, str(REPO / "release"))
sys.path.insert(0, str(REPO / "docs"))
import command_pages
import man_page
import reproducible

PROJECT: dict[str, Any] = tomllib.loads((REPO / "pyproject.toml").read_text("utf-8"))
WORKFLOWS: dict[str, Any] = {
    path.name: yaml.safe_load(path.read_text("utf-8")) for path in sorted((REPO / ".github/workflows").glob("*.yml"))
}
ACTION: dict[str, Any] = yaml.safe_load((REPO / "action.yml").read_text("utf-8"))
RELEASE = WORKFLOWS["release.yml"]["jobs"]


def steps() -> list[tuple[str, dict[str, Any]]]:
    found = [(name, step) for name, flow in WORKFLOWS.items() for job in flow["jobs"].values() for step in job["steps"]]
    return [*found, *(("action.yml", step) for step in ACTION["runs"]["steps"])]


# -- workflows -----------------------------------------------------------------------------------------------


def test_every_action_is_pinned_by_a_commit() -> None:
    used = [(name, step["uses"]) for name, step in steps() if "uses" in step]
    assert len(used) > 20
    for name, action in used:
        assert re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}", action), (name, action)


def test_one_action_has_one_commit() -> None:
    pins: dict[str, set[str]] = {}
    for _, step in steps():
        if "uses" in step:
            action, _, pin = step["uses"].partition("@")
            pins.setdefault(action, set()).add(pin)
    assert all(len(found) == 1 for found in pins.values()), pins


def test_no_expression_stands_in_a_script() -> None:
    """What is put into a script is run by the shell; values come as variables. A matrix is our own."""
    for name, step in steps():
        for expression in re.findall(r"\$\{\{\s*(\S+)", step.get("run", "")):
            assert expression.startswith("matrix."), (name, expression)


def test_jobs_have_the_rights_that_they_need_and_no_more() -> None:
    for name, flow in WORKFLOWS.items():
        assert flow["permissions"] in ({}, {"contents": "read"}), name
        assert "pull_request_target" not in flow[True], name  # YAML's `on`
    writes = {
        (name, job, right)
        for name, flow in WORKFLOWS.items()
        for job, about in flow["jobs"].items()
        for right, how in about.get("permissions", {}).items()
        if how == "write"
    }
    assert writes == {
        ("release.yml", "testpypi", "id-token"), ("release.yml", "pypi", "id-token"), ("release.yml", "github", "contents"),
        ("release.yml", "github", "id-token"), ("release.yml", "github", "attestations"), ("release.yml", "image", "packages"),
    }  # fmt: skip


def test_a_release_is_checked_before_it_is_published() -> None:
    order = ("build", "install", "testpypi", "pypi", "github")
    for job, before in zip(order[1:], order, strict=False):
        assert before in RELEASE[job]["needs"], job
    for job in ("testpypi", "pypi"):
        publish = RELEASE[job]["steps"][-1]
        assert publish["uses"].startswith("pypa/gh-action-pypi-publish@")
        assert not {"user", "password", "attestations"} & set(publish.get("with", {}))
    assert RELEASE["pypi"]["if"] == "github.ref_type == 'tag'"


def test_every_python_that_is_named_is_installed_into() -> None:
    named = [each.rsplit(" ", 1)[1] for each in PROJECT["project"]["classifiers"] if re.search(r":: 3\.\d+$", each)]
    assert RELEASE["install"]["strategy"]["matrix"]["python"] == named
    assert PROJECT["project"]["requires-python"] == f">={named[0]}"


def test_what_the_workflows_run_is_there() -> None:
    for name, step in steps():
        for script in re.findall(r"\b((?:release|tests)/\w+\.py)\b", step.get("run", "")):
            assert (REPO / script).is_file(), (name, script)
        for target in re.findall(r"^make ([a-z-]+)", step.get("run", ""), re.MULTILINE):
            assert re.search(rf"^{target}:", (REPO / "Makefile").read_text("utf-8"), re.MULTILINE), (name, target)


# -- recipe, image, manual page ------------------------------------------------------------------------------


def test_the_recipe_asks_for_what_the_wheel_asks_for() -> None:
    text = re.sub(r"\$\{\{.*?\}\}", "X", (REPO / "release/conda/recipe.yaml").read_text("utf-8"))
    recipe = yaml.safe_load(text)
    assert recipe["context"]["version"] == PROJECT["project"]["version"]
    wanted = {each.replace(">=", " >=") for each in PROJECT["project"]["dependencies"]}
    assert set(recipe["requirements"]["run"]) - {"python >=3.11"} == wanted
    torch = PROJECT["project"]["optional-dependencies"]["train"]
    named = {each.replace(">=", " >=").replace("torch ", "pytorch ") for each in torch}
    assert set(recipe["requirements"]["run_constraints"]) == named
    assert recipe["build"]["python"]["entry_points"] == [f"foretrain = {PROJECT['project']['scripts']['foretrain']}"]


def test_the_image_runs_as_nobody_special() -> None:
    """Its base is named by its digest: a tag can be moved."""
    lines = (REPO / "release/Dockerfile").read_text("utf-8").splitlines()
    bases = [line.split()[1] for line in lines if line.startswith("FROM ")]
    own = {line.split()[3] for line in lines if line.startswith("FROM ")}
    assert all(base in own or re.fullmatch(r"python:[\w.-]+@sha256:[0-9a-f]{64}", base) for base in bases)
    stages = [n for n, line in enumerate(lines) if line.startswith("FROM ")]
    for start, end in zip(stages, [*stages[1:], len(lines)], strict=True):
        users = [line.split()[1] for line in lines[start:end] if line.startswith("USER ")]
        assert users[-1] == "foretrain"
    assert any(line.startswith("VOLUME") and "/cache/huggingface" in line for line in lines)
    assert any("HF_HOME=/cache/huggingface" in line for line in lines)


def test_the_manual_page_has_every_command_and_is_in_the_wheel() -> None:
    text = man_page.PATH.read_text("utf-8")
    assert text.isascii()
    for name, _ in command_pages.commands():
        assert f'.SS "foretrain {name}' in text, name
    for code in ExitCode:
        assert f"\n.B {int(code)}\n" in text
    shared = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["shared-data"]
    assert shared == {str(man_page.PATH.relative_to(REPO)): "share/man/man1/foretrain.1"}


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not here")
def test_groff_understands_the_manual_page() -> None:
    command = ["groff", "-man", "-ww", "-Tutf8", str(man_page.PATH)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert not done.stderr
    assert "plan the training of GPTs" in done.stdout


def test_what_roff_understands_is_only_text() -> None:
    assert man_page.roff(".so x") == "\\&.so x"
    assert man_page.roff("'a \\fB-b\n c") == "\\&'a \\efB\\-b c"
    assert man_page.roff("1 × 2") == "1 \\[u00D7] 2"


# -- builds --------------------------------------------------------------------------------------------------


def wheel(path: Path, **changes: Any) -> Path:
    """A made-up archive of two members."""
    about: dict[str, Any] = {"text": b"1", "time": (2020, 2, 2, 0, 0, 0), "order": ("a", "b"), "mode": 0o644, **changes}
    with zipfile.ZipFile(path, "w") as archive:
        for name in about["order"]:
            info = zipfile.ZipInfo(name, about["time"])
            info.external_attr = about["mode"] << 16
            archive.writestr(info, about["text"] if name == "b" else b"0")
    return path


def test_what_two_builds_differ_in_is_named(tmp_path: Path) -> None:
    one = wheel(tmp_path / "one.whl")
    assert reproducible.differences(one, wheel(tmp_path / "same.whl")) == []
    assert reproducible.differences(one, wheel(tmp_path / "text.whl", text=b"2")) == ["b"]
    assert reproducible.differences(one, wheel(tmp_path / "time.whl", time=(2021, 1, 1, 0, 0, 0))) == ["a", "b"]
    assert reproducible.differences(one, wheel(tmp_path / "mode.whl", mode=0o600)) == ["a", "b"]
    assert reproducible.differences(one, wheel(tmp_path / "order.whl", order=("b", "a"))) == [
        "the order of the members"
    ]


@pytest.mark.slow
def test_two_builds_are_the_same_bytes(tmp_path: Path) -> None:
    pytest.importorskip("build.__main__")  # a folder of that name is a package, too
    command = [sys.executable, str(REPO / "release" / "reproducible.py"), "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".gz", ".whl"]
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as archive:
        names = archive.namelist()
    assert any(name.endswith("share/man/man1/foretrain.1") for name in names)
    assert not [name for name in names if "tests" in name.split("/")[:1]]
