"""Models that come from nanoGPT and Hugging Face and leave for them: same weights, same logits, same next step."""

import json
import math
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from foretrain.base.errors import ConfigError, ExitCode, UserError
from foretrain.config.nanogpt_checkpoint import tensors_of
from foretrain.config.options import RunConfig
from foretrain.config.resolve import from_values, resolve
from foretrain.config.shape import ModelShape
from foretrain.data import hf_tokenizer
from foretrain.data.batches import TokenFile, evaluation_batches
from foretrain.data.dataset import read_info
from foretrain.data.tokenizer import BpeTokenizer, ByteTokenizer, CharTokenizer, Gpt2Tokenizer, Tokenizer
from foretrain.model import foreign
from foretrain.model.gpt2 import GPT
from foretrain.model.step import build, evaluation_loss, learning_rate
from foretrain.runs.folder import RunDirectory
from foretrain.training import checkpoint, starting
from foretrain.training.exports.source import export
from tests.kit.batches import train_batches
from tests.kit.command import foretrain, refused
from tests.kit.nanogpt import held_by_nanogpt, reference_loss, trained_model, write_ckpt
from tests.kit.tiny import TINY, tiny, write_dataset
from tests.kit.training import assert_same, final_tensors, train

SHAPE = ("n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size")
UNSHAPED = {key: value for key, value in TINY.items() if key not in SHAPE}
IDX = torch.randint(0, 96, (3, 16), generator=torch.Generator().manual_seed(5))


def logits_of(config: Any, weights: dict[str, torch.Tensor], idx: torch.Tensor = IDX) -> torch.Tensor:
    model = GPT(config).eval()
    checkpoint.put_weights(weights.items(), model, "test")
    with torch.no_grad():
        return model.lm_head(model.hidden(idx))


def run_weights(run: str, step: int) -> dict[str, torch.Tensor]:
    return load_file(checkpoint.path_of(Path(run) / "checkpoints", step) / "model.safetensors")


def problems_of(**values: Any) -> list[UserError]:
    with pytest.raises(ConfigError) as caught:
        from_values({**UNSHAPED, **values})
    return caught.value.problems


def ckpt(**changes: object) -> Any:
    state = trained_model(**changes)
    write_ckpt(Path("ckpt.pt"), held_by_nanogpt(state))
    return state


# -- from nanoGPT --------------------------------------------------------------------------------------------


def test_a_run_starts_from_nanogpts_weights() -> None:
    state = ckpt(bias=True)
    config = from_values({**UNSHAPED, "init_from": "./ckpt.pt", "max_iters": 2}).config
    assert [getattr(config, key) for key in SHAPE] == [getattr(state.config, key) for key in SHAPE]
    events: list[Any] = []
    record = train(config, listen=events.append)
    info = read_info(Path("data/toy"))
    val = TokenFile(info, "val", 96)
    batches = evaluation_batches(val, config.seed, "val", rows=8, batch_size=4, block=16, device=state.device)
    expected = sum(float(evaluation_loss(state, batch)) for batch in batches) / 2
    assert record.first_val_loss == pytest.approx(expected, abs=1e-6)
    note = next(event for event in events if getattr(event, "id", "") == "started_from")
    assert (note.values["step"], len(note.values["sha256"])) == (0, 64)


def test_through_nanogpt_and_back_is_as_if_it_had_never_left() -> None:
    """12 steps at once, against 5, a ckpt.pt, and 7 more from it with its moments: bit for bit on the CPU."""
    train(tiny(out_dir="whole"))
    train(tiny(out_dir="first", max_iters=5))
    export(Path("first"), "nanogpt", Path("left"))
    config = from_values({**UNSHAPED, "init_from": "left/ckpt.pt", "init_optimizer": True, "out_dir": "second"}).config
    record = train(config)
    assert (record.status, record.steps_done) == ("finished", 12)
    assert_same(*({k: v for k, v in final_tensors(Path(run)).items() if "rng" not in k} for run in ("whole", "second")))
    losses = [
        [m["loss"] for m in RunDirectory(Path(r)).read_lines("metrics") if m["kind"] == "step"]
        for r in ("whole", "second")
    ]
    assert losses[0][5:] == losses[1]


