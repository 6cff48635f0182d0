"""nanoGPT's ckpt.pt as data: what torch.save wrote is read bit for bit, everything else is one sentence, within limits."""

import io
import json
import os
import pickle
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from foretrain.config import nanogpt_checkpoint as nanogpt_reader
from foretrain.config.nanogpt_checkpoint import Refused, shape_of, tensors_of
from foretrain.config.options import RunConfig
from foretrain.config.shape import ModelShape
from foretrain.config.weights_file import read_nanogpt
from foretrain.model.gpt2 import GPT
from tests.kit.nanogpt import SHAPE_KEYS, held_by_nanogpt, trained_model, write_ckpt
from tests.kit.tiny import tiny


def problem_of(path: Path) -> str:
    with pytest.raises(Refused) as caught:
        read_nanogpt(path)
    assert len(str(caught.value)) < 200
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("prefix", ["", "_orig_mod."])
@pytest.mark.parametrize("bias", [True, False])
def test_weights_and_moments_are_read_bit_for_bit(prefix: str, bias: bool) -> None:
    state = trained_model(bias=bias)
    said = read_nanogpt(write_ckpt(Path("ckpt.pt"), held_by_nanogpt(state, prefix)), Path(), moments=True)
    assert said["shape"] == {key: getattr(state.config, key) for key in SHAPE_KEYS}
    assert (said["iter_num"], said["best_val_loss"], said["moments"]) == (2, 3.25, True)
    weights, moments = load_file("model.safetensors"), load_file("optimizer.safetensors")
    named = dict(state.model.named_parameters())
    assert weights.keys() == named.keys()
    assert len(moments) == 3 * len(named)
    for name, parameter in named.items():
        assert torch.equal(weights[name], parameter)
        for kind, value in state.optimizer.state[parameter].items():
            assert torch.equal(moments[f"{kind}/{name}"], value)


def test_masks_other_dtypes_and_a_crop_are_read() -> None:
    """Versions before PyTorch 2 keep their causal masks; crop_block_size keeps the whole storage behind its rows."""
    state = trained_model()
    held = held_by_nanogpt(state)
    for layer in range(2):
        held["model"][f"transformer.h.{layer}.attn.bias"] = torch.tril(torch.ones(1, 1, 16, 16))
    held["model"]["transformer.wpe.weight"] = held["model"]["transformer.wpe.weight"][:7]
    held["model"]["transformer.ln_f.weight"] = held["model"]["transformer.ln_f.weight"].bfloat16()
    held["model_args"]["block_size"] = 7
    said = read_nanogpt(write_ckpt(Path("ckpt.pt"), held), Path())
    assert (said["shape"]["block_size"], said["masks"]) == (7, 2)
    weights = load_file("model.safetensors")
    assert torch.equal(weights["transformer.wpe.weight"], held["model"]["transformer.wpe.weight"])
    assert weights["transformer.ln_f.weight"].dtype == torch.bfloat16


@settings(max_examples=40)
@given(
    layers=st.integers(1, 12), heads=st.integers(1, 4), head_width=st.integers(1, 5), vocabulary=st.integers(1, 40),
    block=st.integers(1, 20), bias=st.booleans(), conv1d=st.booleans(),
)  # fmt: skip
def test_names_and_shapes_are_those_of_the_model(
    layers: int, heads: int, head_width: int, vocabulary: int, block: int, bias: bool, conv1d: bool
) -> None:
    config = RunConfig(n_layer=layers, n_head=heads, n_embd=heads * head_width, block_size=block, bias=bias)
    shape = ModelShape.of(config.model_copy(update={"vocab_size": vocabulary}))
    mine = tensors_of(layers, shape.n_embd, vocabulary, block, bias)
    assert list(mine.items()) == [(p.name, p.shape) for p in shape.parameters()]
    turned = tensors_of(layers, shape.n_embd, vocabulary, block, bias, conv1d=conv1d)
    found = shape_of({**turned, "lm_head.weight": (vocabulary, shape.n_embd)}, conv1d=conv1d)
    assert found == {key: getattr(shape.config, key) for key in found}


def test_the_tables_are_those_of_the_module() -> None:
    config = tiny(bias=True)
    own = {name: tuple(p.shape) for name, p in GPT(config).named_parameters()}
    assert own == tensors_of(config.n_layer, config.n_embd, config.vocab_size, config.block_size, True)


# -- what is no checkpoint of nanoGPT's ----------------------------------------------------------------------


