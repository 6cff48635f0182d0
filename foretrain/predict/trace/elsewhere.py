"""`foretrain.trace`: any code on a stand-in card, here or by name in a process of the torch that will train, which runs
this file too (`work`) and returns JSON. No torch."""

import importlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretrain.base.errors import UserError
from foretrain.hardware.catalogue import Gpu
from foretrain.predict import software
from foretrain.predict.trace import interpreter, service
from foretrain.predict.trace.forked import ChildEnded
from foretrain.predict.trace.record import Trace
from foretrain.predict.trace.traced import StandInError, Traced, call_with, card_of

if TYPE_CHECKING:
    from foretrain.predict.trace.session import Tracing


class CodeFailed(RuntimeError):
    """The traced code raised an error in the other process; its traceback is a note."""


def trace(
    code: "Callable[[Tracing], object] | str | Path",
    gpu: str | Gpu = "RTX 4070",
    *,
    compile: bool = False,
    pads: bool = False,
    in_process: bool = False,
    python: str | Path = "",
    torch_version: str = "",
) -> Traced:
    """Return what the code takes on the card: it runs once on fake tensors, and every storage is recorded.

    `code`: a function, which is called with a Tracing; or by name a script ("train.py"), a function of a script
    ("train.py:main") or of a module ("package.module:main"), which runs in a process of its own. `python`: the Python
    of the environment that will train, or its folder, whose torch traces; a function must then be at the top of a
    module or script. `torch_version`: of the torch which will train, where another one traces: notes name the known
    differences. `compile`: torch.compile inside the code runs Inductor for the card, without kernels. `pads`: the
    assumed result of pad_mm's measurements. The code must make its model and tensors itself, on `device` (torch.cuda
    says that it is available), and sees no values: .item() returns 1.

    A function runs in a forked child, so that this process can train afterwards; variables that the code sets are lost.
    `in_process`: run it here instead, as where no fork is; torch.cuda then stays unusable. Where the code meets
    something whose size only the card knows, it runs a second time with the most of it (`high`). Raises StandInError
    where that torch cannot stand in for the card, or has already used one; UserError for what cannot be sent to another
    process.
    """
    card = card_of(gpu)
    if torch_version and software.parse(torch_version) is None:
        raise StandInError(f"torch_version={torch_version!r} is not a version of torch, such as '2.9.1'")
    if not python and not isinstance(code, str | Path):
        from foretrain.predict.trace import session

        found = session.trace(code, card, compile=compile, pads=pads, in_process=in_process)
        return found.with_versions(torch_version)
    if in_process:
        raise UserError("usage.trace_in_process")
    with interpreter.use_interpreter(str(python)):
        if reason := service.why_not():
            raise StandInError(reason)
        return _sent(Target.of(code), card, compile, pads).with_versions(torch_version)


@dataclass(frozen=True)
class Target:
    file: str
    module: str
    function: str

    @classmethod
    def of(cls, code: object) -> "Target":
        """Read a name, or find a function's. Raises UserError where it has none that another process can find."""
        if isinstance(code, str | Path):
            return cls._named(str(code))
        name, home = getattr(code, "__qualname__", ""), getattr(code, "__module__", "") or ""
        module = sys.modules.get(home)
        file = getattr(module, "__file__", None)
        if not name.isidentifier() or getattr(module, name, None) is not code or file is None:
            raise UserError("usage.trace_cannot_send", name=name or type(code).__name__)
        return cls(str(Path(file).absolute()), "", name) if home == "__main__" else cls("", home, name)

    @classmethod
    def _named(cls, text: str) -> "Target":
        place, colon, function = text.rpartition(":") if ":" in text else (text, "", "")
        if colon and not function.isidentifier():
            raise UserError("usage.trace_target", target=text)
        if place.endswith(".py"):
            if not Path(place).is_file():
                raise UserError("usage.trace_no_file", path=place)
            return cls(str(Path(place).absolute()), "", function)
        if not function or not all(part.isidentifier() for part in place.split(".")):
            raise UserError("usage.trace_target", target=text)
        return cls("", place, function)

    def run(self, on: "Tracing") -> None:
        if self.file and not self.function:
            sys.argv = [self.file]
            try:
                runpy.run_path(self.file, run_name="__main__")
            except SystemExit as end:
                if end.code not in (None, 0):
                    raise CodeFailed(f"{self.file} ended with sys.exit({end.code!r})") from None
            return
        try:
            found = runpy.run_path(self.file) if self.file else vars(importlib.import_module(self.module))
        except ModuleNotFoundError as error:
            if error.name != self.module:
                raise
            raise StandInError(str(UserError("usage.trace_no_module", module=self.module))) from None
        function = found.get(self.function)
        if not callable(function):
            place = self.file or self.module
            raise StandInError(str(UserError("usage.trace_no_function", place=place, function=self.function)))
        call_with(function, on)