def test_another_run_can_be_gone_on_from() -> None:
    train(tiny(out_dir="whole"))
    train(tiny(out_dir="first", max_iters=5))
    config = from_values({**UNSHAPED, "init_from": "./first", "init_optimizer": True, "out_dir": "second"}).config
    train(config)
    assert_same(*({k: v for k, v in final_tensors(Path(run)).items() if "rng" not in k} for run in ("whole", "second")))
    newest = checkpoint.path_of(Path("first/checkpoints"), 5)
    with (newest / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x7f")
    with refused("checkpoint.cannot_start") as caught:
        train(from_values({**UNSHAPED, "init_from": "./first", "out_dir": "third"}).config)
    assert "does not match its digest" in str(caught.value)


def test_positions_are_cropped_and_rows_are_added() -> None:
    state = ckpt()
    values = {**UNSHAPED, "init_from": "./ckpt.pt", "block_size": 8, "vocab_size": 100, "init_optimizer": True}
    resolved = from_values({**values, "max_iters": 3})
    assert [note.id for note in resolved.notes] == ["config.init_from_pads", "config.init_from_crops"]
    record = train(resolved.config)
    assert record.steps_done == 3
    other = trained_model(0, block_size=8, vocab_size=100)
    found = starting.find("./ckpt.pt")
    assert found
    other.config = resolved.config
    assert starting.put(found, other, Path()).step == 2
    own, theirs = dict(other.model.named_parameters()), dict(state.model.named_parameters())
    wpe, wte = "transformer.wpe.weight", "transformer.wte.weight"
    assert torch.equal(own[wpe], theirs[wpe][:8])
    assert torch.equal(own[wte][:96], theirs[wte])
    assert torch.allclose(own[wte][96:], theirs[wte].mean(0).expand(4, -1))
    moment, before = other.optimizer.state[own[wte]]["exp_avg"], state.optimizer.state[theirs[wte]]["exp_avg"]
    assert torch.equal(moment, torch.cat([before, torch.zeros(4, 32)]))
    assert float(other.optimizer.state[own[wte]]["step"]) == 2
    assert not list(Path().glob(".import-*"))


@settings(max_examples=50)
@given(
    seed=st.integers(0, 10**6), V=st.integers(1, 30), more=st.integers(1, 60), scale=st.sampled_from([0.02, 1.0, 20.0])
)
def test_added_rows_raise_the_loss_by_no_more_than_they_say(seed: int, V: int, more: int, scale: float) -> None:
    random = torch.Generator().manual_seed(seed)
    head = torch.randn(V, 8, generator=random, dtype=torch.float64) * scale
    hidden = torch.randn(20, 8, generator=random, dtype=torch.float64)
    targets = torch.randint(0, V, (20,), generator=random)
    model = ModelShape.of(RunConfig(vocab_size=V + more, n_embd=8, n_head=1))
    grown = foreign.fit(next(model.parameters()), head, model)
    before, after = (nn.functional.cross_entropy(hidden @ h.T, targets) for h in (head, grown))
    assert before - 1e-9 <= after <= before + math.log((V + more) / V) + 1e-9


def test_what_contradicts_the_file_is_said() -> None:
    ckpt()
    found = problems_of(init_from="./ckpt.pt", n_layer=3, n_embd=64, bias=True, block_size=17, vocab_size=95)
    assert {p.values["key"]: p.id.split(".")[1] for p in found} == {
        "n_layer": "init_from_contradicts", "n_embd": "init_from_contradicts", "bias": "init_from_contradicts",
        "block_size": "init_from_beyond", "vocab_size": "init_from_beyond",
    }  # fmt: skip
    assert [p.id for p in problems_of(init_from="./none.pt")] == ["config.init_from_missing"]
    assert [p.id for p in problems_of(init_from="./data")] == ["config.init_from_missing"]
    assert [p.id for p in problems_of(init_from="gpt3")] == ["config.bad_value"]
    Path("junk.pt").write_bytes(b"junk")
    assert "no zip" in str(problems_of(init_from="junk.pt")[0])
    Path("empty").mkdir()
    assert "holds no ckpt.pt" in str(problems_of(init_from="./empty")[0])
    (Path("empty") / "pytorch_model.bin").write_bytes(b"x")
    assert "safetensors" in str(problems_of(init_from="./empty")[0])
    os.mkfifo("pipe.pt")
    Path("zeros.safetensors").symlink_to("/dev/zero")
    Path("piped").mkdir()
    os.mkfifo("piped/run.json")
    for word in ("pipe.pt", "zeros.safetensors", "./piped", "~nobody-here/x", "/" + "x" * 400):
        assert problems_of(init_from=word)[0].id == "config.init_from_unusable"
    for word in ("scratch", "gpt2"):
        assert [p.id for p in problems_of(init_from=word, init_optimizer=True)] == ["config.init_optimizer_without"]
    held = held_by_nanogpt(trained_model(0))
    write_ckpt(Path("fresh.pt"), held)
    assert [p.id for p in problems_of(init_from="fresh.pt", init_optimizer=True)] == ["config.init_optimizer_none"]


def test_heads_are_asked_for_where_a_file_does_not_tell_them() -> None:
    save_file({name: torch.zeros(shape) for name, shape in hf_shapes().items()}, "lone.safetensors")
    assert "config.init_from_heads" in [p.id for p in problems_of(init_from="lone.safetensors")]
    foretrain("plan", "--gpu", "4070", "--init_from=lone.safetensors", "--n_head=4", code=0)


def test_nanogpts_own_resume_is_told_the_way() -> None:
    Path("out").mkdir()
    Path("out/ckpt.pt").touch()
    result = foretrain("train", "--init_from=resume", "--device=cpu", code=ExitCode.USAGE)
    assert "--init_from=out/ckpt.pt --init_optimizer" in result.stderr


def die(*_: object) -> None:
    raise RuntimeError("gone")


def test_run_that_saved_nothing_restarts_from_the_same_weights(monkeypatch: Any) -> None:
    ckpt()
    config = from_values({**UNSHAPED, "init_from": "./ckpt.pt"}).config
    whole = train(config.model_copy(update={"out_dir": "whole"}))

    with monkeypatch.context() as patch:
        patch.setattr("foretrain.training.trainer.train_step", die)
        with pytest.raises(RuntimeError):
            train(config)
    # nanoGPT's word takes the run's own origin; another one is refused.
    record = train(config.model_copy(update={"init_from": "resume", "max_iters": 4}), resume=True)
    assert record.config.init_from == "./ckpt.pt"
    with refused("usage.resume_changed"):
        train(config.model_copy(update={"init_from": "scratch"}), resume=True)
    train(config, resume=True)
    assert whole.status == "finished"
    assert_same(final_tensors(Path("whole")), final_tensors(Path("out")))


def test_weights_that_changed_under_a_run_are_noticed(monkeypatch: Any) -> None:
    ckpt()
    config = from_values({**UNSHAPED, "init_from": "./ckpt.pt"}).config
    with monkeypatch.context() as patch:
        patch.setattr("foretrain.training.trainer.train_step", die)
        with pytest.raises(RuntimeError):
            train(config)
    ckpt(seed=7)
    with refused("data.weights_changed"):
        train(config, resume=True)


# -- from and to Hugging Face --------------------------------------------------------------------------------


def hf_shapes() -> dict[str, tuple[int, ...]]:
    return tensors_of(2, 32, 96, 16, True, conv1d=True)


def hugging_face(folder: str, **changes: Any) -> Any:
    """A GPT-2 of transformers with weights large enough to show every difference, saved by itself."""
    transformers = pytest.importorskip("transformers")
    values = {
        "n_layer": 2,
        "n_head": 2,
        "n_embd": 32,
        "vocab_size": 96,
        "n_positions": 16,
        "activation_function": "gelu",
    }
    config = transformers.GPT2Config(**{**values, "bos_token_id": 0, "eos_token_id": 0, **changes})
    torch.manual_seed(3)
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(folder)
    return model


def started(init_from: str, **values: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """(config, weights) of a run that starts from these weights, before its first step."""
    config = from_values({**UNSHAPED, "init_from": init_from, **values}).config
    state = build(config, torch.device("cpu"), torch.float32, compile=False)
    found = starting.find(init_from)
    assert found
    starting.put(found, state, Path())
    return config, {name: p.detach() for name, p in state.model.named_parameters()}


def test_logits_are_those_of_hugging_face() -> None:
    model = hugging_face("theirs")
    with torch.no_grad():
        expected = model(IDX).logits
    config, weights = started("./theirs")
    assert (config.bias, config.vocab_size, config.n_head) == (True, 96, 2)
    assert (logits_of(config, weights) - expected).abs().max() < 1e-5
    assert (logits_of(config, weights)).std() > 1
    # OpenAI's own files on the hub: no "transformer.", masks among the weights, a config.json beside them.
    named = load_file("theirs/model.safetensors")
    bare = {name.removeprefix("transformer."): value for name, value in named.items()}
    bare["h.0.attn.bias"] = torch.ones(1, 1, 16, 16)
    Path("bare").mkdir()
    save_file(bare, "bare/model.safetensors")
    shutil.copy("theirs/config.json", "bare/config.json")
    assert_same(started("bare/model.safetensors")[1], weights)
    # Several files with an index, and half precision.
    names = sorted(named)
    Path("sharded").mkdir()
    shards = {"a.safetensors": names[:9], "b.safetensors": names[9:]}
    for file, part in shards.items():
        save_file({name: named[name].bfloat16() for name in part}, f"sharded/{file}")
    listed = {name: file for file, part in shards.items() for name in part}
    Path("sharded/model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    shutil.copy("theirs/config.json", "sharded/config.json")
    assert_same(started("./sharded")[1], {name: value.bfloat16().float() for name, value in weights.items()})


def test_the_published_activation_is_said_and_near() -> None:
    model = hugging_face("theirs", activation_function="gelu_new")
    resolved = from_values({**UNSHAPED, "init_from": "./theirs"})
    assert [note.id for note in resolved.notes] == ["config.init_from_gelu"]
    config, weights = started("./theirs")
    with torch.no_grad():
        assert not torch.allclose(logits_of(config, weights), model(IDX).logits, atol=1e-5)
    x = torch.linspace(-12, 12, 1_000_001, dtype=torch.float64)
    apart = (nn.functional.gelu(x) - nn.functional.gelu(x, approximate="tanh")).abs().max()
    assert 0.0004 < apart < 0.0005  # what the note says


@pytest.mark.parametrize(
    "odd",
    [{"activation_function": "relu"}, {"n_inner": 64}, {"layer_norm_epsilon": 1e-6}, {"scale_attn_weights": False},
     {"scale_attn_by_inverse_layer_idx": True}],
)  # fmt: skip
def test_gpt2s_that_compute_something_else_are_refused(odd: dict[str, Any]) -> None:
    hugging_face("theirs", **odd)
    assert [p.id for p in problems_of(init_from="./theirs")] == ["config.init_from_unusable"]
    assert problems_of(init_from="./theirs", bias=False)[0].id == "config.init_from_unusable"


def test_damaged_safetensors_are_sentences() -> None:
    save_file({name: torch.zeros(shape) for name, shape in hf_shapes().items()}, "a.safetensors")
    whole = Path("a.safetensors").read_bytes()
    for broken in (
        b"",
        whole[:5],
        whole[:300],
        b"\xff" * 8 + whole[8:],
        whole[:8] + b"[" + whole[9:],
        whole[:8] + b"[" * 500,
    ):
        Path("b.safetensors").write_bytes(broken)
        assert [p.id for p in problems_of(init_from="b.safetensors", n_head=2)] == ["config.init_from_unusable"]
    Path("c.safetensors").write_bytes(whole[:-10])  # its header is whole, its numbers are not
    config = from_values({**UNSHAPED, "init_from": "c.safetensors", "n_head": 2}).config
    with refused("checkpoint.cannot_start"):
        train(config)


def test_published_weights_come_from_the_cache(own_directory: Path, monkeypatch: Any) -> None:
    pytest.importorskip("huggingface_hub")
    folder = own_directory / "hub" / "models--openai-community--gpt2"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    snapshot = folder / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    save_file({name: torch.zeros(shape) for name, shape in hf_shapes().items()}, snapshot / "model.safetensors")
    (snapshot / "config.json").write_text('{"n_head": 2, "model_type": "gpt2"}')
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(own_directory / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    found = starting.find("gpt2")
    assert (found.shape["n_embd"], found.activation) == (32, "gelu_new")
    with refused("environment.no_weights", code=ExitCode.ENVIRONMENT) as caught:
        starting.find("gpt2-medium")
    assert "./gpt2-medium" in str(caught.value)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match="huggingface_hub is not installed"):
        str(starting.find("gpt2"))


def test_published_shapes_may_be_cropped_and_padded() -> None:
    config = resolve(["--init_from=gpt2", "--block_size=256", "--vocab_size=50304"]).config
    assert (config.block_size, config.vocab_size, config.bias) == (256, 50304, True)
    assert resolve(["--init_from=gpt2", "--vocab_size=100"]).config.vocab_size == 50257
    assert resolve(["--init_from=gpt2"]).config.vocab_size == 50257


@pytest.mark.parametrize("bias", [True, False])
def test_transformers_loads_what_is_exported(bias: bool) -> None:
    transformers = pytest.importorskip("transformers")
    write_dataset(Path("data/toy"), vocab=90)
    Path("data/toy/meta.json").write_text(json.dumps({"dtype": "uint16", "tokenizer": "byte", "vocab_size": 90}))
    config = tiny(bias=bias, dropout=0.1, vocab_size=260)
    train(config)
    said = export(Path("out"), "hf", Path("theirs"))
    assert (said.step, said.notes) == (12, () if bias else ("zero_biases",))
    model = transformers.AutoModelForCausalLM.from_pretrained("theirs").eval()
    assert type(model).__name__ == "GPT2LMHeadModel"
    expected = logits_of(config, run_weights("out", 12))
    with torch.no_grad():
        found = model(IDX).logits
    assert found.shape == (3, 16, 260)
    assert (found - expected).abs().max() < 1e-5
    if not bias:
        assert all(not bool(p.any()) for name, p in model.named_parameters() if name.endswith("bias"))
    words = transformers.AutoTokenizer.from_pretrained("theirs")
    assert words.encode("def é:\n  x") == list("def é:\n  x".encode())
    assert words.decode(list(b" a  b\n")) == " a  b\n"
    made = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=8, do_sample=False)
    assert made.shape[1] <= 11
    assert int(made.max()) < 256
    # And it comes back bit for bit, with or without its biases.
    if bias:
        assert_same(started("./theirs")[1], run_weights("out", 12))


def test_a_plain_export_comes_back() -> None:
    train(tiny())
    made = export(Path("out"), "safetensors")
    assert (made.path, made.files) == ("out/export-safetensors", ("config.json", "model.safetensors"))
    config, weights = started("out/export-safetensors/")
    assert [getattr(config, key) for key in SHAPE] == [TINY.get(key, False) for key in SHAPE]
    assert_same(weights, run_weights("out", 12))


# -- to nanoGPT ----------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Names and order of nanoGPT's block; the arithmetic is tests/model/test_step.py's."""

    def __init__(self, C: int, bias: bool) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(C, bias=bias)
        self.attn = nn.ModuleDict({"c_attn": nn.Linear(C, 3 * C, bias=bias), "c_proj": nn.Linear(C, C, bias=bias)})
        self.ln_2 = nn.LayerNorm(C, bias=bias)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(C, 4 * C, bias=bias), "c_proj": nn.Linear(4 * C, C, bias=bias)})


