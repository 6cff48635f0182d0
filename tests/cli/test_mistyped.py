"""What a slip of the fingers is told: options, configs that are no file, stdin."""

import errno
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from foretrain.base.errors import UserError
from foretrain.cli import app
from foretrain.runs import folder
from tests.kit.command import foretrain, refused
from tests.kit.tiny import tiny
from tests.kit.training import train

PLAN = ("plan", "gpt2-124m", "--gpu", "4070")


@pytest.mark.parametrize(
    ("words", "option", "near"),
    [
        (("--jsno",), "--jsno", "--json"),
        (("--fulll",), "--fulll", "--full"),
        (("--gup", "4070"), "--gup", "--gpu"),
        (("--usedbyothers", "2GB"), "--usedbyothers", "--used-by-others"),
        (("--compile_mod=default",), "--compile_mod", "--compile_mode"),
        (("--batchsize=8",), "--batchsize", "--batch_size"),
    ],
)
def test_a_mistyped_option_is_said_with_what_it_looks_like(words: tuple[str, ...], option: str, near: str) -> None:
    result = foretrain(*PLAN, *words, code=2)
    assert result.stderr.startswith(f"error: No such option: {option}. Did you mean {near}")
    assert "`foretrain plan --help` lists all" in result.stderr
    assert "configuration" not in result.stderr


def test_what_looks_like_nothing_is_sent_to_the_help() -> None:
    result = foretrain(*PLAN, "--qqqzzz", code=2)
    assert result.stderr.startswith("error: No such option: --qqqzzz. `foretrain plan --help`")


def test_wrong_options_are_told_beside_errors_of_the_config() -> None:
    error = json.loads(foretrain(*PLAN, "--jsno", "--batch_size=0", "--json").stdout)
    assert [problem["id"] for problem in error["problems"]] == ["config.no_such_option_near", "config.bad_value"]
    assert error["exit_code"] == 2


def test_an_option_of_a_file_is_looked_up_in_the_config_alone() -> None:
    Path("a.toml").write_text("jsno = 3\n")
    said = foretrain("plan", "a.toml", "--gpu", "4070").stderr
    assert "jsno (a.toml:1)" in said
    assert "--json" not in said


@pytest.mark.parametrize("words", [("plan",), ("train",), ("data", "verify"), ()])
def test_h_is_help(words: tuple[str, ...]) -> None:
    short, long = foretrain(*words, "-h"), foretrain(*words, "--help")
    assert (short.returncode, short.stdout) == (0, long.stdout)


def piped(text: str, *words: str, monkeypatch: pytest.MonkeyPatch) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode()), "utf-8"))
    result = foretrain(*words)
    return result.returncode, result.stdout, result.stderr


