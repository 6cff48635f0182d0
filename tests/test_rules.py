"""The rules of the house, held by tests: layers, sizes, texts, units, start-up without torch."""

import ast
import re
import string
import tomllib
from pathlib import Path

import pytest

from foretrain import messages
from foretrain.config import RunConfig, knobs
from foretrain.errors import EXIT_CODE_OF
from tests.helpers import REPO, foretrain

PACKAGE = REPO / "foretrain"
FILES = sorted(p for p in PACKAGE.rglob("*.py") if "vendor" not in p.parts)
MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 60

# Layer -> what it may import, itself included. `facts` are the modules at the root of the package.
ALLOWED = {
    "facts": {"facts"},
    "lm": {"facts", "lm"},
    "prepare": {"facts", "lm", "prepare"},
    "predict": {"facts", "lm", "predict"},
    "run": {"facts", "lm", "run"},
    "advise": {"facts", "lm", "predict", "run", "advise"},
    "report": {"facts", "lm", "prepare", "predict", "run", "advise", "report"},
    "web": {"facts", "lm", "predict", "run", "advise", "report", "web"},
    "cli": {"facts", "lm", "prepare", "predict", "run", "advise", "report", "web", "cli"},
    "__main__": {"cli"},
}


def layer_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in ALLOWED else "facts"


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(REPO).with_suffix("").parts).removesuffix(".__init__")


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            # `from foretrain.report import text` imports the module foretrain.report.text
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


@pytest.mark.parametrize(
    "path", [p for p in FILES if p != PACKAGE / "__init__.py"], ids=lambda p: str(p.relative_to(PACKAGE))
)
def test_layers_import_only_downwards(path: Path) -> None:
    own = layer_of(module_of(path))
    used = {layer_of(name) for name in imports_of(path) if name.startswith("foretrain.")}
    assert used <= ALLOWED[own], f"{own} imports {used - ALLOWED[own]}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_files_and_functions_stay_small(path: Path) -> None:
    text = path.read_text("utf-8")
    assert len(text.splitlines()) <= MAX_FILE_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            assert lines <= MAX_FUNCTION_LINES, f"{node.name} has {lines} lines"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_public_things_have_docstrings(path: Path) -> None:
    tree = ast.parse(path.read_text("utf-8"))
    if path.stat().st_size:
        assert ast.get_docstring(tree), "a module says what is inside"
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_") and node.name != "add_to":
            assert ast.get_docstring(node), f"{node.name} has no docstring"


def test_only_the_command_line_prints() -> None:
    for path in FILES:
        if layer_of(module_of(path)) != "cli":
            calls = [n for n in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(n, ast.Call)]
            assert not [c for c in calls if isinstance(c.func, ast.Name) and c.func.id == "print"], path


def test_plan_and_help_never_import_torch_or_numpy() -> None:
    import subprocess
    import sys

    snapshot = str(REPO / "examples" / "snapshots" / "fragmented.pickle")
    told = (["explain", snapshot], ["watch", "--quiet", "--", "true"], ["serve", "--help"])
    for words in (["--help"], ["plan", "--help"], ["plan", "gpt2-124m", "--gpu", "4070"], ["gpus"], ["runs"], *told):
        code = (
            "import sys\nfrom foretrain.cli import app\n"
            f"try: app({words!r})\nexcept SystemExit as e: assert e.code in (0, None), e.code\n"
            "heavy = {'torch', 'numpy', 'safetensors', 'tokenizers'} & set(sys.modules)\nassert not heavy, heavy"
        )
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr


# -- texts -------------------------------------------------------------------------------------------------


def ids_in_code() -> set[str]:
    """Every string constant in the code that looks like a text id."""
    constants = set()
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                constants.add(node.value)
    for script in PACKAGE.glob("web/static/*.js"):
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
                assert spec in messages._FORMATS or re.fullmatch(r"[,]?(\.\d+f)?|,", spec or ""), (id, spec)


def test_catalogue_and_texts_are_valid_toml() -> None:
    for name in ("gpus.toml", "locales/en.toml"):
        assert tomllib.loads((PACKAGE / name).read_text("utf-8"))


# -- knobs and records -------------------------------------------------------------------------------------


def test_every_knob_is_obeyed_by_something() -> None:
    """A knob that nothing reads would be a lie; the inert ones say that they have no effect."""
    text = "".join(p.read_text("utf-8") for p in FILES if p.name not in ("config.py", "presets.py"))
    for knob in knobs():
        if not knob.inert:
            own = {"eval_batch_size": "eval_batch", "eval_block_size": "eval_block", "eval_sequences": "eval_rows"}.get(
                knob.name, knob.name
            )
            derived = {"memory_limit": "memory_limit_bytes", "checkpointed_blocks": "checkpointed"}.get(knob.name, own)
            assert re.search(rf"\b(config|c|own|s|self\.config|resolved\.config)\.{derived}\b", text), knob.name


def test_numbers_in_records_carry_their_unit() -> None:
    from foretrain import calibration
    from foretrain.advise import compare, log_analysis, log_steady, noise, questions, settle, subject, utilization
    from foretrain.advise.forecast_check import Row
    from foretrain.predict import energy, memory, plan, time
    from foretrain.run import store

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
        "predicted", "measured", "low", "high", "cost_low", "unsteadiness", "knobs", "cost_expected",
        "cost_high", "rent_low", "rent_expected", "rent_high", "cost_per_hour", "cost", "bits_per_byte", "share", "at",
        "one_value", "other_value", "printed_mfu", "losses",
    }  # fmt: skip
    records = [
        memory.PhaseMemory, memory.StepMemory, memory.Component, plan.Timing, plan.Work, time.Range, Row, energy.Power,
        log_analysis.LogAnalysis, log_analysis.Losses, log_analysis.Remaining, log_steady.Disturbance,
        calibration.Calibration, calibration.KernelTime, calibration.StepTime, utilization.Utilization, store.StepMetrics, store.EvaluationMetrics, store.RunRecord, store.MeasuredMemory,
        store.MeasuredPhase, compare.Side, noise.Interval, questions.Pair, settle.OneChange, subject.Curve, subject.Memory,
    ]  # fmt: skip
    for record in records:
        for name, field in record.model_fields.items():
            if re.search(r"\bfloat\b", str(field.annotation)):
                assert name.endswith(units) or name in plain, f"{record.__name__}.{name}"


def test_config_defaults_are_within_their_own_limits() -> None:
    assert RunConfig.model_validate(RunConfig().model_dump()) == RunConfig()


def test_exported_names_are_sorted_and_real() -> None:
    import foretrain

    assert foretrain.__all__ == sorted(foretrain._HOMES)
    for name in foretrain.__all__:
        assert getattr(foretrain, name) is not None


def test_command_line_surface_is_bounded() -> None:
    """Options beyond the knobs stay few; raise the number in a visible line."""
    import typer.main

    from foretrain.cli import app

    command = typer.main.get_command(app)
    options = [p for c in command.commands.values() for p in c.params if p.param_type_name == "option"]  # type: ignore[attr-defined]
    assert len(options) <= 118


def test_help_of_every_command_has_examples() -> None:
    import typer.main

    from foretrain.cli import app

    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        assert command.help, name
        assert "Examples" in (command.epilog or ""), name
    assert foretrain("--help").returncode == 0