class NanoGPT(nn.Module):
    """A model with the state dict of nanoGPT's, made from model_args alone."""

    def __init__(
        self, n_layer: int, n_head: int, n_embd: int, block_size: int, bias: bool, vocab_size: int, dropout: float
    ) -> None:
        super().__init__()
        parts = {"wte": nn.Embedding(vocab_size, n_embd), "wpe": nn.Embedding(block_size, n_embd)}
        parts["h"] = nn.ModuleList([Block(n_embd, bias) for _ in range(n_layer)])
        self.transformer = nn.ModuleDict({**parts, "ln_f": nn.LayerNorm(n_embd, bias=bias)})
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight


@pytest.mark.parametrize("bias", [True, False])
def test_nanogpt_goes_on_where_the_run_stopped(bias: bool) -> None:
    """Loaded as nanoGPT's train.py loads it, with its optimizer; the next step's weights are those of our next step."""
    config = tiny(bias=bias, max_iters=6, decay_lr=False, grad_clip=0.0)
    train(config)
    train(config.model_copy(update={"max_iters": 7}), resume=True)
    made = export(checkpoint.path_of(Path("out/checkpoints"), 6), "nanogpt", Path("left"))
    assert made.files == ("ckpt.pt",)
    held = torch.load("left/ckpt.pt", map_location="cpu", weights_only=True)
    assert set(held) == {"model", "optimizer", "model_args", "iter_num", "best_val_loss", "config"}
    assert held["model_args"] == {**{key: getattr(config, key) for key in SHAPE}, "dropout": 0.0}
    assert (held["iter_num"], type(held["best_val_loss"]), held["config"]["dataset"]) == (6, float, "toy")
    model = NanoGPT(**held["model_args"])
    model.load_state_dict(held["model"])
    named = dict(model.named_parameters())
    decayed = [p for p in named.values() if p.dim() >= 2]
    others = [p for p in named.values() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.5, 0.5))
    optimizer.load_state_dict(held["optimizer"])
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.1, 0.0]
    assert (optimizer.param_groups[0]["betas"], optimizer.param_groups[0]["lr"]) == ((0.9, 0.95), 1e-2)
    info = read_info(Path("data/toy"))
    tokens = TokenFile(info, "train", 96)
    for idx, targets in train_batches(
        tokens, config.seed, 6, batch_size=4, accumulation=2, block=16, device=torch.device("cpu")
    ):
        weights = {**named, "lm_head.weight": model.lm_head.weight}
        (reference_loss(weights, config, idx, targets) / 2).backward()
    assert learning_rate(config, 6) == 1e-2
    optimizer.step()
    ours = run_weights("out", 7)
    assert ours.keys() == named.keys()
    for name, parameter in named.items():
        mine, theirs = ours[name], parameter.detach()
        if name.endswith("c_attn.bias"):  # no loss depends on the keys' bias: its gradient is rounding alone
            mine, theirs = (torch.cat([b[:32], b[64:]]) for b in (mine, theirs))
        assert torch.allclose(mine, theirs, atol=2e-6), name


