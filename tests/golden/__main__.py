"""`python -m tests.golden BASE`, or `make golden BASE=<commit>`: every answer of this tree against those of a commit.

Ends with 1 where an answer differs and no entry of declared.py allows it, and with 2 where a case did not end.
"""

import argparse
import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from .case import Case
from .cases import input_folder, listed
from .compare import Difference, differences, judged
from .declared import DECLARED
from .runner import environment, folder_of, lines_of, result_file

REPO = Path(__file__).parent.parent.parent
COLUMNS = {"light": "120", "narrow": "80", "torch": "120"}
INPUTS = ("examples", "tests/data/machines", "tests/data/field")


def main() -> int:
    args = _arguments()
    wanted = (one for one in listed() if not one.kept_as)
    cases = [
        one
        for one in wanted
        if any(text in one.name for text in args.only.split("|")) and (one.quick or not args.quick)
    ]
    if args.list:
        _list(cases)
        return 0
    commit = _git("rev-parse", "--verify", f"{args.base}^{{commit}}")[:12]
    home = Path(args.keep).resolve() / commit
    with _alone(home):
        tree = _exported(home / "tree", commit)
        inputs = _inputs(home / "inputs", tree)
        key = _key()
        base = home / f"results-{key}"
        print(f"{len(cases)} cases. BASE is {commit}; its answers are kept in {base}")
        _answer("BASE", tree, base, inputs, cases, args)
    here = tree if args.self else REPO
    mine = REPO / "build" / "golden" / "here" / f"{commit}-{key}-{_digest_of(here / 'foretrain')}"
    if args.self:
        mine = mine.with_name(f"{mine.name}-self")
    for other in mine.parent.iterdir() if mine.parent.exists() else ():
        if other != mine:
            shutil.rmtree(other, ignore_errors=True)
    _answer("BASE again" if args.self else "here", here, mine, inputs, cases, args)
    return _verdict(base, mine, cases, args)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("base", nargs="?", default="HEAD", metavar="BASE", help="the commit whose answers are right")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="only the cases with this text in their name, or with one of A|B"
    )
    parser.add_argument("--quick", action="store_true", help="a fifth of the cases")
    parser.add_argument("--at-once", type=int, default=min(4, os.cpu_count() or 2), metavar="N", help="cases at once")
    parser.add_argument("--again", action="store_true", help="run the cases of both trees anew")
    parser.add_argument("--self", action="store_true", help="run BASE twice and compare it with itself")
    parser.add_argument("--most", type=int, default=60, metavar="N", help="differences to print")
    parser.add_argument(
        "--keep", default=str(REPO / "build" / "golden"), metavar="FOLDER", help="where BASE's are kept"
    )
    parser.add_argument("--list", action="store_true", help="print the cases and how many there are")
    return parser.parse_args()


def _list(cases: list[Case]) -> None:
    for one in cases:
        print(f"{one.group:7}{one.name}")
    print(", ".join(f"{command} {count}" for command, count in Counter(one.command for one in cases).most_common()))
    print(f"{len(cases)} cases, {sum(len(one.steps) for one in cases)} commands")


def _git(*words: str) -> str:
    return subprocess.run(["git", "-C", str(REPO), *words], check=True, capture_output=True, text=True).stdout.strip()


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Two who ask for the same commit take turns: the second finds what the first ran."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _exported(tree: Path, commit: str) -> Path:
    if not tree.exists():
        beside = Path(tempfile.mkdtemp(dir=tree.parent))
        archive = subprocess.run(["git", "-C", str(REPO), "archive", commit], check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", str(beside)], input=archive, check=True)
        beside.rename(tree)
    return tree


def _inputs(inputs: Path, tree: Path) -> Path:
    """What both trees are given: the files of BASE, so that a moved example changes no case."""
    for name in INPUTS:
        there = inputs / "repo" / name
        if not there.exists():
            there.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=inputs.parent) as beside:
                shutil.copytree(tree / name, Path(beside) / "copy")
                (Path(beside) / "copy").rename(there)
    return inputs


def _key() -> str:
    """What all results depend on besides the tree: how cases are run, torch, this machine."""
    runner = (Path(__file__).parent / "runner.py").read_bytes()
    info = Path("/proc/cpuinfo")
    cpu = next((line for line in info.read_text().splitlines() if "model name" in line), "") if info.exists() else ""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    parts = [runner, version("torch"), platform.python_version(), cpu, memory]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


