"""Configs by somebody who wants a program run, a file read, or the machine's memory and time.

Each would write the file `canary` or read `secret.txt` if it were run, or grow without end if it were believed.
"""

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

CANARY, SECRET = "canary", "secret.txt"
RUN = f"__import__('os').system('touch {CANARY}')"
WRITE = f"open('{CANARY}', 'w').write('x')"
READ = f"open('{SECRET}').read()"


class Hostile(NamedTuple):
    """One attempt. `lay` makes what is needed in the current folder; `words` follow `plan` or `train`.

    `refused`: it must not be taken for a config; else it may be harmless (a comment, a text that stays text).
    """

    name: str
    words: tuple[str, ...]
    lay: Callable[[], None]
    refused: bool = True


def _written(name: str, data: bytes) -> Callable[[], None]:
    def lay() -> None:
        Path(name).write_bytes(data)

    return lay


def _file(name: str, text: str | bytes, suffix: str = ".py", *, refused: bool = True) -> Hostile:
    data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    return Hostile(name, (f"hostile{suffix}",), _written(f"hostile{suffix}", data), refused)


# Statements and expressions of Python that do something where they are run; a name before them is what they are.
CODE = {
    "call": RUN, "assigned call": f"n_layer = {RUN}", "eval": f'eval("{RUN}")', "exec": f'exec("{RUN}")',
    "import and call": f"import os\nos.system('touch {CANARY}')", "from import": f"from os import system as s\ns('touch {CANARY}')",
    "star import": f"from os import *\nsystem('touch {CANARY}')", "subprocess": f"import subprocess as s\nn_layer = s.call(['touch', '{CANARY}'])",
    "write": f"n_layer = {WRITE}", "read": f"dataset = {READ}", "f-string": f"dataset = f\"{{{RUN}}}\"",
    "f-string format": f"dataset = f\"{{1!r:{{{RUN}}}}}\"", "nested f-string": f"dataset = f\"{{f'{{1}}'}}{{{RUN}}}\"",
    "walrus": f"n_layer = (x := {RUN})", "bare walrus": f"(n_layer := {RUN})", "lambda": f"n_layer = (lambda: {RUN})()",
    "decorator": f"@{RUN}.__class__\ndef f(): pass", "decorated class": f"@print\n@(lambda c: {RUN})\nclass C: pass",
    "function default": f"def f(x={RUN}): pass", "function annotation": f"def f(x: {RUN}): pass",
    "class body": f"class C:\n  x = {RUN}", "metaclass": f"class C(metaclass=lambda *a: {RUN}): pass",
    "list": f"n_layer = [{RUN}]", "comprehension": f"n_layer = [{RUN} for _ in range(1)]", "set": f"n_layer = {{{RUN}}}",
    "dict": f"n_layer = {{'a': {RUN}}}", "dict comprehension": f"n_layer = {{1: {RUN} for _ in [1]}}",
    "generator": f"n_layer = list({RUN} for _ in [1])", "ternary": f"n_layer = {RUN} if True else 1", "and": f"n_layer = 1 and {RUN}",
    "or": f"n_layer = 0 or {RUN}", "compare": f"n_layer = 1 < {RUN}", "subscript": f"n_layer = [1][{RUN}]", "slice": f"n_layer = 'a'[{RUN}:]",
    "attribute": f"n_layer = {RUN}.real", "star": f"n_layer, *b = [{RUN}]", "unpacking": f"n_layer, n_head = 1, {RUN}",
    "augmented": f"n_layer = 1\nn_layer += {RUN}", "chained": f"n_layer = n_head = {RUN}", "subscript target": f"globals()['x'] = {RUN}",
    "attribute target": f"import os\nos.environ = {RUN}", "delete": f"n_layer = 1\ndel [{RUN}][0]", "if": f"if {RUN}:\n  n_layer = 1",
    "while": f"while {RUN}:\n  pass", "for": f"for n_layer in [{RUN}]:\n  pass", "with": f"with open('{CANARY}', 'w') as f:\n  pass",
    "try": f"try:\n  {RUN}\nexcept Exception: pass", "finally": f"try: pass\nfinally: {RUN}", "assert": f"assert {RUN}", "raise": f"raise {RUN}",
    "match": f"match {RUN}:\n  case _: n_layer = 1", "async": f"import asyncio\nasync def f(): {RUN}\nasyncio.run(f())", "yield": f"def f():\n  yield {RUN}\nlist(f())",
    "global": f"global n_layer\nn_layer = {RUN}", "percent": f"dataset = '%s' % {RUN}", "format": f"dataset = '{{0.__class__}}'.format({RUN})",
    "sum with call": f"n_layer = 1 + {RUN}", "negated call": f"n_layer = -{RUN}", "not call": f"bias = not {RUN}", "power of call": f"n_layer = 2 ** {RUN}",
    "subclasses": "n_layer = ().__class__.__base__.__subclasses__()", "builtins": f"n_layer = __builtins__['eval']('{RUN[:10]}')",
    "unpickle": "import pickle\nn_layer = pickle.loads(b'cos\\nsystem\\n(S\"touch canary\"\\ntR.')", "ctypes": f"import ctypes\nctypes.CDLL(None).system(b'touch {CANARY}')",
    "exec of file": f"exec(open('{SECRET}').read())", "compile": f"exec(compile('{WRITE[:4]}', '', 'exec'))", "type": f"type('x', (), {{'a': {RUN}}})",
    "semicolon": f"n_layer = 6; {RUN}", "backslash": f"n_layer = \\\n{RUN}", "two in a line": f"n_layer = 6 ; n_head = {RUN}", "await": f"async def f():\n  await {RUN}",
    "shebang": f"#!/bin/sh\ntouch {CANARY}\n", "import hook": f"import sys\nsys.path_hooks.append(lambda p: {RUN})\nimport nothing",
    "late exit": f"import atexit\natexit.register(lambda: {RUN})", "thread": f"import threading\nthreading.Thread(target=lambda: {RUN}).start()",
    "setattr": f"setattr(__builtins__, 'print', {RUN})", "environment": "import os\nos.environ['PATH'] = '/tmp'\nx = os.fork()", "type alias": f"n_layer: int = {RUN}",
}  # fmt: skip
HARMLESS = {
    "annotation": f"n_layer: {RUN} = 3",
    "comment": f"# {RUN}\nn_layer = 12", "docstring": f'"""{RUN}"""\nn_layer = 12', "import": "import evil\nn_layer = 12",
    "inert": f"wandb_run_name = 'x' + str({RUN})", "type comment": f"n_layer = 12  # type: {RUN}",
}  # fmt: skip


