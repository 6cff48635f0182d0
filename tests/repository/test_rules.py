"""The rules of the house, held by tests: rooms, sizes, texts, units, start-up without torch."""

import ast
import re
import string
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

from foretrain.analysis import log_analysis, log_checks, measured_step
from foretrain.analysis.forecast_check import Row
from foretrain.base import messages
from foretrain.base.errors import EXIT_CODE_OF
from foretrain.cli import app
from foretrain.comparison import ablations, compare, questions, repeats, subject
from foretrain.config.option import option
from foretrain.config.options import OPTIONS, RunConfig
from foretrain.hardware import calibration
from foretrain.predict import memory, plan, timing
from foretrain.predict.speed import time
from foretrain.runs import folder, record
from tests import long_tests
from tests.kit.command import REPO, foretrain
from tests.kit.data import shards
from tests.kit.nanogpt import held_by_nanogpt, trained_model, write_ckpt

PACKAGE = REPO / "foretrain"
FILES = sorted(PACKAGE.rglob("*.py"))

MAX_FUNCTION_LINES, MAX_OPTIONS = 60, 181
# A file holds one subject in 120 to 500 lines, and a package has 4 to 15 files or is a file. These numbers only ever
# become smaller. The house stands at 330 files, 75,000 lines, 150 tables that ruff leaves alone, and none of the others.
SIZE = {
    "files": 503,
    "lines": 94_990,
    "files below 60 lines": 30,
    "files above 600 lines": 0,
    "packages below 4 files": 2,
    "packages above 15 files": 7,
    "statements that ruff leaves alone": 687,
}
SLACK = 0.01  # a number that is this much too high is lowered

# The rooms from the lowest up, each with those above it in ARCHITECTURE.md's table that it may not import.
ROOMS: dict[str, set[str]] = {
    "base": set(),
    "hardware": set(),
    "config": set(),
    "data": set(),
    "model": set(),
    "predict": set(),
    "runs": {"model", "predict"},
    "evaluation": {"predict"},
    "training": {"predict"},  # the trainer cannot see its forecast
    "measure": set(),
    "advice": {"evaluation", "training"},
    "analysis": {"measure"},
    "comparison": {"measure", "advice"},
    "app": set(),
    "reports": set(),
    "web": {"measure"},
    "cli": set(),
}
# Imports within functions: what takes long to import and is not always needed. This number only ever becomes smaller.
DEFERRED_IMPORTS = 49

# Modules that import one another. This list only ever becomes shorter: cure one, and delete its line.
CYCLES: set[tuple[str, ...]] = set()


@cache
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text("utf-8")) for path in FILES}


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def assert_none(breaches: Iterable[str]) -> None:
    found = sorted(breaches)
    assert not found, "\n" + "\n".join(found)


def room_of(module: str) -> str:
    return module.split(".")[1]


def allowed(room: str) -> set[str]:
    order = list(ROOMS)
    return set(order[: order.index(room) + 1]) - ROOMS[room]


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(REPO).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path) for path in FILES}


def imports_of(path: Path) -> set[str]:
    """Modules that a file imports: at its top, within functions and for types only."""
    found = set()
    for node in ast.walk(trees()[path]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno} imports by a relative name"
            # `from foretrain.reports import text` imports the module foretrain.reports.text
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else f"{node.module}" for name in names}
    return found


def test_rooms_import_only_those_above_them() -> None:
    assert_none(
        f"{name_of(path)}: {room_of(module_of(path))} may not import {name}"
        for path in FILES
        if path.parent != PACKAGE
        for name in imports_of(path)
        if name.startswith("foretrain.") and room_of(name) not in allowed(room_of(module_of(path)))
    )


def test_architecture_says_what_each_room_may_import() -> None:
    text = (REPO / "ARCHITECTURE.md").read_text("utf-8")
    rows = re.findall(r"^\| `(\w+)/` \|[^|]+\| (?:nothing above|all above)(?: but ([\w, ]+))? \|$", text, re.MULTILINE)
    assert {room: set(names.split(", ")) - {""} for room, names in rows} == ROOMS
    assert [room for room, _ in rows] == list(ROOMS)


