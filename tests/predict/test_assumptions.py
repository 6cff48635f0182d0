"""What a plan assumes of a dataset that is not here: nanoGPT's own are known, any other vocabulary is said to be a guess."""

import json
import pickle
from pathlib import Path

import pytest

from foretrain.analysis.explanation import explain
from foretrain.app.plan import Target, make_plan
from foretrain.comparison.sources.plans import with_vocabulary
from foretrain.config.resolve import from_text, resolve
from foretrain.data.corpus import data_of_config
from foretrain.hardware.catalogue import find
from foretrain.reports.document import Paragraph
from foretrain.reports.views import explain as explain_view
from foretrain.web.form import Form, line_of
from tests.kit.command import foretrain
from tests.kit.tiny import write_dataset

# The settings of karpathy/nanoGPT config/train_shakespeare_char.py that a plan depends on.
SHAKESPEARE_CHAR = """
out_dir = 'out-shakespeare-char'
eval_interval = 250
eval_iters = 200
log_interval = 10
always_save_checkpoint = False
dataset = 'shakespeare_char'
gradient_accumulation_steps = 1
batch_size = 64
block_size = 256
n_layer = 6
n_head = 6
n_embd = 384
dropout = 0.2
learning_rate = 1e-3
max_iters = 5000
lr_decay_iters = 5000
min_lr = 1e-4
beta2 = 0.99
warmup_iters = 100
"""


@pytest.fixture
def config(own_directory: Path) -> str:
    path = own_directory / "train_shakespeare_char.py"
    path.write_text(SHAKESPEARE_CHAR)
    return str(path)


def planned(*words: str) -> dict:
    result = foretrain("plan", *words, "--gpu", "4070", "--json", code=0)
    return json.loads(result.stdout)


def test_the_most_used_config_of_nanogpt_plans_like_its_preset(config: str) -> None:
    own, preset = planned(config), planned("shakespeare-char")
    assert own["config"]["vocab_size"] == 65
    assert own["counts"]["n_params_nanogpt"] == pytest.approx(10.65e6, rel=0.01)
    assert own["memory"] == preset["memory"]
    assert [note["id"] for note in own["assumptions"]] == ["vocab_of_nanogpt"]
    assert preset["assumptions"] == []
    assert own["work"]["dataset_tokens"] == 1_003_854  # data/shakespeare_char/prepare.py


def test_every_command_says_the_assumption_at_its_top(config: str) -> None:
    words = (["plan"], ["advise"], ["plan", "--within", "1h"], ["plan", "--gpu", "3060,4070"])
    for command, *options in words:
        options = options if "--gpu" in options else [*options, "--gpu", "4070"]
        shown = " ".join(foretrain(command, config, *options).stdout.split())
        assert "vocab_size = 65" in shown, (command, options)
        assert "meta.pkl" in shown


def test_the_explanation_says_it_too(config: str) -> None:
    made = make_plan(resolve([config]), Target(find("4070"), 0))
    shown = explain_view.document(explain(made), made).sections[0].blocks  # estimated: no trace
    assert any(isinstance(block, Paragraph) and block.message.id == "assumed.vocab_of_nanogpt" for block in shown)


def test_a_pasted_config_has_it_too() -> None:
    found = from_text(SHAKESPEARE_CHAR, "train_shakespeare_char.py")
    assert "vocab_size" not in found.sources  # so the form leaves it open
    form = Form(values={key: getattr(found.config, key) for key in found.sources})
    (found,) = line_of(form).request().forecasts()
    made = found.plan
    assert made.config.vocab_size == 65
    assert [note.id for note in made.assumptions] == ["vocab_of_nanogpt"]


def test_what_is_here_wins_over_what_is_known(config: str) -> None:
    folder = write_dataset(Path("data/shakespeare_char"))
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 85}))
    for found in (data_of_config(resolve([config])).config, with_vocabulary(resolve([config]), None)):
        assert found.vocab_size == 85
    assert planned(config)["assumptions"] == []
    assert with_vocabulary(resolve([config]), 77).vocab_size == 77  # a log of the run knows best
    assert planned(config, "--vocab_size=96")["config"]["vocab_size"] == 96


@pytest.mark.parametrize(
    ("dataset", "assumed", "tokens"),
    [("openwebtext", [], 9_035_582_198), ("shakespeare", [], 301_966), ("my_books", ["vocab_default"], None)],
)
def test_other_names(dataset: str, assumed: list[str], tokens: int | None) -> None:
    """nanoGPT's GPT-2 data have no meta.pkl, so 50,304 is what it takes; of an unknown name nobody can tell."""
    found = data_of_config(resolve([f"--dataset={dataset}"]))
    assert found.config.vocab_size == 50_304
    assert [note.id for note in found.assumptions] == assumed
    assert found.tokens == tokens


def test_a_config_that_names_no_dataset_assumes_nothing_of_it() -> None:
    found = data_of_config(resolve(["gpt2-124m"]))
    assert (found.tokens, found.assumptions) == (None, ())
