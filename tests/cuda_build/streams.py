"""Random programs on one to four streams, in PyTorch's CUDA build and in the simulator, byte for byte.

    python -m tests.cuda_build.streams [--programs 40] [--length 400] [--streams N] [--first SEED] [--write]

Allocated, active and reserved bytes after every event, and every size that the driver was asked for in its order. It
needs the environment that `make cuda-truth` makes. `--write` keeps the measured programs in tests/data/streams.json,
to which the fast suite holds the simulator without the CUDA build; those there were made with
`--programs 8 --length 160 --streams 3 --first 100 --write`.
"""

import argparse
import json
import subprocess
import sys
from dataclasses import asdict
from typing import Any

from foretrain.base.units import MIB
from foretrain.predict.snapshot import SEGMENT_KINDS
from tests.cuda_build.environment import CARD_MEMORY_MIB, PYTHON, on_the_card
from tests.cuda_build.grid import REPO
from tests.kit.stream_programs import WAYS, Event, Program, differences, random_program, run, simulate

KEPT = REPO / "tests" / "data" / "streams.json"


def measure(program: Program) -> dict[str, Any]:
    """The program in this process, whose allocator is as fresh as it ever was. Runs in the CUDA build."""
    import torch

    torch.cuda.init()
    torch.cuda.empty_cache()
    free_bytes, memory_bytes = torch.cuda.mem_get_info()
    if program.fraction < 1:
        torch.cuda.set_per_process_memory_fraction(program.fraction, 0)
    # Free blocks are kept in the order of the streams' handles, so that is the order of our numbers.
    sides = sorted((torch.cuda.Stream() for _ in range(3)), key=lambda stream: stream.cuda_stream)
    streams = [torch.cuda.default_stream(), *sides]
    tensors: dict[int, torch.Tensor] = {}

    def do(event: Event) -> bool:
        kind, id, number = event
        if kind == "alloc":
            try:
                tensors[id] = torch.empty(number, dtype=torch.uint8, device="cuda")
            except torch.cuda.OutOfMemoryError:
                return False
        elif kind == "free":
            del tensors[id]
        elif kind == "record_stream":
            tensors[id].record_stream(streams[number])
        elif kind == "stream":
            torch.cuda.set_stream(streams[id])
        else:
            torch.cuda.empty_cache()
        return True

    def counts() -> tuple[int, int, int]:
        stats = torch.cuda.memory_stats()
        names = ("allocated_bytes", "active_bytes", "reserved_bytes")
        allocated, active, reserved = (stats[f"{name}.all.current"] for name in names)
        return allocated, active, reserved

    torch.cuda.reset_accumulated_memory_stats()
    torch.cuda.memory._record_memory_history(context=None)
    outcome = run(program, do, counts)
    snapshot: dict[str, Any] = dict(torch.cuda.memory._snapshot())
    history = snapshot["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    found = [(SEGMENT_KINDS[each["action"]], each["size"]) for each in history if each["action"] in SEGMENT_KINDS]
    outcome.segments, outcome.retries = found, torch.cuda.memory_stats()["num_alloc_retries"]
    tensors.clear()
    torch.cuda.set_stream(streams[0])
    torch.cuda.empty_cache()
    return {**asdict(outcome), "memory_bytes": memory_bytes, "free_bytes": free_bytes}


def measured(programs: list[Program]) -> list[dict[str, Any]]:
    """The programs in one process of the CUDA build; all with the same settings, memory and cap."""
    first = programs[0]
    environment = on_the_card(memory_mib=first.memory_mib or CARD_MEMORY_MIB, PYTORCH_CUDA_ALLOC_CONF=first.settings)
    return _on_the_card([], environment, json.dumps([asdict(each) for each in programs]))


def _on_the_card(words: list[str], environment: dict[str, str], text: str = "") -> Any:
    """What this script, as a process of the CUDA build, answers."""
    done = subprocess.run(
        [PYTHON, "-m", "tests.cuda_build.streams", "--child", *words], input=text,
        env=environment, cwd=REPO, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"the CUDA build failed: {done.stderr.strip()[-1500:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measured_step(name: str) -> list[Any]:
    """Allocated and reserved peak of a step, and its segments in MiB. Runs in the CUDA build."""
    import torch

    from tests.kit.stream_steps import STEPS

    torch.cuda.init()
    torch.cuda.memory._record_memory_history(context=None)
    STEPS[name]()
    snapshot: dict[str, Any] = dict(torch.cuda.memory._snapshot())
    sizes = [each["size"] // MIB for each in snapshot["device_traces"][0] if each["action"] == "segment_alloc"]
    return [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), sizes]


def child() -> None:
    """Measures the programs on stdin."""
    programs = [Program(**{**each, "events": [tuple(e) for e in each["events"]]}) for each in json.load(sys.stdin)]
    print(json.dumps([measure(program) for program in programs]))


def _row(program: Program, result: dict[str, Any]) -> tuple[str, list[str]]:
    wrong = differences(simulate(program, result["memory_bytes"], result["free_bytes"]), result)
    numbers = [event[1] for event in program.events if event[0] == "stream"]
    text = (
        f"{len({0, *numbers})} streams, {len(program.events)} events, {len(result['segments'])} segments, "
        f"{result['retries']} retries, {result['refused']} refused: {'; '.join(wrong) or 'the same'}"
    )
    return text, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=40)
    parser.add_argument("--length", type=int, default=400, help="events of each")
    parser.add_argument("--streams", type=int, default=0, help="of each (one to four, in turn)")
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    parser.add_argument("--write", action="store_true", help=f"keep them in {KEPT.relative_to(REPO)}")
    parser.add_argument(
        "--step",
        metavar="NAME",
        help="a step of tests/kit/stream_steps.py, as tests/predict/trace/test_streams.py has it",
    )
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measured_step(args.step))) if args.step else child()
        return 0
    if args.step:
        print(_on_the_card(["--step", args.step], on_the_card()))
        return 0
    each_way = -(-args.programs // len(WAYS))
    kept, failed, total = [], 0, 0
    for number, way in enumerate(WAYS):
        seeds = range(args.first + number * each_way, args.first + (number + 1) * each_way)
        programs = [random_program(seed, way, args.length, args.streams or 1 + seed % 4) for seed in seeds]
        for seed, program, result in zip(seeds, programs, measured(programs), strict=True):
            text, wrong = _row(program, result)
            print(f"{way[0] or 'default'}, {way[1] or CARD_MEMORY_MIB} MiB x {way[2]}, seed {seed}: {text}", flush=True)
            kept.append({"program": asdict(program), "measured": result})
            failed += bool(wrong)
            total += 1
    print(f"{total - failed} of {total} programs the same, byte for byte")
    if args.write and not failed:
        lines = ",\n".join(json.dumps(each, separators=(",", ":")) for each in kept)
        KEPT.write_text(f"[\n{lines}\n]\n", "utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
