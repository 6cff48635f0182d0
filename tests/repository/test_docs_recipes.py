"""docs/extend.md is followed, as it stands there: a card, an option, a technique, a family, a layer, a log format, a tracker, a language."""

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path
from typing import Any

import pytest

from foretrain.base.messages import texts
from foretrain.hardware.catalogue import Gpu, catalogue
from tests.kit import cards
from tests.kit.command import REPO
from tests.kit.tiny import TINY, write_dataset

PAGE = (REPO / "docs" / "extend.md").read_text("utf-8")


def recipe(name: str) -> str:
    found = re.search(rf"<!-- recipe: {name} -->\n```\w+\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    assert found, name
    return found[1]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    shutil.copytree(REPO / "foretrain", tmp_path / "foretrain", ignore=shutil.ignore_patterns("__pycache__", "static"))
    return tmp_path


def python(package: Path, *words: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(package)}
    done = subprocess.run(
        [sys.executable, *words], cwd=package, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_adding_a_gpu(package: Path) -> None:
    block = recipe("gpu")
    ((name, figures),) = tomllib.loads(block).items()
    card = Gpu(name=name, **figures)
    assert name not in {gpu.name for gpu in catalogue().values()}
    cards.assert_figures_follow_a_second_way(card)
    cards.assert_ratios_between_dtypes(card)
    with (package / "foretrain" / "hardware" / "gpus.toml").open("a", encoding="utf-8") as file:
        file.write("\n" + block)
    shown = python(package, "-m", "foretrain", "plan", "gpt2-124m", "--gpu", "4071")
    assert name in shown
    assert "Fits." in shown


def test_a_wrong_figure_of_a_gpu_is_found() -> None:
    """The check that the page promises is one: the sparse figure does not pass."""
    ((name, figures),) = tomllib.loads(recipe("gpu")).items()
    sparse = Gpu(name=name, **{**figures, "fp16_dense_tflops": 2 * figures["fp16_dense_tflops"]})
    with pytest.raises(AssertionError):
        cards.assert_figures_follow_a_second_way(sparse)


ASKED_OF_A_NEW_OPTION = """
import json, sys
sys.path.insert(0, sys.argv[1])
import product_tables
from foretrain.cli.completion import config_options
from foretrain.config.checks import effect_of
from foretrain.config.options import step_options
from foretrain.config.resolve import from_text, resolve, to_toml
from foretrain.predict.speed.time import SAME
from foretrain.web.calls import fields

resolved = resolve(["gpt2-124m", "--z-loss", "0.25"])
print(json.dumps({
    "value": resolved.config.z_loss,
    "step": resolve(["examples/nanogpt.py", "--z_loss=0.25"]).step,
    "in nanoGPT": resolved.config.as_nanogpt().z_loss,
    "read back": from_text(to_toml(resolved.config), "x.toml").config == resolved.config,
    "completion": config_options("--z"),
    "page": next(field for field in fields() if field["name"] == "z_loss"),
    "docs": next(line for line in product_tables.options().splitlines() if "`z_loss`" in line),
    "resume": effect_of("z_loss"),
    "measured by it": "z_loss" in step_options(resolved.config) and "z_loss" in SAME,
}))
"""


def test_adding_an_option(package: Path) -> None:
    """One place is touched, and every part of foretrain knows the option."""
    block = recipe("option")
    add_option(package, block)
    (package / "examples").mkdir()
    (package / "examples" / "nanogpt.py").write_text("n_layer = 2\n", "utf-8")
    found = json.loads(python(package, "-c", ASKED_OF_A_NEW_OPTION, str(REPO / "docs")))
    page = found.pop("page")
    assert (page["least"], page["most"], page["stops"][1]) == (0, 1, 0.1)
    assert f'"{page["help"]}"' in block
    assert found.pop("docs").startswith("| `z_loss` ¹ | `0.0` | weight of")
    assert found == {
        "value": 0.25, "step": "foretrain", "in nanoGPT": 0.0, "read back": True, "completion": ["--z_loss="],
        "resume": "refuses", "measured by it": True,
    }  # fmt: skip
    shown = python(package, "-m", "foretrain", "plan", "gpt2-124m", "--z_loss=0.25", "--show-config")
    assert re.search(r"z_loss +0\.25 +--z_loss=0\.25 +weight of", shown)
    sources = ("--json", "gpt2-124m+gpu=4070+z_loss=0.25", "gpt2-124m+gpu=4070")
    compared = json.loads(python(package, "-m", "foretrain", "compare", *sources))
    (setting,) = [each for each in compared["differing"] if each["name"] == "z_loss"]
    assert (setting["values"], setting["affects"]) == ([0.25, 0.0], ["speed", "learning"])


def add_option(package: Path, block: str) -> None:
    file = package / "foretrain" / "config" / "options.py"
    block, text = textwrap.indent(block, "    "), file.read_text("utf-8")
    assert block.split(":")[0] not in text, "it is no new one any more"
    file.write_text(text.replace("    optimizer_offload: bool", f"{block}    optimizer_offload: bool"), "utf-8")


def asked(package: Path, *words: str, code: int = 0) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": str(package)}
    command = [sys.executable, "-m", "foretrain", *words, "--json"]
    done = subprocess.run(command, cwd=package, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


def peak_of(plan: dict[str, Any]) -> int:
    (memory,) = (each for each in plan["memory"] if each["step"] == "foretrain")
    return max(phase["allocated_bytes"] for phase in memory["phases"])


def add_technique(package: Path, text: str) -> None:
    add_option(package, recipe("technique option"))
    (package / "foretrain" / "model" / "techniques" / "recompute_mlp.py").write_text(text, "utf-8")


# Run with the changed package: the kit's checks of every technique, and a training run.
CHECKS_OF_A_TECHNIQUE = """
import sys
sys.path.append(sys.argv[1])
from foretrain.model.techniques import TECHNIQUES
from tests.kit import techniques
from tests.kit.tiny import tiny
from tests.kit.training import train

new = next(each for each in TECHNIQUES if each.id == "recompute_mlp")
chunks = next(each for each in TECHNIQUES if each.id == "chunked_loss")
assert techniques.combinable(new, chunks)
assert [each.id for each in TECHNIQUES if not techniques.combinable(each, new)] == [
    "recompute_norm_gelu", "activation_checkpointing", "checkpointed_blocks", "checkpoint_offload", "recompute_mlp"
]
techniques.assert_the_traced_peak_falls(new)
techniques.assert_the_ledger_knows_it(new)
techniques.assert_losses_are_unchanged_where_it_says_so(new)
techniques.assert_it_works_with_every_other((new, chunks))
record = train(tiny(recompute_mlp=True))
assert (record.status, record.config.recompute_mlp) == ("finished", True), record
"""


def test_adding_a_technique(package: Path) -> None:
    """An option and one file: help, plans, conflicts, advice, the trace and the trainer know it."""
    add_technique(package, recipe("technique"))
    words = ("plan", "gpt2-124m", "--gpu", "4070", "--batch_size=8")
    shown = python(package, "-m", "foretrain", *words, "--recompute_mlp=true", "--show-config")
    assert re.search(r"recompute_mlp +True ", shown)
    completion = "from foretrain.cli.completion import config_options; print(config_options('--recompute_m'))"
    assert python(package, "-c", completion).strip() == "['--recompute_mlp=']"
    for compile in ("true", "false"):
        plain = asked(package, *words, f"--compile={compile}")
        less = asked(package, *words, f"--compile={compile}", "--recompute_mlp=true")
        assert peak_of(less) < 0.9 * peak_of(plain)
        assert less["timing"]["step_s"]["expected_s"] > plain["timing"]["step_s"]["expected_s"]
    refused = asked(package, *words, "--recompute_mlp=true", "--activation_checkpointing=true", code=2)
    assert "recompute_mlp = True and activation_checkpointing = True exclude each other" in json.dumps(refused)
    advised = python(package, "-m", "foretrain", "advise", *words[1:], "--goal", "fit", "--full")
    assert "recompute_mlp" in advised
    python(package, "-c", CHECKS_OF_A_TECHNIQUE, str(REPO))


def test_a_technique_without_its_hook_is_found(package: Path) -> None:
    """What the test above asserts of a plan is not so by itself."""
    without = recipe("technique").replace("if config.recompute_mlp:", "if False:")
    assert without != recipe("technique")
    add_technique(package, without)
    words = ("plan", "gpt2-124m", "--gpu", "4070", "--batch_size=8", "--compile=false")
    assert peak_of(asked(package, *words)) == peak_of(asked(package, *words, "--recompute_mlp=true"))


def add_family(package: Path, layer: str) -> None:
    model, config = package / "foretrain" / "model", package / "foretrain" / "config"
    (model / "geglu.py").write_text(layer, "utf-8")
    (model / "parallel.py").write_text(recipe("family model"), "utf-8")
    (config / "families" / "parallel.py").write_text(recipe("family"), "utf-8")
    table, options = config / "families" / "__init__.py", config / "options.py"
    text, found = re.subn(r"\bin \(NanoGPT\(\), ", "in (NanoGPT(), Parallel(), ", table.read_text("utf-8"))
    assert found == 1
    line = "from foretrain.config.families.nanogpt import NanoGPT\n"
    table.write_text(text.replace(line, f"{line}from foretrain.config.families.parallel import Parallel\n"), "utf-8")
    text, found = re.subn(
        r'recipe: Literal\["nanogpt", ', 'recipe: Literal["nanogpt", "parallel", ', options.read_text("utf-8")
    )
    assert found == 1
    options.write_text(text, "utf-8")


# The same model written in one piece, with the weights of ours; the estimate against the trace; a run that is resumed.
CHECKS_OF_A_FAMILY = """
import sys
sys.path.append(sys.argv[1])
import torch
import torch.nn.functional as F
from foretrain.model.language_model import make_model
from foretrain.config.shape import ModelShape
from foretrain.model.techniques import TECHNIQUES
from tests.kit import techniques
from tests.kit.tiny import tiny
from tests.kit.training import train

config = tiny(recipe="parallel")
model = make_model(config)
shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
assert shapes == {p.name: p.shape for p in ModelShape.of(config).parameters()}

w = {name: p.detach() for name, p in model.named_parameters()}
idx = torch.arange(64).view(4, 16) % 96
x = w["tokens.weight"][idx] + w["positions.weight"]
C, D = config.n_embd, config.n_embd // config.n_head
for i in range(config.n_layer):
    own = {name.split(".", 2)[2]: p for name, p in w.items() if name.startswith(f"blocks.{i}.")}
    y = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt() * own["norm.weight"]
    q, k, v = ((y @ own["attn.c_attn.weight"].T).view(4, 16, 3, config.n_head, D).permute(2, 0, 3, 1, 4))
    scores = (q @ k.mT / D**0.5).masked_fill(torch.ones(16, 16).triu(1).bool(), -torch.inf).softmax(-1)
    mixed = (scores @ v).transpose(1, 2).reshape(4, 16, C) @ own["attn.c_proj.weight"].T
    gate, up = y @ own["mlp.gate.weight"].T, y @ own["mlp.up.weight"].T
    x = x + mixed + (0.5 * gate * (1 + torch.erf(gate / 2**0.5)) * up) @ own["mlp.down.weight"].T
x = F.layer_norm(x, (C,), w["last_norm.weight"])
torch.testing.assert_close(model.hidden(idx).detach(), x, atol=1e-5, rtol=1e-5)

techniques.REFERENCE = techniques.REFERENCE.model_copy(update={"recipe": "parallel"})
for technique in TECHNIQUES:
    if technique.id in ("chunked_loss", "activation_checkpointing"):
        techniques.assert_the_ledger_knows_it(technique)
assert train(config).status == "finished"
"""


def test_adding_a_family_and_a_layer(package: Path) -> None:
    """A model of new parts plans, compiled and not, is traced and trains, by its own code."""
    add_family(package, recipe("layer"))
    for compile in ("true", "false"):
        words = ("plan", "gpt2-124m", "--recipe=parallel", "--gpu", "4070", f"--compile={compile}")
        plan = asked(package, *words)
        assert plan["config"]["recipe"] == "parallel"
        assert plan["timing"]["step_s"]["expected_s"] > 0
        assert peak_of(plan) > 12 * (12 * 16 * 768**2 + 2 * 50304 * 768)  # weights and both moments, at least
    refused = asked(package, *words, "--recompute_norm_gelu=true", code=2)
    assert "recipe_recomputes" in json.dumps(refused)
    python(package, "-c", CHECKS_OF_A_FAMILY, str(REPO))


def test_a_wrong_layer_is_found(package: Path) -> None:
    """The check of the family compares with maths that is not its own."""
    wrong = recipe("layer").replace("F.gelu(", "F.relu(")
    assert wrong != recipe("layer")
    add_family(package, wrong)
    with pytest.raises(AssertionError, match="not close"):
        python(package, "-c", CHECKS_OF_A_FAMILY, str(REPO))


# What huggingface/mytrainer src/mytrainer/trainer.py prints.
MYTRAINER = (
    "[INFO|DP=0|PP=0|TP=0]: iteration: {} / 400 | consumed_tokens: {} | iteration_ms: {:.1f} | "
    "tokens_per_sec: 3.34K | global_batch_size: 8 | lm_loss: {:.2f} | lr: 0.00015 | hardware_tflops_per_gpu: 3.1"
)


def test_adding_a_log_format(package: Path) -> None:
    """One file, and a log of a program that was not known is that program's."""
    lines = [MYTRAINER.format(step, 8 * step, 120 + step % 3, 10 - step / 100) for step in range(10, 410, 10)]
    (package / "run.log").write_text("\n".join(lines), "utf-8")
    assert asked(package, "explain", "run.log")["format"] == "unknown"
    file = package / "foretrain" / "runs" / "formats" / "mytrainer.py"
    file.write_text(recipe("log format"), "utf-8")
    found = asked(package, "explain", "run.log")
    assert (found["format"], found["steps"], found["last_step"]) == ("mytrainer", 40, 400)
    assert found["steady_s"] == pytest.approx(0.121, abs=1e-3)
    assert (found["losses"]["first_loss"], found["losses"]["last_loss"]) == (9.9, 6.0)
    assert found["learning_rate"] == 1.5e-4
    assert found["logged_s"] == pytest.approx(400 * 0.121, rel=1e-2)  # a time is the mean of ten steps
    assert "mytrainer's console" in python(package, "-m", "foretrain", "explain", "run.log")


def test_adding_a_tracker(package: Path) -> None:
    """A run reported to it, read back by the command that reads any other source."""
    (package / "foretrain" / "runs" / "trackers" / "csv_table.py").write_text(recipe("tracker"), "utf-8")
    write_dataset(package / "data" / "toy")
    words = [f"--{key}={value}" for key, value in TINY.items()]
    python(package, "-m", "foretrain", "train", *words, "--report-to=csv", "--quiet")
    shown = json.loads(python(package, "-m", "foretrain", "explain", "out/progress-report.csv", "--json"))
    lines = [json.loads(line) for line in (package / "out" / "metrics.jsonl").read_text("utf-8").splitlines()]
    assert shown["losses"]["last_loss"] == lines[-2]["loss"]
    assert shown["losses"]["last_val_loss"] == lines[-1]["val_loss"]
    assert shown["steps"] == TINY["max_iters"]


def test_adding_a_language(package: Path) -> None:
    block = recipe("language")
    tables = tomllib.loads(block)
    assert tables.pop("language")["direction"] in ("ltr", "rtl")
    for table, own in tables.items():
        for id, text in own.items():
            assert f"{table}.{id}" in texts("en")
            assert re.findall(r"{.*?}", text) == re.findall(r"{.*?}", texts("en")[f"{table}.{id}"])
    (package / "foretrain" / "locales" / "xx.toml").write_text(block, "utf-8")
    code = "from foretrain.base.messages import say; print(say('plan.verdict', 'xx'))"
    assert python(package, "-c", code).strip() == tables["plan"]["verdict"]


NOTEBOOKS = sorted((REPO / "examples" / "notebooks").glob("*.ipynb"))
QUICK = {"will-it-fit"}  # others import torch, or train
# What a notebook does with a cell: runs it, and shows what its last line is worth.
PROGRAM = """
import ast, json, sys

names = {"__name__": "__main__"}
for source in json.load(open(sys.argv[1], encoding="utf-8")):
    *lines, last = ast.parse(source).body
    shows = isinstance(last, ast.Expr)
    exec(compile(ast.Module(lines if shows else [*lines, last], []), "cell", "exec"), names)
    if shows:
        value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
        html = getattr(value, "_repr_html_", lambda: None)()
        print("HTML" if html else "TEXT", html or repr(value))
"""


def test_there_are_notebooks_and_no_output_is_kept_in_them() -> None:
    assert len(NOTEBOOKS) >= 4
    for path in NOTEBOOKS:
        found = json.loads(path.read_text("utf-8"))
        assert found["nbformat"] == 4
        assert not any(cell.get("outputs") for cell in found["cells"]), path.name


@pytest.mark.parametrize(
    "path", [pytest.param(p, id=p.stem, marks=() if p.stem in QUICK else pytest.mark.slow) for p in NOTEBOOKS]
)
def test_a_notebook_runs(path: Path, tmp_path: Path) -> None:
    if path.stem == "model-in-hand":
        pytest.importorskip("transformers", minversion="5")
        pytest.importorskip("peft")
    cells = json.loads(path.read_text("utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    (tmp_path / "cells.json").write_text(json.dumps(sources), "utf-8")
    (tmp_path / "notebook.py").write_text(f"if __name__ == '__main__':\n    exec({PROGRAM!r})\n", "utf-8")
    ended = subprocess.run(
        [sys.executable, "notebook.py", "cells.json"], capture_output=True, text=True, check=False, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPO)},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "GiB" in ended.stdout or "MiB" in ended.stdout or "loss" in ended.stdout, ended.stdout
    if path.stem != "trace-your-code":
        assert "<pre" in ended.stdout
    if path.stem in ("will-it-fit", "model-in-hand"):
        assert "<svg" in ended.stdout