@pytest.mark.parametrize("command", ["plan", "advise"])
@pytest.mark.parametrize(
    ("name", "text"), [("a.py", "n_layer = 3\ncompile = False\n"), ("a.toml", "[model]\nn_layer = 3\nbias = false\n")]
)
def test_a_config_is_read_from_stdin(command: str, name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Path(name).write_text(text)
    words = ("--gpu", "4070", "--batch_size=4", "--json")
    code, out, _ = piped(text, command, "-", *words, monkeypatch=monkeypatch)
    assert code == 0
    said, of_file = json.loads(out), json.loads(foretrain(command, name, *words).stdout)
    assert said["step"] == of_file["step"] == ("nanogpt" if name == "a.py" else "foretrain")
    same = ("config", "available_bytes") if command == "plan" else ("now", "tokens_per_step")
    assert [said[key] for key in same] == [of_file[key] for key in same]


def test_the_next_command_after_stdin_can_be_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    _, out, _ = piped("compile = False\n", "plan", "-", "--gpu", "4090", "--n_layer=3", monkeypatch=monkeypatch)
    assert "python train.py FILE.py --n_layer=3" in out


def test_stdin_with_nothing_or_too_much_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, says in (("", "nothing came from stdin"), ("#" * 70_000, "too large for a config")):
        code, _, err = piped(text, "plan", "-", "--gpu", "4070", monkeypatch=monkeypatch)
        assert code == 2
        assert says in err


def test_what_a_pipe_is_advised_works(monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo("fifo.py")
    said = foretrain("plan", "fifo.py", "--gpu", "4070").stderr
    assert re.search("give - in its place, and the pipe as < PIPE", said)
    assert piped("batch_size = 4\n", "plan", "-", "--gpu", "4070", monkeypatch=monkeypatch)[0] == 0


def test_a_folder_and_a_file_of_another_name_are_said_to_be_that() -> None:
    Path("empty").mkdir()
    Path("full").mkdir()
    Path("full/a.py").write_text("n_layer = 3\n")
    Path("notes").write_text("n_layer = 3\n")
    for word, says in (
        ("empty", "empty: is a folder without a .toml or .py file"),
        ("full", "full: is a folder; name a config in it, such as full/a.py"),
        ("notes", "notes: its name does not end in .toml or .py"),
    ):
        result = foretrain("plan", word, "--gpu", "4070", code=2)
        assert says in result.stderr


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [("--step-time", "0.0001", "7,687,000% MFU is impossible"), ("--logged-mfu", "250", "1,338% MFU of the RTX 4070")],
)
def test_a_speed_that_no_card_has_is_refused_with_its_numbers(option: str, value: str, says: str) -> None:
    result = foretrain(*PLAN, option, value)
    assert (result.returncode, result.stdout) == (2, "")
    assert f"{option} {value}: " in result.stderr
    assert says in result.stderr
    assert "58.3 TFLOP/s" in result.stderr


@pytest.mark.parametrize(("option", "value"), [("--step-time", "12"), ("--logged-mfu", "12.9")])
def test_the_time_names_the_option_that_gave_it(option: str, value: str) -> None:
    said = " ".join(foretrain(*PLAN, option, value).stdout.split())
    assert f"memory estimated, time from {option}" in said
    assert "(log)" not in said


@pytest.mark.parametrize("words", [("--gpu", "4070", "--device=cpu"), ("--gpu", "cpu", "--device=cuda")])
def test_a_device_that_contradicts_the_card_is_refused(words: tuple[str, ...]) -> None:
    for command in ("plan", "advise"):
        result = foretrain(command, "gpt2-124m", *words, code=2)
        assert words[2] in result.stderr
        assert "contradict" in result.stderr


def test_a_config_for_the_cpu_is_started_on_the_planned_card() -> None:
    Path("a.toml").write_text('preset = "baby"\ndevice = "cpu"\n')
    assert "foretrain train a.toml --device=cuda" in foretrain("plan", "a.toml", "--gpu", "4070").stdout


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("--dtype=bf16", "one of auto, float32, bfloat16, float16; did you mean bfloat16?"),
        ("--dtype=fp16", "did you mean float16?"),
        ("--price-per-kwh=0,35", "did you mean 0.35?"),
        ("--batch_size=1,000", "did you mean 1000?"),
        ("--batch_size=-2", "must be a whole number from 1 to 1,000,000."),
        ("--price_per_kwh=-2", "must be a number from 0 to "),
        ("--compile=maybe", "must be true or false"),
    ],
)
def test_a_wrong_value_is_told_with_what_was_perhaps_meant(word: str, says: str) -> None:
    result = foretrain(*PLAN, word, code=2)
    assert says in result.stderr


@pytest.mark.parametrize("id", ["ar", "hi"])
def test_what_a_value_must_be_is_said_in_the_language(id: str) -> None:
    for word in ("--batch_size=-2", "--dtype=bf8", "--compile=maybe", "--dropout=2", "--currency="):
        said = foretrain(*PLAN, word, "--lang", id).stderr
        assert not re.search(r"whole|number|one of|must|bool|text", said), said


@pytest.mark.parametrize("id", ["ar", "hi"])
def test_the_language_may_follow_help(id: str) -> None:
    before = foretrain("--lang", id, "plan", "--help").stdout
    for words in (("plan", "--help", "--lang", id), ("plan", f"--lang={id}", "-h"), ("plan", "-h", f"--lang={id}")):
        assert foretrain(*words).stdout == before
    assert foretrain("plan", "--help").stdout != before


def test_a_card_that_is_named_twice_is_one_card() -> None:
    words = ("plan", "gpt2-124m", "--json", "--gpu")
    assert foretrain(*words, "4070,4070").stdout == foretrain(*words, "4070").stdout


def test_a_file_as_run_directory_is_said_to_be_one() -> None:
    Path("README.md").write_text("x")
    with refused(code=4, match="because it is a file"):
        folder.base_path("README.md")


