"""Reads every config of a folder of somebody's trainer, and prints what came of each: `python benchmarks/finetune_configs.py FOLDER...`

Nothing is run, fetched or looked up: the model that a file names is only named. With --keys the unknown keys are
counted over all files, with --files every file has a line.
"""

import sys
import traceback
from collections import Counter
from pathlib import Path

from foretrain.base.errors import UserError
from foretrain.config.finetune.read import read_file

SUFFIXES = (".yaml", ".yml", ".json", ".py")


def files_in(folder: Path) -> list[Path]:
    """The files that may be a trainer's config: YAML; of JSON and Python what a user names by itself."""
    if folder.is_file():
        return [folder]
    return sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES[:2] and path.is_file())


def main(words: list[str]) -> int:
    """The table of the folders; 1 where a file ended in a traceback."""
    folders = [Path(word) for word in words if not word.startswith("--")]
    read, refused, crashed = 0, Counter[str](), []
    formats, unknown, unplanned = Counter[str](), Counter[str](), Counter[str]()
    for folder in folders:
        for path in files_in(folder):
            try:
                found = read_file(path)
            except UserError as error:
                refused[str(error).replace(str(path), "FILE").replace(str(folder), "FOLDER")] += 1
                if "--files" in words:
                    print(f"refused  {path}: {error}")
                continue
            except Exception:
                crashed.append(f"{path}\n{traceback.format_exc()}")
                continue
            read += 1
            formats[found.format] += 1
            unknown.update(found.unknown)
            unplanned.update(each.partition(" = ")[0] for each in found.unplanned)
            if "--files" in words:
                print(
                    f"read     {path}: {found.format}, {found.model}, {found.values}; not planned {found.unplanned}; unknown {found.unknown}"
                )
    print(
        f"{read + sum(refused.values()) + len(crashed)} files: {read} read, {sum(refused.values())} refused with a sentence, {len(crashed)} tracebacks"
    )
    print("formats: " + ", ".join(f"{name} {count}" for name, count in formats.most_common()))
    for sentence, count in refused.most_common():
        print(f"  refused {count} x {sentence}")
    print(f"unknown keys ({len(unknown)}): " + ", ".join(f"{key} {count}" for key, count in unknown.most_common()))
    if "--keys" in words:
        print(
            f"not planned ({len(unplanned)}): " + ", ".join(f"{key} {count}" for key, count in unplanned.most_common())
        )
    print("\n".join(crashed))
    return 1 if crashed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
