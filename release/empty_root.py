"""Installs a wheel where nothing is, and runs the first two commands of a new user there.

    python release/empty_root.py dist [--train] [--out FILE.json]

A fresh virtual environment of this Python, no pip cache, an empty home, an empty working directory. The commands see no
variable of yours and only the environment's own folder on PATH, so no compiler and no git. `plan` and `--version` need
nothing but the wheel, so they are run first and measured: packages, bytes, seconds. With --train the extra `train` is
added, and `demo` has to train a small GPT on the CPU to a lower loss. On Linux as root the commands have no network.
"""

import argparse
import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MOST_BYTES, MOST_PACKAGES = 65_000_000, 25
NOT_OURS = ("pip", "setuptools", "wheel")  # of the environment itself
# On Windows a process without these cannot start, or finds no sockets.
SYSTEM = ("SYSTEMROOT", "SYSTEMDRIVE", "COMSPEC", "PATHEXT")
PLAN = ("plan", "gpt2-124m", "--gpu", "RTX 4070", "--used-by-others", "2GB")
DEMO = ("demo", "--steps", "60", "--json")


class Root:
    """The environment in `folder`; commands run in it as in a container that holds nothing else."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = folder / "environment"
        self.bin = self.environment / ("Scripts" if os.name == "nt" else "bin")
        self.site = Path()
        subprocess.run([sys.executable, "-m", "venv", str(self.environment)], check=True)
        for name in ("home", "here", "temporary"):
            (folder / name).mkdir()

    def variables(self) -> dict[str, str]:
        """All variables that a command sees."""
        home, temporary = str(self.folder / "home"), str(self.folder / "temporary")
        names = {"PATH": str(self.bin), "HOME": home, "USERPROFILE": home, "TMPDIR": temporary, "TEMP": temporary}
        return names | {name: os.environ[name] for name in SYSTEM if name in os.environ}

    def install(self, *what: str) -> None:
        """By pip, with the network settings of the user, and without its cache."""
        command = [str(self.bin / "python"), "-m", "pip", "install", "--quiet", "--no-cache-dir", *what]
        subprocess.run(command, check=True)

    def run(self, *words: str) -> tuple[str, float]:
        """(what a foretrain command prints on stdout, how many seconds it took). Raises CalledProcessError."""
        command = [*_without_network(), str(self.bin / "foretrain"), *words]
        before = time.perf_counter()
        done = subprocess.run(
            command, env=self.variables(), cwd=self.folder / "here", stdin=subprocess.DEVNULL, capture_output=True,
            text=True, encoding="utf-8", check=False,
        )  # fmt: skip
        if done.returncode:
            print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
            done.check_returncode()
        return done.stdout, time.perf_counter() - before

    def packages(self) -> list[str]:
        """'name version' of each package but the environment's own."""
        command = [str(self.bin / "python"), "-m", "pip", "list", "--format=json"]
        listed = json.loads(subprocess.check_output(command, text=True))
        return [f"{each['name']} {each['version']}" for each in listed if each["name"] not in NOT_OURS]

    def size_bytes(self) -> int:
        """Bytes that these packages take: all files of site-packages but those of the environment's own."""
        code = "import sysconfig; print(sysconfig.get_path('purelib'))"
        site = Path(subprocess.check_output([str(self.bin / "python"), "-c", code], text=True).strip())
        kept = [each for each in site.iterdir() if not each.name.startswith((*NOT_OURS, "_distutils", "distutils-"))]
        return sum(
            file.stat().st_size for each in kept for file in ([each] if each.is_file() else each.rglob("*"))
            if file.is_file()
        )  # fmt: skip


def _without_network() -> list[str]:
    """What stands before a command to take the network from it, where that can be had."""
    unshare = shutil.which("unshare")
    alone = [unshare, "--net", "--"] if unshare and hasattr(os, "geteuid") and os.geteuid() == 0 else []
    return alone if alone and subprocess.run([*alone, "true"], capture_output=True, check=False).returncode == 0 else []


def base(root: Root, wheel: str) -> dict[str, Any]:
    """What the planner alone takes, and what its first answer was."""
    root.install(wheel)
    version, _ = root.run("--version")
    first, first_s = root.run(*PLAN)
    _, again_s = root.run(*PLAN)
    if "Fits" not in first and "Does not fit" not in first:
        raise SystemExit(f"plan gave no verdict:\n{first}")
    packages = root.packages()
    return {
        "version": version.split()[-1], "packages": packages, "size_bytes": root.size_bytes(),
        "first_plan_s": round(first_s, 2), "second_plan_s": round(again_s, 2), "first_line": first.splitlines()[0],
        "network": not _without_network(), "load": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
    }  # fmt: skip


def train(root: Root, wheel: str) -> dict[str, Any]:
    """What the demo's run in the same root came to."""
    root.install(f"{wheel}[train]")
    text, seconds = root.run(*DEMO)
    run = json.loads(text)["run"]
    if run["status"] != "finished" or not run["val_loss"] < run["first_val_loss"]:
        raise SystemExit(f"the loss did not fall: {run['first_val_loss']} to {run['val_loss']}")
    return {"seconds": round(seconds, 1), **{key: run[key] for key in ("first_val_loss", "val_loss", "compiled")}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", help="the wheel, or a folder that holds one")
    parser.add_argument("--train", action="store_true", help="also with the extra `train`, which brings torch")
    parser.add_argument("--out", type=Path, help="add what was measured to this JSON file, under this Python's version")
    options = parser.parse_args()
    given = Path(options.wheel)
    wheel = str((next(given.glob("*.whl")) if given.is_dir() else given).resolve())
    with tempfile.TemporaryDirectory() as name:
        root = Root(Path(name).resolve())
        system = f"{platform.system()} {platform.machine()}"
        found = {"system": system, "date": datetime.date.today().isoformat(), **base(root, wheel)}
        if options.train:
            found["train"] = train(root, wheel)
    print(json.dumps(found, indent=1))
    if options.out:
        before = json.loads(options.out.read_text("utf-8")) if options.out.is_file() else {}
        known = {**before, platform.python_version(): found}
        options.out.write_text(json.dumps(known, indent=1) + "\n", "utf-8")
    count, size = len(found["packages"]), found["size_bytes"]
    over = count > MOST_PACKAGES or size > MOST_BYTES
    if over:
        print(f"over the limit: {count} packages (at most {MOST_PACKAGES}), {size:,} bytes (at most {MOST_BYTES:,})")
    return int(over)


if __name__ == "__main__":
    sys.exit(main())