def size_of_the_house() -> dict[str, int]:
    texts = {path: path.read_text("utf-8") for path in FILES}
    lines = {path: text.count("\n") for path, text in texts.items()}
    in_package = Counter(path.parent for path in FILES if path.name != "__init__.py")
    return {
        "files": len(FILES),
        "lines": sum(lines.values()),
        "files below 60 lines": sum(count < 60 for path, count in lines.items() if path.name != "__init__.py"),
        "files above 600 lines": sum(count > 600 for count in lines.values()),
        "packages below 4 files": sum(count < 4 for count in in_package.values()),
        "packages above 15 files": sum(count > 15 for count in in_package.values()),
        "statements that ruff leaves alone": sum(text.count("# fmt: skip") for text in texts.values()),
    }


def test_the_house_only_becomes_smaller() -> None:
    now = size_of_the_house()
    assert now.keys() == SIZE.keys()
    assert_none(f"{count} {what}; at most {SIZE[what]}" for what, count in now.items() if count > SIZE[what])
    assert_none(f"{count} {what} now, lower its number in SIZE" for what, count in now.items()
                if count < SIZE[what] * (1 - SLACK) - 1)  # fmt: skip


def test_folders_are_at_most_three_deep() -> None:
    assert_none(name_of(path) for path in FILES if len(path.relative_to(PACKAGE).parts) > 4)


def test_few_imports_are_deferred() -> None:
    functions = [
        node
        for tree in trees().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    found = {id(node) for function in functions for node in ast.walk(function)
             if isinstance(node, ast.Import | ast.ImportFrom)}  # fmt: skip
    assert len(found) <= DEFERRED_IMPORTS, f"{len(found)} imports stand within functions: move them to the file's head"
    assert len(found) == DEFERRED_IMPORTS, f"only {len(found)} imports stand within functions: lower DEFERRED_IMPORTS"


def test_no_new_cycles_of_imports() -> None:
    """Deferred and type-only imports count: they hide a cycle and do not cure it."""
    imported = {module_of(path): imports_of(path) & MODULES - {module_of(path)} for path in FILES}
    groups = cycles(imported)
    assert_none(" and ".join(group) + " import one another" for group in groups - CYCLES)
    assert_none(" and ".join(group) + ": no cycle any more, delete it from CYCLES" for group in CYCLES - groups)


def cycles(imported: dict[str, set[str]]) -> set[tuple[str, ...]]:
    """Groups of modules of which each reaches all others."""
    reached: dict[str, set[str]] = {}
    for start in imported:
        seen, open_ = set(), [start]
        while open_:
            new = imported[open_.pop()] - seen
            seen |= new
            open_ += new
        reached[start] = seen
    return {
        tuple(sorted({start, *(other for other in reached[start] if start in reached[other])}))
        for start in imported
        if start in reached[start]
    }


def test_cycles_are_found_through_several_modules() -> None:
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set(), "e": {"a"}}) == {("a", "b", "c")}
    assert cycles({"a": {"b"}, "b": {"c"}, "c": set()}) == set()


def test_functions_stay_small() -> None:
    assert_none(
        f"{name_of(path)}:{node.lineno} {node.name} has {lines} lines; at most {MAX_FUNCTION_LINES}"
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := (node.end_lineno or 0) - node.lineno + 1) > MAX_FUNCTION_LINES
    )


