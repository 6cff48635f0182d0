"""`make cuda-truth`: predictions against PyTorch's real CUDA build, on a card that computes nothing.

    python -m tests.cuda_build [--tier large] [--only TEXT] [--minutes 45]

It makes its own environment in build/cuda-truth/ (about 6 GB, once), measures every case there, traces it here, and
writes benchmarks/results/cuda_build.json. What is done is kept case by case: after Ctrl-C or a
change of the code only what that change decides is done again.
"""

import argparse
import ast
import contextlib
import gzip
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any

from foretrain.predict.trace import service
from foretrain.predict.trace.service import Request, TraceUnavailable
from tests.cuda_build import compare, grid, trainer
from tests.cuda_build.environment import HOME, PYTHON, EnvironmentError, driver_digest, make, on_the_card
from tests.cuda_build.grid import REPO, cases

RESULTS = REPO / "benchmarks" / "results"
TRACES_A_BATCH = 8


class Stopped(Exception):
    """Somebody wants this to end."""


class Run:
    def __init__(self, wanted: list[Any], minutes: float) -> None:
        self.cases = wanted
        self.started, self.seconds = time.monotonic(), minutes * 60
        self.stop = threading.Event()
        self.untraced: dict[str, str] = {}  # case -> why
        self.measured, self.traced = 0, 0
        for case in wanted:
            if was_killed(case):
                kept(case).unlink()
        self.waiting = [case for case in wanted if not kept(case).exists()]
        self.before = len(wanted) - len(self.waiting)
        self.host: subprocess.Popen[str] | None = None

    def late(self) -> bool:
        return self.stop.is_set() or time.monotonic() - self.started > self.seconds

    def measure(self) -> None:
        """One process on the card; a case that it ends at takes only itself with it."""
        if not self.waiting:
            return
        log = (HOME / "measure.log").open("wb")
        with subprocess.Popen(
            [PYTHON, "-m", "tests.cuda_build.measure"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
            env=on_the_card(), cwd=REPO, text=True, start_new_session=True,
        ) as host:  # fmt: skip
            assert host.stdin is not None
            assert host.stdout is not None
            self.host = host
            try:
                for case in self.waiting:
                    if self.late():
                        break
                    # Inductor keeps which matmuls it pads by shape, and would not measure for this case what it did for
                    # an earlier one; force_disable_caches does not reach these files.
                    shutil.rmtree(HOME / "inductor" / "cache", ignore_errors=True)
                    job = {**case._asdict(), "out": str(kept(case))}
                    host.stdin.write(json.dumps(job) + "\n")
                    host.stdin.flush()
                    if not host.stdout.readline():
                        if self.stop.is_set():
                            return
                        raise EnvironmentError(f"the measuring process ended; {HOME / 'measure.log'} says why")
                    self.measured += 1
            finally:
                with contextlib.suppress(BrokenPipeError):
                    host.stdin.close()

    def end(self) -> None:
        """Stop now: the case in hand is lost, and no other."""
        self.stop.set()
        if self.host is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.host.pid, signal.SIGKILL)

    def trace(self) -> None:
        """The traces of all cases, so many in one process; they are kept by foretrain's own cache."""
        service.AT_ONCE = 1  # the other core measures
        rest = list(self.cases)
        while rest and not self.late():
            batch, rest = rest[:TRACES_A_BATCH], rest[TRACES_A_BATCH:]
            self._trace([(case, request) for case in batch for request in compare.requests(case)])
            self.traced += len(batch)

    def _trace(self, batch: list[tuple[Any, Request]]) -> None:
        try:
            service.traces([request for _, request in batch], self._listen)
        except TraceUnavailable as error:
            if len(batch) == 1:
                self.untraced[batch[0][0].name] = str(error)
                return
            for one in batch:  # which of them was it?
                self._trace([one])

    def _listen(self, text: str) -> None:
        if self.stop.is_set():
            raise Stopped

    def show(self, threads: list[threading.Thread]) -> None:
        """A line a second on a terminal, one a minute elsewhere, until all threads have ended."""
        terminal, told = sys.stderr.isatty(), 0.0
        while any(thread.is_alive() for thread in threads):
            for thread in threads:
                thread.join(0.5)
            now = time.monotonic()
            if terminal or now - told > 60:
                told = now
                print(
                    f"\r{self.line()}" if terminal else self.line(),
                    end="" if terminal else "\n",
                    file=sys.stderr,
                    flush=True,
                )
        print(f"\r{self.line()}" if terminal else self.line(), file=sys.stderr, flush=True)

    def line(self) -> str:
        """'[####----] measured 31/96, traced 24/96, about 4 min left'."""
        total, done = len(self.cases), self.before + self.measured
        share = (done + self.traced) / (2 * total) if total else 1.0
        bar = "#" * round(24 * share)
        spent = time.monotonic() - self.started
        slowest = max(
            spent / self.measured * (len(self.waiting) - self.measured) if self.measured else 0,
            spent / self.traced * (total - self.traced) if self.traced else 0,
        )
        left = f"about {slowest / 60:.0f} min left" if slowest else ""
        return f"[{bar:24}] measured {done}/{total}, traced {self.traced}/{total}  {left}   "


def kept(case: Any) -> Path:
    what = [case.settings, case.dtype, case.step, case.compiled, measuring_code()]
    key = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:24]
    return HOME / "measured" / f"{key}.json.gz"