def changed(**changes: Any) -> dict[str, Any]:
    return {**held_by_nanogpt(trained_model(0)), **changes}


def with_weight(name: str, tensor: Any) -> dict[str, Any]:
    held = held_by_nanogpt(trained_model(0))
    return {**held, "model": {**held["model"], name: tensor}}


class _Runs:
    def __reduce__(self) -> Any:
        return os.system, ("touch ran",)


ODD = {
    "code": (lambda: changed(config=_Runs()), "asks for posix.system"),
    "class": (lambda: changed(config=Path("x")), "asks for pathlib"),
    "numpy": (lambda: changed(best_val_loss=__import__("numpy").float64(3.0)), "asks for numpy"),
    "not a table": (lambda: [1, 2], "it has no model"),
    "no model": (lambda: {"iter_num": 3}, "it has no model"),
    "negative": (lambda: changed(iter_num=-1), "iter_num is no whole number"),
    "heads": (lambda: changed(model_args={"n_head": 5}), "5 heads do not divide"),
    "args": (lambda: changed(model_args={"n_head": 2, "n_layer": 9}), "n_layer = 9, its tensors 2"),
    "other model": (lambda: with_weight("transformer.h.0.attn.q_norm.weight", torch.ones(3)), "q_norm"),
    "shape": (lambda: with_weight("transformer.ln_f.weight", torch.ones(31)), "ln_f.weight is 31 instead of 32"),
    "whole numbers": (
        lambda: with_weight("transformer.ln_f.weight", torch.ones(32, dtype=torch.int64)), "does not hold fractions"
    ),
    "complex": (lambda: with_weight("transformer.ln_f.weight", torch.ones(32, dtype=torch.complex64)), "asks for"),
    "untied": (lambda: with_weight("lm_head.weight", torch.randn(96, 32)), "lm_head is another matrix"),
    "view": (lambda: with_weight("transformer.wpe.weight", torch.randn(32, 16).t()), "not contiguous"),
    "not a tensor": (lambda: with_weight("transformer.ln_f.weight", 3), "not a tensor"),
}  # fmt: skip


@pytest.mark.parametrize("kind", ODD)
def test_what_nanogpt_does_not_write_is_one_sentence(kind: str) -> None:
    make, says = ODD[kind]
    assert says in problem_of(write_ckpt(Path("ckpt.pt"), make()))
    assert not Path("ran").exists()


def test_an_lm_head_with_a_copy_of_the_embedding_is_tied() -> None:
    held = held_by_nanogpt(trained_model(0))
    held["model"]["lm_head.weight"] = held["model"]["lm_head.weight"].clone()
    assert read_nanogpt(write_ckpt(Path("ckpt.pt"), held))["shape"]["vocab_size"] == 96


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda o: o["param_groups"].pop(), "other groups"),
        (lambda o: o["param_groups"][0]["params"].reverse(), "other groups"),
        (lambda o: o["state"][0].update(max_exp_avg_sq=torch.zeros(96, 32)), "no plain AdamW state"),
        (lambda o: o["state"].pop(3), "no plain AdamW state"),
        (lambda o: o["state"][0].update(exp_avg=torch.zeros(3)), "of another shape"),
        (lambda o: o["state"][0].update(step="2"), "step count"),
        (lambda o: o["state"][0].update(step=torch.tensor(float("nan"))), "step count"),
    ],
)
def test_other_optimizers_are_refused_and_their_weights_are_not(change: Any, says: str) -> None:
    held = held_by_nanogpt(trained_model())
    change(held["optimizer"])
    path = write_ckpt(Path("ckpt.pt"), held)
    with pytest.raises(Refused, match=says):
        read_nanogpt(path, Path(), moments=True)
    read_nanogpt(path, Path())
    assert load_file("model.safetensors")


# -- hostile files -------------------------------------------------------------------------------------------