def _sent(target: Target, card: Gpu, compile: bool, pads: bool) -> Traced:
    with tempfile.TemporaryDirectory(prefix="foretrain-") as folder:
        out = Path(folder) / "answer"
        own = [path or str(Path.cwd()) for path in sys.path if not path.endswith((".zip", "-packages", "lib-dynload"))]
        paths = [str(Path(target.file).parent)] if target.file else []
        job = {
            "target": vars(target), "gpu": card.model_dump(mode="json"), "compile": compile, "pads": pads,
            "paths": [*paths, *own], "out": str(out),
        }  # fmt: skip
        ended = process(job)
        try:
            answer = json.loads(out.read_text("utf-8"))
        except (OSError, ValueError):
            raise StandInError(f"the process that traced ended without an answer (exit {ended})") from None
    if "error" in answer:
        raise _error(answer)
    low, *high = (
        Traced(Trace.from_json(found["trace"]), card, tuple(found["notes"]), bound=found["bound"])
        for found in answer["found"]
    )
    return replace(low, high=high[0]) if high else low


def process(job: dict[str, Any]) -> int:
    command, more = interpreter.now().worker("foretrain.predict.trace.elsewhere")
    environment = {**os.environ, **more, "CUDA_VISIBLE_DEVICES": "", "TORCH_WARM_POOL": "0"}
    return subprocess.run(command, input=json.dumps(job), text=True, env=environment, check=False).returncode


def _error(answer: dict[str, Any]) -> Exception:
    error = (StandInError if answer["error"] == "StandInError" else CodeFailed)(answer["text"])
    error.add_note(answer["traceback"])
    return error


def _answer(job: dict[str, Any]) -> dict[str, Any]:
    from foretrain.predict.trace import self_test, session

    try:
        self_test.prove_this_torch()
        target = Target(**job["target"])
        card = Gpu.model_validate(job["gpu"])
        found = session.trace(target.run, card, compile=job["compile"], pads=job["pads"])
        ends = [found, *([found.high] if found.high else [])]
        return {"found": [{"trace": end.trace.to_json(), "notes": end.notes, "bound": end.bound} for end in ends]}
    except (StandInError, self_test.TraceError, ChildEnded) as error:
        return {"error": "StandInError", "text": str(error), "traceback": traceback.format_exc()}
    except Exception as error:
        text = (
            str(error) if isinstance(error, CodeFailed) else f"the traced code raised {type(error).__name__}: {error}"
        )
        return {"error": "CodeFailed", "text": text, "traceback": traceback.format_exc()}


def work(job: dict[str, Any]) -> None:
    sys.path[:0] = job["paths"]
    answer = _answer(job)
    sys.stdout.flush()
    Path(job["out"]).write_text(json.dumps(answer), "utf-8")


if __name__ == "__main__":
    work(json.load(sys.stdin))
    os._exit(0)  # torch's static destructors meet the stand-in's patches otherwise
