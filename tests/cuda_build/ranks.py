"""Several ranks on PyTorch's real CUDA build, on cards that compute nothing, against traces of each rank.

    python -m tests.cuda_build.ranks [--only TEXT] [--again]

Every rank is a process with a card of its own, in a real NCCL group whose library does nothing. Each also runs small on
the CPU, in a gloo group, where values are real; the host must take the same branches. What is done is kept case by case
in build/cuda-truth/. Writes benchmarks/results/cuda_build_ranks.json.
"""

import argparse
import gzip
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from foretrain.config.options import RunConfig
from foretrain.config.sharing import Sharing
from foretrain.predict.allocator.replay import replay
from foretrain.predict.memory import estimated
from foretrain.predict.spec import StepSpec
from foretrain.predict.trace import service
from foretrain.predict.trace.service import Request, TraceUnavailable
from tests.cuda_build.__main__ import measuring_code
from tests.cuda_build.compare import BYTES, card, origin, spread, told
from tests.cuda_build.environment import HOME, PYTHON, EnvironmentError, make, on_the_card
from tests.cuda_build.grid import LLAMA, REPO

RESULT = REPO / "benchmarks" / "results" / "cuda_build_ranks.json"
SECONDS = 900  # a case that takes longer is ended
WATCHDOG_SECONDS = 0.1  # torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp, kWatchdogThreadSleepMillis
ALLOCATED_LIMIT, RESERVED_LIMIT = 0.005, 0.03  # beyond these a case fails
Row = dict[str, Any]


class Case(NamedTuple):
    """A run, how it is shared, and which of its ranks is looked at. `keeps`: no time passes between two steps, so that
    NCCL still has the first bucket when DDP makes the next ones."""

    name: str
    settings: dict[str, Any]
    dtype: str
    sharing: Sharing
    rank: int
    keeps: bool


MODELS: dict[str, dict[str, Any]] = {
    "GPT-2": {
        "n_layer": 4, "n_head": 4, "n_embd": 256, "block_size": 256, "batch_size": 4, "vocab_size": 4097, "bias": True,
    },
    "Llama": {**LLAMA, "n_layer": 4},
}  # fmt: skip
WAYS = {
    "DDP": Sharing("ddp", 2, 2),
    "DDP without views": Sharing("ddp", 2, 2, bucket_view=False),
    "ZeRO-1": Sharing("zero1", 2, 2),
    "FSDP2": Sharing("fsdp", 2, 2),
    "FSDP2 not resharded": Sharing("fsdp_no_reshard", 2, 2),
    "FSDP2 held back": Sharing("fsdp", 2, 2, syncs_each=False),
}
OTHERS = [
    *(("GPT-2 124M", {"batch_size": 8, "gradient_accumulation_steps": 4}, "bfloat16", way) for way in ("DDP", "FSDP2")),
    *(("Llama", {**MODELS["Llama"], "gradient_accumulation_steps": 2}, "float32", way) for way in ("DDP", "FSDP2")),
    *(("Llama", {**MODELS["Llama"], "gradient_accumulation_steps": 2}, "float16", way) for way in ("DDP", "FSDP2")),
]
KEEPING = ("DDP", "ZeRO-1")
FOUR = Sharing("hsdp", 4, 2)


def cases() -> list[Case]:
    """Both families and accumulations, every way; then other dtypes and sizes, and four ranks on two nodes."""
    runs = [
        (model, {**settings, "gradient_accumulation_steps": accumulation}, "bfloat16", way)
        for model, settings in MODELS.items()
        for accumulation in (1, 4)
        for way in WAYS
    ]
    found = [(model, settings, dtype, way, WAYS[way], False) for model, settings, dtype, way in [*runs, *OTHERS]]
    for model, settings, dtype, way in runs:
        if way in KEEPING:
            found.append((model, settings, dtype, f"{way}, bucket kept", WAYS[way], True))
    four = {**MODELS["GPT-2"], "gradient_accumulation_steps": 2}
    found.append(("GPT-2", four, "bfloat16", "HSDP of 2 x 2", FOUR, False))
    return [
        Case(
            f"{way}, {model}, {dtype}, accumulation {settings['gradient_accumulation_steps']}, rank {rank}",
            settings,
            dtype,
            sharing,
            rank,
            keeps,
        )
        for model, settings, dtype, way, sharing, keeps in found
        for rank in (0, sharing.world - 1)
    ]


def spec_of(case: Case) -> StepSpec:
    config = RunConfig(**{**case.settings, "compile": False})
    return StepSpec.of(config, card(), dtype=case.dtype, compiled=False, sharing=case.sharing)  # type: ignore[arg-type]


def requests(case: Case) -> list[Request]:
    """The traces that predict a case. Whether NCCL kept a bucket is a matter of milliseconds where it was to keep it."""
    return [
        Request(spec_of(case), rank=case.rank, keeps=keeps) for keeps in ((True, False) if case.keeps else (False,))
    ]


