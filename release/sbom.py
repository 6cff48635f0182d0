"""Writes what an installation of the wheel consists of, as a CycloneDX bill of materials.

    python release/sbom.py dist --out sbom/foretrain.cdx.json      needs cyclonedx-bom (release/requirements.txt)

The wheel is installed into a fresh virtual environment, and that environment is read: versions as an index gives them
on this day. The extras are not in it.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
SKIPPED = ("pip", "setuptools")  # of the environment itself


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path, help="the wheel, or a folder that holds one")
    parser.add_argument("--out", type=Path, required=True, help="the file to write")
    options = parser.parse_args()
    wheel = next(options.wheel.glob("*.whl")) if options.wheel.is_dir() else options.wheel
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        python = str(Path(folder) / ("Scripts/python.exe" if os.name == "nt" else "bin/python"))
        subprocess.run([python, "-m", "pip", "install", "--quiet", str(wheel)], check=True)
        subprocess.run([python, "-m", "pip", "uninstall", "--quiet", "--yes", *SKIPPED], check=True)
        command = [sys.executable, "-m", "cyclonedx_py", "environment", "--pyproject", str(ROOT / "pyproject.toml")]
        command += ["--output-reproducible", "--output-format", "JSON", python]
        made = subprocess.check_output(command, text=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(made, "utf-8")
    print(f"{len(json.loads(made)['components'])} components in {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