def zipped(path: Path, data: bytes, *, method: int = zipfile.ZIP_STORED, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w", method) as file:
        file.writestr("ckpt/data.pkl", data)
        for name, content in members.items():
            file.writestr(f"ckpt/{name}", content)
    return path


def bomb_of_memo() -> bytes:
    return b"\x80\x02Nr" + struct.pack("<I", 2**31) + b"."  # nine bytes that ask for a memo of 2^31 places


BOMBS = {
    "memo": bomb_of_memo,
    "lists": lambda: b"\x80\x02" + b"]" * (15 << 20) + b".",
    "long text": lambda: b"\x80\x04\x8d" + struct.pack("<Q", 2**40) + b"x.",
    "bytearray": lambda: b"\x80\x05\x96" + struct.pack("<Q", 2**35) + b"x.",
    "nesting": lambda: b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".",
    "doubling": lambda: b"\x80\x02]q\x00" + b"(h\x00h\x00e" * 100_000 + b".",
    "no pickle": lambda: b"\xff" * 100,
    "empty": lambda: b"",
    "digits": lambda: b"I" + b"9" * 1_000_000 + b"\n.",
}


@pytest.mark.fault(
    "a hostile or bloated ckpt.pt", row="B.6", sees="exit code 7", safe="everything: read apart, in bounded memory"
)
def test_bombs_take_neither_memory_nor_time() -> None:
    for kind, made in BOMBS.items():
        assert problem_of(zipped(Path(f"{kind}.pt"), made())), kind
    # In a process of its own, as the system keeps the largest child that a process ever had.
    code = (
        "import resource; from pathlib import Path\n"
        "from foretrain.config.nanogpt_checkpoint import Refused; from foretrain.config.weights_file import read_nanogpt as read\n"
        "refused = 0\n"
        "for path in Path().glob('*.pt'):\n"
        "    try: read(path)\n"
        "    except Refused: refused += 1\n"
        f"assert refused == {len(BOMBS)}\n"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)"
    )
    # The limit only ends what would hang: the sizes above are such that obeying them takes hours, on any machine.
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert int(ended.stdout) < 256 * 2**20 + 33 * nanogpt_reader.MAX_PICKLE_BYTES


def test_the_child_has_a_cap_from_the_files_size() -> None:
    code = (
        "import resource; from foretrain.config import nanogpt_checkpoint as r; r.limit_memory(1 << 20)\n"
        "print(resource.getrlimit(resource.RLIMIT_AS)[0])\ntry: bytearray(400 << 20)\nexcept MemoryError: print('capped')"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == [str((256 + 32) << 20), "capped"]


def test_zips_that_are_none_of_torchs() -> None:
    zeros = pickle.dumps({"model": 0, "x": "0" * 50_000_000})
    assert "compressed" in problem_of(zipped(Path("a.pt"), zeros, method=zipfile.ZIP_DEFLATED))
    assert "more than any nanoGPT needs" in problem_of(zipped(Path("b.pt"), bytes(17 << 20)))
    assert "big-endian" in problem_of(zipped(Path("c.pt"), b"N.", byteorder=b"big"))
    Path("d.pt").write_bytes(pickle.dumps({"model": {}}))
    assert "no zip" in problem_of(Path("d.pt"))
    with zipfile.ZipFile("e.pt", "w") as file:
        file.writestr("a/data.pkl", b"N.")
        file.writestr("b/data.pkl", b"N.")
    assert "not written by torch.save" in problem_of(Path("e.pt"))


def test_shared_bytes_cannot_fill_the_disk() -> None:
    """One storage behind every tensor would be written out many times over."""
    held = held_by_nanogpt(trained_model(0, n_layer=40))
    one = torch.zeros(4 * 32 * 32)
    for name, tensor in held["model"].items():
        held["model"][name] = one[: tensor.numel()].view(tensor.shape)
    path = write_ckpt(Path("ckpt.pt"), held)
    with pytest.raises(Refused, match="share their bytes"):
        read_nanogpt(path, Path())
    assert not Path("model.safetensors").exists()


@settings(max_examples=25)
@given(st.data())
def test_damage_anywhere_is_a_sentence_or_harmless(data: Any) -> None:
    """In this process, so that a traceback would show; the cap is left out."""
    whole = _whole()
    broken = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        broken[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.one_of(st.just(len(whole)), st.integers(0, len(whole))))
    Path("broken.pt").write_bytes(broken[:cut])
    limit, nanogpt_reader.limit_memory = nanogpt_reader.limit_memory, lambda size: None
    try:
        answer = nanogpt_reader.main("broken.pt", ".", "moments")
    finally:
        nanogpt_reader.limit_memory = limit
    json.dumps(answer)
    assert "shape" in answer or answer["problem"]


def _whole(kept: list[bytes] = []) -> bytes:  # noqa: B006
    if not kept:
        file = io.BytesIO()
        torch.save(held_by_nanogpt(trained_model()), file)
        kept.append(file.getvalue())
    return kept[0]