def _sized() -> Iterator[Hostile]:
    deep = 20_000
    for name, text in {
        "power": "n_layer = 9 ** 9 ** 9",
        "power of power": "n_layer = 2 ** 2 ** 2 ** 2 ** 2 ** 2",
        "negative power": "n_layer = (-9) ** 9 ** 9.5",
        "chained products": "n_layer = " + " * ".join(["9" * 18] * 2000),
        "shift": "n_layer = 1 << 10 ** 12",
        "repeated text": "dataset = 'a' * 10 ** 12",
        "doubled text": "a = 'a' * 1\n" + "a = a + a\n" * 60 + "dataset = a",
        "doubled text by sums": "a = 'aaaaaaaa'\n" + "a = a + a\n" * 200 + "dataset = a",
        "doubled number": "a = 10.0\n" + "a = a * a\n" * 500 + "n_layer = a",
        "list": "n_layer = [0] * 10 ** 12",
        "comprehension": "n_layer = [[0] * 10 ** 6 for _ in range(10 ** 6)]",
        "range": "n_layer = sum(range(10 ** 18))",
        "endless loop": "while True: pass",
        "long number": "n_layer = " + "9" * 60_000,
        "long hex number": "n_layer = 0x" + "f" * 60_000,
        "long float": "learning_rate = 0." + "0" * 60_000 + "1",
        "minus": "n_layer = " + "-" * deep + "1",
        "not": "bias = " + "not " * 10_000 + "True",
        "brackets": "n_layer = " + "(" * deep + "1" + ")" * deep,
        "lists": "n_layer = " + "[" * deep + "]" * deep,
        "sum": "n_layer = " + "1 + " * deep + "1",
        "attributes": "n_layer = a" + ".b" * deep,
        "calls": "n_layer = a" + "()" * deep,
        "subscripts": "n_layer = a" + "[0]" * 15_000,
        "lambdas": "n_layer = " + "lambda:" * 8000 + "1",
        "ternaries": "n_layer = " + "1 if 1 else " * 5000 + "1",
        "compares": "n_layer = 1" + "<1" * deep,
        "blocks": "".join(" " * i + "if 1:\n" for i in range(300)) + " " * 300 + "n_layer = 1",
        "strings": "dataset = " + "'a' " * 15_000,
        "joined strings": "dataset = " + "'a' + " * 10_000 + "'a'",
        "names": "\n".join(f"x{i} = {i}" for i in range(5000)),
        "one name often": "n_layer = 12\n" * 5000,
        "long line": "n_layer = 12 " + " " * 60_000,
        "long comment": "#" * 65_000,
        "f-strings": "dataset = " + "f'{1}' " * 8000,
        "format width": "dataset = '%999999999999d' % 1",
        "format width f": "dataset = f'{1:999999999999}'",
        "unicode name": "\U0001d4c3_layer = 12\n" * 1000,
        "tab after tab": "\t" * 60_000,
    }.items():
        yield _file(
            f"python {name}",
            text,
            refused=name
            not in ("long comment", "one name often", "long line", "strings", "tab after tab", "unicode name"),
        )
    half = "".join(f"k{i} = 1\n" for i in range(6000))
    for name, text in {
        "arrays": "n_layer = " + "[" * 30_000 + "]" * 30_000, "tables": "n_layer = " + "{a=" * 15_000 + "1" + "}" * 15_000, "dots": "n_layer." + "a." * 30_000 + "a = 1",
        "dotted header": "[" + "a." * 30_000 + "a]", "dots within": "n_layer = {" + "a." * 30_000 + "a = 1}", "dots in an array": "n_layer = [\n" + "{" + "a." * 20_000 + "a = 1},\n]",
        "dots by line": "".join(f"n_layer{'.a' * 200}.b{i} = 1\n" for i in range(150)), "many headers": "".join(f"[a{i}]\n" for i in range(9000)), "array of tables": "[[a]]\n" * 10_000,
        "dots in quotes": "n_layer" + '."a"' * 15_000 + " = 1", "preset dots": "preset." + "a." * 30_000 + "a = 1", "keys": half, "long number": "n_layer = " + "9" * 60_000, "hex": "n_layer = 0x" + "f" * 60_000,
        "long key": "a" * 65_000 + " = 1", "long text": "dataset = '" + "a" * 65_000 + "'", "escapes": 'dataset = "' + "\\u0041" * 10_000 + '"', "float": "learning_rate = 1e999999999",
        "date": "n_layer = 9999-99-99", "old date": "n_layer = 0001-01-01T00:00:00Z", "time": "n_layer = 23:59:60", "multi-line": 'dataset = """' + "\n" * 60_000 + '"""',
        "unclosed": "dataset = '''" + "a" * 60_000, "backslashes": 'dataset = "' + "\\" * 60_001, "twice": "n_layer = 1\nn_layer = 2", "table twice": "[model]\n[model]", "NUL": "n_layer = 1\0",
        "preset bomb": "preset = 'gpt2-124m'\n" * 2, "header depth by lines": "".join("[" + ".".join(["a"] * i) + "]\n" for i in range(1, 250)), "spaces": "n_layer =" + " " * 60_000,
        "inline in array": "n_layer = [" + "{a=1}," * 9000 + "]", "numbers": "n_layer = [" + "1," * 32_000 + "]", "mixed depth": "n_layer = [\n" + ("{" + "a." * 90 + "a = [\n") * 120 + "]" * 1,
    }.items():  # fmt: skip
        yield _file(f"toml {name}", text, ".toml")


