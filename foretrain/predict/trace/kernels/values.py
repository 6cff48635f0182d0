"""The values that a trace assumes, since fake tensors have none.

Some are known: what torch.zeros, torch.full or torch.tensor(3) filled a whole storage with, and what follows from it.
Results are taken as finite, so isnan and isinf are false. Everything else is 1; where the code decides on such a value,
its file and line are noted. Where the other branch may take more, the answer is a lower bound.
"""

import ast
import contextlib
import linecache
import math
import operator
import re
import sys
import weakref
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch

from foretrain.predict.trace.card.guard import StandInError
from foretrain.predict.trace.card.patches import Patches

Number = bool | int | float

ROUNDS = 20  # of a loop that only a value ends
ENDLESS = 1000  # decisions of one line in one call, where its loop cannot be read
SMALL = 4096  # elements of a float tensor whose value is tracked
PLACES = 3  # that a note names
# Where libraries ask for values that change no memory: seeds, and the codes of 8 bits in order.
HARMLESS = ("accelerate/data_loader.py", "bitsandbytes/functional.py")
LEAVES = ast.Break | ast.Continue | ast.Return | ast.Raise
# Calls that take nothing of the card.
SHOWS = {"print", "warn", "debug", "info", "warning", "error", "log", "write", "set_postfix", "zero_grad"}

aten = torch.ops.aten
HERE = str(Path(__file__).parents[1])
TORCH = str(Path(torch.__file__).parent)

COMPARED: dict[str, Callable[[Any, Any], bool]] = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
}  # fmt: skip
RECKONED: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv,
    "logical_and": lambda a, b: bool(a) and bool(b), "logical_or": lambda a, b: bool(a) or bool(b),
    "logical_xor": lambda a, b: bool(a) != bool(b), "bitwise_and": operator.and_, "bitwise_or": operator.or_,
    "bitwise_xor": operator.xor, "maximum": max, "minimum": min,
}  # fmt: skip
FILLED: dict[str, Number] = {
    "zeros": 0, "zeros_like": 0, "new_zeros": 0, "ones": 1, "ones_like": 1, "new_ones": 1,
    "isnan": False, "isinf": False, "isposinf": False, "isneginf": False, "isfinite": True,
}  # fmt: skip
FILLED_WITH = {"full": 1, "full_like": 1, "new_full": 2, "scalar_tensor": 0}  # which argument is the value
PASSED_ON = {
    "_to_copy", "clone", "any", "all", "max", "min", "amax", "amin", "mean", "neg", "abs", "logical_not",
    "bitwise_not", "lift_fresh_copy",
}  # fmt: skip
CHANGED = {"neg": operator.neg, "abs": abs, "logical_not": operator.not_, "bitwise_not": operator.not_}
# GradScaler's, which change these only where a gradient is not finite.
UNCHANGED = {"_amp_foreach_non_finite_check_and_unscale_", "_amp_update_scale_"}


class Known(NamedTuple):
    """The value of all elements of a storage; `certain` is false where it follows from an assumed 1."""

    value: Number
    certain: bool


class _Rounds(dict[int, int]):
    """How often each instruction of a running function has decided on a value. It is stored as a debugger's trace
    function, the only mark that a frame takes; called as one it traces nothing.
    """

    def __call__(self, *args: Any) -> None: ...


