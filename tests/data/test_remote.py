"""Shards at an address, through a bounded cache: digests decide, a broken fetch goes on, another file system is told."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from foretrain.app.training_session import prepare_data
from foretrain.base.errors import ExitCode, UserError
from foretrain.config.resolve import resolve
from foretrain.data import remote
from foretrain.data.batches import TokenFile
from foretrain.data.dataset import read_info
from foretrain.data.inspection import verify
from foretrain.data.locate import locate, read_mix
from foretrain.data.remote import SIZE_VARIABLE, fetch_all, folder_of, missing_shards, read_remote
from tests.kit.command import foretrain
from tests.kit.data import ids_of, shards


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FORETRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(SIZE_VARIABLE, raising=False)
    yield
    fsspec.filesystem("memory").store.clear()


def upload(folder: Path, url: str) -> str:
    system, path = fsspec.core.url_to_fs(url)
    system.makedirs(path, exist_ok=True)
    for file in folder.iterdir():
        system.pipe_file(f"{path}/{file.name}", file.read_bytes())
    return url


def problem(call: Any, *words: Any) -> UserError:
    with pytest.raises(UserError) as caught:
        call(*words)
    assert "\n" not in str(caught.value)
    return caught.value


def test_only_the_index_is_fetched_for_a_plan() -> None:
    local = shards(Path("a"))
    (local / "tokenizer.json").write_text("{}")
    info = locate(upload(local, "memory://bucket/a"))
    own = read_info(local)
    assert (info.train_tokens, info.fingerprint, info.name) == (own.train_tokens, own.fingerprint, "a")
    names = {path.name for path in folder_of("memory://bucket/a").iterdir()}
    assert "tokenizer.json" in names
    assert not [name for name in names if name.endswith(".bin")]


def test_shards_come_when_they_are_read() -> None:
    local = shards(Path("a"))
    info = read_remote(upload(local, "memory://bucket/a"))
    file = TokenFile(info, "train", 256)
    want = ids_of(local, "train")
    assert np.array_equal(file.rows(np.array([750]), 20)[0], want[750:770])
    here = folder_of("memory://bucket/a")
    assert [path.name for path in here.glob("*.bin")] == ["train-00001.bin"]
    fetch_all(info)
    assert not list(missing_shards(info))
    assert np.array_equal(TokenFile(info, "train", 256).rows(np.array([0]), len(want))[0], want)
    assert verify(info).problems == ()


def test_a_file_address_and_a_mixture_of_both() -> None:
    shards(Path("a"))
    shards(Path("b"), seed=1)
    url = f"file://{Path('b').absolute()}"
    Path("mix.toml").write_text(f'[weights]\na = 1\n"{url}" = 1\n')
    info = read_mix(Path("mix.toml"))
    assert [part.dataset.remote for part in info.parts] == [None, url]
    assert TokenFile(info, "train", 256).rows(np.array([0]), 5).shape == (1, 5)


@pytest.mark.fault("a download that breaks", row="B.4", sees="the same command continues", safe="what was fetched")
def test_a_broken_fetch_goes_on_where_it_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    local = shards(Path("a"), shard_tokens=100_000)
    info = read_remote(upload(local, "memory://bucket/a"))
    monkeypatch.setattr(remote, "PIECE_BYTES", 500)
    counts: list[int] = []

    def broken(count: int) -> None:
        counts.append(count)
        if len(counts) == 4:
            raise ConnectionError("the line is dead")

    error = problem(fetch_all, info, broken)
    assert (error.id, error.exit_code) == ("data.remote", ExitCode.DATA)
    (part,) = folder_of("memory://bucket/a").glob("*.part")
    assert part.stat().st_size == 1500
    again: list[int] = []
    fetch_all(info, again.append)
    assert again[0] == 1500  # these were not fetched again
    assert verify(info).problems == ()


def test_what_is_not_what_the_index_says_is_not_kept() -> None:
    local = shards(Path("a"))
    data = bytearray((local / "train-00001.bin").read_bytes())
    data[9] ^= 1
    (local / "train-00001.bin").write_bytes(data)
    info = read_remote(upload(local, "memory://bucket/a"))
    error = problem(fetch_all, info)
    assert error.id == "data.remote_changed"
    assert not list(folder_of("memory://bucket/a").glob("*00001*"))
    fsspec.filesystem("memory").rm_file("/bucket/a/train-00001.bin")
    assert problem(fetch_all, info).id == "data.remote_missing"


def test_a_dataset_that_was_replaced_there() -> None:
    """Its shards are fetched anew; those that did not change stay."""
    url = upload(shards(Path("a")), "memory://bucket/a")
    fetch_all(read_remote(url))
    upload(shards(Path("b"), seed=3), url)
    info = read_remote(url)
    assert len(list(missing_shards(info))) == len(list(Path("b").glob("*.bin")))
    fetch_all(info)
    assert verify(info).problems == ()
    assert read_info(Path("b")).fingerprint == info.fingerprint


def test_without_a_network_what_is_here_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    url = upload(shards(Path("a")), "memory://bucket/a")
    fetch_all(read_remote(url))

    def refuse(address: str) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(remote, "file_system", refuse)
    assert verify(read_remote(url)).problems == ()
    error = problem(read_remote, "memory://bucket/other")
    assert error.id == "data.remote"
    assert "no route to host" in str(error)


def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards that were used longest ago go first; a dataset that cannot fit is refused before anything is fetched."""
    urls = [upload(shards(Path(name), seed=number), f"memory://bucket/{name}") for number, name in enumerate("abc")]
    sizes = [sum(p.stat().st_size for p in Path(name).glob("*.bin")) for name in "abc"]
    monkeypatch.setattr(remote, "limit_bytes", lambda: sizes[0] + sizes[1] + sizes[2] // 2)
    for number, url in enumerate(urls[:2]):
        fetch_all(read_remote(url))
        os.utime(folder_of(url) / ".used", (number, number))
    fetch_all(read_remote(urls[2]))
    held = sum(p.stat().st_size for p in (folder_of(urls[0]).parent).rglob("*.bin"))
    assert held <= remote.limit_bytes()
    assert list(missing_shards(read_remote(urls[0])))
    assert not list(missing_shards(read_remote(urls[1])))
    monkeypatch.setattr(remote, "limit_bytes", lambda: sizes[0] // 2)
    error = problem(fetch_all, read_remote(urls[0]))
    assert (error.id, error.exit_code) == ("disk.data_cache", ExitCode.DISK_FULL)
    monkeypatch.undo()
    monkeypatch.setenv(SIZE_VARIABLE, "much")
    assert problem(remote.limit_bytes).id == "usage.cache_size"


def test_a_disk_that_is_too_small_is_told_first(monkeypatch: pytest.MonkeyPatch) -> None:
    info = read_remote(upload(shards(Path("a")), "memory://bucket/a"))
    usage = shutil.disk_usage(".")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    error = problem(fetch_all, info)
    assert (error.id, error.exit_code) == ("disk.no_room_to_fetch", ExitCode.DISK_FULL)
    assert not list(Path(info.path).glob("*.part"))


@pytest.mark.parametrize(
    ("url", "id"),
    [
        ("memory://bucket/nothing", "data.remote_no_index"),
        ("nosuch://bucket/x", "data.remote"),
        ("s3://bucket/x", "environment.no_file_system"),
    ],
)
def test_addresses_that_cannot_be_read(url: str, id: str) -> None:
    if url.startswith("s3") and shutil.which("python") and __import__("importlib.util").util.find_spec("s3fs"):
        pytest.skip("s3fs is installed here")
    assert problem(read_remote, url).id == id


def test_hostile_names_at_an_address() -> None:
    """Names from there never leave the cache's folder."""
    local = shards(Path("a"))
    url = upload(local, "memory://bucket/..%2f..%2fevil")
    here = folder_of(url)
    assert here.parent == folder_of("memory://x").parent
    read_remote(url)
    assert {p.parent for p in here.rglob("*") if p.is_file()} <= {here, here / ".new"}


def test_train_and_data_from_an_address() -> None:
    """What `train` does before its first step: every shard is here, and the vocabulary is the dataset's."""
    shards(Path("there"), 200)
    url = f"file://{Path('there').absolute()}"
    resolved, info = prepare_data(resolve([f"--dataset={url}", "--block_size=16"]))
    assert resolved.config.vocab_size == 256
    assert not list(missing_shards(info))
    result = foretrain("data", "info", url, code=0)
    assert "kept in" in " ".join(result.stdout.split())
