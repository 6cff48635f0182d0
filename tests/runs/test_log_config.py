"""What a log says of its own config is believed: nanoGPT prints the file that it was given and every option."""

import pickle
from itertools import pairwise
from pathlib import Path

import pytest

from foretrain.analysis.log_analysis import analyse, config_of
from foretrain.analysis.log_checks import utilization
from foretrain.cli.commands.watch import config_of as watched_config
from foretrain.comparison.compare import compare
from foretrain.comparison.sources import load
from foretrain.comparison.sources.request import take_apart
from foretrain.config.resolve import resolve
from foretrain.hardware.catalogue import find
from foretrain.runs.folder import RunDirectory
from foretrain.runs.record import LOG, WatchedRun
from foretrain.runs.training_log import TrainingLog, parse_log
from tests.kit.command import foretrain

# As karpathy/nanoGPT configurator.py prints them: the file as it is, then each option.
CONFIG = """# train a miniature character-level shakespeare model
out_dir = 'out-shakespeare-char'
eval_interval = 250 # keep frequent because we'll overfit

wandb_log = False # override via command line if you like
dataset = 'shakespeare_char'
gradient_accumulation_steps = 1
batch_size = 64
block_size = 256 # context of up to 256 previous characters

n_layer = 6
n_head = 6
n_embd = 384
dropout = 0.2
learning_rate = 1e-3 # with baby networks can afford to go a bit higher
max_iters = 5000
lr_decay_iters = max_iters # make equal to max_iters usually
min_lr = 1e-4 # learning_rate / 10 usually
"""


def text(*options: str, file: str = CONFIG, steps: int = 30, ms: float = 90.0) -> str:
    printed = f"Overriding config with config/train_shakespeare_char.py:\n{file}\n" if file else ""
    head = "".join(f"Overriding: {option}\n" for option in options)
    tail = "tokens per iteration will be: 768\nfound vocab_size = 65 (inside data/shakespeare_char/meta.pkl)\n"
    lines = "".join(f"iter {i}: loss {4 - i / 100:.4f}, time {ms:.2f}ms, mfu -100.00%\n" for i in range(steps))
    return printed + head + tail + lines


def log(*options: str, **more: object) -> TrainingLog:
    return parse_log(text(*options, **more).splitlines(keepends=True))  # type: ignore[arg-type]


def write(path: Path, content: str) -> Path:
    path.write_text(content)
    return path


def test_the_printed_file_and_the_options_over_it_are_read() -> None:
    found = log("batch_size = 12", "device = cpu", "compile = False", "max_iters = 2000").header.settings
    assert (found["batch_size"], found["device"], found["compile"], found["dropout"]) == (12, "cpu", False, 0.2)
    assert (found["max_iters"], found["lr_decay_iters"], found["dataset"]) == (2000, 5000, "shakespeare_char")
    assert "out_dir" in found
    assert "keep" not in found


def test_lines_after_the_config_of_a_log_are_no_settings() -> None:
    lines = text().replace("iter 0:", "n_layer = 99\niter 0:")
    assert parse_log(lines.splitlines(keepends=True)).header.settings["n_layer"] == 6


def test_a_run_begun_again_in_one_file_says_its_settings_anew() -> None:
    twice = text("learning_rate = 1e-3") + text("learning_rate = 3e-3", file="")
    found = parse_log(twice.splitlines(keepends=True)).header.settings
    assert found == {"learning_rate": 3e-3}


def test_explain_reckons_with_what_the_log_says_ran(tmp_path: Path) -> None:
    """The quarter-size run of nanoGPT's README, explained with the file that it overrode."""
    options = ("batch_size = 12", "block_size = 64", "n_layer = 4", "n_head = 4", "n_embd = 128", "max_iters = 40")
    config = write(tmp_path / "train.py", CONFIG)
    used = config_of(resolve([str(config)]), log(*options))
    assert (used.batch_size, used.n_layer, used.max_iters, used.vocab_size) == (12, 4, 40, 65)
    found = analyse(log(*options), config=used, gpu=find("RTX 4070"))
    assert not [f for f in found.findings if f.id.startswith(("differs.", "not_this"))]
    assert found.utilization == utilization(used, find("RTX 4070"), 0.09, tokens_per_step=768)
    assert found.remaining.steps == 40 - 29
    path = write(tmp_path / "run.log", text(*options))
    ended = foretrain("explain", str(path), "--config", str(config), "--gpu", "4070", code=0)
    assert "does not belong" not in ended.stdout


def test_what_the_user_types_is_held_against_the_log(tmp_path: Path) -> None:
    config = write(tmp_path / "train.py", CONFIG)
    read = log("batch_size = 12")
    used = config_of(resolve([str(config), "--batch_size=8"]), read)
    assert used.batch_size == 8
    found = {f.id: f.values for f in analyse(read, config=used, gpu=find("RTX 4070")).findings}
    assert found["differs.override"] == {"key": "batch_size", "log": "12", "config": 8}