class Values:
    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Any], Known]] = {}
        self._places: dict[tuple[str, bool], dict[str, None]] = {}
        self._planned: list[bool] = []
        self._counted = weakref.WeakSet[Any]()  # storages that hold consecutive numbers
        self.real: Callable[[Tensor], Tensor | None] | None = None  # the values that a batch gives (kernels/reals.py)

    def after(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        if _counts_on(self, func, args) and isinstance(out, Tensor) and (storage := storage_of(out)) is not None:
            self._counted.add(storage)
        rule = _rule(func)
        if rule is not None and isinstance(out, Tensor):
            passed_on = func.overloadpacket.__name__ in PASSED_ON and self._has(args[0])
            known = rule(self, args, kwargs, out) if passed_on or _is_asked_for(out) else None
            if known is not None or _writes(func):
                self.learn(out, known)
        elif (places := _writes(func)) and func.overloadpacket.__name__ not in UNCHANGED:
            for place in places:
                changed = kwargs.get(place) if isinstance(place, str) else args[place] if place < len(args) else None
                for tensor in changed if isinstance(changed, list | tuple) else (changed,):
                    if isinstance(tensor, Tensor):
                        self.forget(tensor)

    def forget(self, tensor: Tensor) -> None:
        if self._known and _is_asked_for(tensor) and (storage := storage_of(tensor)) is not None:
            self._known.pop(storage._cdata, None)

    def _has(self, tensor: Tensor) -> bool:
        return (storage := storage_of(tensor)) is not None and storage._cdata in self._known

    def learn(self, tensor: Tensor, known: Known | None) -> None:
        storage = storage_of(tensor) if known is not None or _is_asked_for(tensor) else None
        if storage is None:
            return
        if known is None or storage.nbytes() != tensor.numel() * tensor.element_size():
            self._known.pop(storage._cdata, None)
            return
        key = storage._cdata
        self._known[key] = (weakref.ref(storage, lambda ref: self._gone(key, ref)), known)

    def _gone(self, key: int, ref: weakref.ref[Any]) -> None:
        if key in self._known and self._known[key][0] is ref:
            del self._known[key]

    def of(self, x: Any) -> Known:
        if not isinstance(x, Tensor):
            return Known(x, certain=True)
        constant = getattr(x, "constant", None)
        if constant is not None and constant.numel() == 1:
            with no_dispatch():
                return Known(constant.item(), certain=True)
        real = self.real(x) if self.real is not None and x.numel() == 1 else None
        if real is not None:
            with no_dispatch():
                return Known(real.item(), certain=True)
        storage = storage_of(x)
        if storage is not None and (found := self._known.get(storage._cdata)) and found[0]() is storage:
            return found[1]
        return Known(_as(x.dtype, 1), certain=False)

    def scalar(self, tensor: Tensor) -> Number:
        known = self.of(tensor)
        value = _as(tensor.dtype, known.value)
        if tensor.dtype == torch.bool:
            if self._planned:
                return self._planned.pop(0)
            return value if known.certain else self.decided(bool(value))
        return value if tensor.dtype.is_floating_point or known.certain else self.read(int(value))

    def read(self, value: int) -> int:
        """Note an integer that no tensor holds, since a size may follow from it."""
        frame = _user_frame()
        self._note(f"an integer was read from a tensor and taken as {value}", frame, too_low=not _is_counted(frame))
        return value

    def alike(self, a: Tensor, b: Tensor) -> bool:
        """Answer torch.equal and torch.allclose: true, where the shapes are the same."""
        if a.shape != b.shape:
            return False
        left, right = self.of(a), self.of(b)
        sure = a is b or (left.certain and right.certain)
        return left.value == right.value if sure else self.decided(True)

    def counts(self, tensor: Any) -> bool:
        return isinstance(tensor, Tensor) and (storage := storage_of(tensor)) is not None and storage in self._counted

    def is_certain(self, tensor: Tensor) -> bool:
        return self.of(tensor).certain

    def decided(self, answer: bool) -> bool:
        """Note that the code decides on an unknown value, and invert the answer where a loop would never end."""
        frame = _user_frame()
        if frame is None:
            return answer
        asking = _asking_frame() or frame
        if self._endless(asking, frame):
            self._note(f"a loop that values end was left after {ROUNDS} rounds", frame, too_low=True)
            return not answer
        who = _stepping(asking, frame) or "the code"
        self._note(f"{who} decided on a value, taken as {answer}", frame, too_low=not _takes_most(asking, answer))
        return answer

    def _endless(self, asking: FrameType | None, user: FrameType) -> bool:
        for frame in {asking, user} - {None}:
            assert frame is not None
            if frame.f_trace is None and sys.gettrace() is None:
                frame.f_trace = _Rounds()
            if isinstance(rounds := frame.f_trace, _Rounds):
                count = rounds[frame.f_lasti] = rounds.get(frame.f_lasti, 0) + 1
                if count % ROUNDS == 0 and _in_while(frame):
                    return True
                if count >= ENDLESS:
                    raise StandInError(
                        f"the loop at {_place(frame)} asks for values again and again, and a trace has none: "
                        "let it end by a count"
                    )
        return False

    @contextlib.contextmanager
    def planned(self, answers: list[bool]) -> Iterator[None]:
        before, self._planned = self._planned, [*answers, False]
        try:
            yield
        finally:
            self._planned = before

    @contextlib.contextmanager
    def unnoted(self) -> Iterator[None]:
        """Within it nothing is noted: what decides there is known."""
        before = {what: dict(places) for what, places in self._places.items()}
        yield
        self._places = before

    def _note(self, what: str, frame: FrameType | None, *, too_low: bool) -> None:
        if frame is not None and not frame.f_code.co_filename.endswith(HARMLESS):
            self._places.setdefault((what, too_low), {}).setdefault(_place(frame))

    @property
    def bounded(self) -> bool:
        return any(too_low for _, too_low in self._places)

    def notes(self) -> list[str]:
        found = []
        for (what, too_low), everywhere in self._places.items():
            places = list(everywhere)
            more = f" and {len(places) - PLACES} more places" if len(places) > PLACES else ""
            so = ", so the answer may be too low" if too_low else ""
            found.append(f"fake tensors have no values{so}: {what}, at {', '.join(places[:PLACES])}{more}")
        return found


class Guess(float):
    """A float that .item() made up, and its arithmetic: decisions on it are noted, and it is shown as "?"."""

    values: Values

    def __repr__(self) -> str:
        return "?"

    def __format__(self, spec: str) -> str:
        width = re.search(r"(?<![.\d])[1-9]\d*", spec)
        return "?".rjust(int(width[0]) if width else 0)

    @classmethod
    def of(cls, value: float, values: Values) -> "Guess":
        guess = cls(value)
        guess.values = values
        return guess

    def __reduce__(self) -> Any:
        return float, (float(self),)

    def __int__(self) -> int:
        return self.values.read(int(float(self)))

    def __floor__(self) -> int:
        return self.values.read(math.floor(float(self)))

    def __ceil__(self) -> int:
        return self.values.read(math.ceil(float(self)))

    def __bool__(self) -> bool:
        return self.values.decided(float(self) != 0.0)

    __hash__ = float.__hash__


def _deciding(name: str) -> Callable[[Guess, Any], Any]:
    def compare(guess: Guess, other: Any) -> Any:
        answer = getattr(float, name)(guess, other)
        # NaN and infinity are tested by value != value and value < inf: these it is not.
        sure = answer is NotImplemented or (isinstance(other, float) and not math.isfinite(other))
        sure |= isinstance(other, Guess) and name in ("__eq__", "__ne__")
        return answer if sure else guess.values.decided(answer)

    return compare


def _guessing(name: str) -> Callable[..., Any]:
    def reckon(guess: Guess, *others: Any) -> Any:
        answer = getattr(float, name)(guess, *others)
        if type(answer) is int:  # rounded
            return guess.values.read(answer)
        return Guess.of(answer, guess.values) if type(answer) is float else answer

    return reckon


for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Guess, f"__{_name}__", _deciding(f"__{_name}__"))
for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "neg", "abs", "round"):
    setattr(Guess, f"__{_name}__", _guessing(f"__{_name}__"))


