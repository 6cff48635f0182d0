"""The committed results of benchmarks, which the generated parts of the docs are made of."""

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"


def result(name: str) -> dict[str, Any]:
    """benchmarks/results/NAME.json."""
    return json.loads((RESULTS / f"{name}.json").read_text("utf-8"))