# `# fmt: skip` on what is no table, by file. These numbers only ever become smaller.
SKIPPED = {
    "app/plan.py": 1,
    "reports/views/compare.py": 3,
    "measure/calibrate.py": 3,
    "analysis/log_analysis.py": 2,
    "app/compare.py": 2,
    "app/explain.py": 1,
    "comparison/repeats.py": 1,
    "data/batches.py": 1,
    "predict/compiled/kernels.py": 2,
    "predict/compiled/halves.py": 2,
    "predict/compiled/step.py": 2,
    "reports/views/plan.py": 1,
    "training/nonfinite.py": 2,
    "advice/outlook.py": 1,
    "analysis/forecast_check.py": 1,
    "analysis/log_checks.py": 1,
    "analysis/snapshot_analysis.py": 1,
    "app/run_report.py": 1,
    "app/train.py": 1,
    "cli/commands/data.py": 1,
    "comparison/sources/tables.py": 1,
    "data/inspection.py": 1,
    "data/hf_tokenizer.py": 1,
    "data/locate.py": 1,
    "data/prepare/engine.py": 1,
    "data/prepare/formats.py": 2,
    "training/watch.py": 1,
    "predict/abstract/autograd.py": 1,
    "predict/abstract/functional.py": 1,
    "predict/abstract/passage.py": 1,
    "predict/abstract/step.py": 1,
    "predict/abstract/tensors.py": 1,
    "predict/speed/ops.py": 1,
    "predict/trace/card/standin.py": 1,
    "predict/trace/kernels/attention.py": 1,
    "reports/numbers.py": 1,
    "reports/views/explain.py": 2,
    "training/attempts.py": 1,
    "training/contention.py": 1,
    "training/feed.py": 1,
    "training/memory_limit.py": 1,
    "training/vitals.py": 1,
    "measure/tuner.py": 1,
}


def test_only_tables_are_left_unformatted() -> None:
    """A table is a collection, or a call with its values, such as the fields of a record."""
    found = Counter({name_of(path): n for path, tree in trees().items() if (n := skipped_statements(path, tree))})
    assert_none(f"{name}: `# fmt: skip` on what is no table, {count} times; at most {SKIPPED.get(name, 0)}"
                for name, count in found.items() if count > SKIPPED.get(name, 0))  # fmt: skip
    assert_none(f"{name}: {found[name]} now, lower its number in SKIPPED" for name, most in SKIPPED.items()
                if found[name] < most)  # fmt: skip


def skipped_statements(path: Path, tree: ast.Module) -> int:
    tables = (ast.Tuple, ast.List, ast.Dict, ast.Set, ast.Call)
    ends = {
        node.end_lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.Return | ast.Expr) and isinstance(node.value, tables)
    }
    lines = enumerate(path.read_text("utf-8").splitlines(), 1)
    return sum("# fmt: skip" in line and number not in ends for number, line in lines)


def test_only_the_command_line_prints() -> None:
    assert_none(
        f"{name_of(path)}:{node.lineno} prints"
        for path, tree in trees().items()
        if path.parent == PACKAGE or room_of(module_of(path)) != "cli"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    )


