"""The smoothing of loss curves in pages and reports: the mean that TensorBoard draws, and what is drawn of it."""

import json
import random
import shutil
import subprocess
from typing import Any

import pytest

from foretrain.reports import html
from foretrain.reports.charts import chart
from foretrain.reports.document import Axis, Curves, Document, Message, Section, Trace
from tests.kit.command import REPO

NODE = shutil.which("node")
in_node = pytest.mark.skipif(NODE is None, reason="no node here")
DRAW = REPO / "foretrain" / "reports" / "draw.js"
# What a browser gives to a script that draws, as far as curves need it.
BROWSER = """
globalThis.document = { documentElement: { dir: "ltr" } };
globalThis.getComputedStyle = () => ({ getPropertyValue: () => "light" });
globalThis.matchMedia = () => ({ matches: false });
"""


def in_javascript(expression: str) -> Any:
    """The value of an expression behind draw.js."""
    code = BROWSER + DRAW.read_text("utf-8").rsplit("export", 1)[0] + f"\nconsole.log(JSON.stringify({expression}));"
    assert NODE is not None
    done = subprocess.run([NODE, "-e", code], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def picture(**more: Any) -> Curves:
    scatter = random.Random(1)
    places, values = tuple(float(i) for i in range(40)), tuple(scatter.random() for _ in range(40))
    train = Trace("train", (places,), values)
    val = Trace("val", (places[::10],), values[::10], 1, dashed=True)
    return Curves(
        Message("picture.loss_over"), (Axis(Message("axis.step")),), Axis(Message("axis.loss")), (train, val), **more
    )


@in_node
def test_smoothing_weighs_values_as_their_closed_form_says() -> None:
    scatter = random.Random(3)
    values = [scatter.gauss(3, 1) for _ in range(50)]
    for weight in (0.0, 0.6, 0.99):
        found = in_javascript(f"smoothed({json.dumps(values)}, {weight})")
        for last, mean in enumerate(found):
            weights = [weight ** (last - i) for i in range(last + 1)]
            wanted = sum(w * v for w, v in zip(weights, values, strict=False)) / sum(weights)
            assert mean == pytest.approx(wanted, rel=1e-9)
    assert in_javascript("smoothed([5, 5, 5], 0.9)") == pytest.approx([5, 5, 5])


@in_node
def test_what_was_measured_stays_faint_behind_and_says_the_words() -> None:
    made = json.dumps(chart(picture(smooth=True)))
    asked = (
        "(p => { const plain = kinds.curves(p, 800).config, soft = kinds.curves({ ...p, weight: 0.9 }, 800).config,"
        " of = one => one.data.datasets.map(d => [d.label, d.order, d.borderColor, d.data.map(at => at.y)]),"
        " shown = [0, 1, 2].map(datasetIndex => !soft.options.plugins.tooltip.filter || soft.options.plugins.tooltip.filter({ datasetIndex }));"
        " return [of(plain), of(soft), shown, kinds.curves({ ...p, smooth: false, weight: 0.9 }, 800).config.data.datasets.length]; })"
    )
    plain, soft, shown, off = in_javascript(f"{asked}({made})")
    assert [label for label, *_ in plain] == ["train", "val"]
    assert [label for label, *_ in soft] == ["train", "val", "train"]
    assert soft[2][3] == plain[0][3]  # as it was measured
    assert soft[1] == plain[1]  # an evaluation is a mean already
    assert soft[0][3][0] == pytest.approx(plain[0][3][0])
    assert max(soft[0][3]) - min(soft[0][3][5:]) < max(plain[0][3]) - min(plain[0][3])
    assert soft[2][1] > soft[0][1]  # behind
    assert soft[2][2] != soft[0][2]
    assert shown == [True, True, False]
    assert off == 2


def test_a_report_has_a_slider_for_losses_only() -> None:
    def page(smooth: bool) -> str:
        section = Section(Message("report.learning"), (picture(smooth=smooth),))
        return html.render(Document(Message("report.learning"), Message("report.learning"), [section]))

    assert 'type="range" name="picture-0-smooth" min="0" max="0.99"' in page(True)
    assert 'class="smooth"' not in page(False)
