"""What holds for every form of export."""

from pathlib import Path
from typing import get_args

import pytest

from foretrain.app.export import export
from foretrain.base.errors import ExitCode
from foretrain.training.exports.forms import FORMS, GGUF_TYPES, Form, GgufType, module_of
from tests.kit.command import foretrain
from tests.kit.tiny import tiny
from tests.kit.training import train


def test_types_list_what_there_is() -> None:
    assert get_args(Form) == tuple(FORMS)
    assert get_args(GgufType) == tuple(GGUF_TYPES)


def test_each_form_writes_a_run_or_says_why_not(own_directory: Path) -> None:
    pytest.importorskip("gguf")
    train(tiny(max_iters=1))
    train(tiny(max_iters=1, recipe="modern", out_dir="odd", optimizer="adamw"))
    listed = foretrain("export", "--help").stdout.replace("│", " ")
    refused = set()
    for form in FORMS:
        made = export("out", form)
        assert made.form == form
        assert made.path == f"out/export-{form}"
        assert sorted(made.files) == sorted(path.name for path in Path(made.path).iterdir())
        assert all((Path(made.path) / name).stat().st_size for name in made.files)
        assert f"{form}:" in " ".join(listed.split())
        other = foretrain("export", "odd", "--to", form)
        if module_of(form).refusal(tiny(recipe="modern")) is None:
            assert other.returncode == ExitCode.DONE
        else:
            refused.add(form)
            assert (other.returncode, other.stderr.count("\n")) == (ExitCode.USAGE, 1)
            assert not Path(f"odd/export-{form}").exists()
    assert refused == {"hf", "gguf", "nanogpt"}