def _encoded() -> Iterator[Hostile]:
    for name in (
        "utf-16",
        "utf-16-be",
        "utf-32",
        "utf-7",
        "cp037",
        "rot13",
        "hex",
        "raw_unicode_escape",
        "unicode_escape",
        "zlib",
    ):
        yield _file(f"cookie {name}", f"# -*- coding: {name} -*-\nn_layer = {RUN}\n")
    yield _file(
        "cookie before an escape",
        b"# coding: unicode_escape\n# \\n" + RUN.encode() + b"\nn_layer = 12\n",
        refused=False,
    )
    for name in ("utf-16", "utf-16-be", "utf-32", "utf-32-be"):
        yield _file(f"in {name}", f"n_layer = {RUN}\n".encode(name))
        yield _file(f"toml in {name}", "n_layer = 12\n".encode(name), ".toml")
    for name, data in {
        "byte order mark and code": b"\xef\xbb\xbf" + RUN.encode(),
        "two marks": b"\xef\xbb\xbf" * 2 + b"n_layer = 12",
        "NUL": b"n_layer = 12\0\n" + RUN.encode(),
        "latin-1": "dataset = '\u00e4'".encode("latin-1"),
        "overlong": b"n_layer\xc0\xbd12",
        "surrogate": b"dataset = '\xed\xa0\x80'",
        "random": bytes(range(256)) * 4,
        "form feed": b"\x0c" + RUN.encode(),
        "zip": b"PK\3\4" + bytes(200),
        "pickle": b"\x80\x04cos\nsystem\n(S'touch canary'\ntR.",
        "pyc": b"\xa7\r\r\n" + bytes(64),
        "elf": b"\x7fELF" + bytes(100),
        "carriage return": b"# x\r" + RUN.encode(),
        "line separator": "# x\u2028".encode() + b"\n" + RUN.encode(),
        "right to left": f"# \u202e\n{RUN}".encode(),
    }.items():
        yield _file(f"bytes {name}", data)


