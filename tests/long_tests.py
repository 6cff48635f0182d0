"""Which tests are long: those that `long_tests.txt` names take a third of a second to a minute each, and most of all the time.

`pytest` alone leaves them out and is done in four minutes on two cores; `make long` runs them, and so does CI. Of a test whose every
case is long, the quickest case stays. The list is made of what a run measured:

    python -m pytest -m "not slow and not gpu" --durations=0 --durations-min=0.01 > durations.txt
    python -m tests.long_tests durations.txt --over 0.3

A new or renamed test counts as short until you make the list again.
"""

import argparse
import re
from collections import Counter
from functools import cache
from pathlib import Path

LIST = Path(__file__).with_name("long_tests.txt")
LINE = re.compile(r"^([0-9.]+)s (?:call|setup|teardown) +(tests/\S.*)$", re.MULTILINE)
STAYS = 4  # times as long as other short tests the quickest case of a test may take


@cache
def listed() -> frozenset[str]:
    """The ids of all long tests."""
    return frozenset(LIST.read_text("utf-8").splitlines())


def found(durations: str, over_s: float) -> list[str]:
    """The ids of the tests that took longer than `over_s` seconds in pytest's report, sorted."""
    seconds = Counter[str]()
    for took, name in LINE.findall(durations):
        seconds[name] += float(took)
    cases: dict[str, list[str]] = {}
    for name in seconds:
        cases.setdefault(name.partition("[")[0], []).append(name)
    quickest = {min(names, key=seconds.__getitem__) for names in cases.values() if len(names) > 1}
    return sorted(
        name for name, took in seconds.items() if took > over_s and (name not in quickest or took > STAYS * over_s)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("durations", type=Path, help="what pytest printed")
    parser.add_argument("--over", type=float, default=0.3, metavar="SECONDS", help="which are long: 0.3 by default")
    args = parser.parse_args()
    names = found(args.durations.read_text("utf-8"), args.over)
    LIST.write_text("".join(f"{name}\n" for name in names), "utf-8")
    print(f"{len(names)} long tests in {LIST}")  # noqa: T201


if __name__ == "__main__":
    main()
