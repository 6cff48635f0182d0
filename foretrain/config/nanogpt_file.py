"""nanoGPT's `config/*.py` read as data: parsed with `ast`, never executed. Accepted is what has one value whoever runs
it; else there is a problem where it sets an option, or a note."""

import ast
import contextlib
import math
import operator
import posixpath
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from foretrain.base.errors import UserError
from foretrain.config.checks import Setting

MAX_BYTES = 64 * 1024
_MAX_NUMBER = 1e18
_MAX_TEXT = 4096

_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not,
    ast.In: lambda value, held: value in held, ast.NotIn: lambda value, held: value not in held,
}  # fmt: skip
# Functions with one value whoever runs them; is_bf16_supported counts emulation (torch/cuda/__init__.py).
_CALLS: dict[str, Callable[..., Any]] = {
    "int": int, "float": float, "str": str, "bool": bool, "abs": abs, "round": round, "min": min, "max": max,
    "len": len, "sum": sum, "math.floor": math.floor, "math.ceil": math.ceil, "math.sqrt": math.sqrt,
    "math.log": math.log, "math.log2": math.log2, "math.exp": math.exp, "os.path.join": posixpath.join,
    "torch.cuda.is_available": lambda: True, "torch.cuda.is_bf16_supported": lambda: True,
    "torch.cuda.device_count": lambda: 1, "torch.backends.mps.is_available": lambda: False,
}  # fmt: skip
# Words that may set any name.
_SETS_ANYTHING = {"exec", "eval", "globals", "locals", "vars", "setattr", "__import__"}
_LIBRARIES = {*sys.stdlib_module_names, "torch", "numpy"}  # they set no option
_DEEPEST = 5  # files that read one another
Neighbour = Callable[[str], tuple[str, str] | None]  # the name in exec(open(name).read()) -> (its text, its path)


class Unsupported(Exception):
    """An expression that is not plain data."""


@dataclass
class ParsedFile:
    settings: list[Setting] = field(default_factory=list)
    notes: list[UserError] = field(default_factory=list)
    problems: list[UserError] = field(default_factory=list)


def _bounded(value: Any) -> Any:
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        if not -_MAX_NUMBER <= value <= _MAX_NUMBER:  # also false for NaN
            raise Unsupported("a number beyond 1e18")
        return value
    if isinstance(value, str) and len(value) <= _MAX_TEXT:
        return value
    raise Unsupported(f"a value of type {type(value).__name__}")


def evaluate(node: ast.expr, names: dict[str, Any]) -> Any:
    """Evaluate an expression that nothing has to be run for. Raises Unsupported for any other."""
    match node:
        case ast.Constant(value=None):
            return None
        case ast.Constant(value=value):
            return _bounded(value)
        case ast.Name(id=name):
            if name in names:
                return names[name]
            raise Unsupported(f"the name {name}")
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as op, operand=operand):
            value = _number(evaluate(operand, names))
            return -value if isinstance(op, ast.USub) else value
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not evaluate(operand, names)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _binary(type(op), evaluate(left, names), evaluate(right, names))
        case ast.BoolOp(op=op, values=values):
            return _either(values, names, stops_at=isinstance(op, ast.Or))
        case ast.IfExp(test=test, body=body, orelse=other):
            return evaluate(body if evaluate(test, names) else other, names)
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            return tuple(evaluate(part, names) for part in parts)
        case ast.Dict(keys=keys, values=values) if None not in keys:
            pairs = zip(keys, values, strict=True)
            return _tried(lambda: {evaluate(key, names): evaluate(each, names) for key, each in pairs if key})
        case ast.Subscript(value=held, slice=key):
            return _tried(lambda: evaluate(held, names)[evaluate(key, names)])
        case ast.Compare(left=left, ops=ops, comparators=others) if all(type(op) in _COMPARISONS for op in ops):
            values = [evaluate(each, names) for each in (left, *others)]
            pairs = zip(ops, values[:-1], values[1:], strict=True)
            return _tried(lambda: all(_COMPARISONS[type(op)](a, b) for op, a, b in pairs))
        case ast.JoinedStr(values=parts):
            return _bounded("".join(_formatted(part, names) for part in parts))
        case ast.Call(func=function, args=args, keywords=[]):
            return _called(function, args, names, node)
    raise Unsupported(_quoted(node))


def _either(values: list[ast.expr], names: dict[str, Any], *, stops_at: bool) -> Any:
    value = None
    for each in values:
        value = evaluate(each, names)
        if bool(value) is stops_at:
            break
    return value


def _formatted(part: ast.expr, names: dict[str, Any]) -> str:
    """Evaluate a piece of an f-string. Raises Unsupported for a width that would fill the memory."""
    if not isinstance(part, ast.FormattedValue):
        return str(evaluate(part, names))
    value = evaluate(part.value, names)
    spec = str(evaluate(part.format_spec, names)) if part.format_spec else ""
    if any(int(digits) > 100 for digits in re.findall(r"\d{1,9}", spec)) or part.conversion not in (-1, ord("s")):
        raise Unsupported(_quoted(ast.JoinedStr([part])))
    return _tried(lambda: format(value, spec))