@pytest.mark.parametrize(
    ("words", "id", "names"),
    [
        (["gpus", "a", "b", "c"], "extra_argument", ["b c", "`foretrain gpus --help`"]),
        (["gpus", "--nope"], "no_such_option", ["--nope", "`foretrain gpus --help`"]),
        (["gpus", "--jso"], "no_such_option_near", ["--jso", "--json"]),
        (["trian"], "no_such_command_near", ["trian", "train", "`foretrain --help`"]),
        (["data", "nope"], "no_such_command", ["nope", "`foretrain data --help`"]),
        (["help"], "help_command", ["`foretrain --help`"]),
        (["help", "plan"], "help_command", ["`foretrain --help`"]),
        (["train", "--resume"], "requires_argument", ["--resume", "`foretrain train --help`"]),
        (["calibrate", "--quick=3"], "takes_no_value", ["--quick"]),
        (["sample"], "missing", ["RUN", "`foretrain sample --help`"]),
        (["advise", "baby", "--apply", "x"], "bad_value", ["--apply x"]),
        (["advise", "baby", "--apply=-1"], "bad_value", ["--apply -1", "0"]),
        (["serve", "--port", "70000"], "bad_value", ["--port 70000", "65535"]),
        (["plan", "baby", "--step-time", "x"], "bad_value", ["--step-time x"]),
        (["plan", "baby", "--gpu", "4070", "--trainer", "z"], "bad_value", ["--trainer z", "nanogpt"]),
        (["export", "out", "--to", "x"], "bad_value", ["--to x", "safetensors"]),
        (["prepare", "a.txt", "--out", "o", "--val", "3"], "bad_value", ["--val 3", "0.5%"]),
        (["prepare", "a.txt", "--out", "o", "--workers", "0"], "bad_value", ["--workers 0", "1,024"]),
        (["prepare", "a.txt", "--out", ""], "empty_value", ["--out"]),
    ],
)
def test_a_wrong_command_line_is_one_sentence_in_the_language(words: list[str], id: str, names: list[str]) -> None:
    for lang in ("en", "ar", "hi"):
        result = foretrain("--lang", lang, *words)
        said = re.sub("[\u2066-\u2069]", "", result.stderr).strip()
        assert (result.returncode, result.stdout, said.count("\n")) == (2, "", 0)
        assert all(name in said for name in names), said
        assert not re.search("Usage|╭|Input should|parse|Got un|Invalid", said)
        if lang != "en":
            assert not re.search("No such|must|needs|error|value|argument", said.replace("values", "")), said
    group = 2 if words[0] == "data" else 1  # a group of commands does not take --json itself
    as_json = json.loads(foretrain(*words[:group], "--json", *words[group:]).stdout)
    assert (as_json["id"], as_json["exit_code"]) == (f"usage.{id}", 2)


def test_check_says_free_only_where_it_is_known_what_others_use() -> None:
    words = ("plan", "gpt2-350m", "--gpu", "RTX 4060 Laptop", "--check", "--oneline")
    said, beside = foretrain(*words).stderr, foretrain(*words, "--used-by-others", "2GiB").stderr
    assert "needs about 10.38 GiB, the device has 7.50 GiB." in said
    assert "needs about 10.38 GiB, only 5.50 GiB free." in beside


def test_hourly_price_and_electricity_price_exclude_each_other() -> None:
    result = foretrain(*PLAN, "--price", "0.5", "--price-per-kwh", "0.35")
    assert (result.returncode, result.stdout) == (2, "")
    assert "--price is what an hour of the card costs" in result.stderr
    foretrain("plan", "gpt2-124m", "--gpu", "4070,4090", "--price", "4090=0.5", "--price-per-kwh", "0.35", code=0)


def test_a_place_without_a_dataset_is_named_once(tmp_path: Path) -> None:
    for words in (("train", "baby", "--device=cpu", f"--dataset={tmp_path}"), ("data", "info", str(tmp_path))):
        result = foretrain(*words, code=7)
        assert f"No dataset at {tmp_path}: " in result.stderr
        assert "data//" not in result.stderr
    assert "nor data/nowhere holds" in foretrain("data", "info", "nowhere").stderr


