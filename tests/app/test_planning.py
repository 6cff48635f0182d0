"""`foretrain.plan` for Python: what is given decides, and the command line says the same."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

import foretrain as library
from foretrain.base.errors import UserError
from foretrain.config.presets import models
from foretrain.reports.document import Axis, Bar, Curves, Message, StackedBars, Trace
from foretrain.reports.shown import svg
from tests.kit.command import REPO, foretrain

ASKED = {"method": "lora", "seq_len": 512, "batch_size": 2, "gradient_checkpointing": True}


class Config:
    """As much of a transformers config as is read."""

    model_type = "qwen3"

    def to_dict(self) -> dict[str, Any]:
        return dict(models()["qwen3-0.6b"].config)


def test_a_fine_tuning_plan_by_name_is_that_of_the_command_line() -> None:
    words = ["--method", "lora", "--seq-len", "512", "--batch-size", "2", "--gradient-checkpointing", "--json"]
    shown = json.loads(foretrain("plan", "qwen3-0.6b", "--gpu", "RTX 4070", "--used-by-others", "1GB", *words).stdout)
    made = library.plan("qwen3-0.6b", gpu="RTX 4070", used_by_others="1GB", **ASKED)
    assert made.to_json() == {key: value for key, value in shown.items() if key not in ("schema", "advice")}
    assert library.plan("qwen3-0.6b", gpu="RTX 4070", used_by_others=10**9, **ASKED) == made


def test_a_config_in_memory_is_planned_as_its_file() -> None:
    made, named = (library.plan(each, gpu="4070", **ASKED) for each in (Config(), "qwen3-0.6b"))
    assert (made.memory, made.counts, made.timing) == (named.memory, named.counts, named.timing)
    assert library.plan(Config(), gpu="4070", name="mine", **ASKED).name == "mine"


def test_what_is_given_decides() -> None:
    assert isinstance(library.plan("qwen3-0.6b", gpu="4070"), library.Plan)  # our own preset of that name
    assert isinstance(library.plan("qwen3-0.6b", gpu="4070", method="qlora"), library.FineTunePlan)
    full = library.plan("hf:Qwen/Qwen3-0.6B", gpu="4070")
    assert isinstance(full, library.FineTunePlan)
    assert full.tune.method == "full"
    logged = library.plan("qwen3-0.6b", gpu="4070", method="lora", step_s=4.0).timing
    assert (logged.source, logged.tokens_per_s) == ("measured (log)", 2048 / 4.0)
    with pytest.raises(UserError, match="full, lora, qlora"):
        library.plan("qwen3-0.6b", gpu="4070", method="lori")
    with pytest.raises(UserError):
        library.plan(Config(), gpu="4070", model="another", method="full")
    unknown: Any = SimpleNamespace(model_type="none", to_dict=lambda: {"model_type": "none"})
    with pytest.raises(UserError):
        library.plan(unknown, gpu="4070")


def test_plans_draw_themselves() -> None:
    for made in (library.plan("gpt2-124m", gpu="4070"), library.plan("smollm2-135m", gpu="4070", **ASKED)):
        html = made._repr_html_() or ""
        assert html.startswith("<pre")
        picture = ElementTree.fromstring(html[html.index("<svg") : html.index("</svg>") + 6])
        assert picture.attrib["role"] == "img"
        assert "steady state" in {text.text for text in picture.iter("{http://www.w3.org/2000/svg}text")}


def test_bars_are_as_long_as_their_bytes() -> None:
    bars = (Bar("<a>", (("weights", 300), ("logits", 100))), Bar("b", (("weights", 100),)))
    drawn = ElementTree.fromstring(svg(StackedBars(Message("picture.memory"), bars, 800)))
    widths = [float(each.attrib["width"]) for each in drawn.iter() if each.tag.endswith("rect")][:3]
    assert widths[0] == pytest.approx(3 * widths[1], rel=0.01)
    assert widths[1] == widths[2]


def test_curves_without_values_are_no_picture() -> None:
    def drawn(*values: float) -> str:
        trace = Trace("run", (tuple(map(float, range(len(values)))),), values)
        return svg(
            Curves(
                Message("picture.memory"),
                (Axis(Message("column.allocated")),),
                Axis(Message("column.allocated")),
                (trace,),
            )
        )

    assert drawn() == ""
    drawing = ElementTree.fromstring(drawn(4.0, 2.0, 3.0))
    dots = next(each.attrib["d"] for each in drawing.iter() if "data-series" in each.attrib and "fill" in each.attrib)
    heights = [float(y) for y in re.findall(r"M[\d.]+ ([\d.]+)", dots)]
    assert heights[0] < heights[2] < heights[1]  # down the page


def start(threads: int, cache: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "FORETRAIN_CACHE": str(cache), "PYTHONPATH": str(REPO)}
    command = [sys.executable, "-m", "tests.kit.many_plans", str(threads)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPO, env=environment)


def test_plans_made_at_once_are_those_made_one_by_one(tmp_path: Path) -> None:
    """In processes of their own, as what one thread has spoilt would be remembered: hence some seconds."""
    made = {threads: start(threads, tmp_path / str(threads)) for threads in (1, 8)}
    answers: dict[int, list[Any]] = {threads: json.loads(process.communicate()[0]) for threads, process in made.items()}
    assert len(answers[1]) == 40
    assert not [answer for answer in answers[1] if isinstance(answer, str)]
    assert [n for n, (alone, at_once) in enumerate(zip(*answers.values(), strict=True)) if alone != at_once] == []
