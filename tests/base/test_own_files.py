"""What a run, a preparation and the cache change is their own: links, pipes and devices in their folders lead nowhere."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from foretrain.base import files
from foretrain.base.cache import Cache
from foretrain.base.errors import ExitCode
from foretrain.data.shards import PROGRESS
from foretrain.runs import folder as store
from foretrain.training import checkpoint
from foretrain.training.checkpoint import Progress
from tests.kit.command import foretrain, refused
from tests.kit.tiny import tiny
from tests.kit.training import train, trained


@pytest.fixture
def decoy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of somebody else's, with files that look like ours."""
    folder = tmp_path_factory.mktemp("decoy")
    for name in ("a", "run.json", ".old-step-0000000001/b", ".trash-x/c", ".staging-y/d", "step-0000000001/e"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("keep")
    return folder


def held(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_removing_a_link_removes_the_link_alone(decoy: Path) -> None:
    before = held(decoy)
    for target in (decoy, decoy / "a", decoy / "nowhere"):
        Path("link").symlink_to(target)
        files.remove_folder(Path("link"))
        assert not Path("link").is_symlink()
    Path("folder/sub").mkdir(parents=True)
    for where in ("folder", "folder/sub"):
        Path(where, "link").symlink_to(decoy)
    files.remove_folder(Path("folder"))
    assert not Path("folder").exists()
    assert held(decoy) == before


@pytest.mark.parametrize(
    "name", ["step-0000000001", ".old-step-0000000003", ".trash-step-0000000001", ".staging-step-0000000002"]
)
def test_pruning_a_linked_checkpoint_removes_the_link(name: str, decoy: Path) -> None:
    before, state = held(decoy), trained()
    folder = Path("checkpoints")
    for step in (2, 3):
        checkpoint.save(folder, state, Progress(step=step))
    (folder / name).symlink_to(decoy)
    checkpoint.save(folder, state, Progress(step=2))
    assert checkpoint.retain(folder, 1, None) == {3}
    assert sorted(path.name for path in folder.iterdir()) == ["step-0000000003"]
    assert held(decoy) == before


@pytest.mark.parametrize("leads", [True, False])
def test_a_checkpoint_takes_the_name_of_a_link(leads: bool, decoy: Path) -> None:
    before, folder = held(decoy), Path("checkpoints")
    folder.mkdir()
    (folder / "step-0000000001").symlink_to(decoy if leads else decoy / "nowhere")
    path = checkpoint.save(folder, trained(), Progress(step=1))
    assert not path.is_symlink()
    assert checkpoint.problem_of(path) is None
    assert held(decoy) == before


def test_a_run_goes_on_from_a_checkpoint_that_lies_elsewhere(tmp_path: Path) -> None:
    config = tiny(max_iters=4, keep_checkpoints=1, out_dir="r")
    train(config)
    (path,) = Path("r/checkpoints").iterdir()
    shutil.move(path, tmp_path / "moved")
    path.symlink_to(tmp_path / "moved")
    before = {each.name: each.read_bytes() for each in (tmp_path / "moved").iterdir()}
    record = train(config.model_copy(update={"max_iters": 6}), resume=True)
    assert record.resumed_from == (4,)
    assert not path.is_symlink()
    assert {each.name: each.read_bytes() for each in (tmp_path / "moved").iterdir()} == before


@pytest.mark.parametrize("name", ["checkpoints", "events.jsonl", "run.lock", "tracker-wandb.log", "scores"])
def test_a_resume_refuses_what_leads_elsewhere(name: str, decoy: Path) -> None:
    path = _run() / name
    target = decoy / ("a" if path.suffix else "")
    shutil.rmtree(path, ignore_errors=True)
    path.unlink(missing_ok=True)
    path.symlink_to(target)
    _refused(path, decoy)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names")
@pytest.mark.parametrize("name", ["events.jsonl", "run.lock"])
def test_a_resume_does_not_wait_for_a_pipe(name: str, decoy: Path) -> None:
    path = _run() / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    _refused(path, decoy)


def _run() -> Path:
    train(tiny(max_iters=2, out_dir="r"))
    return Path("r")


def _refused(path: Path, decoy: Path) -> None:
    """The sentence names the path and a command, after which the run can be taken."""
    before = held(decoy)
    with refused("environment.link") as caught:
        store.RunDirectory(Path("r")).acquire()
    assert held(decoy) == before
    assert str(path) in str(caught.value)
    command = str(caught.value.values["command"])
    assert f"`{command}`" in str(caught.value)
    subprocess.run(["sh", "-c", command], check=True)
    directory = store.RunDirectory(Path("r"))
    directory.acquire()
    directory.release()
    assert held(decoy) == before


def test_lines_are_added_to_a_file_alone(decoy: Path) -> None:
    Path("log.jsonl").symlink_to(decoy / "a")
    with pytest.raises(OSError, match=r".+"):
        files.append_lines(Path("log.jsonl"), ["x"])
    assert (decoy / "a").read_text() == "keep"
    if hasattr(os, "mkfifo"):
        os.mkfifo("pipe")
        with pytest.raises(OSError, match=r".+"):
            files.append_lines(Path("pipe"), ["x"])


@pytest.mark.parametrize("place", ["", "train-00000.bin", "val-00000.bin", ".state.json.new"])
def test_prepare_writes_through_no_link(place: str, decoy: Path) -> None:
    before, progress = held(decoy), Path("out", PROGRESS)
    Path("text.txt").write_text("a text\n" * 50)
    (progress if place else progress.parent).mkdir(parents=True)
    (progress / place).symlink_to(decoy / ("a" if place else ""))
    done = foretrain("prepare", "text.txt", "--out", "out", "--tokenizer", "byte", "--workers", "1", "--quiet")
    assert held(decoy) == before
    assert done.returncode == ExitCode.ENVIRONMENT
    assert len(done.stderr.strip().splitlines()) == 1


def test_the_tokenizer_of_a_preparation_replaces_a_link(decoy: Path) -> None:
    before = held(decoy)
    Path("text.txt").write_text("some words, and some more words\n" * 50)
    Path("out").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        Path("out", name).symlink_to(decoy / "a")
    foretrain("prepare", "text.txt", "--out", "out", "--train-bpe", "260", "--workers", "1", "--quiet", code=0)
    assert held(decoy) == before
    assert not Path("out/tokenizer.json").is_symlink()


def test_the_cache_removes_nothing_but_answers(
    decoy: Path, own_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORETRAIN_CACHE", str(own_directory / "cache"))
    before, cache = held(decoy), Cache("kind", most_files=2)
    cache.path("x").parent.parent.mkdir(parents=True)
    cache.path("x").parent.symlink_to(decoy)
    for number in range(5):
        cache.write(cache.path(str(number)), "{}")
    after = held(decoy)
    assert before.items() <= after.items()
    assert len(after) == len(before) + 2