def _called(function: ast.expr, args: list[ast.expr], names: dict[str, Any], node: ast.expr) -> Any:
    name = ast.unparse(function) if isinstance(function, ast.Name | ast.Attribute) else ""
    if name not in _CALLS or name.partition(".")[0] in names:
        raise Unsupported(_quoted(node))
    values = [evaluate(each, names) for each in args]
    return _bounded(_tried(lambda: _CALLS[name](*values)))


def _tried(compute: Callable[[], Any]) -> Any:
    try:
        return compute()
    except (ArithmeticError, ValueError, TypeError, LookupError) as error:
        raise Unsupported(f"an expression that fails ({error})") from None


def _binary(op: type[ast.operator], left: Any, right: Any) -> Any:
    if op is ast.Add and isinstance(left, str) and isinstance(right, str):
        return _bounded(left + right)
    left, right = _number(left), _number(right)
    if op is ast.Pow and not (abs(right) <= 64):
        raise Unsupported("a power above 64")
    try:
        value = _OPERATORS[op](left, right)
    except (ArithmeticError, ValueError) as error:
        raise Unsupported(f"arithmetic that fails ({error})") from None
    return _bounded(value)


def _number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Unsupported("arithmetic on something that is not a number")
    return value


def _quoted(node: ast.AST) -> str:
    line, *more = ast.unparse(node).split("\n")
    return f"`{line[:40]}{'…' if more or len(line) > 40 else ''}`"


def parse_expression(text: str, names: dict[str, Any] | None = None) -> Any:
    """Evaluate '5 * 8', '1e-3', 'True', or one of `names`; text that is not such an expression stays text."""
    if len(text) > 1000:
        return text
    try:
        return evaluate(ast.parse(text.strip(), mode="eval").body, names or {})
    except (SyntaxError, ValueError, RecursionError, MemoryError, Unsupported):
        return text


def parse(
    text: str,
    path: str,
    known: set[str],
    inert: set[str],
    defaults: Mapping[str, Any] = MappingProxyType({}),
    neighbour: Neighbour = lambda name: None,
) -> ParsedFile:
    """Read the text of a nanoGPT config file; never raise for bad content (`ParsedFile.problems`). `inert`: options
    left out where they are no data; `defaults`: values of train.py; `neighbour` reads another file."""
    result = ParsedFile()
    _Reader(path, known, inert, result, neighbour, dict(defaults)).read_text(text)
    return result


def _tree(text: str, path: str, result: ParsedFile) -> ast.Module | None:
    if len(text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        result.problems.append(UserError("config.file_too_large", path=path, limit=MAX_BYTES))
        return None
    line = 1
    try:
        return ast.parse(text)
    except SyntaxError as error:
        line, reason = error.lineno or 1, error.msg or "cannot be read"
    except (ValueError, RecursionError, MemoryError) as error:
        too_deep = isinstance(error, RecursionError | MemoryError)  # of the parser's own stack, not of the machine
        reason = "it is nested too deeply" if too_deep else str(error) or type(error).__name__
    result.problems.append(UserError("config.not_python", source=f"{path}:{line}", reason=reason))
    return None


def _names(node: ast.AST, context: type[ast.expr_context]) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, context)}


