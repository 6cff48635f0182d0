"""The pre-commit hook and the comment on a pull request: in a git repository, with the shell scripts that GitHub runs."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from foretrain.cli import repository
from foretrain.cli.repository import Answer, Change, answer, changed, markdown, pre_commit, safe
from foretrain.predict.plan import Plan
from tests.kit.command import REPO, foretrain

SMALL = 'preset = "baby"\nmax_iters = 2000\n'
HUGE = 'preset = "gpt2-124m"\nbatch_size = 64\n'
SMOLLM2 = json.dumps({
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 576, "intermediate_size": 1536,
    "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3, "vocab_size": 49152,
    "max_position_embeddings": 8192, "tie_word_embeddings": True, "hidden_act": "silu", "torch_dtype": "bfloat16",
    "rms_norm_eps": 1e-5, "rope_theta": 100000,
})  # fmt: skip
CARD = "--gpu=RTX 4070"
ACTION: dict[str, Any] = yaml.safe_load((REPO / "action.yml").read_text("utf-8"))


def git(*words: str) -> str:
    who = dict.fromkeys(("GIT_AUTHOR_NAME", "GIT_COMMITTER_NAME", "GIT_AUTHOR_EMAIL", "GIT_COMMITTER_EMAIL"), "a")
    nobody = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    done = subprocess.run(
        ["git", *words], env={**os.environ, **who, **nobody}, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def commit(**files: str | None) -> str:
    """The hash of a commit with these files of config/; None removes one."""
    Path("config").mkdir(exist_ok=True)
    for name, text in files.items():
        path = Path("config", f"{name}.toml")
        path.unlink() if text is None else path.write_text(text)
    git("add", "--all")
    git("commit", "--quiet", "--message", "x")
    return git("rev-parse", "HEAD")


@pytest.fixture
def base(own_directory: Path) -> str:
    """A repository with three configs; the hash of its first commit."""
    git("init", "--quiet", "--initial-branch=main", ".")
    Path("pyproject.toml").write_text("[project]\n")
    return commit(same=SMALL, grown=SMALL, gone=SMALL)


# -- the hook ------------------------------------------------------------------------------------------------


def test_the_hook_says_what_plan_says_and_ends_as_the_worst(capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in (("small.toml", SMALL), ("huge.toml", HUGE), ("wrong.toml", "n_layer = -1\n")):
        Path(name).write_text(text)
    assert pre_commit([CARD, "small.toml"]) == 0
    plain = foretrain("plan", "small.toml", CARD, "--oneline", "--quiet").stdout.strip()
    assert capsys.readouterr().out == f"small.toml: {plain}\n"
    assert pre_commit([CARD, "huge.toml", "small.toml"]) == 3
    assert "does not fit the RTX 4070" in capsys.readouterr().out
    assert pre_commit([CARD, "huge.toml", "wrong.toml", "small.toml"]) == 2
    assert "n_layer" in capsys.readouterr().out


def test_the_hook_is_what_pre_commit_reads() -> None:
    (hook,) = yaml.safe_load((REPO / ".pre-commit-hooks.yaml").read_text("utf-8"))
    assert hook["entry"].split() == ["python", "-P", "-m", pre_commit.__module__]
    assert re.search(hook["files"], "nanogpt/config/train.py")
    assert re.search(hook["files"], "configs/a.toml")
    assert not re.search(hook["files"], "pyproject.toml")


# -- the comment ---------------------------------------------------------------------------------------------


def test_a_change_is_told_before_and_after(base: str, capsys: pytest.CaptureFixture[str]) -> None:
    commit(grown=HUGE, gone=None, new=SMALL, bad="n_layer = 'x'\n")
    words = ["--base", base, CARD, "--configs", "config/*.toml"]
    assert repository.pull_request(words) == 0
    text = capsys.readouterr().out
    rows = {line.split(" | ")[0].strip("| "): line for line in text.splitlines() if line.startswith("| ")}
    rows.pop("---")
    assert list(rows) == ["config", *(safe(f"config/{name}.toml") for name in ("bad", "gone", "grown", "new"))]
    grown = rows[safe("config/grown.toml")]
    assert "fits → **does not fit**" in grown
    assert re.search(r"[\d.]+ of 11\.56 GiB → [\d.]+ of 11\.56 GiB", grown)
    assert "→" not in rows[safe("config/new.toml")]
    assert "removed" in rows[safe("config/gone.toml")]
    assert "n&#95;layer" in rows[safe("config/bad.toml")]
    assert text.startswith(repository.MARK)
    assert repository.pull_request([*words, "--check"]) == 2


def test_a_link_out_of_the_repository_is_not_read(
    base: str, capsys: pytest.CaptureFixture[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A pull request may bring one, and what a config has is told to everybody."""
    secret = tmp_path_factory.mktemp("other") / "secret.toml"
    secret.write_text('api_key = "hunter2"\n')
    Path("config/leak.toml").symlink_to(secret)
    Path("config/within.toml").symlink_to("same.toml")
    commit()
    assert repository.pull_request(["--base", base, CARD, "--configs", "config/*.toml"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if "config/" in line]
    assert [row.split(" | ")[0] for row in rows] == ["| config/leak.toml", "| config/within.toml"]
    assert "outside the repository" in rows[0]
    assert "api" not in rows[0]
    assert "fits" in rows[1]


def test_quotes_in_a_sentence_are_quotes() -> None:
    from html import unescape

    assert unescape(safe("'RTX' \"x\"\n  at & <b>#1")) == "'RTX' \"x\" at & <b>#1"


def test_the_figures_are_the_plans(base: str) -> None:
    found = answer(Path("config/same.toml"), [CARD])
    plan = Plan.from_json(foretrain("plan", "config/same.toml", CARD, "--json").stdout)
    assert (found.verdict, found.available_bytes, found.currency) == (plan.verdict, plan.available_bytes, "EUR")
    assert found.needed_bytes == plan.memory_of(plan.step).neediest.needed_expected_bytes
    timing = plan.timing_of(plan.step)
    assert (found.total_s, found.cost) == (timing.total_s.expected_s, timing.cost_expected)


def test_fine_tuning_has_a_row_as_well() -> None:
    Path("model").mkdir()
    Path("model/config.json").write_text(SMOLLM2)
    found = answer(Path("model"), ["--method=lora", "--seq-len=128", "--batch-size=1", "--max-steps=100", CARD])
    assert found.verdict in ("fits", "tight")
    assert found.total_s
    assert found.needed_bytes


def test_only_what_differs_from_the_base_and_matches_is_planned(base: str) -> None:
    git("checkout", "--quiet", "-b", "branch")
    commit(new=SMALL)
    git("checkout", "--quiet", "main")
    commit(later=SMALL)  # of the base branch, and none of this change
    git("checkout", "--quiet", "branch")
    Path("pyproject.toml").write_text("[project]\nname = 'x'\n")
    git("commit", "--all", "--quiet", "--message", "x")
    assert changed("main", ["config/*.toml"]) == [("A", "config/new.toml")]


def test_nothing_changed_and_no_git_are_sentences(base: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert repository.pull_request(["--base", base, "--configs", "config/*.toml"]) == 0
    assert "No training config changed." in capsys.readouterr().out
    assert repository.pull_request(["--base=--output=canary", "--configs", "*.toml"]) == 4
    assert repository.pull_request(["--base", "nowhere", "--configs", "*.toml"]) == 4
    assert "`git` cannot say what changed" in capsys.readouterr().err
    assert not Path("canary").exists()


@pytest.mark.parametrize(
    "text",
    [
        "a|b",
        "<script>",
        "![x](https://evil)",
        "@everyone",
        "[x](y)",
        "`id`",
        "**x**",
        "#1",
        "a\nb",
        "\x1b[2J",
        "https://x",
    ],
)
def test_names_and_sentences_stay_text(text: str) -> None:
    rows = [Change(text, None, Answer(problem=text)), Change(text, None, Answer("fits", 1, 2, 3.0, 4.0, text))]
    lines = markdown(rows, [text]).splitlines()
    assert len(lines) == len(markdown([rows[0]], ["x"]).splitlines()) + 1
    for line in lines[5:7]:
        cells = line.replace("**", "")
        assert cells.count("|") == 6
        assert not re.search(r"[<>`@\[\]\x1b]|https:", re.sub(r"&#?\w+;", "", cells))


# -- the action ----------------------------------------------------------------------------------------------

GH = """#!/bin/sh
printf '%s\\n' "$*" >> "$GH_LOG"
case "$*" in *--jq*) cat "$GH_FOUND";; esac
"""


def step(name: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A step of the action as GitHub runs it, with these variables in the place of its own."""
    found = next(each for each in ACTION["runs"]["steps"] if each.get("name") == name)
    assert not re.search(r"\$\{\{", found["run"])  # an input within a script would be run
    assert set(found["env"]) <= set(variables) | {"GH_TOKEN"}
    path = os.pathsep.join([str(Path("bin").absolute()), os.environ["PATH"]])
    return subprocess.run(
        ["bash", "-eo", "pipefail", "-c", found["run"]], env={**os.environ, **variables, "PATH": path},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.fixture
def runner(base: str, own_directory: Path) -> dict[str, str]:
    """The variables of a runner on which `python` is this one and `gh` writes down what it was asked."""
    names = {"GITHUB_STEP_SUMMARY": "summary", "GITHUB_OUTPUT": "output", "GH_LOG": "log", "GH_FOUND": "found"}
    Path("bin").mkdir()
    Path("bin/gh").write_text(GH)
    Path("bin/python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    for tool in ("gh", "python"):
        Path("bin", tool).chmod(0o755)
    for file in names.values():
        Path(file).touch()
    git("config", "core.excludesFile", "/dev/null")
    return {
        **{name: str(own_directory / file) for name, file in names.items()}, "RUNNER_TEMP": str(own_directory),
        "PYTHONPATH": str(REPO), "BASE": base, "GPU": "RTX 4070", "CONFIGS": "config/*.toml\n\n", "ARGUMENTS": "",
        "CHECK": "false", "REPOSITORY": "o/n", "NUMBER": "7", "CODE": "0",
    }  # fmt: skip


@pytest.mark.skipif(os.name != "posix", reason="GitHub's runners run these steps by bash")
def test_the_steps_of_the_action_plan_and_comment(runner: dict[str, str]) -> None:
    commit(grown=HUGE)
    done = step("Plan the changed configs", **runner)
    assert done.returncode == 0, done.stderr
    assert "does not fit" in Path("summary").read_text()
    assert Path("output").read_text() == "code=0\n"
    step("Comment", **runner)
    assert Path("log").read_text().splitlines()[-1].split()[:5] == ["api", "--silent", "--method", "POST", "repos/o/n/issues/7/comments"]  # fmt: skip
    Path("found").write_text("123\n456\n")
    step("Comment", **runner)
    assert "PATCH repos/o/n/issues/comments/123" in Path("log").read_text().splitlines()[-1]
    step("Plan the changed configs", **{**runner, "CHECK": "true"})
    assert Path("output").read_text().endswith("code=3\n")
    assert step("Fail where a config does not fit", **{**runner, "CODE": "3"}).returncode == 3


@pytest.mark.skipif(os.name != "posix", reason="GitHub's runners run these steps by bash")
def test_no_input_of_the_action_is_run(runner: dict[str, str]) -> None:
    commit(grown=HUGE)
    for name in ("GPU", "CONFIGS", "ARGUMENTS", "BASE"):
        step("Plan the changed configs", **{**runner, name: '$(touch canary)"; touch canary; `touch canary`'})
    assert not Path("canary").exists()


# -- a repository of hostile names ---------------------------------------------------------------------------

PROGRAM = "#!/bin/sh\ntouch '{canary}'\n"
MODULE = "import pathlib\npathlib.Path({canary!r}).touch()\nraise SystemExit(0)\n"
IMPORTED = (
    "json",
    "types",
    "queue",
    "random",
    "click",
    "pydantic",
    "foretrain",
    "pip",
    "hatchling",
    "runpy",
    "sitecustomize",
)
# Each is a file of the repository that the default patterns take. The last part is a config, a program or a word of plan.
HOSTILE = (
    "--python=d/config/a.toml", "--gpu-file=d/config/a.toml", "--write=written/config/b.toml", "--snapshot=snap/config/a.toml",
    "--exact/config/a.toml", "--largest=batch_size/config/a.toml", "--json/config/a.toml", "--help/config/a.toml",
    "--/config/a.toml", "-/config/a.toml", "-h/config/a.toml", "@x/config/a.toml", "~/config/a.toml", "hf:a/config/a.toml",
    "config/$(touch canary).toml", "config/`touch canary`.toml", "config/a\nb.toml", "config/;touch canary;.toml",
    "config/-.toml", "config/--check.toml", "config/ .toml", "config/\udcff.toml", "config/<b>@all.toml",
)  # fmt: skip


@pytest.fixture
def hostile(runner: dict[str, str], own_directory: Path) -> list[str]:
    """The names that a pull request brings; what they name would write `canary` when it is run or imported."""
    canary = own_directory / "canary"
    for name in HOSTILE:
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(SMALL)
    for name in ("d/config/a.toml", "d/bin/python"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(PROGRAM.format(canary=canary))
        Path(name).chmod(0o755)
    for name in IMPORTED:
        Path(f"{name}.py").write_text(MODULE.format(canary=str(canary)))
        Path(name).mkdir()
        for file in ("__init__.py", "__main__.py"):
            Path(name, file).write_text(MODULE.format(canary=str(canary)))
    Path("written/config").mkdir(parents=True)
    Path("snap/config").mkdir(parents=True)
    git("checkout", "--quiet", "-b", "pull")
    git("add", "--all", "--", ":!bin", ":!summary", ":!output", ":!log", ":!found")
    git("commit", "--quiet", "--message", "x")
    return [os.fsdecode(name) for name in git_bytes("ls-files", "-z").split(b"\0") if name]


def git_bytes(*words: str) -> bytes:
    return subprocess.run(["git", *words], capture_output=True, check=True).stdout


def contents(*without: str) -> dict[str, bytes]:
    return {
        str(path): path.read_bytes()
        for path in Path().rglob("*")
        if path.is_file() and path.parts[0] not in (".git", *without) and "__pycache__" not in path.parts
    }


@pytest.mark.skipif(os.name != "posix", reason="GitHub's runners run these steps by bash")
def test_action_runs_and_writes_nothing_of_a_hostile_repository(hostile: list[str], runner: dict[str, str]) -> None:
    said = ("summary", "output", "foretrain.md")
    before = contents(*said)
    done = step(
        "Plan the changed configs", **{**runner, "CONFIGS": ACTION["inputs"]["configs"]["default"], "CHECK": "true"}
    )
    assert done.returncode == 0, done.stderr
    assert contents(*said) == before  # no canary among them
    rows = [line for line in Path("summary").read_text().splitlines() if line.startswith("| ")][1:]
    wrong = [row for row in rows if "**" in row and safe("d/config/a.toml") not in row]
    assert len(rows) == len(HOSTILE) + 2, rows  # the title's line, and d/config/a.toml
    assert wrong == []
    assert Path("output").read_text() == "code=2\n"  # of d/config/a.toml


@pytest.mark.skipif(os.name != "posix", reason="the program of this test is a shell's")
def test_hook_runs_and_writes_nothing_of_a_hostile_repository(hostile: list[str], runner: dict[str, str]) -> None:
    (hook,) = yaml.safe_load((REPO / ".pre-commit-hooks.yaml").read_text("utf-8"))
    files = [name for name in hostile if re.search(hook["files"], name) and name != "d/config/a.toml"]
    assert len(files) >= len(HOSTILE)
    before = contents()
    command = [sys.executable, *hook["entry"].split()[1:], CARD, *files]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(REPO)}, capture_output=True, check=False)
    assert contents() == before
    assert done.returncode == 0, done.stdout
    assert done.stdout.count(b": baby on RTX 4070: ") == len(files), done.stdout


@pytest.mark.parametrize("separator", [[], ["--"]])
def test_a_word_that_names_a_file_is_no_option_of_the_hook(
    separator: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("--gpu=RTX 3060/config/a.toml", "--used-by-others=11GB/config/a.toml"):
        Path(name).parent.mkdir(parents=True)
        Path(name).write_text(SMALL)
        assert pre_commit([CARD, *separator, name]) == 0
        assert "RTX 4070" in capsys.readouterr().out
    Path("small.toml").write_text(SMALL)
    assert pre_commit([CARD, "small.toml", "--gpu=RTX 3060"]) == 2  # behind the first file: a file that is not there
    assert "--gpu=RTX 3060" in capsys.readouterr().out


@pytest.mark.skipif(os.name != "posix", reason="GitHub's runners run these steps by bash")
def test_pip_is_pythons_and_its_packages_have_hashes(hostile: list[str], runner: dict[str, str]) -> None:
    """pip is stood in for, as tests have no network: what matters is which `pip` would be run, where and with what."""
    Path("bin/python").write_text(
        '#!/bin/sh\nprintf "%s\\n" "$*" >> "$GH_LOG"\nexec "' + sys.executable + '" "${1}" -c "import json"\n'
    )
    found = next(each for each in ACTION["runs"]["steps"] if each.get("name") == "Install foretrain")
    assert found["working-directory"] == "${{ runner.temp }}"
    done = step("Install foretrain", **{**runner, "FORETRAIN": str(REPO)})
    assert done.returncode == 0, done.stderr
    asked = Path("log").read_text().splitlines()
    assert all(line.startswith("-P -m pip install ") for line in asked)
    assert [line for line in asked if "--require-hashes" in line or "--no-deps" in line] == asked
    assert not Path("canary").exists()


def test_a_config_that_is_not_utf_8_is_a_row(base: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("config/same.toml").write_bytes(b"# \xff\xfe\n")
    git("commit", "--all", "--quiet", "--message", "x")
    bad = git("rev-parse", "HEAD")
    commit(same=SMALL, new=SMALL)
    assert repository.pull_request(["--base", bad, CARD, "--configs", "config/*.toml"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| config/")]
    assert len(rows) == 2
    assert all("fits" in row for row in rows)
