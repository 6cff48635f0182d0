"""Make the estimates of the recorded cases again: what was measured and traced stays as it was recorded.

python -m tests.cuda_build.estimates            (seconds; needs no CUDA build)
"""

import json
import sys
from datetime import date
from pathlib import Path

from . import compare

RECORDED = Path(__file__).parents[2] / "benchmarks" / "results" / "cuda_build_large.json"


def main() -> int:
    document = json.loads(RECORDED.read_text("utf-8"))
    for row in document["rows"]:
        if "error" not in row:
            row.update(compare.estimates(row))
    document["estimated"] = date.today().isoformat()
    document["summary"] = compare.summary(document["rows"])
    RECORDED.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    print(compare.table(document["rows"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
