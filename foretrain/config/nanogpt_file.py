"""nanoGPT's `config/*.py` read as data: parsed with `ast`, never executed.

Accepted are assignments `name = expression` of literals, names set above, arithmetic on numbers and joined strings.
Everything else is reported with its line: as a note where it cannot matter (imports, a tracker's run name), else
as a problem. nanoGPT itself runs the file with exec (karpathy/nanoGPT configurator.py).
"""

import ast
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
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


class Unsupported(Exception):
    """An expression that is not plain data."""


@dataclass
class ParsedFile:
    """What a file sets, what was skipped with a note, and what is wrong with it."""

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
    """The value of a literal expression. Raises Unsupported for anything that would have to be run."""
    match node:
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
    raise Unsupported(_kind(node))


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


def _kind(node: ast.AST) -> str:
    return _quoted(node)


def _quoted(node: ast.AST) -> str:
    """The beginning of a piece of code, as it is written."""
    line, *more = ast.unparse(node).split("\n")
    return f"`{line[:40]}{'…' if more or len(line) > 40 else ''}`"


def parse_expression(text: str, names: dict[str, Any] | None = None) -> Any:
    """The value of '5 * 8', '1e-3', 'True', or of `names`; text that is not such an expression stays text."""
    if len(text) > 1000:
        return text
    try:
        return evaluate(ast.parse(text.strip(), mode="eval").body, names or {})
    except (SyntaxError, ValueError, RecursionError, MemoryError, Unsupported):
        return text


def parse(text: str, path: str, known: set[str], inert: set[str]) -> ParsedFile:
    """Read the text of a nanoGPT config file.

    `known` are all knobs, `inert` those that are left out where they are no data. Never raises for bad content: see
    `ParsedFile.problems`.
    """
    result = ParsedFile()
    if len(text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        result.problems.append(UserError("config.file_too_large", path=path, limit=MAX_BYTES))
        return result
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        result.problems.append(
            UserError(
                "config.not_python",
                source=f"{path}:{error.lineno or 1}",
                reason=error.msg or "cannot be read",
            )
        )
        return result
    except (ValueError, RecursionError, MemoryError) as error:
        too_deep = isinstance(error, RecursionError | MemoryError)  # of the parser's own stack, not of the machine
        reason = "it is nested too deeply" if too_deep else str(error) or type(error).__name__
        result.problems.append(UserError("config.not_python", source=f"{path}:1", reason=reason))
        return result
    _Reader(path, known, inert, result, _names_read(tree)).read(tree)
    return result


def _names_read(tree: ast.Module) -> set[str]:
    return {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}


@dataclass
class _Reader:
    path: str
    known: set[str]
    inert: set[str]
    result: ParsedFile
    read_later: set[str]
    names: dict[str, Any] = field(default_factory=dict)

    def read(self, tree: ast.Module) -> None:
        for statement in tree.body:
            source = f"{self.path}:{statement.lineno}"
            match statement:
                case ast.Expr(value=ast.Constant()) | ast.Pass():
                    pass
                case ast.Import() | ast.ImportFrom():
                    self.result.notes.append(UserError("config.import_skipped", source=source))
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    self.assign(name, value, source)
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                    self.assign(name, value, source)
                case _:
                    what = _quoted(statement)
                    self.result.problems.append(UserError("config.not_data", source=source, what=what))

    def assign(self, name: str, value: ast.expr, source: str) -> None:
        try:
            self.names[name] = evaluate(value, self.names)
        except (Unsupported, RecursionError) as error:
            self.names.pop(name, None)
            what = str(error) or "an expression that is nested too deeply"
            if name in self.inert:
                self.result.notes.append(UserError("config.skipped_value", key=name, source=source, what=what))
            else:
                self.result.problems.append(UserError("config.not_data", source=source, what=f"{name} = {what}"))
            return
        # A helper variable, such as tokens = 10e9, is fine where a later line reads it; otherwise it is a
        # misspelt knob, which nanoGPT would take in silence.
        if name in self.known or name not in self.read_later:
            self.result.settings.append(Setting(name, self.names[name], source))
