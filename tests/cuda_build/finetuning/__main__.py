"""Fine-tuning on PyTorch's real CUDA build, on a card that computes nothing, against traces and estimates.

    python -m tests.cuda_build.finetuning [--only TEXT] [--again] [--kept] [--estimates]

Every case is a script in a process of its own (run.py): transformers' Trainer, peft, bitsandbytes. What is done is
kept case by case in build/cuda-truth/. Writes benchmarks/results/cuda_build_finetuning.json.
"""

import argparse
import contextlib
import gzip
import hashlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from foretrain.config.hub.source import facts_of
from foretrain.predict.allocator.replay import replay
from foretrain.predict.finetune.memory import estimated
from foretrain.predict.finetune.plan import resolved
from foretrain.predict.trace import interpreter, service
from foretrain.predict.trace.finetune.request import FineTuneRequest
from foretrain.predict.trace.service import TraceUnavailable
from tests.cuda_build.compare import BYTES, card, origin, spread, told
from tests.cuda_build.environment import HOME, PYTHON, EnvironmentError, driver_digest, make, on_the_card
from tests.cuda_build.finetuning.cases import Case, cases
from tests.cuda_build.grid import REPO
from tests.kit.finetune import source_of

RESULT = REPO / "benchmarks" / "results" / "cuda_build_finetuning.json"
TRACES_A_BATCH = 8
SECONDS = 1800  # a case that takes longer is ended
COPIES_MIB = "1"  # larger ones are dropped: no value of a weight decides anything
NOT_THE_RUN = ("build",)  # a phase of the watch before anything is there
Row = dict[str, Any]


def request(case: Case) -> FineTuneRequest:
    return FineTuneRequest(source_of(case.config, case.model), case.tune, card())


def job(case: Case) -> dict[str, Any]:
    """As run.py reads it, without the place of its answer."""
    tune = case.tune.model_dump(mode="json")
    return {"config": case.config, "small": case.short, "tune": tune, "moved": case.moved}


def kept(case: Case) -> Path:
    here = Path(__file__).parent
    files = [
        here / "run.py",
        *([here / "sft.py"] if case.tune.loop == "trl" else []),
        here.parent / "measure.py",
        here.parent / "branches.py",
    ]
    what = [job(case), driver_digest(), interpreter.now().versions(), *(path.read_text("utf-8") for path in files)]
    key = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:24]
    return HOME / "finetuned" / f"{key}.json.gz"


def measured(case: Case) -> dict[str, Any]:
    """What the card counted, from a process of its own where it is not kept."""
    out = kept(case)
    if not out.exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**job(case), "out": str(out)})
        words = [str(PYTHON), "-m", "tests.cuda_build.finetuning.run"]
        environment = on_the_card(FAKECUDA_COPY_MIB=COPIES_MIB)
        with (HOME / "finetuning.log").open("ab") as log:
            try:
                code = subprocess.run(
                    words, input=text.encode(), stdout=log, stderr=log, env=environment, cwd=REPO, timeout=SECONDS
                ).returncode
            except subprocess.TimeoutExpired:
                return {"error": f"it took more than {SECONDS} s"}
        if not out.exists():
            return {"error": f"the process ended with {code}"}
    return json.loads(gzip.decompress(out.read_bytes()))


def row(case: Case) -> Row:
    found: Row = {"name": case.name, "kind": case.kind, "model": case.model, "options": case.options}
    answers: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: answers.append(measured(case)))
    thread.start()  # on one core; the trace has the other
    try:
        trace = service.traces([request(case)])[0]
    except TraceUnavailable as error:
        return {**found, "error": f"not traced: {error}"}
    finally:
        thread.join()
    real = answers[0]
    if "error" in real:
        return {**found, "error": real["error"]}
    branches = [each for each in real["branches"] if not _harmless(each)]
    if branches:
        return {**found, "error": f"not a real step: {branches[0]}", "branches": branches}
    traced = {phase.phase: phase for phase in replay(trace).phases}
    guessed = {phase.phase: phase for phase in _estimate(case)}
    found["seconds"] = real["seconds"]
    found["phases"] = {
        name: {what: _three(phase[what], traced.get(name), guessed.get(name), what) for what in BYTES}
        for name, phase in real["phases"].items()
        if name not in NOT_THE_RUN
    }
    return {**found, **highest_of(found["phases"])}


