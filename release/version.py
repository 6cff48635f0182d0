"""Prints the version that pyproject.toml states; with --tag it must be that of the tag, or the exit code is 1.

python release/version.py --tag v0.1.0
"""

import argparse
import sys
import tomllib
from pathlib import Path

PROJECT = Path(__file__).parent.parent / "pyproject.toml"


def version() -> str:
    """The version in pyproject.toml."""
    return tomllib.loads(PROJECT.read_text("utf-8"))["project"]["version"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tag", help="the tag that is released, such as v0.1.0")
    tag = parser.parse_args().tag
    print(version())
    if tag and tag != f"v{version()}":
        print(f"the tag is {tag}, pyproject.toml says {version()}: one of the two is wrong", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
