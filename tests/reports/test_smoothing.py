"""The smoothing of loss curves in pages and reports: the mean that TensorBoard draws, and what is drawn of it."""

import json
import random
import re
import shutil
import subprocess
from typing import Any

import pytest

from foretrain.reports import html
from foretrain.reports.charts import chart
from foretrain.reports.document import Axis, Curves, Document, Message, Section, Trace
from foretrain.reports.plots import markup
from tests.kit.command import REPO

NODE = shutil.which("node")
in_node = pytest.mark.skipif(NODE is None, reason="no node here")
SCRIPT = REPO / "foretrain" / "reports" / "chart.js"


def in_javascript(expression: str) -> Any:
    code = SCRIPT.read_text("utf-8").rsplit("export", 1)[0] + f"\nconsole.log(JSON.stringify({expression}));"
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


def test_only_what_was_measured_is_smoothed() -> None:
    """An evaluation is a mean already, and has markers."""
    svg = markup(chart(picture(smooth=True)).views[0].draw(920).svg())
    assert re.findall(r'data-series="(\d)"( data-smooth="")?', svg) == [("0", ' data-smooth=""'), ("1", ""), ("1", "")]
    assert "data-smooth" not in markup(chart(picture()).views[0].draw(920).svg())


@in_node
def test_a_path_is_read_as_it_was_drawn() -> None:
    shown = picture(smooth=True)
    plot = chart(shown).views[0].draw(920)
    path = next(part[1]["d"] for part in plot.parts if "data-smooth" in part[1])
    found = in_javascript(f"placesOf({json.dumps(path)})")
    wanted = [(plot.px(x), plot.py(y)) for x, y in zip(shown.traces[0].places[0], shown.traces[0].values, strict=True)]
    assert [at for each in found for at in each] == pytest.approx([at for each in wanted for at in each], abs=0.051)


def test_a_report_has_a_slider_for_losses_only() -> None:
    def page(smooth: bool) -> str:
        section = Section(Message("report.learning"), (picture(smooth=smooth),))
        return html.render(Document(Message("report.learning"), Message("report.learning"), [section]))

    assert 'type="range" min="0" max="0.99"' in page(True)
    assert 'class="smooth"' not in page(False)
