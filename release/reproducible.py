"""Builds the wheel and the sdist twice and compares them byte for byte.

    python release/reproducible.py --out dist      needs `build` and hatchling (release/requirements.txt)

Each build gets a copy of what git tracks in a folder of its own, with other times of the files, another umask, time
zone and language. SOURCE_DATE_EPOCH is the time of the last commit, unless it is set already. What differs is named and
the exit code is 1; else the files go to --out, with their SHA-256 on stdout.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
# (time zone, language, umask, age of the files in seconds): what must not show in a build.
SURROUNDINGS = (("UTC", "C", 0o022, 0), ("Asia/Kathmandu", "C.UTF-8", 0o077, 86_400 * 400))


def commit_time() -> str:
    """The seconds since 1970 of the last commit, as SOURCE_DATE_EPOCH wants them."""
    told = os.environ.get("SOURCE_DATE_EPOCH")
    return told or subprocess.check_output(["git", "log", "-1", "--format=%ct"], cwd=ROOT, text=True).strip()


def tracked() -> list[str]:
    """The files that git tracks, as they are in the working tree."""
    listed = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
    return [name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def build(folder: Path, epoch: str, surroundings: tuple[str, str, int, int]) -> dict[str, Path]:
    """{file name: path} of what a build in a copy of the tree made."""
    zone, language, umask, age_s = surroundings
    source, out = folder / "source", folder / "out"
    for name in tracked():
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, target)
        target.chmod(0o666 & ~umask)
        os.utime(target, (float(epoch) - age_s,) * 2)
    environment = {**os.environ, "SOURCE_DATE_EPOCH": epoch, "TZ": zone, "LC_ALL": language}
    before = os.umask(umask)
    try:
        subprocess.run(
            [sys.executable, "-P", "-m", "build", "--no-isolation", "--outdir", str(out), str(source)],
            env=environment, check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
    finally:
        os.umask(before)
    return {path.name: path for path in sorted(out.iterdir())}


def members(path: Path) -> dict[str, tuple[object, ...]]:
    """{member: (digest of its bytes, mode, time, owner)} of an archive."""
    found: dict[str, tuple[object, ...]] = {}
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as archive:
            for each in archive.infolist():
                digest = hashlib.sha256(archive.read(each)).hexdigest()
                found[each.filename] = (digest, each.external_attr, each.date_time, each.create_system)
        return found
    with tarfile.open(path) as archive:
        for each in archive:
            data = archive.extractfile(each)
            digest = hashlib.sha256(data.read()).hexdigest() if data else ""
            found[each.name] = (digest, each.mode, each.mtime, each.uid, each.gid, each.uname, each.gname)
    return found


def differences(first: Path, second: Path) -> list[str]:
    """What two archives differ in; nothing where they are the same bytes."""
    if first.read_bytes() == second.read_bytes():
        return []
    one, other = members(first), members(second)
    named = [name for name in sorted({*one, *other}) if one.get(name) != other.get(name)]
    order = [] if list(one) == list(other) else ["the order of the members"]
    return [*named, *order] or ["the compressed bytes"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where the files go (dist)")
    options = parser.parse_args()
    epoch = commit_time()
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name) / "first", Path(name) / "second" / "deeper"]
        first, second = (build(folder, epoch, each) for folder, each in zip(folders, SURROUNDINGS, strict=True))
        if list(first) != list(second):
            print(f"the builds made other files: {list(first)} and {list(second)}")
            return 1
        different = {file: found for file in first if (found := differences(first[file], second[file]))}
        for file, found in different.items():
            print(f"{file} differs in {len(found)}: {', '.join(found[:10])}")
        if different:
            return 1
        options.out.mkdir(parents=True, exist_ok=True)
        for file, path in first.items():
            shutil.copyfile(path, options.out / file)
            print(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
