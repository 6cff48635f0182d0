"""Lists every fault that a test injects: what a user sees, what is safe, and the test.

python -m tests.faults.catalogue
"""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
GROUPS = {
    "B.1": "Memory", "B.2": "Numbers", "B.3": "Disk, process, machine", "B.4": "Data", "B.5": "Configuration", "B.6": "Hostile input",
}  # fmt: skip


def marked() -> list[tuple[str, str, str, str, str]]:
    """Return (group, fault, what is seen, what is safe, the test) of every `pytest.mark.fault`."""
    found = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.parse(path.read_text("utf-8")).body:
            for mark in getattr(node, "decorator_list", []):
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.fault":
                    values = {word.arg: ast.literal_eval(word.value) for word in mark.keywords}
                    name = f"{path.relative_to(ROOT).as_posix()}::{node.name}"  # type: ignore[attr-defined]
                    found.append((values["row"], ast.literal_eval(mark.args[0]), values["sees"], values["safe"], name))
    return sorted(found, key=lambda row: row[0])


if __name__ == "__main__":
    for group, title in GROUPS.items():
        print(title)
        for row, fault, sees, safe, test in marked():
            if row == group:
                print(f"  {fault}\n    you see: {sees}\n    safe: {safe}\n    {test}")
