"""Runs golden cases with the package of one tree. Started by `tests.golden`, once a tree and group of cases.

It runs as `python -m golden.runner` with the tree before all else in PYTHONPATH, so nothing here may import `tests` or
a private module of foretrain: those have other names in another tree. Each step of a case runs in a fork of this
process, which has imported the command line (and torch, for the cases that need it) and done nothing else yet.
"""

import argparse
import contextlib
import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .case import Case, Step
from .cases import digest, input_folder, listed

TIME_LIMIT_S = 1200.0  # of a case; a machine that others use too gives it a tenth of a core
# One thread: what is summed in parallel differs in the last bit with the number of threads.
ENVIRONMENT = {
    "NO_COLOR": "1", "TERM": "dumb", "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", "TZ": "UTC",
    "LC_ALL": "C.UTF-8", "PYTHONHASHSEED": "0", "TIKTOKEN_CACHE_DIR": "/nonexistent", "HF_HUB_OFFLINE": "1",
}  # fmt: skip
WRITTEN_AT = 1_750_000_000  # inputs are told apart by when they were written, too
TEXT_BYTES = 3_000_000


def environment(tree: Path, machine: Path, home: Path) -> dict[str, str]:
    """A user's environment with nothing of this user's in it."""
    ours = str(Path(__file__).parent.parent)
    return {
        **ENVIRONMENT, "PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join([str(tree), ours]),
        "HOME": str(home), "XDG_CACHE_HOME": str(home / ".cache"), "XDG_CONFIG_HOME": str(home / ".config"),
        "FORETRAIN_CACHE": str(home / "cache"), "FORETRAIN_TEST_MACHINE": str(machine),
    }  # fmt: skip


def folder_of(case: Case) -> str:
    return hashlib.sha256(case.name.encode()).hexdigest()[:8]


