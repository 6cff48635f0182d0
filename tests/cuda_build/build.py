"""Build the driver for the torch of a Python:  python tests/cuda_build/build.py PYTHON FOLDER

The C files of driver/ are compiled against the headers that come with torch's wheels. Whatever torch's libraries ask
for and no file defines becomes a stub: of driver/stubs.txt, or one that says its name on stderr when it is called.
So a new torch shows what is missing.
"""

import re
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

DRIVER = Path(__file__).parent / "driver"
LIBRARIES = (
    "c10_cuda",
    "torch_cpu",
    "torch_cuda",
    "torch_cuda_linalg",
    "torch_python",
    "torch_nvshmem",
    "caffe2_nvrtc",
)
ASKED = re.compile(r"^(__cuda|cuda[A-Z]|cu[A-Z]|cublas|nvml|nccl)")
OWN_LIBRARIES = re.compile(r"^cu(File|fft)")  # these are the real ones
NOT_SUPPORTED = 801  # cudaErrorNotSupported, and the driver's number for it
LINKS = ("libcuda.so.1", "libcuda.so", "libnvidia-ml.so.1")  # what others load the driver as


class BuildError(RuntimeError):
    """The driver cannot be built; the sentence says why."""


def packages_of(python: Path) -> Path:
    code = "import importlib.util as u; print(u.find_spec('torch').origin)"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True)
    if found.returncode:
        raise BuildError(f"{python} has no torch: {found.stderr.strip().splitlines()[-1]}")
    return Path(found.stdout.strip()).parent.parent


def wanted(packages: Path) -> set[str]:
    """Functions that torch's libraries take from CUDA's, and those that torch asks the driver for by name."""
    libraries = [packages / "torch" / "lib" / f"lib{name}.so" for name in LIBRARIES]
    listed = _output("nm", "-D", "--undefined-only", *(path for path in libraries if path.exists()))
    names = {line.split()[-1].split("@")[0] for line in listed.splitlines() if line.startswith(" ")}
    by_name = (packages / "torch/include/c10/cuda/driver_api.h").read_text()
    asked = {name for name in names if ASKED.match(name) and not OWN_LIBRARIES.match(name)}
    return asked | set(re.findall(r"_\(((?:cu|nvml)\w+)", by_name))


def stub_patterns() -> list[str]:
    lines = (DRIVER / "stubs.txt").read_text().splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def stubs(asked: set[str], defined: set[str], patterns: list[str]) -> tuple[str, list[str]]:
    """C for the functions that no file defines, and the names of those that nobody thought of.

    Names of the table are always made: Triton and others ask for some by name, which no list shows.
    """
    source = ["int fakecuda_missing(const char *name, int answer);"]
    missing: list[str] = []
    table = {name for name in patterns if "*" not in name}
    for name in sorted((asked | table) - defined):
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            source.append(f"int {name}(void) {{ return 0; }}")
        elif not {f"{name}_v2", f"{name}_v3"} & defined:  # asked for by name: the newer version answers
            missing.append(name)
            source.append(f'int {name}(void) {{ return fakecuda_missing("{name}", {NOT_SUPPORTED}); }}')
    return "\n".join(source) + "\n", missing


def build(python: Path, folder: Path) -> list[str]:
    """Make libfakecuda.so and its links in a folder; the functions that are missing. Raises BuildError."""
    packages = packages_of(python)
    headers = sorted(packages.glob("nvidia/cu*/include"))
    if not headers:
        raise BuildError(f"the torch of {python} is not a CUDA build: its wheels bring no CUDA headers")
    folder.mkdir(parents=True, exist_ok=True)
    triton = packages / "triton/backends/nvidia/include"  # brings crt/, which cuda_runtime.h includes
    flags = ["-O2", "-fPIC", "-Wall", "-Werror", "-Wno-attributes", "-I", str(headers[0]), "-I", str(triton)]
    objects = []
    for source in sorted(DRIVER.glob("*.c")):
        objects.append(folder / f"{source.stem}.o")
        _output("gcc", *flags, "-c", source, "-o", objects[-1])
    defined = {line.split()[-1] for line in _output("nm", "--defined-only", *objects).splitlines() if " T " in line}
    text, missing = stubs(wanted(packages), defined, stub_patterns())
    (folder / "stubs.c").write_text(text)
    objects.append(folder / "stubs.o")
    _output("gcc", *flags, "-w", "-c", folder / "stubs.c", "-o", objects[-1])
    library = folder / "libfakecuda.so"
    _output("gcc", "-shared", "-o", library, *objects, "-lpthread", "-ldl", "-Wl,-soname,libcuda.so.1")
    for name in LINKS:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(library.name)
    return missing


def _output(*words: str | Path) -> str:
    try:
        done = subprocess.run(words, capture_output=True, text=True)
    except FileNotFoundError:
        raise BuildError(f"{words[0]} is needed to build the driver and is not installed") from None
    if done.returncode:
        raise BuildError(f"{words[0]} failed: {done.stderr.strip()[-2000:]}")
    return done.stdout


if __name__ == "__main__":
    try:
        lacking = build(Path(sys.argv[1]), Path(sys.argv[2]))
    except BuildError as error:
        sys.exit(str(error))
    print(f"{len(lacking)} functions are missing and say so when they are called; built in {sys.argv[2]}")