def highest_of(phases_of: dict[str, Any]) -> Row:
    found: Row = {}
    for what in BYTES:
        phases = [phase[what] for phase in phases_of.values()]
        highest = {who: max(phase[who] or 0 for phase in phases) for who in ("real", "traced", "estimated")}
        found[what] = {
            **highest, "trace_error": highest["traced"] / highest["real"] - 1,
            "estimate_error": highest["estimated"] / highest["real"] - 1 if highest["estimated"] else None,
            # of all phases, of those that have anything
            "trace_worst_phase": max(((p["traced"] or 0) / p["real"] - 1 for p in phases if p["real"]), key=abs),
        }  # fmt: skip
    return found


def estimated_again(each: Row, case: Case) -> Row:
    """A row with the estimate of today; what was measured and traced stays."""
    if "error" in each:
        return each
    guessed = {phase.phase: phase for phase in _estimate(case)}
    phases = {
        name: {what: {**phase[what], "estimated": getattr(guessed.get(name), what, None)} for what in BYTES}
        for name, phase in each["phases"].items()
    }
    return {**each, "phases": phases, **highest_of(phases)}


def _harmless(branch: str) -> bool:
    """Whether a difference decides no branch: a CPU scales no gradients, and the Trainer asks for numbers to log them."""
    scaled = "grad_scaler.py" in branch and branch.endswith("a CPU never asked")
    return scaled or (branch.startswith("transformers/trainer.py") and branch.endswith("a CPU finite"))


def _three(real: int, traced: Any, guessed: Any, what: str) -> dict[str, int | None]:
    """A phase's bytes; None where the other side has no such phase."""
    return {
        "real": real, "traced": getattr(traced, what) if traced else None,
        "estimated": getattr(guessed, what) if guessed else None,
    }  # fmt: skip


def _estimate(case: Case) -> Any:
    facts = facts_of(case.config, case.model)
    if facts is None:
        return ()
    return estimated(facts, resolved(source_of(case.config, case.model), case.tune, card()), card()).memory.phases


def summary(rows: list[Row]) -> dict[str, Any]:
    """By kind of case: how many, and how far trace and estimate lie from what the card counted."""
    found: dict[str, Any] = {}
    for kind in dict.fromkeys(each["kind"] for each in rows):
        mine = [each for each in rows if each["kind"] == kind]
        good = [each for each in mine if "error" not in each]
        found[kind] = {"cases": len(mine), "failed": len(mine) - len(good)}
        for what in BYTES:
            for who in ("trace_error", "trace_worst_phase", "estimate_error"):
                errors = [each[what][who] for each in good if each[what][who] is not None]
                if errors:
                    found[kind][f"{what} {who}"] = {**spread(errors), "exact": sum(e == 0 for e in errors)}
    return found


def main() -> int:
    """Measure, compare, and write what was found. Exit code 0, 1 where a case failed, 4 without the environment."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="TEXT", help="only cases that have this in their name; nothing is written")
    parser.add_argument("--again", action="store_true", help="measure again what is kept")
    parser.add_argument("--kept", action="store_true", help="only cases that were measured before; all that is written")
    parser.add_argument(
        "--estimates", action="store_true", help="only the estimates of what is written; no environment"
    )
    args = parser.parse_args()
    if args.estimates:
        document = json.loads(RESULT.read_text("utf-8"))
        by_name = {case.name: case for case in cases()}
        rows = [estimated_again(each, by_name[each["name"]]) for each in document["rows"]]
        write(document | {"summary": summary(rows), "rows": rows})
        return 0
    os.environ["FORETRAIN_CACHE"] = str(HOME / "cache")
    wanted = [case for case in cases() if not args.only or args.only in case.name]
    try:
        make(lambda text: print(text, file=sys.stderr, flush=True), finetuning=True)
    except EnvironmentError as error:
        print(error, file=sys.stderr)
        return 4
    all_cases = len(wanted)
    if args.kept:
        wanted = [case for case in wanted if kept(case).exists()]
    rows = []
    for i, case in enumerate(wanted):
        if args.again:
            kept(case).unlink(missing_ok=True)
        if i % TRACES_A_BATCH == 0:  # so many in one process; a case whose trace fails says so below
            with contextlib.suppress(TraceUnavailable):
                service.traces([request(each) for each in wanted[i : i + TRACES_A_BATCH]])
        rows.append(row(case))
        print(told(rows[-1], "trace_error"), flush=True)
    failed = sum("error" in each for each in rows)
    if not args.only:
        document = {
            **origin(__doc__, interpreter.now().versions()),
            "not_done": all_cases - len(wanted), "summary": summary(rows), "rows": rows,
        }  # fmt: skip
        write(document)
    return 1 if failed else 0


def write(document: dict[str, Any]) -> None:
    RESULT.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    print(f"wrote {RESULT}")


if __name__ == "__main__":
    sys.exit(main())