def main() -> int:
    """Run the cases that are asked for and have no result yet; a line on stdout for each that ended."""
    parser = argparse.ArgumentParser()
    for name in ("tree", "inputs", "results", "scratch", "group"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("names", help="a JSON file with the names of cases")
    args = parser.parse_args()
    tree, results = Path(args.tree).resolve(), Path(args.results)
    wanted = set(json.loads(Path(args.names).read_text("utf-8")))
    cases = [case for case in listed() if case.name in wanted and case.group == args.group]
    _import(tree, args.group)
    running: dict[int, tuple[Case, float]] = {}
    parent = os.getppid()
    while cases or running:
        while cases and len(running) < args.at_once:
            case = cases.pop(0)
            running[_forked(case, args)] = (case, time.monotonic())
        alone = os.getppid() != parent  # whoever asked is gone
        if alone:
            cases.clear()
        _end_late(running, everything=alone)
        number, status = os.waitpid(-1, os.WNOHANG)
        if number not in running:
            time.sleep(0.01)
            continue
        case, _ = running.pop(number)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(number, signal.SIGKILL)  # children that a step left behind
        done = status == 0 and result_file(results, case).exists()
        print(json.dumps({"case": case.name, "done": done}), flush=True)
        shutil.rmtree(Path(args.scratch) / folder_of(case), ignore_errors=True)
    return 0


def result_file(results: Path, case: Case) -> Path:
    return results / f"{digest(case)}.json"


def _import(tree: Path, group: str) -> None:
    import foretrain
    import foretrain.cli.commands

    if not Path(str(foretrain.__file__)).resolve().is_relative_to(tree):
        sys.exit(f"foretrain came from {foretrain.__file__}, not from {tree}")
    if group == "torch":
        import torch

        torch.set_num_threads(1)


def _end_late(running: dict[int, tuple[Case, float]], *, everything: bool) -> None:
    for number, (_, begun) in running.items():
        if everything or time.monotonic() - begun > TIME_LIMIT_S:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(number, signal.SIGKILL)


def _forked(case: Case, args: argparse.Namespace) -> int:
    """Begin a case in a process of its own, the head of its own group."""
    if number := os.fork():
        return number
    code = 1
    try:
        os.setsid()
        begun = time.monotonic()
        found = _run(case, Path(args.scratch) / folder_of(case), Path(args.inputs))
        path = result_file(Path(args.results), case)
        found["seconds"] = round(time.monotonic() - begun, 2)
        beside = path.with_suffix(f".{os.getpid()}")
        beside.write_text(json.dumps(found, ensure_ascii=False), "utf-8")
        beside.replace(path)
        code = 0
    except BaseException as error:
        print(json.dumps({"case": case.name, "broken": repr(error)[:500]}), flush=True)
    finally:
        os._exit(code)


def _run(case: Case, folder: Path, inputs: Path) -> dict[str, Any]:
    """What a case gives: of each step the exit code, what it printed and what it wrote."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    home = folder.parent / f"{folder.name}-home"
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir()
    os.chdir(folder)
    for name in case.inputs:
        shutil.copytree(inputs / input_folder(name), folder, dirs_exist_ok=True, symlinks=True)
    for name, text in case.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    for path in folder.rglob("*"):
        os.utime(path, (WRITTEN_AT, WRITTEN_AT))
    before = _state(folder)
    told = {name: os.environ[name] for name in ("PYTHONPATH", "FORETRAIN_TEST_MACHINE", "PATH", "COLUMNS")}
    os.environ.clear()
    os.environ |= {**ENVIRONMENT, **told, "HOME": str(home), "XDG_CACHE_HOME": str(home / ".cache"),
                   "XDG_CONFIG_HOME": str(home / ".config"), "FORETRAIN_CACHE": str(home / "cache"), **case.env}  # fmt: skip
    steps = []
    for number, step in enumerate(case.steps):
        if step.requests:
            steps.append(_served(step, home))
        else:
            steps.append(_stepped(step, home / f"step{number}", light=case.group != "torch"))
    after = _state(folder)
    if case.kept_as:
        beside = inputs / f"{folder.name}.part"
        shutil.copytree(folder, beside)
        beside.rename(inputs / input_folder(case.kept_as))
    written = {name: _content(folder / name) for name, state in after.items() if before.get(name) != state}
    shutil.rmtree(home, ignore_errors=True)
    return {"case": case.name, "folder": str(folder), "steps": steps, "written": written,
            "removed": sorted(set(before) - set(after))}  # fmt: skip


def _state(folder: Path) -> dict[str, tuple[int, str]]:
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink():
            found[path.relative_to(folder).as_posix()] = (path.stat().st_size, _digest(path))
    return found


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _content(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    rights = oct(path.stat().st_mode & 0o777)
    if len(data) <= TEXT_BYTES:
        with contextlib.suppress(UnicodeDecodeError):
            return {"text": data.decode(), "rights": rights}
    return {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data), "rights": rights}


def _stepped(step: Step, base: Path, *, light: bool) -> dict[str, Any]:
    """One command or piece of Python, in a fork whose three streams are files."""
    base.mkdir()
    (base / "in").write_text(step.stdin, "utf-8")
    number = os.fork()
    if not number:
        code = 70
        try:
            sys.modules["__main__"].__package__ = ""  # or usage lines begin with `python -m golden.foretrain`
            for stream, name, mode in ((0, "in", os.O_RDONLY), (1, "out", os.O_WRONLY | os.O_CREAT),
                                       (2, "err", os.O_WRONLY | os.O_CREAT)):  # fmt: skip
                handle = os.open(base / name, mode, 0o600)
                os.dup2(handle, stream)
                os.close(handle)
            sys.stdin = io.TextIOWrapper(io.FileIO(0), "utf-8")
            sys.stdout = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, "w")), "utf-8")
            sys.stderr = io.TextIOWrapper(io.BufferedWriter(io.FileIO(2, "w")), "utf-8", write_through=True)
            code = _called(step)
            sys.stdout.flush()
            if light:
                heavy = [name for name in ("torch", "numpy", "pandas") if name in sys.modules]
                (base / "imported").write_text(json.dumps(heavy), "utf-8")
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stderr.flush()
            os._exit(code)
    status = os.waitpid(number, 0)[1]
    found: dict[str, Any] = {
        "asked": " ".join(step.words) or "python", "exit": os.waitstatus_to_exitcode(status),
        "stdout": (base / "out").read_text("utf-8", "replace"), "stderr": (base / "err").read_text("utf-8", "replace"),
    }  # fmt: skip
    if (base / "imported").exists():
        found["imported"] = json.loads((base / "imported").read_text("utf-8"))
    return found


def _called(step: Step) -> int:
    if step.python:
        try:
            exec(compile(step.python, "<step>", "exec"), {"__name__": "__main__"})
        except Exception as error:  # what a user's notebook shows
            print(f"{type(error).__name__}: {error}")
            return 1
        return 0
    from foretrain.cli import main

    sys.argv = ["foretrain", *step.words]
    try:
        main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    return 0


def _served(step: Step, home: Path) -> dict[str, Any]:
    """What the page answers: `foretrain serve` in a process of its own, and requests one after the other."""
    code = "from foretrain.cli import main; main()"
    command = [sys.executable, "-c", code, "serve", "--json", *step.words]
    with (home / "serve.err").open("wb") as err:
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=err, text=True, stdin=subprocess.DEVNULL)
    assert server.stdout
    try:
        said = json.loads(server.stdout.readline())
        origin, _, token = said["url"].partition("/#token=")
        answers: list[dict[str, Any]] = []
        for request in step.requests:
            answers.append(_asked(origin, token, _with_runs(request, answers)))
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(TIME_LIMIT_S)
    text = json.dumps(answers, ensure_ascii=False)
    for number, id in enumerate(_runs(answers)):  # an id is a digest of where the run lies
        text = text.replace(id, f"<run {number}>")
    return {"asked": "serve", "said": sorted(said), "exit": server.returncode, "answers": json.loads(text),
            "stderr": (home / "serve.err").read_text("utf-8", "replace")}  # fmt: skip


def _runs(answers: list[dict[str, Any]]) -> list[str]:
    listed = next((one["answer"] for one in answers if one["request"] == "GET /api/runs"), {})
    return [run["id"] for run in listed.get("runs", ())]


def _with_runs(request: tuple[Any, ...], answers: list[dict[str, Any]]) -> tuple[Any, ...]:
    """A request with {0} replaced by the id of the first run in the list, and so on."""
    text = json.dumps(request)
    for number, id in enumerate(_runs(answers)):
        text = text.replace(f"{{{number}}}", id)
    return tuple(json.loads(text))


def _asked(origin: str, token: str, request: tuple[Any, ...]) -> dict[str, Any]:
    """One request (method, path, body) and its answer; a job is asked for until it is done."""
    method, path, *rest = request
    body = rest[0] if rest else None
    found = _sent(origin, token, method, path, body)
    answer = found["answer"]
    until = time.monotonic() + TIME_LIMIT_S
    while isinstance(answer, dict) and (job := answer.get("job")) and time.monotonic() < until:
        found = _sent(origin, token, "GET", f"/api/jobs/{job}", None)
        answer = found["answer"]
    return {"request": f"{method} {path}", **found}


def _sent(origin: str, token: str, method: str, path: str, body: Any) -> dict[str, Any]:
    headers = {"x-foretrain-token": token, "origin": origin, "sec-fetch-site": "same-origin"}
    data = None
    if body is not None:
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        headers["content-type"] = "application/json"
    asked = urllib.request.Request(origin + path, data, headers, method=method)
    try:
        with urllib.request.urlopen(asked, timeout=TIME_LIMIT_S) as response:
            status, text, kind = response.status, response.read().decode("utf-8", "replace"), response.headers
    except urllib.error.HTTPError as error:
        status, text, kind = error.code, error.read().decode("utf-8", "replace"), error.headers
    try:
        answer: Any = json.loads(text)
    except ValueError:
        answer = text
    return {"status": status, "type": kind.get("content-type"), "answer": answer}


def lines_of(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    assert process.stdout
    for line in process.stdout:
        with contextlib.suppress(ValueError):
            said = json.loads(line)
            if isinstance(said, dict):
                yield said


if __name__ == "__main__":
    sys.exit(main())