def test_init_from_of_a_log_brings_its_shape(tmp_path: Path) -> None:
    config = write(tmp_path / "train.py", CONFIG)
    used = config_of(resolve([str(config)]), log("init_from = gpt2-medium", "batch_size = -3"))
    assert (used.n_layer, used.n_embd, used.block_size, used.batch_size) == (24, 1024, 256, 64)


def test_compare_sees_the_learning_rates_that_two_logs_print(tmp_path: Path) -> None:
    one = write(tmp_path / "one.log", text("learning_rate = 1e-3"))
    other = write(tmp_path / "other.log", text("learning_rate = 3e-3", ms=95.0))
    found = compare([load(take_apart(str(one))), load(take_apart(str(other)))])
    assert [(s.name, s.values) for s in found.differing] == [("learning_rate", ((1e-3, 1e-4), (3e-3, 1e-4)))]
    named = write(tmp_path / "train.py", CONFIG)
    found = compare([load(take_apart(f"{one}+{named}")), load(take_apart(f"{other}+{named}"))])
    assert [s.name for s in found.differing] == ["learning_rate"]


def test_a_watched_run_has_the_vocabulary_of_its_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nanoGPT in its own folder: `watch` finds data/…/meta.pkl, and an older record has the log's word."""
    import numpy as np

    monkeypatch.chdir(tmp_path)
    write(tmp_path / "configurator.py", "")
    write(tmp_path / "train.py", "")
    config = write(tmp_path / "small.py", CONFIG.replace("shakespeare_char'", "mine'"))
    data = tmp_path / "data" / "mine"
    data.mkdir(parents=True)
    for split in ("train", "val"):
        np.zeros(1000, np.uint16).tofile(data / f"{split}.bin")
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 85, "stoi": {}, "itos": {}}))
    found = watched_config(["python", "train.py", str(config), "--device=cpu"])
    assert found.vocab_size == 85
    record = WatchedRun(
        id="w", name="w", command=("python", "train.py"), status="finished", started_at="2026-11-21T10:00:00Z", interval_s=1.0,
        config=resolve([str(config)]).config,
    )  # fmt: skip
    folder = tmp_path / "watch"
    folder.mkdir()
    RunDirectory(folder).write_record(record)
    own = "Overriding: gradient_accumulation_steps = 1\n" + text(file="").replace("= 65", "= 85").replace(
        "768", "16,384"
    )
    write(folder / LOG, own)
    for words in (("explain", str(folder)), ("report", str(folder), "--out", str(tmp_path / "r.html"))):
        ended = foretrain(*words, "--gpu", "4070", code=0)
        assert "does not belong" not in ended.stdout
    assert "does not belong" not in (tmp_path / "r.html").read_text()
    subject = load(take_apart(str(folder)))
    assert subject.config.vocab_size == 85


def test_the_whole_run_is_what_the_log_shows_and_the_time_left(tmp_path: Path) -> None:
    """One interval of evaluations in both, the log's: the config says another one."""
    lines = ["tokens per iteration will be: 768\n"]
    for i in range(0, 400, 10):
        if i % 50 == 0:
            lines.append(f"step {i}: train loss 4.0, val loss 4.0\n")
        lines.append(f"iter {i}: loss 4.0, time {1100.0 if i % 50 == 0 else 100.0:.2f}ms, mfu 0.10%\n")
    config = resolve(["shakespeare-char", "--max_iters=1000", "--eval_interval=250"]).config
    found = analyse(parse_log(lines), config=config, gpu=find("RTX 4070"))
    so_far_s = 391 * 0.1 + 8 * 1.0  # steps 0 to 390, eight evaluations
    left_s = 610 * 0.1 + 13 * 1.0
    assert found.remaining.time_s.expected_s == pytest.approx(left_s)
    assert found.whole_run_s.expected_s == pytest.approx(so_far_s + left_s)
    longer = [analyse(parse_log(lines[:n]), config=config).whole_run_s for n in (30, 40, 49)]
    assert all(a and b and a.expected_s == pytest.approx(b.expected_s, rel=0.02) for a, b in pairwise(longer))


def test_log_with_any_nanogpt_schedule_is_read(tmp_path: Path) -> None:
    """50 steps of 100 of warm-up: nanoGPT trains it, so its log and its speed are explained."""
    config = write(tmp_path / "train.py", CONFIG.replace("min_lr = 1e-4", "min_lr = 1.0"))
    path = write(tmp_path / "run.log", text("max_iters = 50", "warmup_iters = 100", "lr_decay_iters = 20"))
    words = (str(config), "--max_iters=50", "--warmup_iters=100", "--lr_decay_iters=20", "--gpu", "4070")
    for command in (
        ("explain", str(path), "--config", *words), ("mfu", *words, "--step-time", "0.09"),
        ("compare", f"{path}+{config}", f"{path}+{config}+gpu=4090+max_iters=60"),
    ):  # fmt: skip
        ended = foretrain(*command)
        assert "in the configuration:" not in ended.stderr
        assert ended.returncode == 0 or command[0] == "compare", ended.stderr
