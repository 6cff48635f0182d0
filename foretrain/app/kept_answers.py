"""Printed answers of the planner, kept on disk, so that the command line repeats them without importing anything.

The key is a hash of what was asked, the config with its dataset, the cards, torch's version and our code. An answer
that depends on a CPU, a calibration, a file of weights or the user's own cards is not kept.
"""

import contextlib
import hashlib
import os
from functools import cache
from pathlib import Path

import pydantic

from foretrain.app.plan import targets
from foretrain.app.request import PretrainingRequest
from foretrain.base.cache import Cache
from foretrain.base.errors import UserError
from foretrain.base.installation import GPU_FILE_VARIABLE
from foretrain.config.presets import GPT2_SHAPES
from foretrain.predict import software

PRINTED = Cache("answers", compressed=True, most_files=300)  # of some kilobytes each
PACKAGE = Path(__file__).parents[1]


@cache
def code(package: Path = PACKAGE) -> str:
    """Return a hash of our code and tables. A file of another size or date is another one, as for Python's bytecode."""
    digest = hashlib.sha256(pydantic.VERSION.encode())
    for folder, folders, files in os.walk(package):
        folders.sort()
        for file in sorted(files):
            if file.endswith((".py", ".toml")):
                found = os.stat(f"{folder}/{file}")  # noqa: PTH116
                digest.update(f"{folder}/{file} {found.st_size} {found.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def path_of(request: PretrainingRequest, asked: object) -> Path | None:
    """Return where the answer to a request is kept; None where it may change. `asked`: what else decides it."""
    config = request.resolved.config
    if config.init_from not in ("scratch", *GPT2_SHAPES) or "://" in config.dataset or GPU_FILE_VARIABLE in os.environ:
        return None
    with contextlib.suppress(UserError):
        cards, data = targets(request.cards.gpu, request.cards.others, config), request.data_of(request.resolved)
        if all(each.gpu.kind == "cuda" and each.gpu.calibration is None for each in cards):
            torch = software.of(config.torch_version)
            return PRINTED.path(repr((code(), request.resolved, data, cards, torch, asked)))
    return None