def _digest_of(package: Path) -> str:
    found = hashlib.sha256()
    for path in sorted(package.rglob("*")):
        if path.is_file() and path.suffix != ".pyc":
            found.update(str(path.relative_to(package)).encode() + path.read_bytes())
    return found.hexdigest()[:12]


def _answer(who: str, tree: Path, results: Path, inputs: Path, cases: list[Case], args: argparse.Namespace) -> None:
    """Run the cases that have no result; what other cases need first."""
    if args.again:
        shutil.rmtree(results, ignore_errors=True)
    results.mkdir(parents=True, exist_ok=True)
    kept = [one for one in listed() if one.kept_as]
    needed = {name for one in cases for name in one.inputs}
    making = [one for one in kept if one.kept_as in needed and not (inputs / input_folder(one.kept_as)).exists()]
    if making:
        _run(f"{who}, inputs", tree, results, inputs, making, args.at_once)
    missing = [one for one in cases if not result_file(results, one).exists()]
    if missing:
        _run(who, tree, results, inputs, missing, args.at_once)


def _run(who: str, tree: Path, results: Path, inputs: Path, cases: list[Case], at_once: int) -> None:
    begun, done = time.monotonic(), 0
    with tempfile.TemporaryDirectory(prefix="golden-") as scratch:
        names = Path(scratch) / "names.json"
        names.write_text(json.dumps([one.name for one in cases]), "utf-8")
        for group in COLUMNS:
            if not any(one.group == group for one in cases):
                continue
            for said in lines_of(_runner(tree, results, inputs, group, Path(scratch), at_once)):
                if "broken" in said or not said["done"]:
                    print(f"\rnot done: {said['case']} {said.get('broken', '')}".ljust(100))
                done += "done" in said
                _progress(who, done, len(cases), said["case"], time.monotonic() - begun)
    print(f"\r{who}: {done} of {len(cases)} cases in {time.monotonic() - begun:.0f} s".ljust(100))


def _runner(tree: Path, results: Path, inputs: Path, group: str, scratch: Path, at_once: int) -> subprocess.Popen[str]:
    machine = inputs / "repo" / "tests" / "data" / "machines" / "intel.json"
    command = [
        sys.executable, "-m", "golden.runner", "--tree", str(tree), "--inputs", str(inputs), "--results", str(results),
        "--scratch", str(scratch), "--group", group, "--at-once", str(at_once), str(scratch / "names.json"),
    ]  # fmt: skip
    told = {**environment(tree, machine, scratch / "home"), "COLUMNS": COLUMNS[group]}
    return subprocess.Popen(command, cwd=scratch, env=told, stdout=subprocess.PIPE, text=True)


def _progress(who: str, done: int, all_: int, name: str, seconds: float) -> None:
    if not sys.stdout.isatty():
        if done % max(1, all_ // 10) == 0:
            print(f"{who}: {done} of {all_}, {seconds:.0f} s", flush=True)
        return
    filled = 30 * done // all_
    print(f"\r{who} [{'#' * filled}{'.' * (30 - filled)}] {done}/{all_} {name[:40]:40}", end="", flush=True)


def _verdict(base: Path, mine: Path, cases: list[Case], args: argparse.Namespace) -> int:
    found: list[Difference] = []
    undone: list[str] = []
    for one in cases:
        paths = [result_file(folder, one) for folder in (base, mine)]
        if not all(path.exists() for path in paths):
            undone.append(one.name)
            continue
        old, new = (json.loads(path.read_text("utf-8")) for path in paths)
        for result in (old, new):  # where it ran has another name each time, of one length
            assert result["folder"].endswith(folder_of(one))
        found += differences(old, new, measured=one.measured)
    left, unused = judged(found, () if args.self else DECLARED)
    for difference in left[: args.most]:
        print(difference)
    if len(left) > args.most:
        print(f"… and {len(left) - args.most} more (--most N)")
    whole = not args.only and not args.quick and not undone
    for declaration in unused if whole else ():
        print(f"declared, but nothing differs so: {declaration}")
    for name in undone:
        print(f"no result: {name}")
    differing = len({difference.case for difference in left})
    print(
        f"{len(cases) - len(undone)} cases compared: {len(left)} differences in {differing} cases, "
        f"{len(found) - len(left)} declared, {len(unused) if whole else 0} declarations unused"
    )
    return 2 if undone else 1 if left or (whole and unused) else 0


if __name__ == "__main__":
    sys.exit(main())
