"""What holds for every form of export."""

from pathlib import Path
from typing import get_args

import pytest
import torch

from foretrain.app.export import export
from foretrain.base.errors import ExitCode, UserError
from foretrain.config.families import FAMILIES
from foretrain.model.language_model import make_model
from foretrain.training import checkpoint
from foretrain.training.exports.forms import FORMS, GGUF_TYPES, Form, GgufType, module_of
from tests.kit.command import foretrain
from tests.kit.tiny import tiny
from tests.kit.training import train


def test_types_list_what_there_is() -> None:
    assert get_args(Form) == tuple(FORMS)
    assert get_args(GgufType) == tuple(GGUF_TYPES)


NEEDS = {"gguf": "gguf", "onnx": "onnxscript", "hf": "huggingface_hub"}
REFUSED = {"hf", "gguf", "nanogpt"}  # by a family that others have no model of


@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=pytest.mark.slow if form == "onnx" else ()) for form in FORMS]
)
def test_each_form_writes_a_run_or_says_why_not(form: Form) -> None:
    if form in NEEDS:
        pytest.importorskip(NEEDS[form])
    train(tiny(max_iters=1))
    made = export("out", form)
    assert (made.form, made.path) == (form, f"out/export-{form}")
    assert sorted(made.files) == sorted(path.name for path in Path(made.path).iterdir())
    assert all((Path(made.path) / name).stat().st_size for name in made.files)
    assert (module_of(form).refusal(tiny(recipe="modern")) is not None) == (form in REFUSED)
    if form in REFUSED:
        train(tiny(max_iters=1, recipe="modern", out_dir="odd", optimizer="adamw"))
        other = foretrain("export", "odd", "--to", form)
        assert (other.returncode, other.stderr.count("\n")) == (ExitCode.USAGE, 1)
        assert not Path(f"odd/export-{form}").exists()


@pytest.mark.parametrize("form", [form for form in FORMS if form != "onnx"])
def test_a_limit_on_files_is_one_sentence_and_leaves_nothing(form: Form) -> None:
    """`ulimit -f`: torch, numpy and safetensors each word it in their own way, two of them without the number."""
    resource = pytest.importorskip("resource")
    if form in NEEDS:
        pytest.importorskip(NEEDS[form])
    train(tiny(max_iters=1))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))
    try:
        with pytest.raises(UserError, match="ulimit -f") as caught:
            export("out", form, "there")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (caught.value.id, caught.value.exit_code) == ("disk.limit_export", ExitCode.DISK_FULL)
    assert [path.name for path in Path().iterdir() if "there" in path.name] == []


def test_each_form_is_named_in_the_help() -> None:
    listed = " ".join(foretrain("export", "--help").stdout.replace("│", " ").split())
    assert all(f"{form}:" in listed for form in FORMS)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", FAMILIES)
def test_an_onnx_graph_gives_our_logits(recipe: str) -> None:
    """By ONNX's reference implementation, for rows and lengths that the graph was not made with."""
    pytest.importorskip("onnxscript")
    reference = pytest.importorskip("onnx.reference")
    config = tiny(max_iters=2, recipe=recipe, n_head=4, n_kv_head=2 if recipe == "llama" else 0, optimizer="adamw")
    train(config)
    made = export("out", "onnx")
    assert made.files == ("model.onnx", "model.onnx.data")
    ours = make_model(config).eval()
    checkpoint.load_model(checkpoint.path_of(Path("out/checkpoints"), 2), ours)
    graph = reference.ReferenceEvaluator("out/export-onnx/model.onnx")
    for shape in ((1, 1), (3, 16), (2, 7)):
        idx = torch.arange(shape[0] * shape[1]).view(shape) * 7 % 96
        with torch.no_grad():
            expected = ours.lm_head(ours.hidden(idx)).float()
        (found,) = graph.run(None, {"input_ids": idx.numpy()})
        assert (torch.from_numpy(found) - expected).abs().max() < 1e-5
        assert expected.std() > 0.01