def kept(case: Case) -> Path:
    what = [case.settings, case.dtype, asdict(case.sharing), case.keeps, measuring_code(Path(__file__))]
    key = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:24]
    return HOME / "ranks" / f"{key}-{case.rank}.json.gz"


# -- in the CUDA build -------------------------------------------------------------------------------------


def host() -> None:
    """Runs on standard input, one a line; the ranks of each are forks of this process, all at once."""
    import torch.distributed.fsdp  # noqa: F401  # torch, once for all of them

    for line in sys.stdin:
        job = json.loads(line)
        with tempfile.TemporaryDirectory() as folder:
            children = [_forked(job, rank, folder) for rank in range(job["sharing"]["world"])]
            for child in children:
                os.waitpid(child, 0)
        print(job["name"], flush=True)


def _forked(job: dict[str, Any], rank: int, folder: str) -> int:
    child = os.fork()
    if child:
        return child
    import resource
    import traceback

    from tests.cuda_build.measure import PROCESSOR_SECONDS, write

    try:
        resource.setrlimit(resource.RLIMIT_CPU, (PROCESSOR_SECONDS, PROCESSOR_SECONDS))
        try:
            found = measure(job, rank, folder)
        except Exception as error:
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {str(error)[:400]}"}
        if out := job["outs"].get(str(rank)):
            write(Path(out), found)
    finally:
        os._exit(0)


def measure(job: dict[str, Any], rank: int, folder: str) -> dict[str, Any]:
    """A rank of a case, on its card and then small on the CPU. Raises what the run raises."""
    import torch
    import torch.distributed as dist

    from foretrain.model.parallel import Share
    from foretrain.predict.trace import drive
    from tests.cuda_build import measure as one
    from tests.cuda_build.branches import differences
    from tests.cuda_build.grid import shrunk

    class Watch(one.Watch):
        """Passes take no time on this card. On another one they take longer than NCCL's watchdog sleeps."""

        def enter(self, phase: str) -> None:
            if not job["keeps"]:
                time.sleep(3 * WATCHDOG_SECONDS)
            super().enter(phase)

    backward = torch.Tensor.backward

    def late(*args: Any, **kwargs: Any) -> None:
        if job["keeps"]:
            time.sleep(3 * WATCHDOG_SECONDS)
        backward(*args, **kwargs)

    torch.Tensor.backward = late  # type: ignore[method-assign]
    sharing = Sharing(**job["sharing"])
    drive.MICRO_STEPS = 1_000_000  # a trace stops at three; a run does all of them

    def run(backend: str, settings: dict[str, Any], device: str, watch: one.Watch) -> dict[str, Any]:
        store = dist.FileStore(f"{folder}/{backend}", sharing.world)
        dist.init_process_group(backend, store=store, rank=rank, world_size=sharing.world)
        try:
            return one.run(job, settings, device, watch, compiled=False, share=Share(sharing)).record()
        finally:
            dist.destroy_process_group()

    torch.cuda.set_device(rank)
    torch.cuda.memory._record_memory_history(context=None, max_entries=one.MOST_ENTRIES)
    watch = Watch()
    branches = run("nccl", job["knobs"], "cuda", watch)
    watch.close()
    entries = torch.cuda.memory._snapshot()["device_traces"][rank]
    torch.cuda.memory._record_memory_history(enabled=None)
    with one.no_overflow():
        real = run("gloo", shrunk(job["knobs"]), "cpu", one.Still())
    return {
        "phases": watch.phases, "marks": watch.marks, **one.history(entries), "branches": differences(branches, real),
    }  # fmt: skip


# -- compared ----------------------------------------------------------------------------------------------


def measured(wanted: Sequence[Case]) -> None:
    waiting: dict[str, dict[str, Any]] = {}
    for case in wanted:
        if not kept(case).exists():
            run = case.name.rpartition(", rank")[0]
            job = {
                "name": run, "knobs": case.settings, "dtype": case.dtype, "step": "foretrain",
                "sharing": asdict(case.sharing), "keeps": case.keeps, "outs": {},
            }  # fmt: skip
            waiting.setdefault(run, job)["outs"][str(case.rank)] = str(kept(case))
    if not waiting:
        return
    (HOME / "ranks").mkdir(parents=True, exist_ok=True)
    most = max(job["sharing"]["world"] for job in waiting.values())
    with (HOME / "ranks.log").open("wb") as log:
        subprocess.run(
            [PYTHON, "-m", "tests.cuda_build.ranks", "--child"],
            input="".join(json.dumps(job) + "\n" for job in waiting.values()),
            env=on_the_card(FAKECUDA_DEVICES=str(most)), cwd=REPO, text=True, stdout=sys.stderr, stderr=log,
            timeout=SECONDS * len(waiting),
        )  # fmt: skip