@cache
def measuring_code(*more: Path) -> str:
    """A hash of what the measured code does. A module that moves, or is described otherwise, keeps what was measured."""
    here = Path(__file__).parent
    files = [here / "measure.py", here / "branches.py", REPO / "foretrain" / "predict" / "trace" / "drive.py", *more]
    files += (REPO / "foretrain" / "model").rglob("*.py")
    said = sorted(_without_imports(path.read_text("utf-8")) for path in files)
    return hashlib.sha256("".join([driver_digest(), *said]).encode()).hexdigest()


def _without_imports(source: str) -> str:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [line for line in body if not _is_said_only(line)]  # type: ignore[attr-defined]
    return ast.dump(tree)


def _is_said_only(node: ast.AST) -> bool:
    """An import, a docstring, or what is imported for types."""
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        return True
    text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    return text or isinstance(node, ast.Import | ast.ImportFrom)


def read(case: Any) -> dict[str, Any] | None:
    try:
        return json.loads(gzip.decompress(kept(case).read_bytes()))
    except (OSError, EOFError, ValueError):
        return None


def was_killed(case: Any) -> bool:
    """Whether its process was killed without having used up its time, as the system does when its memory is full."""
    found = read(case) or {}
    if found.get("error") != "the process ended with -9":
        return False
    from tests.cuda_build.measure import PROCESSOR_SECONDS  # which imports torch

    return found["seconds"] < PROCESSOR_SECONDS


def rows(run: Run) -> list[compare.Row]:
    found = []
    for case in run.cases:
        measured = read(case)
        if measured is None:
            continue
        if case.name in run.untraced:
            found.append({**case._asdict(), "error": run.untraced[case.name]})
        elif all(service.TRACES.path(request.key()).exists() for request in compare.requests(case)):
            found.append(compare.compared(case, measured))
    return found


def pytest_on_card() -> str:
    """The last line of `pytest -m gpu` in the CUDA build, which lacks what tests of the page import."""
    files = [str(path) for path in sorted((REPO / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text("utf-8")]
    words = [PYTHON, "-m", "pytest", "-m", "gpu", "-n", "0", "-p", "no:cacheprovider", "-W", "default", *files]
    done = subprocess.run(words, env=on_the_card(), cwd=REPO, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    return lines[-1].strip("= ") if lines else done.stderr.strip()[-300:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tier", choices=("default", "large"), default="default")
    parser.add_argument(
        "--only", metavar="TEXT", help="only cases that have this in their name; no results are written"
    )
    parser.add_argument(
        "--seed", type=int, metavar="N", help="draw other cases than the usual ones; no results are written"
    )
    parser.add_argument("--minutes", type=float, default=None, help="start no case after so long (default tier: 40)")
    parser.add_argument("--cases-only", action="store_true", help="neither the trainer nor pytest")
    parser.add_argument("--out", type=Path, default=None, help="(benchmarks/results/cuda_build[_large].json)")
    args = parser.parse_args()
    os.environ["FORETRAIN_CACHE"] = str(HOME / "cache")  # the traces of this harness are its own
    if args.seed is not None:
        grid.SEED = args.seed
    wanted = cases("large" if args.only else args.tier)
    if args.seed is not None:
        wanted = [case for case in wanted if case.name.startswith(("eager ", "compiled "))]  # what a seed draws
    if args.only:
        wanted = [case for case in wanted if args.only in case.name]
    if not wanted:
        print(f"no case has {args.only!r} in its name", file=sys.stderr)
        return 2
    try:
        make(lambda text: print(text, file=sys.stderr, flush=True))
    except EnvironmentError as error:
        print(error, file=sys.stderr)
        return 4
    (HOME / "measured").mkdir(parents=True, exist_ok=True)
    run = Run(wanted, args.minutes or (40 if args.tier == "default" else 240))
    threads = [threading.Thread(target=_quietly, args=(work, run)) for work in (run.measure, run.trace)]
    for thread in threads:
        thread.start()
    try:
        run.show(threads)
    except KeyboardInterrupt:
        run.end()
        for thread in threads:
            thread.join()
        print("\nstopped; what is done is kept, and the same command continues", file=sys.stderr)
        return 130
    if run.stop.is_set():
        return 1
    found = rows(run)
    print(compare.table(found))
    if args.only or args.seed is not None:
        return 0
    document = {
        **compare.origin(__doc__), "tier": args.tier,
        "not_done": len(wanted) - len(found), "summary": compare.summary(found),
    }  # fmt: skip
    if not args.cases_only:
        document["trainer"] = trainer.rows(lambda text: print(text, file=sys.stderr, flush=True))
        document["pytest_gpu"] = pytest_on_card()
        print(*map(compare.told, document["trainer"]), document["pytest_gpu"], sep="\n")
    out = args.out or RESULTS / ("cuda_build.json" if args.tier == "default" else f"cuda_build_{args.tier}.json")
    out.write_text(json.dumps({**document, "rows": found}, indent=1) + "\n", "utf-8")
    print(f"wrote {out}")
    return 0


def _quietly(work: Any, run: Run) -> None:
    try:
        work()
    except Stopped:
        pass
    except Exception as error:
        print(f"\n{type(error).__name__}: {error}", file=sys.stderr)
        run.end()


if __name__ == "__main__":
    sys.exit(main())
