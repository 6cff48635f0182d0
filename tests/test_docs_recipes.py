"""docs/extend.md is followed, as it stands there: a card, an option, a technique and a language are added."""

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

from foretrain.base.messages import texts
from foretrain.hardware.catalogue import Gpu, catalogue
from foretrain.model.techniques import TECHNIQUES, Technique, combinable
from tests.kit import cards, techniques
from tests.kit.command import REPO

PAGE = (REPO / "docs" / "extend.md").read_text("utf-8")


def recipe(name: str) -> str:
    """The block that follows `<!-- recipe: NAME -->`."""
    found = re.search(rf"<!-- recipe: {name} -->\n```\w+\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    assert found, name
    return found[1]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder with a copy of the package, to change."""
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
import generate
from foretrain.cli.completion import config_options
from foretrain.config.on_resume import effect_of
from foretrain.config.options import step_options
from foretrain.config.resolve import from_text, resolve, to_toml
from foretrain.predict.tuned_steps import SAME
from foretrain.web.fields import fields

resolved = resolve(["gpt2-124m", "--z-loss", "0.25"])
print(json.dumps({
    "value": resolved.config.z_loss,
    "step": resolve(["examples/nanogpt.py", "--z_loss=0.25"]).step,
    "in nanoGPT": resolved.config.as_nanogpt().z_loss,
    "read back": from_text(to_toml(resolved.config), "x.toml").config == resolved.config,
    "completion": config_options("--z"),
    "page": next(field for field in fields() if field["name"] == "z_loss"),
    "docs": next(line for line in generate.option_tables().splitlines() if "`z_loss`" in line),
    "resume": effect_of("z_loss"),
    "measured by it": "z_loss" in step_options(resolved.config) and "z_loss" in SAME,
}))
"""


def test_adding_an_option(package: Path) -> None:
    """One place is touched, and every part of foretrain knows the option."""
    block = textwrap.indent(recipe("option"), "    ")
    file = package / "foretrain" / "config" / "options.py"
    text = file.read_text("utf-8")
    assert "z_loss" not in text, "it is no new one any more"
    file.write_text(text.replace("    optimizer_offload: bool", f"{block}    optimizer_offload: bool"), "utf-8")
    (package / "examples").mkdir()
    (package / "examples" / "nanogpt.py").write_text("n_layer = 2\n", "utf-8")
    found = json.loads(python(package, "-c", ASKED_OF_A_NEW_OPTION, str(REPO / "docs")))
    page = found.pop("page")
    assert (page["least"], page["most"], page["stops"][1], page["ours"]) == (0, 1, 0.1, True)
    assert f'"{page["help"]}"' in block
    assert found.pop("docs").startswith("| `z_loss` ¹ | `0.0` |  | ≥ 0, ≤ 1 | weight of")
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


def written_technique() -> Technique:
    return eval(recipe("technique"), {"Technique": Technique})  # the page's own text


@pytest.mark.slow
def test_adding_a_technique_traced() -> None:
    techniques.assert_the_traced_peak_falls(written_technique())
    techniques.assert_the_ledger_knows_it(written_technique())


def test_adding_a_technique() -> None:
    technique = written_technique()
    assert technique.id not in {known.id for known in TECHNIQUES}
    techniques.assert_losses_are_unchanged_where_it_says_so(technique)
    other = next(known for known in TECHNIQUES if known.id == "chunked_loss")
    assert combinable(technique, other)
    techniques.assert_it_works_with_every_other((technique, other))


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