@pytest.mark.parametrize("which", ["plans", "others"])
def test_plan_and_help_never_import_torch_or_numpy(which: str, own_directory: Path) -> None:
    shards(own_directory / "data" / "a", 60)
    write_ckpt(Path("ckpt.pt"), held_by_nanogpt(trained_model()))
    snapshot = str(REPO / "examples" / "snapshots" / "fragmented.pickle")
    results = str(REPO / "tests" / "data" / "verify_on_a_card_that_computes_nothing.json")
    case = REPO / "examples" / "real-cases"
    told = (
        ["explain", snapshot], ["verify", "--show", results], ["watch", "--quiet", "--", "true"], ["serve", "--help"],
        ["advise", f"{case}/c.py", "--gpu", "4070"],
        ["compare", f"{case}/b1.log+{case}/b1.py", f"{case}/b2.csv+{case}/b2.py", "--gpu", "4070"],
    )  # fmt: skip
    commands = (
        ["--help"], ["plan", "--help"], ["eval", "--help"], ["plan", "gpt2-124m", "--gpu", "4070"],
        ["plan", "baby", "--gpus", "2 x RTX 4090", "--gradient_accumulation_steps=2"],
        ["plan", "qwen3-0.6b", "--method=qlora", "--gpu", "4070"],
        ["plan", "llama-3.2-1b", "--inference", "--gpu", "4090", "--weights", "q4_k_m"],
        ["plan", "--gpu", "4070", "--init_from=./ckpt.pt"], ["plan", "--gpu", "4070", "--init_from=gpt2"],
        ["plan", "--gpu", "4070", "--dataset=a"], ["data", "info", "a"], ["data", "verify", "a"], ["gpus"], ["runs"],
        ["train", "--block_size=0"],
    )  # fmt: skip
    never = {
        "torch", "numpy", "safetensors", "tokenizers", "starlette", "yaml", "transformers", "huggingface_hub", "lm_eval",
    }  # fmt: skip
    code = (
        f"import sys\nfrom foretrain.cli import app\nfor words in {commands if which == 'plans' else told!r}:\n"
        "    try: app(words)\n    except SystemExit as e: assert e.code in (0, None), (words, e.code)\n"
        "    except Exception as e: assert type(e).__name__ == 'ConfigError' and 'block_size' in str(e), e\n"
        f"    heavy = {never!r} & set(sys.modules)\n"
        f"    assert not heavy, (words, heavy)\n    assert {which == 'others'} or 'psutil' not in sys.modules, words\nprint('all looked at')"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("all looked at\n")


# -- tests -----------------------------------------------------------------------------------------------------

# Private names of the package that tests still use. This list only ever becomes shorter.
PRIVATE_NAMES_IN_TESTS = {
    "faults/test_inputs.py: config_checks._RULES",
    "kit/prepare.py: writer._write",
    "predict/test_abstract.py: step.EagerProgram._uneven",
    "predict/test_abstract.py: step._recorders",
    "predict/test_abstract.py: step._structures",
    "advice/test_written.py: advice_view._saved",
    "advice/test_advisor.py: advice_view._time",
    "advice/test_advisor.py: advice_view._useless",
    "model/test_attention.py: attention._forward_shapes",
    "analysis/test_run.py: run_explain_view._why",
    "model/test_low_precision.py: low_precision._int8_matmul",
    "model/test_low_precision.py: low_precision._int_mm",
    "model/test_low_precision.py: low_precision._sums_in_fp32",
    "data/prepare/test_prepare.py: cli._count",
    "data/prepare/test_prepare.py: cli._share",
    "data/prepare/test_prepare.py: cli._size",
    "data/prepare/test_bad_files.py: foretrain.data.prepare.opened._FIRST_WAIT_S",
    "data/prepare/test_bad_files.py: remote._ATTEMPTS",
    "data/prepare/test_bad_files.py: vocabulary._find",
    "predict/trace/test_any_code.py: guard._alive",
    "predict/test_uneven.py: outlook_view._frontier",
    "measure/test_verify.py: verify_step._prepare",
    "training/test_watch.py: watching.Sampler._sample",
}


def test_tests_lie_in_the_room_that_they_test() -> None:
    paths = {path.relative_to(REPO / "tests").parts[0] for path in (REPO / "tests").rglob("test_*.py")}
    assert paths <= {*ROOMS, "repository", "faults"}


def test_tests_share_by_the_kit_and_call_public_names() -> None:
    """What two test modules need is in tests/kit/; a private name pins how something is done, not what it does."""
    found = set()
    for path in sorted((REPO / "tests").rglob("*.py")):
        tree = ast.parse(text := path.read_text("utf-8"))
        names = str(path.relative_to(REPO / "tests"))
        modules = {name for node in ast.walk(tree) for name in _imported(node)}
        assert_none(f"{names} imports {each}: move it to tests/kit/" for each in modules
                    if re.match(r"tests\.(\w+\.)*test_", each))  # fmt: skip
        assert_none(f"{names}: {each} has more than 60 characters" for each in re.findall(r"def (test_\w{56,})", text))
        found |= {f"{names}: {each}" for each in private_names(tree)}
    assert_none(f"{each} is private: use a public name" for each in found - PRIVATE_NAMES_IN_TESTS)
    assert_none(f"{each}: not used any more, delete its line" for each in PRIVATE_NAMES_IN_TESTS - found)


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []


def private_names(tree: ast.AST) -> Iterable[str]:
    ours = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("foretrain")
        for alias in node.names
    } | {"foretrain"}
    private = re.compile(r"_[^_]\w*$")
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("foretrain"):
            yield from (alias.name for alias in node.names if private.match(alias.name))
        elif isinstance(node, ast.Attribute) and private.match(node.attr):
            if ast.unparse(node.value).split(".")[0] in ours:
                yield ast.unparse(node)
        elif isinstance(node, ast.Call) and node.args:
            # monkeypatch.setattr(module, "_name", …), mock.patch("foretrain.module._name")
            constants = [each.value for each in node.args[:2] if isinstance(each, ast.Constant)]
            for text in constants:
                if isinstance(text, str) and re.match(r"foretrain\..*\._[^_]\w*$", text):
                    yield text
                elif isinstance(text, str) and private.match(text) and ast.unparse(node.args[0]).split(".")[0] in ours:
                    yield f"{ast.unparse(node.args[0])}.{text}"


