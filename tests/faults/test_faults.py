"""A few of each fault in every run of the suite; `make faults` has hundreds, `make faults-long` thousands."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.faults.__main__ import TIERS
from tests.kit.command import REPO


def test_a_few_of_each_fault(own_directory: Path) -> None:
    """In a process of its own: the fork-server must have no threads."""
    result = subprocess.run(
        [sys.executable, "-m", "tests.faults", "--tier", "suite"], capture_output=True, text=True, check=False, cwd=REPO,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(own_directory)},
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads(result.stdout)
    assert set(found) == set(TIERS["suite"])
    assert found["kills"]["kills"] >= TIERS["suite"]["kills"]
    assert found["kills"]["equal"] == found["kills"]["runs"] >= 2
    assert found["bit_flips"]["found"] == TIERS["suite"]["bit_flips"]


def test_every_tier_has_more_of_each() -> None:
    for name, count in TIERS["suite"].items():
        assert count <= TIERS["pr"][name] <= TIERS["nightly"][name]
