"""Answers of the planner as they were printed, kept on disk, so that the command line gives them at once when they are
asked again, without importing what they come from.

An answer is kept under a hash of all that decides it: what was asked, the config with its dataset, the cards, the
torch that it is for, and our code. What a CPU does depends on the machine as it is now, what a calibrated card does on
what was measured here, what begins with a file of weights on the file: none of them is kept, nor what the user's own
cards and datasets from elsewhere decide.
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
    """Return where the answer to a request is kept; None where it may be another one the next time. `asked`: what else
    decides what is printed."""
    config = request.resolved.config
    if config.init_from not in ("scratch", *GPT2_SHAPES) or "://" in config.dataset or GPU_FILE_VARIABLE in os.environ:
        return None
    with contextlib.suppress(UserError):
        cards, data = targets(request.cards.gpu, request.cards.others, config), request.data_of(request.resolved)
        if all(each.gpu.kind == "cuda" and each.gpu.calibration is None for each in cards):
            torch = software.of(config.torch_version)
            return PRINTED.path(repr((code(), request.resolved, data, cards, torch, asked)))
    return None
