"""The committed results of benchmarks, which the generated parts of the docs are made of."""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def result(name: str) -> dict[str, Any]:
    """benchmarks/results/NAME.json."""
    return json.loads((RESULTS / f"{name}.json").read_text("utf-8"))
