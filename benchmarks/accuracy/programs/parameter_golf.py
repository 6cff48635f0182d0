"""openai/parameter-golf, train_gpt.py: a compiled GPT of 9 blocks with Muon, on one card."""

import os
import struct
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.accuracy.programs import theirs

HEADER, TOKENS = 256, 900_000


class Pieces:
    """A tokenizer of 1,024 pieces of one letter."""

    def __init__(self, **options: object) -> None: ...

    def vocab_size(self) -> int:
        return 1024

    def is_control(self, id: int) -> bool:
        return False

    is_unknown = is_unused = is_byte = is_control

    def id_to_piece(self, id: int) -> str:
        return "a"


class Read(Exception):
    """The peak has been read: nothing after it is of interest."""


def run(on: Any, settings: dict[str, Any], checkouts: list[Path]) -> dict[str, int]:
    theirs.stand_in("sentencepiece", SentencePieceProcessor=Pieces)
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("train", "val"):
            shard = struct.pack(f"<{HEADER}i", 20240520, 1, TOKENS, *[0] * (HEADER - 3)) + bytes(2 * TOKENS)
            (Path(folder) / f"fineweb_{kind}_000000.bin").write_bytes(shard)
        (Path(folder) / "pieces.model").write_bytes(b"")
        # Two warm-up steps and two steps instead of 20 and thousands: the third allocates what the second did.
        os.environ |= {
            "DATA_PATH": folder, "TOKENIZER_PATH": f"{folder}/pieces.model", "ITERATIONS": "2", "WARMUP_STEPS": "2",
            "VAL_LOSS_EVERY": "0", "TRAIN_LOG_EVERY": "1", "MAX_WALLCLOCK_SECONDS": "0",
            **{name: str(value) for name, value in settings.items()},
        }  # fmt: skip
        program: Any = theirs.load(checkouts[0] / "train_gpt.py", "their_train_gpt")
        program.subprocess.run = lambda *args, **kwargs: theirs.Anything()
        readings: dict[str, int] = {}
        peak = torch.cuda.max_memory_reserved

        def read_and_stop(*args: Any, **kwargs: Any) -> int:
            readings.update(allocated=torch.cuda.max_memory_allocated(), reserved=peak())
            raise Read

        torch.cuda.max_memory_reserved = read_and_stop
        before = Path.cwd()
        os.chdir(folder)
        try:
            program.main()
        except Read:
            pass
        finally:
            os.chdir(before)
            torch.cuda.max_memory_reserved = peak
    return {"peak allocated": readings["allocated"], "peak reserved": readings["reserved"]}