@dataclass
class _Reader:
    path: str
    known: set[str]
    inert: set[str]
    result: ParsedFile
    neighbour: Neighbour
    names: dict[str, Any]
    depth: int = 0
    read_later: set[str] = field(default_factory=set)
    is_opaque: bool = False  # whether something that may set any name was left out

    def read_text(self, text: str) -> None:
        tree = _tree(text, self.path, self.result)
        if tree is not None:
            self.read_later |= _names(tree, ast.Load)
            try:
                self.read(tree.body)
            except RecursionError:
                self.problem(f"{self.path}:1", "an expression that is nested too deeply")

    def read(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            source = f"{self.path}:{statement.lineno}"
            match statement:
                case ast.Expr(value=ast.Constant()) | ast.Pass():
                    pass
                case ast.Expr(value=ast.Call(func=ast.Name(id="print"))) if _bound(statement).isdisjoint(self.known):
                    pass
                case ast.ImportFrom(module=str(module), names=[ast.alias(name="*")]):
                    self.import_star(module, statement, source)
                case ast.Import() | ast.ImportFrom() if _bound(statement).isdisjoint(self.known):
                    self.result.notes.append(UserError("config.import_skipped", source=source))
                case ast.Assign(targets=targets, value=value) if all(_is_plain(each) for each in targets):
                    for target in targets:
                        self.assign(target, value, source)
                case ast.AnnAssign(target=ast.Name() as target, value=ast.expr() as value):
                    self.assign(target, value, source)
                case ast.AugAssign(target=ast.Name(id=name) as target, op=op, value=value):
                    self.assign(target, ast.BinOp(ast.Name(name, ast.Load()), op, value), source)
                case ast.If(test=test, body=body, orelse=other):
                    self.branch(test, body, other, statement, source)
                case ast.Expr(value=ast.Call(func=ast.Name(id="exec"), args=[first, *_])):
                    self.read_file(first, statement, source)
                case _:
                    self.leave_out(statement, source)

    def branch(
        self, test: ast.expr, body: list[ast.stmt], other: list[ast.stmt], statement: ast.stmt, source: str
    ) -> None:
        try:
            holds = evaluate(test, self.names)
        except Unsupported:
            self.leave_out(statement, source)
        else:
            self.read(body if holds else other)

    def read_file(self, code: ast.expr, statement: ast.stmt, source: str) -> None:
        """Read exec(open(name).read()), or of what compile makes of it, where name is a file that lies here."""
        found = False
        match code:
            case ast.Call(func=ast.Name(id="compile"), args=[inner, *_]):
                code = inner
        match code:
            case ast.Call(func=ast.Attribute(value=ast.Call(func=ast.Name(id="open"), args=[name, *_]), attr="read")):
                with contextlib.suppress(Unsupported):
                    found = self.read_neighbour(str(evaluate(name, self.names)))
        if not found:
            self.leave_out(statement, source)

    def read_neighbour(self, name: str) -> bool:
        found = self.neighbour(name) if self.depth < _DEEPEST else None
        if found is None:
            return False
        text, path = found
        here, self.path, self.depth = self.path, path, self.depth + 1
        self.read_text(text)
        self.path, self.depth = here, self.depth - 1
        return True

    def import_star(self, module: str, statement: ast.stmt, source: str) -> None:
        if module.partition(".")[0] in _LIBRARIES:
            self.result.notes.append(UserError("config.import_skipped", source=source))
        elif not self.read_neighbour(module.replace(".", "/") + ".py"):
            self.leave_out(statement, source)

    def leave_out(self, statement: ast.stmt, source: str) -> None:
        words = _names(statement, ast.Load)
        anything = bool(words & _SETS_ANYTHING) or _has_star(statement)
        for name in _names(statement, ast.Store):
            self.names.pop(name, None)
        what, bound = _quoted(statement), _bound(statement) & self.known
        keys = sorted(bound - self.inert)
        if anything:
            self.is_opaque = True
            self.result.problems.append(UserError("config.sets_anything", source=source, what=what))
        elif keys:
            self.problem(source, what, key=",".join(keys))
        elif not bound:
            self.result.notes.append(UserError("config.statement_skipped", source=source, what=what))
        for key in sorted(bound & self.inert):
            self.result.notes.append(UserError("config.skipped_value", key=key, source=source, what=what))

    def problem(self, source: str, what: str, **key: str) -> None:
        self.result.problems.append(UserError("config.not_data", source=source, what=what, **key))

    def assign(self, target: ast.expr, node: ast.expr, source: str) -> None:
        targets = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
        names = [each.id for each in targets if isinstance(each, ast.Name)]
        try:
            value = evaluate(node, self.names)
            values = [value] if targets == [target] else list(value) if isinstance(value, tuple) else []
            if len(values) != len(names):
                raise Unsupported(_quoted(node))
            for name, each in zip(names, values, strict=True):
                if name in self.known and not isinstance(each, bool | int | float | str):
                    raise Unsupported(_quoted(node))
        except (Unsupported, RecursionError) as error:
            what = str(error) or "an expression that is nested too deeply"
            for name in names:
                self.names.pop(name, None)
                self.unread(name, what, source)
            return
        for name, each in zip(names, values, strict=True):
            self.names[name] = each
            # Fine where a later line reads it; else a misspelt option, which nanoGPT would take in silence.
            if name in self.known or name not in self.read_later:
                self.result.settings.append(Setting(name, each, source))

    def unread(self, name: str, what: str, source: str) -> None:
        if name in self.inert or name not in self.known:
            self.result.notes.append(UserError("config.skipped_value", key=name, source=source, what=what))
        elif not (self.is_opaque and what.startswith("the name ")):  # its cause was reported
            self.problem(source, f"{name} = {what}", key=name)


def _is_plain(target: ast.expr) -> bool:
    parts = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
    return all(isinstance(part, ast.Name) for part in parts)


def _has_star(statement: ast.stmt) -> bool:
    return any(isinstance(n, ast.ImportFrom) and n.names[0].name == "*" for n in ast.walk(statement))


def _bound(statement: ast.stmt) -> set[str]:
    bound = _names(statement, ast.Store) | _names(statement, ast.Del)
    for node in ast.walk(statement):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    return bound
