"""Answers that are kept on disk, and what makes the planner quick without another answer."""

import gzip
import json
import os
import subprocess
import sys
import time
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from foretrain.app import kept_answers as kept
from foretrain.app.planning import plan
from foretrain.base import messages
from foretrain.base.cache import Cache
from foretrain.base.installation import Later, installed
from foretrain.base.quantities import parse_limit
from foretrain.cli.commands import advise as advise_command
from foretrain.cli.commands import plan as plan_command
from foretrain.config.finetune.read import how_chosen, is_asked
from foretrain.config.options import RunConfig
from foretrain.config.presets import PRESET_ALIASES, PRESETS, is_surely_asked
from foretrain.hardware.catalogue import catalogue, find
from foretrain.predict.memory import Asked, MemoryEstimate
from foretrain.predict.plan import READINGS, seconds_by_steps
from foretrain.predict.pretraining import spent_by_steps, with_steps
from foretrain.predict.spec import StepSpec
from foretrain.predict.within import most_steps
from tests.kit.command import REPO, foretrain

SMALL = ("--n_layer=2", "--n_head=2", "--n_embd=128", "--block_size=64", "--vocab_size=1024", "--batch_size=4")
QUESTIONS = (
    ("plan", *SMALL, "--gpu", "4070", "--json"),
    ("plan", *SMALL, "--gpu", "4070"),
    ("advise", *SMALL, "--gpu", "4070", "--json"),
    ("plan", *SMALL, "--gpu", "4070", "--best", "--within", "1h", "--json"),
)


@pytest.fixture
def cache(own_directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FORETRAIN_CACHE", str(own_directory / "kept"))
    return own_directory / "kept" / "answers"


def _no_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_command, "answering", None)
    monkeypatch.setattr(advise_command, "advising", None)