Rule = Callable[[Values, tuple[Any, ...], dict[str, Any], Tensor], Known | None]


@cache
def _rule(func: Any) -> Rule | None:
    name = func.overloadpacket.__name__
    plain = name[:-1] if name.endswith("_") else name
    if name in FILLED:
        return lambda values, args, kwargs, out: Known(FILLED[name], certain=True)
    if name in FILLED_WITH:
        return lambda values, args, kwargs, out: _certainly(values.of(args[FILLED_WITH[name]]))
    if name in ("fill_", "copy_"):
        return lambda values, args, kwargs, out: values.of(args[1])
    if name == "zero_":
        return lambda values, args, kwargs, out: Known(0, certain=True)
    if plain in COMPARED:
        return lambda values, args, kwargs, out: _compared(values, plain, args)
    if plain in RECKONED and func._overloadname in ("Tensor", "Scalar", "default", "out"):
        return lambda values, args, kwargs, out: _reckoned(values, plain, args, kwargs)
    if name in PASSED_ON and func._overloadname in ("default", "dim", "dims"):
        return lambda values, args, kwargs, out: _passed_on(values, name, args)
    if plain == "masked_fill":
        return lambda values, args, kwargs, out: _masked(values, args)
    if name == "sum":
        return lambda values, args, kwargs, out: _summed(values, args, out)
    if name == "cat":
        return lambda values, args, kwargs, out: _joined(values, args[0])
    return None


