"""The picture of `foretrain top` in docs/pictures/: a terminal of 80 x 24 under tmux, with two runs going on this CPU.

    python docs/top_pictures.py    top.txt (what the terminal shows) and top.svg (the same with its colours)

Nothing is made up: two small runs are trained in a temporary folder, and `foretrain top` looks at them from outside.
"""

import io
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from drawings import CONSOLE_FORMAT
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

ROOT = Path(__file__).parent.parent
TO = ROOT / "docs" / "pictures"
WIDTH, HEIGHT = 80, 24
RUN = (
    "train", "baby", "--device=cpu", "--n_layer=2", "--n_head=4", "--block_size=128", "--batch_size=8",
    "--gradient_accumulation_steps=1", "--max_iters=3000", "--lr_decay_iters=3000", "--warmup_iters=100",
    "--eval_interval=250", "--eval_iters=20", "--log_interval=5", "--cpu_threads=1", "--compile=false", "--quiet",
)  # fmt: skip
RUNS = (
    ("--n_embd=128", "--out_dir=narrow", "--tag=width"),
    ("--n_embd=192", "--out_dir=wide", "--name=wider MLP", "--tag=width"),
)
SOCKET = "foretrain-top-picture"
PATIENCE_S = 300.0


def command(*words: str) -> list[str]:
    return [sys.executable, "-c", "from foretrain.cli import main; main()", *words]


def tmux(*words: str) -> str:
    """Return tmux's output; it has a server of its own."""
    return subprocess.run(["tmux", "-L", SOCKET, *words], capture_output=True, text=True, check=True).stdout


def wait_for(text: str, count: int) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while tmux("capture-pane", "-p").count(text) < count:
        if time.monotonic() > end_s:
            raise SystemExit(f"{text!r} did not come:\n" + tmux("capture-pane", "-p"))
        time.sleep(0.5)


def captured(folder: Path) -> tuple[str, str]:
    """Return (the terminal's text, the same with its colours) while two runs train in this folder."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("NO_COLOR", None)
    runs = [subprocess.Popen(command(*RUN, *words), cwd=folder, env=environment) for words in RUNS]
    try:
        inside = shlex.join(["env", f"PYTHONPATH={ROOT}", *command("top", "--interval=1", ".")])
        tmux("-f", "/dev/null", "new-session", "-d", "-x", str(WIDTH), "-y", str(HEIGHT), "-c", str(folder), inside)
        wait_for("left", len(RUNS))
        time.sleep(20)  # until the remaining time is not a guess from the first steps
        return tmux("capture-pane", "-p"), tmux("capture-pane", "-p", "-e")
    finally:
        subprocess.run(["tmux", "-L", SOCKET, "kill-server"], check=False)
        for run in runs:
            run.terminate()
        for run in runs:
            run.wait()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        plain, coloured = captured(Path(folder))
    lines = plain.splitlines()
    assert len(lines) <= HEIGHT
    assert max(map(len, lines)) <= WIDTH
    (TO / "top.txt").write_text("\n".join(line.rstrip() for line in lines) + "\n", "utf-8")
    console = Console(record=True, width=WIDTH, force_terminal=True, color_system="truecolor", file=io.StringIO())
    console.print(Text.from_ansi(coloured.rstrip("\n")), soft_wrap=True)
    svg = console.export_svg(title="foretrain top", theme=MONOKAI, code_format=CONSOLE_FORMAT, unique_id="top")
    (TO / "top.svg").write_text(svg, "utf-8")
    print(plain)


if __name__ == "__main__":
    main()