@pytest.mark.parametrize("words", QUESTIONS, ids=["plan", "screen", "advise", "best"])
def test_an_answer_is_given_again_without_computing(
    words: tuple[str, ...], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = foretrain(*words, code=0)
    _no_answers(monkeypatch)
    again = foretrain(*words, code=0)
    assert (again.stdout, again.stderr) == (first.stdout, first.stderr)
    monkeypatch.setenv("COLUMNS", "60")
    assert foretrain(*words).returncode != 0  # for another terminal it is drawn anew


def test_an_answer_of_other_code_or_a_damaged_one_is_not_read(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = foretrain(*QUESTIONS[0])
    (one,) = cache.iterdir()
    for bad in (b"no gzip", gzip.compress(b"[" * 10**5), gzip.compress(b" " * (2 << 20)), one.read_bytes()[:-9]):
        one.write_bytes(bad)
        assert foretrain(*QUESTIONS[0]).stdout == first.stdout
    monkeypatch.setattr(kept, "code", lambda: "another version")
    assert foretrain(*QUESTIONS[0]).stdout == first.stdout
    assert len(list(cache.iterdir())) == 2
    _no_answers(monkeypatch)
    monkeypatch.setattr(kept, "code", lambda: "a third version")
    assert foretrain(*QUESTIONS[0]).returncode != 0


@pytest.mark.parametrize(
    "words",
    [
        ("plan", *SMALL, "--gpu", "cpu"),
        ("plan", *SMALL, "--gpu", "4070", "--check"),
        ("plan", *SMALL, "--gpu", "4070", "--full"),
        ("plan", *SMALL, "--gpu", "4070", "--within", "1h", "--write", "found.toml"),
        ("plan", *SMALL, "--gpus", "2 x RTX 4090"),
    ],
    ids=["cpu", "check", "full", "write", "cards"],
)
def test_what_more_than_its_words_decide_is_not_kept(words: tuple[str, ...], cache: Path) -> None:
    assert foretrain(*words).returncode == 0
    assert not cache.exists()


def test_a_file_that_decides_is_looked_at_again(
    cache: Path, own_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, other = own_directory / "my.py", own_directory / "more.py"
    config.write_text("batch_size = 4\nexec(open('more.py').read())\n")
    other.write_text("n_layer = 2\n")
    monkeypatch.setattr(time, "time_ns", lambda: 1 << 62)  # all was written long before
    words = ("plan", "my.py", *SMALL[1:5], "--gpu", "4070", "--json")
    seen = [foretrain(*words, code=0).stdout]
    assert foretrain(*words, code=0).stdout == seen[0]
    assert len(list(cache.iterdir())) == 1
    other.write_text("n_layer = 3\n")
    seen.append(foretrain(*words, code=0).stdout)
    config.write_text("batch_size = 8\nexec(open('more.py').read())\n")
    seen.append(foretrain(*words, code=0).stdout)
    (own_directory / "data" / "openwebtext").mkdir(parents=True)
    for split in ("train", "val"):
        (own_directory / "data" / "openwebtext" / f"{split}.bin").write_bytes(bytes(4096))
    seen.append(foretrain(*words, code=0).stdout)
    assert len(set(seen)) == 4


def test_a_folder_with_a_link_to_nothing_is_looked_at_again(
    cache: Path, own_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = own_directory / "data" / "openwebtext"
    data.mkdir(parents=True)
    (data / "raw").symlink_to("nowhere")
    monkeypatch.setattr(time, "time_ns", lambda: 1 << 62)
    seen = []
    for size in (4096, 4096, 1 << 20):
        for split in ("train", "val"):
            if size > 4096 or not seen:
                (data / f"{split}.bin").write_bytes(bytes(size))
        seen.append(foretrain(*QUESTIONS[0], code=0).stdout)
    assert seen[0] == seen[1] != seen[2]
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize(
    ("name", "later_s"), [("my.toml", 1), ("data/openwebtext/train.bin", 9)], ids=["file", "folder"]
)
def test_an_answer_to_a_file_that_just_changed_is_not_kept(
    name: str, later_s: int, cache: Path, own_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (own_directory / "data" / "openwebtext").mkdir(parents=True)
    (own_directory / "data" / "openwebtext" / "val.bin").write_bytes(bytes(4096))
    written = own_directory / name
    written.write_text("n_layer = 2\n")
    changed_ns = written.stat().st_ctime_ns  # of which a file system may tell the second only
    os.utime(written, ns=(changed_ns, changed_ns + (later_s - 1) * 10**9))
    monkeypatch.setattr(time, "time_ns", lambda: changed_ns + later_s * 10**9)
    foretrain("plan", *([name] if name == "my.toml" else []), *SMALL[1:], "--gpu", "4070", code=0)
    assert not cache.exists()


# Modules of ours that a command imports, where its answer is kept; --full is not. They only ever become fewer.
FULL = (*QUESTIONS[1], "--full")
MODULES = {("--help",): 15, ("plan", "--help"): 51, QUESTIONS[1]: 7, QUESTIONS[2]: 7, FULL: 228, ("runs",): 182}


@pytest.mark.parametrize("words", MODULES, ids=" ".join)
def test_a_command_imports_what_its_answer_needs(words: tuple[str, ...], cache: Path) -> None:
    code = "import atexit, sys; from foretrain.cli import main; sys.argv[0] = 'foretrain'; "
    code += "atexit.register(lambda: print(*sys.modules, file=sys.stderr)); main()"
    command = [sys.executable, "-c", code, *words]
    _, run = (subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(2))
    imported = run.stderr.split()
    ours = [name for name in imported if name.partition(".")[0] == "foretrain"]
    assert len(ours) <= MODULES[words], sorted(ours)
    assert ("pydantic" in imported) == (words in (("plan", "--help"), FULL, ("runs",)))


def test_an_answer_is_of_all_code_and_tables(own_directory: Path) -> None:
    assert (kept.PACKAGE / "app" / "kept_answers.py").is_file()
    found = set()
    for name, text in (("a.py", "1"), ("a.py", "12"), ("a/b.toml", "x = 1"), ("a/b.txt", "")):
        (own_directory / "of" / name).parent.mkdir(parents=True, exist_ok=True)
        (own_directory / "of" / name).write_text(text)
        kept.code.cache_clear()
        found.add(kept.code(own_directory / "of"))
    assert len(found) == 3


def test_a_cache_keeps_the_newest(own_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORETRAIN_CACHE", str(own_directory))
    few = Cache("few", most_files=3)
    for number in range(5):
        path = few.path(f"question {number}")
        few.write(path, str(number))
        os.utime(path, (number + 1, number + 1))
    assert [few.value(few.path(f"question {number}")) for number in range(5)] == [None, None, 2, 3, 4]


# -- what is quick ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(path.name for path in (REPO / "foretrain" / "locales").glob("*.toml")))
def test_locales_are_read_as_tomllib_reads_them(name: str) -> None:
    text = (REPO / "foretrain" / "locales" / name).read_text("utf-8")
    assert messages.read(text) == messages.flat(tomllib.loads(text))


@pytest.mark.parametrize(
    "text",
    [
        '[a]\nx = "1"\n\n[b.c]\n"d e" = "say \\"so\\"\\n"  # why\n',
        '[a]\nx = 1\n[b]\ny = """\n[c]\nz = "1"\n"""\n',
        "[a]\n[b]\nx = 'C:\\\\'\ny.z = \"1\"\n",
        'top = "1"\n',
        "",
    ],
)
def test_other_toml_is_read_too(text: str) -> None:
    assert messages.read(text) == messages.flat(tomllib.loads(text))


def test_the_catalogue_is_read_as_tomllib_reads_it() -> None:
    blocks = tomllib.loads((REPO / "foretrain" / "hardware" / "gpus.toml").read_text("utf-8"))
    assert list(catalogue()) == list(blocks)
    for name, gpu in catalogue().items():
        assert {key: getattr(gpu, key) for key in blocks[name]} == {
            key: tuple(value) if isinstance(value, list) else value for key, value in blocks[name].items()
        }
        assert all(name in (found := find(alias)).name or name in found.choices for alias in gpu.aliases)


def test_a_version_is_read_as_importlib_reads_it() -> None:
    for package in metadata.distributions():
        assert installed(package.metadata["Name"]) == package.version
    assert installed("no-such-package") == ""


def test_what_is_surely_pretraining_is_no_fine_tuning(own_directory: Path) -> None:
    (own_directory / "my.toml").write_text("n_layer = 2\n")
    first = [*PRESETS, *PRESET_ALIASES, "my.toml", "missing.toml", "-", "--batch_size=8", "hf:a/b", "a/b", "gpt2", "."]
    sure = 0
    for words in [[]] + [[word, *more] for word in first for more in ([], ["--method=lora"])]:
        if is_surely_asked(words):
            sure += 1
            assert not is_asked(words)
            assert not how_chosen(words)
    assert sure > len(PRESETS)
    assert is_surely_asked(["gpt2-124m"])
    assert is_surely_asked(["my.toml"])
    assert not is_surely_asked(["qwen3-0.6b"])


def test_a_module_is_imported_when_it_is_used() -> None:
    assert Later("json").loads("[1]") == json.loads("[1]")
    assert repr(Later("no.such.module")) == "Later('no.such.module')"


def test_the_time_of_other_steps_is_that_of_the_whole_run() -> None:
    made = plan("gpt2-124m", "4070")
    spec, timing = made.spec(), made.timing
    assert timing is not None
    for reading in READINGS:
        seconds = seconds_by_steps(timing, spec, reading)
        for steps in (1, 999, 1000, 1001, 19_073, 10**9):
            assert seconds(steps) == getattr(with_steps(timing, spec, steps).total_s, f"{reading}_s")
        limit = parse_limit("20h")
        found = most_steps(limit, spec.config.tokens_per_step, spent_by_steps(timing, spec, limit, reading))
        assert seconds(found) <= 20 * 3600 < seconds(found + 1)


def test_simulation_ends_at_a_first_evaluation_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    config = RunConfig(batch_size=128, gradient_accumulation_steps=4)
    ledger = MemoryEstimate(Asked(StepSpec.of(config, find("4070"))))
    assert not ledger.fits(12 << 30, 12 << 30)
    assert "_run" not in vars(ledger)
    assert ledger.memory == MemoryEstimate(Asked(ledger.spec)).memory
    assert ledger.tensors_bytes > 12 << 30
    assert ledger.is_beyond(12 << 30, 12 << 30)