def _counts_on(values: Values, func: Any, args: tuple[Any, ...]) -> bool:
    if func is aten.arange.default or func is aten.arange.start:
        return True
    return (
        func is aten.add.Tensor
        and not isinstance(args[1], Tensor)
        and not args[0].dtype.is_floating_point
        and values.counts(args[0])
    )


def _certainly(known: Known) -> Known | None:
    return known if known.certain else None


def _compared(values: Values, name: str, args: tuple[Any, ...]) -> Known:
    a, b = args[0], args[1]
    if a is b:  # torch.isnan asks whether a value is not itself
        return Known(COMPARED[name](1, 1), certain=True)
    left, right = values.of(a), values.of(b)
    answer = COMPARED[name](left.value, right.value)
    against_infinity = right.certain and not math.isfinite(right.value)
    return Known(answer, (left.certain and right.certain) or against_infinity)


def _reckoned(values: Values, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Known | None:
    if name == "sub" and args[0] is args[1] and not kwargs:  # is it finite? x - x is 0 for every finite x
        return Known(0, certain=True)
    left, right = values.of(args[0]), values.of(args[1])
    decisive = {"logical_and": False, "bitwise_and": False, "logical_or": True, "bitwise_or": True}
    if name in decisive:
        for side in (left, right):  # false and anything is false
            if side.certain and side.value is decisive[name]:
                return side
    logical = isinstance(left.value, bool) and isinstance(right.value, bool)
    if kwargs.keys() - {"out"} or not (logical or (left.certain and right.certain)):
        return None
    try:
        return Known(RECKONED[name](left.value, right.value), left.certain and right.certain)
    except (ArithmeticError, TypeError):
        return None


def _passed_on(values: Values, name: str, args: tuple[Any, ...]) -> Known | None:
    known = values.of(args[0])
    if not known.certain and not isinstance(known.value, bool):
        return None
    value = bool(known.value) if name in ("any", "all") else known.value
    if name == "bitwise_not" and not isinstance(value, bool):
        return None
    return Known(CHANGED[name](value) if name in CHANGED else value, known.certain)


def _masked(values: Values, args: tuple[Any, ...]) -> Known | None:
    mask = values.of(args[1])
    return values.of(args[2] if mask.value else args[0]) if mask.certain else None


def _joined(values: Values, parts: Any) -> Known | None:
    known = {values.of(part) for part in parts}
    return _certainly(known.pop()) if len(known) == 1 else None


def _summed(values: Values, args: tuple[Any, ...], out: Tensor) -> Known | None:
    known = values.of(args[0])
    if not known.certain and not isinstance(known.value, bool):
        return None
    return Known(known.value * (args[0].numel() // max(1, out.numel())), known.certain)


@cache
def _writes(func: Any) -> tuple[int | str, ...]:
    return tuple(
        argument.name if argument.kwarg_only else place
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _is_asked_for(tensor: Tensor) -> bool:
    """Return whether its value may be asked for: not a weight's or activation's, as tracking takes time."""
    return tensor.numel() <= SMALL or not tensor.dtype.is_floating_point


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    if tensor.layout != torch.strided or is_functorch_wrapped_tensor(tensor):
        return None
    return tensor.untyped_storage()


def _as(dtype: torch.dtype, value: Number) -> Number:
    if dtype == torch.bool:
        return bool(value)
    if dtype.is_floating_point or dtype.is_complex:
        return float(value)
    return int(value) if math.isfinite(value) else 1


def _asking_frame() -> FrameType | None:
    """Return the innermost frame that is not of the trace; it may be in torch, as an optimizer's loop."""
    frame = sys._getframe(1)
    while frame is not None and (_is_in(frame, HERE) or _is_in(frame, f"{TORCH}/_") or _is_dispatch(frame)):
        frame = frame.f_back
    return frame


def _user_frame() -> FrameType | None:
    frame = sys._getframe(1)
    while frame is not None and (_is_in(frame, HERE) or _is_in(frame, TORCH)):
        frame = frame.f_back
    return frame


def _is_in(frame: FrameType, folder: str) -> bool:
    return frame.f_code.co_filename.startswith(folder)


def _is_dispatch(frame: FrameType) -> bool:
    return _is_in(frame, f"{TORCH}/utils/") or _is_in(frame, f"{TORCH}/overrides")


def _place(frame: FrameType) -> str:
    return _at(frame, frame.f_lineno)


def _at(frame: FrameType, line: int) -> str:
    path = Path(frame.f_code.co_filename)
    with contextlib.suppress(ValueError, OSError):
        path = path.relative_to(Path.cwd())
    return f"{path}:{line}"


def place_now() -> str:
    frame = _user_frame()
    return "?" if frame is None else _place(frame)


def raised_at(error: BaseException) -> str:
    """Return the file and line where the user's code raised it; empty where none of theirs did."""
    step, found = error.__traceback__, ""
    while step is not None:
        if not (_is_in(step.tb_frame, HERE) or _is_in(step.tb_frame, TORCH)):
            found = _at(step.tb_frame, step.tb_lineno)
        step = step.tb_next
    return found


def _in_while(frame: FrameType) -> bool:
    return isinstance(_innermost(frame, ast.While | ast.For), ast.While)


def _innermost(frame: FrameType, kind: Any, part: Callable[[Any], Any] = lambda node: node) -> Any:
    source = "".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals))
    innermost: ast.AST | None = None
    for node in ast.walk(_parsed(source)):  # outer nodes come first
        if isinstance(node, kind) and part(node).lineno <= frame.f_lineno <= part(node).end_lineno:
            innermost = node
    return innermost


def _is_counted(frame: FrameType | None) -> bool:
    """Return whether the value read there is only added to a sum or shown, which no size follows from."""
    statement = None if frame is None else _innermost(frame, ast.stmt)
    return isinstance(statement, ast.AugAssign) or (isinstance(statement, ast.Expr) and _is_harmless(statement))


def _stepping(asking: FrameType | None, user: FrameType) -> str:
    """Return whose step decides: an optimizer's, as a rule; '' is nobody's."""
    while asking is not None:
        owner, _, name = asking.f_code.co_qualname.rpartition(".")
        if name == "step" and owner and "<locals>" not in owner.rpartition(".")[2]:
            return owner.rpartition(".")[2]
        asking = None if asking is user else asking.f_back
    return ""


def _takes_most(frame: FrameType, answer: bool) -> bool:
    """Return whether the other branch, a guard's say, does nothing more: the one taken is the upper end."""
    node = _innermost(frame, ast.If | ast.While | ast.IfExp | ast.Assert, lambda node: node.test)
    if node is None:
        return _is_in(frame, f"{TORCH}/optim/")  # a rate between bounds, which max and min compare
    if isinstance(node, ast.Assert):
        return answer
    turns = sum(isinstance(part, ast.Not) for part in ast.walk(node.test))
    if turns and any(isinstance(part, ast.BoolOp) for part in ast.walk(node.test)):
        return False
    taken, other = (node.body, node.orelse) if answer ^ bool(turns % 2) else (node.orelse, node.body)
    if isinstance(node, ast.IfExp):
        return isinstance(other, ast.Constant)
    return not any(map(_spares, taken)) and all(map(_is_harmless, other))


def _spares(statement: ast.stmt) -> bool:
    """Return whether it may take less than its absence: it leaves, or releases something."""
    return any(
        isinstance(part, ast.Delete | LEAVES) or (isinstance(part, ast.Assign) and isinstance(part.value, ast.Constant))
        for part in ast.walk(statement)
    )


def _is_harmless(statement: ast.stmt) -> bool:
    """Return whether it takes no memory and nothing follows from it: it leaves, counts or shows something."""
    if isinstance(statement, ast.Return):
        return statement.value is None or isinstance(statement.value, ast.Name)
    if isinstance(statement, ast.AugAssign):
        return isinstance(statement.value, ast.Constant)
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        called = statement.value.func
        return (called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")) in SHOWS
    return isinstance(statement, ast.Pass | LEAVES)


@cache
def _parsed(source: str) -> ast.Module:
    try:
        return ast.parse(source)
    except SyntaxError:
        return ast.Module([], [])


def patch(patches: Patches, values: Values) -> None:
    """Let fake tensors answer by `values`, and torch.nn.init.trunc_normal_ draw as often as it would."""

    def item(tensor: FakeTensor) -> Any:
        value = Tensor.item(tensor)
        guess = type(value) is float and not torch.compiler.is_compiling() and not values.is_certain(tensor)
        return Guess.of(value, values) if guess else value

    def true(tensor: FakeTensor) -> bool:
        return Tensor.__bool__(tensor) if tensor.dtype == torch.bool else bool(item(tensor))

    patches.set(FakeTensor, "item", item)
    patches.set(FakeTensor, "__bool__", true)
    draw = getattr(torch.nn.init, "_no_grad_trunc_normal_", None)
    if draw is not None:

        def drawn(tensor: Tensor, mean: float, std: float, a: float, b: float, *args: Any, **kwargs: Any) -> Tensor:
            with values.planned(_redraws(tensor.numel(), mean, std, a, b)):
                return draw(tensor, mean, std, a, b, *args, **kwargs)

        patches.set(torch.nn.init, "_no_grad_trunc_normal_", drawn)


def _redraws(count: int, mean: float, std: float, a: float, b: float) -> list[bool]:
    """Return True for each time that trunc_normal_ (2.13) more likely than not draws again. It draws normally where
    enough falls inside, else evenly below the peak."""

    def below(x: float) -> float:
        return (1 + math.erf((x - mean) / std / math.sqrt(2))) / 2

    kept = below(b) - below(a)
    if kept <= 0.3:
        peak = max(a, min(mean, b))
        height = math.exp(-0.5 * ((peak - mean) / std) ** 2) / (std * math.sqrt(2 * math.pi))
        kept = kept / (height * (b - a)) if height > 0 and b > a else 1.0
    rest, answers = count * (1 - kept), []
    while rest >= 0.5 and len(answers) < 1000:
        answers.append(True)
        rest *= 1 - kept
    return answers
