"""`foretrain watch`: the command is not changed, what it takes is measured, and what is left can be explained."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from foretrain.base import process_memory
from foretrain.base.bugs import redacted
from foretrain.cli.commands.watch import config_of
from foretrain.hardware.card import REASONS, Cards
from foretrain.runs import folder
from foretrain.runs.record import SCHEMA, WatchedRun
from foretrain.runs.training_log import read_log
from foretrain.training import watch as watching
from foretrain.training.watch import watch
from tests.kit.command import REPO, foretrain, refused, said
from tests.kit.nvml import GIB, FakeNvml, Nvml

LOG = """print("tokens per iteration will be: 8,192")
for i in range(12):
    print(f"iter {i}: loss {4 - i / 50:.4f}, time {20.0 + i % 3:.2f}ms, mfu 12.90%")
print("step 12: train loss 3.1000, val loss 3.2000")
"""


def watched(code: str, nvml: Any = None, interval_s: float = 0.05) -> tuple[WatchedRun, Path]:
    directory = folder.create("w")
    sink = os.open(os.devnull, os.O_WRONLY)
    try:
        command = [sys.executable, "-c", code]
        return watch(command, directory, interval_s=interval_s, nvml=nvml, out=sink, err=sink), directory.path
    finally:
        os.close(sink)
        directory.release()


# -- the command is not changed ----------------------------------------------------------------------------


def test_output_and_exit_code_pass_through_unchanged() -> None:
    code = (
        "import sys, os; os.write(1, b'a\\xff\\r50%\\x1b[31mred\\x1b[0m\\n' + b'x' * 300000);"
        "sys.stderr.write('bar\\r'); sys.stdout.write(sys.stdin.read()); sys.exit(7)"
    )
    words = [sys.executable, "-c", "from foretrain.cli import main; main()"]
    ended = subprocess.run(
        [*words, "watch", "--quiet", "--", sys.executable, "-c", code],
        input=b"typed", capture_output=True, timeout=600, check=False,
    )  # fmt: skip
    assert ended.returncode == 7
    assert ended.stdout == b"a\xff\r50%\x1b[31mred\x1b[0m\n" + b"x" * 300000 + b"typed"
    assert ended.stderr == b"bar\r"
    assert len(Path("watch/output.log").read_bytes()) == len(ended.stdout) + len(ended.stderr)
    assert folder.RunDirectory(Path("watch")).record_of(WatchedRun).exit_code == 7


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, 137), (signal.SIGTERM, 143)])
def test_a_signal_that_ends_the_command_is_128_and_its_number(number: int, code: int) -> None:
    record, _ = watched(f"import os; os.kill(os.getpid(), {int(number)})")
    assert (record.exit_code, record.status, record.signal) == (code, "stopped", number.name)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_reaches_the_command_once(number: int) -> None:
    code = (
        "import signal, sys, time\nseen = []\n"
        f"signal.signal({int(number)}, lambda *_: seen.append(1))\nprint('ready', flush=True)\n"
        "end = time.time() + 20\nwhile not seen and time.time() < end: time.sleep(0.01)\n"
        "time.sleep(0.3)\nsys.exit(40 + len(seen))"
    )
    words = [sys.executable, "-c", "from foretrain.cli import main; main()", "watch", "--quiet", "--"]
    child = subprocess.Popen([*words, sys.executable, "-c", code], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
    assert child.stdout.readline() == b"ready\n"
    child.send_signal(number)
    assert child.wait(30) == 41
    child.stdout.close()


def test_command_in_a_terminal_has_one_and_gets_ctrl_c_once() -> None:
    code = (
        "import os, signal, sys, time\nseen = []\nsignal.signal(signal.SIGINT, lambda *_: seen.append(1))\n"
        "print('ready', os.isatty(0), os.isatty(1), os.isatty(2), flush=True)\n"
        "while not seen: time.sleep(0.01)\ntime.sleep(0.2)\n"
        "print('typed', sys.stdin.readline().strip(), flush=True)\nsys.exit(40 + len(seen))"
    )
    pid, terminal = pty.fork()
    if pid == 0:
        run = "from foretrain.cli import main; main()"
        os.execv(sys.executable, [sys.executable, "-c", run, "watch", "--quiet", "--", sys.executable, "-c", code])
    shown, sent, end_s = b"", 0, time.monotonic() + 600
    while time.monotonic() < end_s:
        if not select.select([terminal], [], [], 0.1)[0]:
            continue
        try:
            piece = os.read(terminal, 4096)
        except OSError:
            break
        shown += piece
        if b"ready True True True" in shown and sent == 0:
            sent = os.write(terminal, b"\x03")
            os.write(terminal, b"hello\n")
    else:
        os.kill(pid, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 41, shown
    assert b"typed hello" in shown
    os.close(terminal)


def test_reader_that_goes_away_ends_the_command_as_without() -> None:
    words = f"{sys.executable} -c 'from foretrain.cli import main; main()' watch --quiet -- yes"
    ended = subprocess.run(
        ["bash", "-c", f"{words} | head -1; exit ${{PIPESTATUS[0]}}"], capture_output=True, timeout=600, check=False
    )
    assert (ended.stdout, ended.returncode) == (b"y\n", 128 + signal.SIGPIPE)


@pytest.mark.parametrize("command", ["/nonexistent/python", ".", "a\x00b"])
def test_command_that_cannot_start_is_one_sentence(command: str) -> None:
    directory = folder.create("w")
    with refused("environment.cannot_start") as caught:
        watch([command], directory)
    assert "\n" not in str(caught.value)
    assert int(caught.value.exit_code) == 4
    directory.release()


def test_the_command_line_says_what_is_wrong() -> None:
    told = foretrain("watch", "--", "/nonexistent/x", "--flag")
    assert (told.returncode, told.stdout) == (4, "")
    assert told.stderr.count("\n") == 1
    assert not Path("watch").exists()
    assert foretrain("watch", "--interval", "0", "--", "true").returncode == 2
    assert foretrain("watch").returncode == 2
    made = foretrain("watch", "--json", "--out", "a", "--", "sh", "-c", "echo out; exit 3", apart=True)
    found = json.loads(made.stdout)
    assert (made.returncode, found["schema"], found["exit_code"]) == (3, "foretrain.run/1", 3)
    assert made.stderr == "out\n"


# -- what is measured --------------------------------------------------------------------------------------


def test_without_a_card_the_processes_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import pathlib, subprocess, sys, time\nheld = bytearray(80 << 20)\n"
        "inner = 'x = bytearray(60 << 20); print(flush=True); input()'\n"
        "child = subprocess.Popen([sys.executable, '-c', inner], stdin=-1, stdout=-1)\nchild.stdout.read(1)\n"
        "end = time.process_time() + 0.3\nwhile time.process_time() < end: pass\n"
        "while not pathlib.Path('seen').exists(): time.sleep(0.01)\nchild.communicate(b'go')"
    )
    sample = watching.Sampler._sample

    def tell(self: watching.Sampler) -> None:
        """The watched program goes on when it was seen, however busy the machine is."""
        sample(self)
        if (self.count >= 5 and self.processes >= 2 and self.rss_peak_bytes > 140 << 20) or self.count > 1000:
            Path("seen").touch()

    monkeypatch.setattr(watching.Sampler, "_sample", tell)
    record, _ = watched(code)
    assert record.status == "finished"
    assert record.cards == ()
    assert record.nvml_problem
    assert record.processes == 2
    assert 140 << 20 < (record.rss_peak_bytes or 0) < 400 << 20
    assert 0.3 <= (record.cpu_s or 0) < 3
    assert record.samples >= 5
    assert WatchedRun.from_json(json.dumps(record.to_json(schema=SCHEMA))) == record


def test_the_tree_agrees_with_the_system_about_this_process() -> None:
    own_s = sum(os.times()[:4])
    found = process_memory.sample_tree(os.getpid())
    assert os.getpid() in found.pids
    assert own_s - 0.05 <= found.cpu_s
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert child.pid in (process_memory.sample_tree(os.getpid()) or found).pids
    child.communicate(b"\n")
    assert process_memory.sample_tree(2**22 + 1) is None


def test_a_card_is_shared_out_between_the_command_and_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nvml = Nvml()
    real = process_memory.sample_tree

    def sample(pid: int) -> process_memory.TreeSample | None:
        nvml.pid = pid
        return real(pid)

    monkeypatch.setattr(process_memory, "sample_tree", sample)
    record, path = watched("import time; time.sleep(0.4)", nvml)
    (card,) = record.cards
    assert (card.by, card.ours_peak_bytes, card.used_by_others_peak_bytes) == ("processes", 4 * GIB, 2 * GIB)
    assert (card.before_bytes, card.used_peak_bytes, card.total_bytes) == (2 * GIB, 6 * GIB, 12 * GIB)
    assert card.reasons == {"power_cap": 1.0, "thermal": 1.0}
    assert (card.clock_ghz, card.power_w, card.temperature_max_c) == (pytest.approx(2.475), pytest.approx(200), 84)
    assert card.energy_by == "counter"
    assert card.energy_j == pytest.approx(5 * (record.samples - 1))
    lines = [json.loads(line) for line in (path / "samples.jsonl").read_text().splitlines()]
    assert len(lines) == record.samples
    assert lines[-1]["cards"][0]["ours_bytes"] == 4 * GIB
    shown = said(capsys, "explain", "w")
    assert "4.00 GiB by the command, 2.00 GiB by other programs" in shown
    assert "too hot in 100.0%" in shown


def test_where_nvml_names_no_processes_the_rise_counts() -> None:
    record, _ = watched("import time; time.sleep(0.3)", Nvml(processes=False))
    (card,) = record.cards
    assert (card.by, card.ours_peak_bytes, card.used_by_others_peak_bytes) == ("rise", 4 * GIB, 2 * GIB)


def test_driver_that_breaks_ends_samples_not_the_command() -> None:
    record, _ = watched("import time; time.sleep(0.5); raise SystemExit(3)", Nvml(breaks_at=5))
    assert record.exit_code == 3
    assert record.cards[0].used_peak_bytes == 6 * GIB
    assert record.nvml_problem == "GPU is lost"
    assert record.samples > 5


def test_a_driver_that_hangs_does_not_hold_the_command() -> None:
    answer = threading.Event()

    class Hanging(Nvml):
        def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
            if self.looks > 3:
                answer.wait(600)
            return 0

    record, _ = watched("import time; time.sleep(0.3)", Hanging())
    answer.set()  # the command had ended before the driver did
    assert "did not answer" in record.nvml_problem


def test_reasons_are_those_of_the_binding() -> None:
    import pynvml

    names = {
        "idle": "GpuIdle", "applications_clocks": "ApplicationsClocksSetting", "power_cap": "SwPowerCap",
        "hardware_slowdown": "HwSlowdown", "sync_boost": "SyncBoost", "thermal": "SwThermalSlowdown",
        "hardware_thermal": "HwThermalSlowdown", "power_brake": "HwPowerBrakeSlowdown",
        "display_clocks": "DisplayClockSetting",
    }  # fmt: skip
    assert {getattr(pynvml, f"nvmlClocksEventReason{names[id]}"): id for id in REASONS.values()} == REASONS


def test_cards_without_a_driver_are_none() -> None:
    class Broken(FakeNvml):
        def nvmlInit(self) -> None:
            raise OSError("no library")

    cards = Cards(Broken("x", 1, 1))
    assert (cards.facts, cards.sample(()), cards.problem) == ((), (), "no library")


# -- what is left can be read ------------------------------------------------------------------------------


def test_the_log_is_read_as_it_comes_and_afterwards(capsys: pytest.CaptureFixture[str]) -> None:
    record, path = watched(LOG)
    assert (record.steps_done, record.last_step, record.log_format) == (12, 11, "nanogpt")
    assert record.step_s == pytest.approx(0.021)
    assert (record.last_loss, record.val_loss) == (pytest.approx(3.78), 3.2)
    metrics = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert [m["step"] for m in metrics if m["kind"] == "step"] == list(range(12))
    assert metrics[-1] == {"kind": "evaluation", "step": 12, "val_loss": 3.2, "elapsed_s": metrics[-1]["elapsed_s"]}
    assert len(read_log(path / "output.log").steps) == 12
    assert "steady step" in said(capsys, "explain", "w")
    found = json.loads(said(capsys, "explain", "w", "--json"))
    assert (found["steps"], found["watch"]["exit_code"]) == (12, 0)
    assert "Watched runs" in said(capsys, "runs")
    assert json.loads(said(capsys, "runs", "--json"))["runs"][0]["steps_done"] == 12


def test_a_command_without_a_log_is_explained_too(capsys: pytest.CaptureFixture[str]) -> None:
    watched("print('nothing of interest')")
    assert "no step of a program" in said(capsys, "explain", "w")


def test_progress_bars_and_lines_in_pieces_are_read() -> None:
    code = (
        "import os, time\nfor i in range(5):\n    line = f'iter {i}: loss 3.5, time 10.00ms, mfu 1.00%\\r'.encode()\n"
        "    os.write(1, line[:9]); time.sleep(0.01); os.write(1, line[9:])"
    )
    assert watched(code)[0].steps_done == 5


def test_a_killed_watch_is_told_by_its_lock(capsys: pytest.CaptureFixture[str]) -> None:
    record, path = watched("pass")
    directory = folder.RunDirectory(path)
    directory.write_record(record.model_copy(update={"status": "running", "exit_code": None}))
    assert directory.any_record().status == "killed"
    assert "killed" in said(capsys, "explain", "w")
    for damage in ("", "{", '{"schema": 1}', "[]", "null", '{"a": ' * 100_000):
        (path / "run.json").write_text(damage)
        with refused(code=7) as caught:
            said(capsys, "explain", "w")
        assert "\n" not in str(caught.value)


# S stands for a secret; `hf_S` and the like are of the length that such a token has.
LONG = "S3cr3tS3cr3tS3cr3tS3cr3tS3cr3tS3cr"


@pytest.mark.parametrize(
    "word",
    [
        "--wandb-key=S", "HF_TOKEN=S", "--hub_token=S", "--token=S", "token=S", "--hub-token=S", "--backend_token=S", "LOGIN_TOKEN=S", "--push_to_hub_token=S",
        "HUGGINGFACEHUB_API_TOKEN=S", "trainer.hub_token=S", "hubToken=S", "AWS_SECRET_ACCESS_KEY=S", "--api.key=S",
        "--authorization=S", "--override=hub_token=S", "postgresql://u:S@h/db", "--tracking_uri=https://user:S/S@h:1/x",
        "git+https://S@host/a.git", "export X=1; WANDB_API_KEY=S python", "python a.py --hub_token S --lr 1",
        "a --password 'S S' b", '{"hub_token": "S S", "lr": 1}', "curl -H 'Authorization: Bearer S' x", "X-Auth: Bearer S",
        "https://h/x?lr=1&token=S&a=b", f"hf_{LONG}", f"--x=hf_{LONG}", f"ghp_{LONG}", f"github_pat_{LONG}", f"sk-proj-{LONG}",
        "AKIAS3CR3TS3CR3TS3CR", f"glpat-{LONG}", f"xoxb-{LONG}", f"eyJ{LONG}.{LONG}.{LONG}", "5ec2e7" * 6 + "5ec2",
        "-----BEGIN OPENSSH PRIVATE KEY-----\nS\n",
    ],
)  # fmt: skip
def test_secrets_of_the_command_line_are_not_kept(word: str) -> None:
    for words in (["python", word, "--lr=1"], ["sh", "-c", f"echo a; {word}"]):
        kept = " ".join(redacted(words))
        assert not re.search(r"\bS\b|S3|5ec2", kept), kept
        assert "…" in kept


def test_a_word_behind_the_name_of_a_secret_is_not_kept() -> None:
    assert redacted(["--hub-token=S T; S"]) == ("--hub-token=…",)
    words = ["x", "--hub_token", "hf_S1", "--token", "hf_S2", "--api_key", "S3", "--lr", "1"]
    assert redacted(words) == ("x", "--hub_token", "…", "--token", "…", "--api_key", "…", "--lr", "1")


@pytest.mark.parametrize(
    "word",
    [
        "--tokenizer=gpt2", "--max_tokens=5", "--pad_token=<pad>", "eos_token=</s>", "--add_bos_token=true", "--author=me",
        "https://github.com/a/b@main", "s3://bucket/key", "task-of-the-day-2026", "hf_finetune_small.py", "--num_tokens", "a@b.c",
        "tokens=1000", "--monkey=1", "config/train_gpt2.py", "out:log", "--special_tokens=a,b", "d41d8cd98f00b204e9800998ecf8427e",
    ],
)  # fmt: skip
def test_what_is_no_secret_is_kept(word: str) -> None:
    assert redacted(["python", word, "x"]) == ("python", word, "x")


def test_watch_keeps_no_secret_in_its_record() -> None:
    words = [
        "--hub_token",
        "hf_S1",
        "--token",
        "hf_S2",
        "--uri=postgresql://u:S3@h/db",
        "export X=1; WANDB_API_KEY=S4 python",
    ]
    assert (
        foretrain(
            "watch", "--out", "w", "--quiet", "--", sys.executable, "-c", "print(1)", *words, apart=True
        ).returncode
        == 0
    )
    for path in Path("w").rglob("*"):
        assert path.is_dir() or not re.search(rb"S[1-4]", path.read_bytes()), path


def test_the_config_of_a_nanogpt_command_is_read_never_run() -> None:
    Path("configurator.py").write_text("raise SystemExit(1)")
    Path("my.py").write_text("n_layer = 3\nn_head = 2\nn_embd = 64\n")
    found = config_of(["python", "train.py", "my.py", "--batch_size=5"])
    assert (found.n_layer, found.batch_size) == (3, 5)
    assert config_of(["python", "train.py", "--unheard_of=5"]) is None
    assert config_of(["python", str(REPO / "docs" / "generate.py")]) is None
    assert config_of(["./train_gpt2cu"]) is None


def test_a_command_that_leaves_nothing_leaves_no_folder() -> None:
    told = foretrain("watch", "--", "false", apart=True, code=1)
    assert "ended with code 1" in told.stderr
    assert len(told.stderr.splitlines()) == 1
    assert not Path("watch").exists()
    as_json = foretrain("watch", "--json", "--", "false", apart=True)
    assert json.loads(as_json.stdout)["path"] is None
    assert foretrain("watch", "--quiet", "--", "sh", "-c", "echo iter; exit 2", apart=True).returncode == 2
    assert Path("watch").is_dir()