def test_private_names_are_found() -> None:
    code = "from foretrain.base import a as b, _c\nb._d()\np.setattr(b, '_e', 1)\nmock.patch('foretrain.base.a._f')\nown._g\nb.__h__"
    assert set(private_names(ast.parse(code))) == {"_c", "b._d", "b._e", "foretrain.base.a._f"}


# -- texts -------------------------------------------------------------------------------------------------


def ids_in_code() -> set[str]:
    """Every string constant in the code that looks like a text id."""
    constants = set()
    for tree in trees().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                constants.add(node.value)
    for script in [*PACKAGE.glob("web/static/*.js"), *(REPO / "static_site").glob("*.js")]:
        constants |= set(re.findall(r"[\"']([a-z_]+(?:\.[a-z_]+)*)[\"']", script.read_text("utf-8")))
    return constants


def test_every_text_is_used_and_every_error_has_a_text() -> None:
    constants = ids_in_code()
    for id in messages.texts():
        rest, last = id.partition(".")[2], id.rsplit(".", 1)[-1]
        assert {id, rest, last, f".{last}"} & constants, f"nothing says {id}"
    # Errors are raised by id without "error.": each of those must have a text and an exit code.
    pattern = re.compile(r"UserError\(\s*(?:f?)\"([a-z_]+\.[a-z_]+)\"")
    raised = {id for path in FILES for id in pattern.findall(path.read_text("utf-8"))}
    assert len(raised) > 40
    for id in raised:
        assert messages.has(f"error.{id}"), id
        assert id.split(".")[0] in EXIT_CODE_OF, id


def test_placeholders_use_known_formats() -> None:
    for id, template in messages.texts().items():
        for _, name, spec, _ in string.Formatter().parse(template):
            if name is not None:
                assert re.fullmatch(r"[A-Za-z_0-9]+", name), id
                assert spec in messages.FORMATS or re.fullmatch(r"[,]?(\.\d+f)?|,|[a-z ]+\|[a-z ]+", spec or ""), (
                    id,
                    spec,
                )


def test_catalogue_and_texts_are_valid_toml() -> None:
    for name in ("hardware/gpus.toml", "locales/en.toml"):
        assert tomllib.loads((PACKAGE / name).read_text("utf-8"))


# -- knobs and records -------------------------------------------------------------------------------------


def test_every_knob_is_obeyed_by_something() -> None:
    """A knob that nothing reads would be a lie; the inert ones say that they have no effect."""
    text = "".join(p.read_text("utf-8") for p in FILES if p.name not in ("config.py", "presets.py"))
    read = set(re.findall(r"\b(?:config|c|own|s)\.(\w+)", text))
    for knob in OPTIONS.values():
        if not knob.inert:
            own = {
                "eval_batch_size": "eval_batch", "eval_block_size": "eval_block", "eval_sequences": "eval_rows",
                "n_kv_head": "kv_heads", "head_dim": "head_width", "mlp_width": "mlp_inner",
            }.get(knob.name, knob.name)  # fmt: skip
            derived = {"memory_limit": "memory_limit_bytes", "checkpointed_blocks": "checkpointed"}.get(knob.name, own)
            assert derived in read, knob.name