def row(case: Case) -> Row:
    found: Row = {"name": case.name}
    try:
        real = json.loads(gzip.decompress(kept(case).read_bytes()))
    except (OSError, EOFError, ValueError):
        return {**found, "error": f"not measured; {HOME / 'ranks.log'} says why"}
    if "error" in real:
        return {**found, "error": real["error"]}
    branches = [each for each in real["branches"] if not _harmless(each, case)]
    if branches:
        return {**found, "error": f"not a real step: {branches[0]}", "branches": branches}
    try:
        answers = [{p.phase: p for p in replay(trace).phases} for trace in service.traces(requests(case))]
    except TraceUnavailable as error:
        return {**found, "error": f"not traced: {error}"}
    ran = {name: phase for name, phase in real["phases"].items() if name in answers[0]}
    traced = min(
        answers, key=lambda each: max(abs(each[name].allocated_bytes - ran[name]["allocated_bytes"]) for name in ran)
    )
    if case.keeps:
        found["kept"] = traced is answers[0]
    for what in BYTES:
        highest = max(phase[what] for phase in ran.values())
        predicted = max(getattr(traced[name], what) for name in ran)
        found[what] = {
            "real": highest, "traced": predicted, "error": predicted / highest - 1,
            "worst_phase": max((getattr(traced[name], what) / ran[name][what] - 1 for name in ran), key=abs),
        }  # fmt: skip
    return with_estimate(found, case)


def with_estimate(each: Row, case: Case) -> Row:
    """A row with the estimate of today, of the rank with the most to hold; what was measured and traced stays."""
    if "error" in each:
        return each
    memory = estimated(spec_of(case), keeps=each.get("kept", False)).memory
    found = dict(each)
    for what in BYTES:
        guessed = max(getattr(phase, what) or 0 for phase in memory.phases if phase.phase != "resume")
        found[what] = {**each[what], "estimated": guessed, "estimate_error": guessed / each[what]["real"] - 1}
    return found


def _harmless(branch: str, case: Case) -> bool:
    """Whether a difference decides nothing: ZeRO-1 deals other numbers of weights where they have other sizes, and a CPU
    scales no gradients."""
    dealt = case.sharing.strategy == "zero1" and branch.startswith("parameters that a step left")
    return dealt or ("grad_scaler.py" in branch and branch.endswith("a CPU never asked"))


def fails(each: Row) -> bool:
    limits = zip(BYTES, (ALLOCATED_LIMIT, RESERVED_LIMIT), strict=True)
    return "error" in each or any(abs(each[what]["error"]) > limit for what, limit in limits)


def main() -> int:
    """Measure, compare, and write what was found. Exit code 0, 1 where a case failed, 4 without the environment."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="TEXT", help="only cases that have this in their name; nothing is written")
    parser.add_argument("--estimates", action="store_true", help="only the estimates of what is written")
    parser.add_argument("--again", action="store_true", help="measure again what is kept")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        host()
        return 0
    if args.estimates:
        document = json.loads(RESULT.read_text("utf-8"))
        by_name = {case.name: case for case in cases()}
        write(document, [with_estimate(each, by_name[each["name"]]) for each in document["rows"]])
        return 0
    os.environ["FORETRAIN_CACHE"] = str(HOME / "cache")  # the traces of this harness are its own
    wanted = [case for case in cases() if not args.only or args.only in case.name]
    try:
        make(lambda text: print(text, file=sys.stderr, flush=True))
    except EnvironmentError as error:
        print(error, file=sys.stderr)
        return 4
    if args.again:
        for case in wanted:
            kept(case).unlink(missing_ok=True)
    measured(wanted)
    try:
        service.traces(
            [request for case in wanted for request in requests(case)]
        )  # all in one process; one that fails says so below
    except TraceUnavailable as error:
        print(error, file=sys.stderr)
    rows = [row(case) for case in wanted]
    print("\n".join(map(told, rows)))
    if not args.only:
        write(origin(__doc__), rows)
    return int(any(map(fails, rows)))


def write(document: dict[str, Any], rows: list[Row]) -> None:
    good = [each for each in rows if "error" not in each]
    found = {
        "cases": len(rows), "failed": sum(map(fails, rows)), "buckets_kept": sum(each.get("kept", False) for each in rows),
        "summary": {
            f"{what} {who}": spread([each[what][who] for each in good])
            for what in BYTES for who in ("error", "worst_phase", "estimate_error")
        },
        "rows": rows,
    }  # fmt: skip
    RESULT.write_text(json.dumps({**document, **found}, indent=1) + "\n", "utf-8")
    print(f"wrote {RESULT}")


if __name__ == "__main__":
    sys.exit(main())
