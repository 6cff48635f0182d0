"""What the static site is built from and is not ours: Pyodide (npm) and a few wheels (pip), pinned by digest, kept."""

import hashlib
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

HERE = Path(__file__).parent
# Pyodide 314 is Python 3.14, with the ABI that pydantic-core's wheels are built for (PEP 783).
PYODIDE, PYODIDE_SHA256 = "314.0.7", "66b7949e5a0cba2250b586d7e368bf12fb482800748d182c4618254b685ffaa0"
PYTHON, ABI, PLATFORM = "3.14", "cp314", "pyemscripten_2026_0_wasm32"
PYTHON_ONLY = "win_amd64"  # of wheels whose Python files alone are used
PYODIDE_FILES = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")


class CannotFetch(RuntimeError):
    """Something that the site needs cannot be had here; the sentence says what, and why."""


def pyodide(cache: Path) -> Path:
    """The npm package, unpacked: its folder. Raises CannotFetch."""
    archive, folder = cache / f"pyodide-{PYODIDE}.tgz", cache / f"pyodide-{PYODIDE}"
    if not archive.is_file() or _digest(archive) != PYODIDE_SHA256:
        _run(["npm", "pack", "--silent", f"pyodide@{PYODIDE}", "--pack-destination", str(cache)], f"pyodide {PYODIDE}")
        if _digest(archive) != PYODIDE_SHA256:
            raise CannotFetch(f"{archive.name} is not the file that was pinned (SHA-256 {_digest(archive)})")
    if not all((folder / name).is_file() for name in PYODIDE_FILES):
        with tarfile.open(archive) as packed:
            for member in packed.getmembers():
                if member.isfile() and (name := Path(member.name).name) in PYODIDE_FILES:
                    folder.mkdir(exist_ok=True)
                    (folder / name).write_bytes(packed.extractfile(member).read())  # type: ignore[union-attr]
    return folder


def wheels(cache: Path) -> list[Path]:
    """The wheels of requirements.txt, which pip holds to their digests. Raises CannotFetch."""
    folder = cache / "wheels"
    wanted = _pins()
    found = {_digest(path): path for path in folder.glob("*.whl")}
    if not set(wanted) <= set(found):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--only-binary=:all:", "--require-hashes", "--implementation", "cp", "--python-version", PYTHON]
        command += ["--abi", ABI, "--platform", PLATFORM, "--platform", PYTHON_ONLY, "--dest", str(folder)]
        _run([*command, "--requirement", str(HERE / "requirements.txt")], "the wheels of requirements.txt")
        found = {_digest(path): path for path in folder.glob("*.whl")}
    return [found[digest] for digest in wanted]


def licences(wheel: Path) -> str:
    """The texts of the licences that a wheel carries."""
    with zipfile.ZipFile(wheel) as packed:
        names = [name for name in packed.namelist() if ".dist-info/licenses/" in name and not name.endswith("/")]
        return "\n".join(packed.read(name).decode("utf-8") for name in names)


def _pins() -> list[str]:
    lines = (HERE / "requirements.txt").read_text("utf-8").splitlines()
    return [line.partition("--hash=sha256:")[2].strip() for line in lines if "--hash" in line]


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "none"


def _run(command: list[str], what: str) -> None:
    """A download by the registry's own client. Raises CannotFetch."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotFetch(f"{what} cannot be fetched: {error}") from None
    if result.returncode:
        last = [line for line in result.stderr.splitlines() if "error" in line.lower()]
        raise CannotFetch(f"{what} cannot be fetched: {(last or ['no reason given'])[-1].strip()[:300]}")