def test_a_run_on_a_card_leaves_the_fused_kernel_on() -> None:
    """load_state_dict takes `fused` from the file: without it nanoGPT would go on with the slower kernel."""
    state = trained_model()
    weights = {name: p.detach() for name, p in state.model.named_parameters()}
    moments = {f"{k}/{n}": v for n, p in state.model.named_parameters() for k, v in state.optimizer.state[p].items()}
    for fused in (True, False):
        made = foreign.nanogpt_optimizer(weights, moments, state.config, 1e-3, fused=fused)
        assert [bool(group["fused"]) for group in made["param_groups"]] == [fused, fused]
        assert len(made["state"]) == len(weights)


# -- the command ---------------------------------------------------------------------------------------------


def test_export_refuses_and_says_why(monkeypatch: Any) -> None:
    def id_of(*words: Any, **options: Any) -> str:
        with pytest.raises(UserError) as caught:
            export(*words, **options)
        return caught.value.id

    assert id_of(Path("none"), "hf") == "data.no_run"
    train(tiny(max_iters=6))
    Path("full").mkdir()
    Path("full/mine").write_text("mine")
    Path("full/config.json").write_text("old")
    assert id_of(Path("out"), "hf", Path("full")) == "usage.export_not_empty"
    export(Path("out"), "hf", Path("full"), force=True)
    assert Path("full/mine").read_text() == "mine"
    assert json.loads(Path("full/config.json").read_text())["model_type"] == "gpt2"
    assert id_of(Path("out"), "hf", Path("full/mine")) == "usage.cannot_write_file"
    for below_a_file in ("full/mine/x", "full/mine/x/y"):
        assert id_of(Path("out"), "hf", Path(below_a_file), force=True) == "usage.cannot_write_file"

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("foretrain.training.exports.hugging_face.save_file", full)
        assert id_of(Path("out"), "hf", Path("later")) == "disk.full_export"
    assert not Path("later").exists()
    assert not list(Path().glob(".later-*"))
    record = RunDirectory(Path("out")).read_record()
    odd = record.config.model_copy()
    object.__setattr__(odd, "recipe", "modern")
    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "read_record", lambda self: record.model_copy(update={"config": odd}))
        for form in ("hf", "nanogpt"):
            assert id_of(Path("out"), form, Path("later")) == "usage.export_recipe"
    moments = checkpoint.path_of(Path("out/checkpoints"), 6) / "optimizer.safetensors"
    moments.write_bytes(moments.read_bytes()[:-1])
    assert id_of(moments.parent, "hf", Path("later")) == "checkpoint.none_valid"
    assert export(Path("out"), "hf", Path("later")).step == 5  # the newest intact one