# What lists three options outside config/, and why it is no attribute of theirs. Keep it short.
LISTS_OF_OPTIONS = {
    ("measure/verify_session.py", "_CHARACTERS"): "a run with its values",
    ("measure/verify_session.py", "_30M"): "a run with its values",
    ("measure/verify_session.py", "_124M"): "a run with its values",
    ("measure/verify_session.py", "_350M"): "a run with its values",
    ("measure/verify_session.py", "_SMALL"): "a run with its values",
    ("measure/calibrate.py", "REFERENCE"): "a run with its values",
    ("measure/calibrate.py", "LARGE_REFERENCE"): "a run with its values",
    ("measure/calibrate.py", "SMALL_REFERENCE"): "a run with its values",
    ("measure/calibrate.py", "NARROW_REFERENCE"): "a run with its values",
    ("model/techniques/recompute_norm_gelu.py", "refuses"): "the options of a conflict",
    ("model/techniques/optimizer_in_backward.py", "refuses"): "the options of a conflict",
    ("model/techniques/optimizer_in_backward.py", "reference"): "the run that is traced",
    ("model/techniques/optimizer_in_backward.py", "beside"): "what must be set with it",
    ("advice/combine.py", "_smaller_models"): "ids of advice rules",
    ("predict/speed/ops.py", "Kind"): "kinds of operations",
    ("comparison/questions.py", "_same_evaluation"): "what foretrain's evaluation is drawn by",
    ("comparison/questions.py", "_alike"): "what the error of a predicted speed hangs on",
    ("reports/views/agreement.py", "_sizes"): "the columns of one table",
}


def test_only_config_lists_options() -> None:
    """What is known of options stands where they are defined; others ask for those with an attribute.

    A dictionary within a function is a change of some options, and no list of them.
    """
    found = {
        (name_of(path), owner)
        for path, tree in trees().items()
        if path.parent == PACKAGE or room_of(module_of(path)) != "config"
        for statement in tree.body
        for owner, node in _collections(statement)
        if len(_texts_in(node) & OPTIONS.keys()) >= 3
    }
    assert_none(f"{file}: {owner} lists options; give them an attribute in config/options.py"
                for file, owner in found - LISTS_OF_OPTIONS.keys())  # fmt: skip
    assert_none(f"{file}: {owner} lists no options any more: delete its line" for file, owner in
                LISTS_OF_OPTIONS.keys() - found)  # fmt: skip


def _collections(statement: ast.stmt) -> Iterable[tuple[str, ast.expr]]:
    """(function or constant, every tuple, list, set or dictionary in it)."""
    scope = statement.body if isinstance(statement, ast.ClassDef) else [statement]
    for each in scope:
        in_function = isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
        targets = each.targets if isinstance(each, ast.Assign) else [getattr(each, "target", each)]
        owner = each.name if in_function else ast.unparse(targets[0])
        kinds = (ast.Tuple, ast.List, ast.Set) if in_function else (ast.Tuple, ast.List, ast.Set, ast.Dict)
        yield from ((owner, node) for node in ast.walk(each) if isinstance(node, kinds))


def _texts_in(node: ast.expr) -> set[str]:
    members = node.keys if isinstance(node, ast.Dict) else node.elts  # type: ignore[attr-defined]
    return {each.value for each in members if isinstance(each, ast.Constant) and isinstance(each.value, str)}


def test_a_list_of_options_is_found() -> None:
    code = "A: tuple = ('bias', 'seed', 'dtype')\ndef f(x):\n    return [g(n) for n in ('bias', 'seed', 'dtype')]\n"
    code += "def change():\n    return {'bias': 1, 'seed': 2, 'dtype': 3}\nclass C:\n    T = {'bias': 1, 'seed': 2, 'dtype': 3}"
    found = [owner for line in ast.parse(code).body for owner, node in _collections(line)
             if len(_texts_in(node) & OPTIONS.keys()) >= 3]  # fmt: skip
    assert found == ["A", "f", "T"]


def test_an_option_says_what_matters() -> None:
    """What an option affects and what a resume makes of it have no default."""
    said = {"group": "model", "affects": (), "on_resume": "free"}
    assert option(1, "help", **said)
    for left_out in said:
        with pytest.raises(TypeError, match=left_out):
            option(1, "help", **{name: value for name, value in said.items() if name != left_out})
    for each in OPTIONS.values():
        assert each.needs is None or each.needs[0] in OPTIONS, each.name
        assert each.reference == "same" or "speed" in each.affects, f"{each.name}: a timed step has nothing of it"
        assert not each.by_effect or {"speed", "memory"} & {*each.affects}, each.name
        if each.slider:
            low, high, _ = each.slider
            assert each.least is None or each.least <= low, each.name
            assert each.most is None or high <= each.most, each.name


