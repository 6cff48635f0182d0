"""Checkouts of other projects' programs, which the user brings. Nothing is downloaded."""

import subprocess
from pathlib import Path


class Missing(Exception):
    """There is no such checkout, or not of that commit: one sentence."""


def find(repository: str, folder: Path | None) -> Path:
    """Return the checkout of owner/name@commit, as owner/name, owner+name or name in the folder."""
    full, _, commit = repository.partition("@")
    owner, _, name = full.partition("/")
    if folder is None:
        raise Missing(f"needs a checkout of {full} at {commit}: give --checkouts DIR")
    for place in (folder / owner / name, folder / f"{owner}+{name}", folder / name):
        if place.is_dir():
            _check(place, full, commit)
            return place.resolve()
    raise Missing(f"needs a checkout of {full} at {commit} in {folder} (as {owner}/{name}, {owner}+{name} or {name})")


def _check(place: Path, full: str, commit: str) -> None:
    """Raise Missing for another commit, where git knows; an unpacked archive has no .git and is taken as it is."""
    if not (place / ".git").exists():
        return
    try:
        done = subprocess.run(
            ["git", "-C", str(place), "rev-parse", "HEAD"], capture_output=True, text=True, check=False, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return
    head = done.stdout.strip()
    if head and not head.startswith(commit):
        raise Missing(f"{place} is at {head[: len(commit)]}, and the figures are of {full} at {commit}: check that out")