def test_code_in_a_config_is_quoted() -> None:
    lines = (
        "for i in range(3):",
        "    batch_size = i",
        "vars().update(batch_size=3)",
        "max_iters = [i for i in (1, 2)]",
    )
    Path("loop.py").write_text("\n".join(lines))
    said = foretrain("plan", "loop.py", "--gpu", "4070").stderr
    assert "loop.py:1: `for i in range(3):…` would have to be run" in said
    assert "loop.py:3: `vars().update(batch_size=3)` would have to be run" in said
    assert "max_iters = `[i for i in (1, 2)]`" in said
    assert "(For)" not in said


def test_a_loss_that_is_not_finite_is_not_hidden_in_the_summary() -> None:
    losses = ((0, "4.2000"), (10, "nan"), (20, "nan"))
    lines = (f"iter {step}: loss {loss}, time 300.00ms, mfu 10.00%" for step, loss in losses)
    Path("nan.log").write_text("\n".join(lines))
    assert "4.2000 → 4.2000, of the losses that are finite numbers" in foretrain("explain", "nan.log").stdout


@pytest.mark.parametrize("lang", ["en", "ar", "hi"])
def test_advice_names_no_rule_by_its_id(lang: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    words = ("advise", "gpt2-350m", "--gpu", "RTX 4060 Laptop", "--used-by-others", "2GB", "--full", "--lang", lang)
    said = " ".join(re.sub("[\u2066-\u2069]", "", foretrain(*words).stdout).split())
    assert not re.search(r"free_others|eval_batch\b|half_precision|micro_batch\b|chunked_loss\b", said)
    if lang == "en":
        assert "closing other programs: not enough." in said


def test_freeing_a_part_of_what_others_use_says_of_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    said = foretrain("advise", "gpt2-124m", "--gpu", "4070", "--used-by-others", "6GiB", "--full").stdout
    assert re.search(r"free 1\.\d\d GiB of the 6\.00 GiB used by other programs", said)


def test_bad_value_is_said_where_a_program_runs_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["pytest"])
    with pytest.raises(UserError, match=r"--trials 0: must be at least 1"):
        app(["tune", "baby", "--trials=0"], standalone_mode=False)


def test_what_the_system_refuses_to_write_has_one_exit_code() -> None:
    """/proc takes no file, whoever asks."""
    train(tiny(max_iters=1))
    for words in (
        ("export", "out", "--to", "safetensors", "--out", "/proc/x"),
        ("report", *PLAN[1:], "--out", "/proc/x.html"),
        ("plan", *PLAN[1:], "--within", "12h", "--write", "/proc/x.toml"),
        ("train", "baby", "--device=cpu", "--out_dir=/proc/x"),
    ):
        result = foretrain(*words, code=4)
        assert "/proc/x" in result.stderr
        assert "cannot be written" in result.stderr


def test_the_value_that_counts_is_told() -> None:
    """The last one, and of one that is no number that it is none."""
    assert "--tokens 0: must be at least 1" in foretrain("sample", "x", "--tokens", "20", "--tokens=0").stderr
    assert "--temperature nan: must be a number." in foretrain("sample", "x", "--temperature", "nan").stderr


def test_a_limit_on_the_output_is_no_bug() -> None:
    """`ulimit -f`, and what it is redirected to."""
    code = (
        "import errno, os\nfrom foretrain.cli import common, main\n"
        "def limited(*words, **more):\n    raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))\n"
        "common.OUT.print = limited\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", code, "gpus"], capture_output=True, text=True, check=False)
    assert done.returncode == 8
    assert "ulimit -f" in done.stderr
    assert "bug" not in done.stderr


def test_a_folder_without_rights_is_no_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the system says it to whoever is not root: of the file, and what to do."""
    stat = os.stat

    def refused(path: object, *words: object, **more: object) -> os.stat_result:
        if "closed" in str(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, *words, **more)  # type: ignore[arg-type, call-overload]

    Path("closed").mkdir()
    monkeypatch.setattr(os, "stat", refused)
    for words in (("explain", "closed"), ("plan", "closed", "--inference", "--gpu=4070")):
        done = foretrain(*words)
        assert (done.returncode, done.stderr.count("\n")) == (4, 1), words
        assert "closed" in done.stderr
        assert "permissions" in done.stderr
        assert "bug" not in done.stderr
