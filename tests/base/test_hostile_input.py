"""What others put into files, folders, addresses and signals: a sentence with a next step, and nothing lost."""

import errno
import json
import os
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from foretrain.base import bugs, files
from foretrain.base.bugs import redacted_message, without_password
from foretrain.base.errors import ExitCode, UserError
from foretrain.base.signals import StopFlag, Terminated, raising_terminated
from tests.kit.command import foretrain
from tests.kit.tiny import tiny, write_dataset
from tests.kit.training import train

SECRETS = {
    "s3://AKIAX:S3CRET@bucket/set": "S3CRET", "https://user:S3CRET@host/set": "S3CRET",
    "https://host/set?token=S3CRET": "S3CRET", "https://acc.blob.core.windows.net/c/set?sv=1&sig=S3CRET%2F": "S3CRET",
    "https://hf_S3CRETS3CRETS3CRET@host/set": "hf_S3", "s3://bucket/set?X-Amz-Signature=S3CRET": "S3CRET",
}  # fmt: skip


# -- secrets -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", SECRETS)
def test_address_with_a_password_is_refused_before_it_is_shown(address: str, own_directory: Path) -> None:
    for words in (["data", "info", address], ["plan", "baby", "--gpu", "4090", f"--dataset={address}"]):
        result = foretrain(*words, "--json", code=ExitCode.USAGE)
        assert "usage.secret_in_address" in result.stdout
        assert SECRETS[address] not in result.stdout + result.stderr
        assert "AWS_ACCESS_KEY_ID" in result.stderr
    assert not list(own_directory.iterdir())


@pytest.mark.parametrize(
    "address",
    ["s3://bucket/set", "abfs://container@account.dfs.core.windows.net/set", "hf://datasets/owner/name@main/a",
     "https://host:8080/design=1/set", "https://host/set?page_token=eos"],
)  # fmt: skip
def test_other_addresses_are_taken_as_they_are(address: str) -> None:
    if "page_token" in address:
        with pytest.raises(UserError, match="password"):
            without_password(address)
    else:
        assert without_password(address) == address


def test_messages_and_tracebacks_hold_no_token(own_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORETRAIN_CACHE", str(own_directory))
    token, commit = "hf_" + "aB3" * 10, "0123456789abcdef0123456789abcdef01234567"
    try:
        raise RuntimeError(f"401 for https://user:S3CRET@host/x with {token}")
    except RuntimeError as error:
        found = bugs.unexpected_error(error)
    kept = Path(found.values["path"]).read_text("utf-8")
    assert "401 for https://…@host/x with …" in kept
    assert "S3CRET" not in kept
    assert (
        redacted_message(f"no revision {commit}; {token}; HF_TOKEN: set it")
        == f"no revision {commit}; …; HF_TOKEN: set it"
    )
    result = foretrain("plan", "baby", "--gpu", token, "--json", code=ExitCode.USAGE)
    assert token not in result.stdout + result.stderr


# -- a run whose record or lock is not what it was ---------------------------------------------------------


@pytest.mark.parametrize("how", ["gone", "cut", "empty", "pipe"])
def test_a_run_without_its_record_is_not_begun_again_in_silence(how: str) -> None:
    train(tiny(out_dir="r", max_iters=4))
    path, text = Path("r/run.json"), Path("r/run.json").read_text("utf-8")
    path.unlink()
    if how == "pipe":
        os.mkfifo(path)
    elif how != "gone":
        path.write_text(text[:200] if how == "cut" else "", "utf-8")
    words = [f"--{key}={value}" for key, value in tiny(out_dir="r", max_iters=8).model_dump().items() if _was_set(key)]
    result = foretrain("train", *words, "--resume", "auto", code=ExitCode.DATA)
    assert not Path("r-2").exists()
    (option,) = [word for word in shlex.split(result.stderr) if word.startswith("--init_from=")]
    assert foretrain("train", *words, option).returncode == 0
    assert Path("r-2/run.json").is_file()


def _was_set(key: str) -> bool:
    return key in tiny(out_dir="r").model_fields_set


@pytest.mark.parametrize("leads", ["nowhere/lock", "decoy", "."])
def test_a_lock_that_is_a_link_is_a_sentence(leads: str, own_directory: Path) -> None:
    train(tiny(out_dir="r", max_iters=4))
    Path("decoy").write_text("keep")
    Path("r/run.lock").unlink()
    Path("r/run.lock").symlink_to(own_directory / leads)
    words = [f"--{key}={value}" for key, value in tiny(out_dir="r", max_iters=8).model_dump().items() if _was_set(key)]
    result = foretrain("train", *words, "--resume", "auto", code=ExitCode.ENVIRONMENT)
    assert "r/run.lock: is a link" in result.stderr
    assert Path("decoy").read_text() == "keep"


# -- signals -----------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGUSR2", "SIGXCPU", "SIGQUIT", "SIGHUP", "SIGINT"])
def test_what_would_end_a_run_stops_it_with_its_state_saved(name: str) -> None:
    number = getattr(signal, name)
    if number != signal.SIGINT:
        signal.signal(number, signal.SIG_DFL)  # another test may have left its own
    with StopFlag() as flag:
        signal.raise_signal(number)
        assert flag.signal_name == name
        if name in ("SIGINT", "SIGQUIT"):
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(number)
        else:
            signal.raise_signal(number)
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    try:
        with StopFlag() as flag:
            signal.raise_signal(signal.SIGUSR1)
        assert not flag.stopping
        assert heard == [signal.SIGUSR1], "who wants it gets it"
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGXCPU"])
def test_a_command_that_is_told_to_end_says_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def end(*args: Any, **options: Any) -> None:
        signal.raise_signal(getattr(signal, name))

    monkeypatch.setattr("foretrain.cli.commands.calibrate.calibrate", end)
    result = foretrain("calibrate", "--device", "cpu", code=ExitCode.INTERRUPTED)
    assert f"Stopped by {name}" in result.stderr
    assert signal.getsignal(getattr(signal, name)) is signal.SIG_DFL
    with pytest.raises(Terminated, match=name), raising_terminated():
        signal.raise_signal(getattr(signal, name))


# -- exit codes and names ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "code"),
    [(errno.EROFS, 4), (errno.EACCES, 4), (errno.ENOSPC, 8), (errno.EDQUOT, 8), (errno.EFBIG, 8), (errno.ENOENT, 2)],
)
def test_what_could_not_be_written_has_one_exit_code(number: int, code: int) -> None:
    assert files.not_written(Path("nowhere", "x"), OSError(number, os.strerror(number))).exit_code == code