def test_the_best_checkpoint_can_be_asked_for() -> None:
    train(tiny(learning_rate=1e-2, decay_lr=False, eval_interval=2, keep_checkpoints=9))
    progress = checkpoint.read_progress(checkpoint.path_of(Path("out/checkpoints"), 12))
    path = checkpoint.path_of(Path("out/checkpoints"), 12) / "state.json"
    assert progress.best_step
    assert export(Path("out"), "safetensors", Path("a"), best=True).step == progress.best_step
    assert export(Path("out"), "safetensors", Path("b")).step == 12
    assert path.is_file()


def test_export_says_what_it_did() -> None:
    train(tiny(max_iters=2))
    done = foretrain("export", "out")
    assert (done.returncode, done.stderr.count("note:")) == (0, 2)
    assert "step-0000000002 (step 2) → out/export-hf: README.md, config.json" in done.stdout
    again = foretrain("export", "out", "--force", "--json")
    assert json.loads(again.stdout)["notes"] == ["zero_biases", "no_tokenizer"]
    assert foretrain("export", "out", "--to", "tflite").returncode == ExitCode.USAGE
    assert not Path("out/export-tflite").exists()


# -- tokenizers ----------------------------------------------------------------------------------------------

TEXT = "def f(x):\n    return x ** 2  # naïve – 日本\t🙂\n\n'don''t' 12345"