def _placed() -> Iterator[Hostile]:
    """Files that are none, and names that lead elsewhere."""

    def link(to: str) -> Callable[[], None]:
        return lambda: Path("hostile.py").symlink_to(to)

    def listening() -> None:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind("hostile.py")

    for target in (
        "/dev/zero",
        "/dev/random",
        "/dev/stdin",
        "/dev/tty",
        "hostile.py",
        "/proc/self/mem",
        "/proc/self/environ",
        "/proc/kmsg",
        "/nonexistent",
        "/",
    ):
        yield Hostile(f"link to {target}", ("hostile.py",), link(target))
    yield Hostile(f"link to {SECRET}", ("hostile.py",), link(SECRET), refused=False)  # a config: its call is not run
    yield Hostile("pipe", ("hostile.py",), lambda: os.mkfifo("hostile.py"))
    yield Hostile("pipe of toml", ("hostile.toml",), lambda: os.mkfifo("hostile.toml"))
    yield Hostile("socket", ("hostile.py",), listening)
    yield Hostile("folder", ("hostile.py",), lambda: Path("hostile.py").mkdir())
    yield Hostile("a terabyte of nothing", ("hostile.py",), lambda: _sparse("hostile.py", 2**40))
    yield Hostile("just too large", ("hostile.toml",), lambda: _sparse("hostile.toml", 2**16 + 1))
    for word in ("/dev/zero.py", "/dev/fd/0", "-.py", "../" * 200 + "etc/passwd.py", "a" * 300 + ".py", "hostile.py\0.toml", "file:///etc/passwd.py", "http://127.0.0.1:9/a.toml",
                 "\\\\host\\share\\a.py", "CON.py", "~root/.bashrc.py", "$(touch canary).py", "`touch canary`.py", "; touch canary #.py", "| touch canary.py", "%s%s%s%n.py", "{0.__class__}.py"):  # fmt: skip
        yield Hostile(f"named {word[:30]!r}", (word,), lambda: None)


def _sparse(name: str, size_bytes: int) -> None:
    with Path(name).open("wb") as file:
        file.truncate(size_bytes)


def _typed() -> Iterator[Hostile]:
    """Code as a value on the command line, and in texts that name files."""
    for key in (
        "n_layer",
        "learning_rate",
        "bias",
        "device",
        "dtype",
        "init_from",
        "memory_limit",
        "allocator_settings",
        "batch_size",
    ):
        for name, value in {
            "call": RUN,
            "format": "{0.__class__.__init__.__globals__}",
            "shell": f"$(touch {CANARY})",
        }.items():
            yield Hostile(
                f"--{key}={name}",
                ("gpt2-124m", f"--{key}={value}"),
                lambda: None,
                refused=key != "init_from" or name == "call",
            )
    for key in ("n_layer", "grad_clip"):
        for name, value in {
            "power": "9**9**9",
            "digits": "9" * 100_000,
            "minus": "-" * 900 + "1",
            "brackets": "(" * 400 + "1" + ")" * 400,
            "sum": "1+" * 450 + "1",
        }.items():
            yield Hostile(
                f"--{key}={name}", ("gpt2-124m", f"--{key}={value}"), lambda: None, refused=name in ("power", "digits")
            )
    for path in (
        "/dev/zero",
        "/proc/self/mem",
        "pipe.pt",
        "/",
        "~nobody-here/x",
        "../" * 100,
        "a/" * 400,
        "\0/x",
        "zero.safetensors",
    ):
        yield Hostile(f"init_from={path[:20]!r}", ("gpt2-124m", f"--init_from={path}"), _bait)
    for path in ("/dev/zero", "/proc/self", "pipe", "..", "a/" * 400, "file:///etc", "zip://x", "bait"):
        yield Hostile(f"dataset={path[:20]!r}", ("gpt2-124m", f"--dataset={path}"), _bait, refused=False)


def _bait() -> None:
    os.mkfifo("pipe.pt")
    os.mkfifo("pipe")
    Path("zero.safetensors").symlink_to("/dev/zero")
    Path("bait").mkdir()
    for name in ("train.bin", "val.bin", "meta.json", "meta.pkl", "dataset.json", "mix.toml"):
        os.mkfifo(f"bait/{name}")


def attempts() -> list[Hostile]:
    found = [_file(f"code {name}", f"{text}\n", refused=True) for name, text in CODE.items()]
    found += [_file(f"harmless {name}", f"{text}\n", refused=False) for name, text in HARMLESS.items()]
    found += [
        _file(f"toml text {key}", f'{key} = """{RUN}"""\n', ".toml", refused=key != "dataset")
        for key in ("n_layer", "dtype", "dataset", "learning_rate", "device")
    ]
    return [*found, *_sized(), *_encoded(), *_placed(), *_typed()]