def test_a_mixture_that_cannot_be_written_ends_as_others_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, *args: Any, **options: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    write_dataset(Path("data/toy"))
    monkeypatch.setattr(Path, "write_text", refuse)
    foretrain("data", "mix", "toy=1", "--out", "mix.toml", code=ExitCode.ENVIRONMENT)


@pytest.mark.parametrize(
    ("name", "content"), [("x.gguf", b"GGUF\x03\0\0\0"), ("other.json", b"{}"), ("vocabulary.txt", b"\xff\xfe hello")]
)
def test_a_tokenizer_is_named_as_it_was_given(name: str, content: bytes) -> None:
    Path(name).write_bytes(content)
    Path("text.txt").write_text("hello")
    result = foretrain("prepare", "text.txt", "--out", "out", "--tokenizer", name, "--json", code=ExitCode.DATA)
    assert json.loads(result.stdout)["message"].startswith(f"{name}: is not a tokenizer.json")


def test_a_watch_without_a_folder_names_its_own_option() -> None:
    result = foretrain("watch", "--out", "", "--", "true", code=ExitCode.USAGE)
    assert "--out must not be empty" in result.stderr


# -- files that were made to cost time ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "step" + " " * 200_000 + "loss" + "\t" * 200_000 + "3\n",
        "\n" * 1_000_000,
        "loss:" * 50_000 + "=:" * 100_000 + "\n",
    ],
    ids=["spaces", "empty lines", "words"],
)
def test_a_log_of_nothing_is_soon_refused(text: str) -> None:
    """Processor time, which other programs do not change: some cost minutes."""
    Path("x.log").write_text(text)
    before = time.process_time()
    foretrain("explain", "x.log", code=ExitCode.DATA)
    assert time.process_time() - before < 10


@pytest.mark.parametrize("suffix", [b".toml", b".py"])
def test_a_config_may_have_a_name_that_is_no_text(suffix: bytes) -> None:
    name = os.fsdecode(b"bad\xff" + suffix)
    Path(name).write_text("n_layer = 2\nn_head = 2\nn_embd = 64\n")
    foretrain("plan", name, "--gpu", "4090", "--json", code=0)


@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_head_s_width_need_not_be_a_multiple_of_8(method: str) -> None:
    """Attention pads such a head, so it needs no less than a narrower one, and no more than the next multiple of 8."""
    needed = []
    for width in (56, 60, 64):
        Path("m").mkdir(exist_ok=True)
        config = {
            "model_type": "llama", "hidden_size": 8 * width, "head_dim": width, "intermediate_size": 1024,
            "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 1000,
        }  # fmt: skip
        Path("m/config.json").write_text(json.dumps(config))
        result = foretrain("plan", "m", "--gpu", "4090", "--method", method, "--json", code=0)
        phases = json.loads(result.stdout)["memory"]["phases"]
        needed.append(max(phase["allocated_bytes"] for phase in phases))
    assert needed == sorted(needed)
