"""Which tests are long, and which are slow: those that `long_tests.txt` and `slow_tests.txt` name.

`pytest` alone leaves both out and takes four minutes on two cores. `make long`, which CI runs too, takes the long ones
in ten minutes of processor time. `make slow` takes the slow ones before a release, and the workflow of versions once a
week. The quickest case of a test may take longer than the others, so that the test stays: in `pytest` alone if there
are several, in `make long` also if it is the only one. The lists are made of what a run measured:

    python -m pytest -m "not gpu and (long or not slow)" --durations=0 --durations-min=0.01 > durations.txt
    python -m tests.long_tests durations.txt

A new or renamed test counts as short until you make the lists again.
"""

import argparse
import re
from collections import Counter
from functools import cache
from pathlib import Path

LIMITS_S = {"long": (0.3, 1.2), "slow": (0.7, 2.5)}  # of each case, and of the quickest one
LINE = re.compile(r"^([0-9.]+)s (?:call|setup|teardown) +(tests/\S.*)$", re.MULTILINE)


def list_of(mark: str) -> Path:
    return Path(__file__).with_name(f"{mark}_tests.txt")


@cache
def listed(mark: str) -> frozenset[str]:
    return frozenset(list_of(mark).read_text("utf-8").splitlines())


def found(durations: str, mark: str) -> list[str]:
    """The ids of the tests that are long or slow by pytest's report, sorted."""
    over_s, quickest_s = LIMITS_S[mark]
    seconds = Counter[str]()
    for took, name in LINE.findall(durations):
        seconds[name] += float(took)
    cases: dict[str, list[str]] = {}
    for name in seconds:
        cases.setdefault(name.partition("[")[0], []).append(name)
    quickest = {min(names, key=seconds.__getitem__) for names in cases.values() if len(names) > 1 or mark == "slow"}
    return sorted(name for name, took in seconds.items() if took > (quickest_s if name in quickest else over_s))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("durations", type=Path, help="what pytest printed")
    durations = parser.parse_args().durations.read_text("utf-8")
    slow = found(durations, "slow")
    for mark, names in (("slow", slow), ("long", sorted({*found(durations, "long")} - {*slow}))):
        list_of(mark).write_text("".join(f"{name}\n" for name in names), "utf-8")
        print(f"{len(names)} tests in {list_of(mark)}")  # noqa: T201


if __name__ == "__main__":
    main()