def reload(tokenizer: Tokenizer) -> Any:
    fast = pytest.importorskip("tokenizers")
    return fast.Tokenizer.from_str(hf_tokenizer.files_of(tokenizer, 128)["tokenizer.json"])


def test_bytes_are_their_own_ids() -> None:
    again = reload(ByteTokenizer())
    text = TEXT + "".join(map(chr, [*range(0x800), 0x2028, 0xFFFD, 0x10FFFF]))
    assert again.encode(text).ids == list(text.encode())
    assert again.decode(list(text.encode())) == text


def test_characters_keep_their_ids() -> None:
    ours = CharTokenizer(dict(enumerate(sorted(set(TEXT)))))
    again = reload(ours)
    assert again.encode(TEXT).ids == list(ours.encode(TEXT.encode()))
    assert again.decode(again.encode(TEXT).ids) == TEXT


def test_a_trained_bpe_is_passed_on_and_gpt2s_is_made_from_ranks() -> None:
    """GPT-2's vocabulary needs a network; a BPE trained_model here stands in for it, in tiktoken's form and back."""
    tiktoken = pytest.importorskip("tiktoken")
    bpe = BpeTokenizer.train([Path(__file__).read_bytes()], 600)
    assert json.loads(hf_tokenizer.files_of(bpe, 8)["tokenizer_config.json"])["eos_token"] == "<|endoftext|>"
    assert reload(bpe).encode(TEXT).ids == list(bpe.encode(TEXT.encode()))
    vocabulary = json.loads(bpe.text)["model"]["vocab"]
    to_bytes = {character: byte for byte, character in hf_tokenizer.byte_characters().items()}
    tokens = {bytes(to_bytes[c] for c in t): id for t, id in vocabulary.items() if t != BpeTokenizer.SEPARATOR}
    ranks = {token: rank for rank, token in enumerate(sorted(tokens, key=lambda token: tokens[token]))}
    pattern = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""  # GPT-2's, as in tiktoken
    ours = Gpt2Tokenizer.__new__(Gpt2Tokenizer)
    ours._encoding = tiktoken.Encoding("test", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    made = json.loads(hf_tokenizer.files_of(ours, 8)["tokenizer.json"])
    learned = [m if isinstance(m, list) else m.split(" ") for m in json.loads(bpe.text)["model"]["merges"]]
    assert made["model"]["merges"] == learned
    text = TEXT + Path(__file__).read_text("utf-8").replace(BpeTokenizer.SEPARATOR, "")
    assert reload(ours).encode(text).ids == list(ours.encode(text.encode()))
    assert made["added_tokens"][0]["id"] == 50256


def test_shapes_of_the_model_are_kept_by_an_export() -> None:
    shape = ModelShape.of(RunConfig(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=96))
    weights = {p.name: torch.randn(p.shape) for p in shape.parameters()}
    made = foreign.to_hugging_face(weights, shape)
    assert {name: tuple(t.shape) for name, t in made.items()} == hf_shapes()
    for name in weights:
        turned = made[name].t() if name.endswith(shape.family.transposed) else made[name]
        assert torch.equal(turned, weights[name])