def test_numbers_in_records_carry_their_unit() -> None:
    units = (
        "_bytes",
        "_s",
        "_j",
        "_w",
        "_gib",
        "_ghz",
        "_bits",
        "_flops",
        "_tflops",
        "_per_s",
        "_per_pin",
        "_per_sm",
        "_g",
    )
    # Dimensionless by nature, or with the unit stated in the docstring of the record.
    plain = {
        "mfu", "nanogpt_mfu", "epochs", "loss", "grad_norm", "learning_rate", "val_loss", "train_loss",
        "first_val_loss", "best_val_loss", "first_loss", "last_loss", "last_val_loss",
        "slower_factor", "causal_mfu", "hfu", "clock_mfu", "clock_hfu", "logged_mfu", "nanochat_mfu", "whole_run_cost",
        "predicted", "measured", "low", "high", "cost_low", "unsteadiness", "drift", "options", "cost_expected",
        "cost_high", "rent_low", "rent_expected", "rent_high", "cost_per_hour", "cost", "bits_per_byte", "share", "at",
        "one_value", "other_value", "printed_mfu", "losses", "others_share", "settings",
    }  # fmt: skip
    records = [
        memory.PhaseMemory, memory.RunMemory, memory.Component, plan.Timing, plan.Work, time.Range, Row, timing.Power,
        log_analysis.LogAnalysis, log_analysis.Losses, log_analysis.Remaining, measured_step.Disturbance,
        calibration.Calibration, calibration.KernelTime, calibration.StepTime, log_checks.Utilization, folder.StepMetrics, folder.EvaluationMetrics, record.TrainedRun, record.WatchedRun, record.TrainerRun, record.MeasuredMemory,
        record.MeasuredPhase, compare.Side, repeats.Interval, questions.Pair, ablations.Ablation, subject.Curve, subject.Memory,
    ]  # fmt: skip
    for each in records:
        for name, field in each.model_fields.items():
            if re.search(r"\bfloat\b", str(field.annotation)):
                assert name.endswith(units) or name in plain, f"{each.__name__}.{name}"


def test_config_defaults_are_within_their_own_limits() -> None:
    assert RunConfig.model_validate(RunConfig().model_dump()) == RunConfig()


def test_exported_names_are_sorted_and_real() -> None:
    import foretrain

    listed = re.findall(r" as (\w+)$", (PACKAGE / "__init__.pyi").read_text("utf-8"), re.MULTILINE)
    assert foretrain.__all__ == dir(foretrain) == sorted(listed)
    for name in foretrain.__all__:
        assert getattr(foretrain, name) is not None


def test_command_line_surface_is_bounded() -> None:
    """Options stay few, without what (nearly) every command has; raise the number in a visible line."""
    options = [
        p
        for c in app.members().values()
        for p in c.params
        if p.param_type_name == "option"
        and p.name not in ("lang", "gpu_file", "help_all")
        and not getattr(p, "hidden", False)
    ]
    assert len(options) <= MAX_OPTIONS


def test_help_of_every_command_has_examples() -> None:
    for name, command in app.members().items():
        assert command.help, name
        assert "Examples" in (command.epilog or ""), name
    assert foretrain("--help").returncode == 0


def test_long_tests_are_there() -> None:
    """Every line of both lists names a test; one that has another name by now would come back unnoticed."""
    assert not long_tests.listed("long") & long_tests.listed("slow")
    for name in long_tests.listed("long") | long_tests.listed("slow"):
        path, function = name.split("[")[0].split("::", 1)
        assert f"def {function.split('::')[-1]}(" in (REPO / path).read_text("utf-8"), name


def test_a_list_of_long_tests_is_read_from_what_pytest_prints() -> None:
    printed = "0.20s setup    tests/a.py::b[c d]\n0.15s call     tests/a.py::b[c d]\n0.25s call     tests/a.py::e\n"
    assert long_tests.found(printed, "long") == ["tests/a.py::b[c d]"]
    printed = "1.10s call     tests/a.py::b[c]\n1.15s call     tests/a.py::b[d]\n1.90s call     tests/a.py::e\n"
    assert long_tests.found(printed, "long") == ["tests/a.py::b[d]", "tests/a.py::e"]
    assert long_tests.found(printed, "slow") == ["tests/a.py::b[d]"]
