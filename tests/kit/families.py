"""What holds for every family whose maths and names of weights are those of a model of transformers'."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from foretrain.base.errors import ConfigError
from foretrain.config.families import family_of
from foretrain.config.options import RunConfig
from foretrain.config.resolve import from_values
from foretrain.config.shape import ModelShape
from foretrain.hardware.catalogue import find
from foretrain.model.language_model import make_model
from foretrain.model.step import build
from foretrain.model.writer import generate
from foretrain.predict.plan import plan
from foretrain.predict.speed.ops import flops, micro_batch
from foretrain.predict.trace.forecast import traced
from foretrain.training import starting
from foretrain.training.exports.source import export
from tests.kit.operations import counted, way
from tests.kit.tiny import TINY
from tests.kit.training import assert_same, final_tensors, train


def tokens(config: RunConfig, rows: int = 3) -> torch.Tensor:
    random = torch.Generator().manual_seed(5)
    return torch.randint(0, config.vocab_size, (rows, config.block_size), generator=random)


def large(model: torch.nn.Module, by: float = 0.1, head_by: float | None = None) -> Any:
    """The model with weights large enough to show every difference. `head_by`: of the head, where it takes more."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter) * (head_by if head_by and "lm_head" in name else by))
    return model.eval()


def theirs(config: RunConfig, **changes: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    values = family_of(config).write_config(config, None)
    made = getattr(transformers, values["architectures"][0])
    values = {key: value for key, value in values.items() if key not in ("architectures", "model_type")}
    torch.manual_seed(3)
    return large(made(made.config_class(**{**values, **changes})))


def assert_the_maths_is_theirs(ours: Any, others: Any, config: RunConfig) -> torch.Tensor:
    """Logits, loss and gradients of two models with the same weights are the same; returns the logits."""
    idx = tokens(config)
    targets = torch.cat([idx[:, 1:], torch.full((len(idx), 1), -1)], 1)
    expected, loss = others(idx, labels=idx), ours(idx, targets)
    found = ours.lm_head(ours.hidden(idx))
    assert (found - expected.logits).abs().max() < 1e-5
    assert (ours.lm_head(ours.hidden(idx)[:, -1]) - expected.logits[:, -1]).abs().max() < 1e-5
    assert float(loss.detach()) == pytest.approx(float(expected.loss.detach()), abs=1e-5)
    loss.backward()
    expected.loss.backward()
    gradients = {name: parameter.grad for name, parameter in others.named_parameters()}
    assert gradients.keys() == dict(ours.named_parameters()).keys()
    for name, parameter in ours.named_parameters():
        assert parameter.grad.abs().max() > 1e-4, name
        assert torch.allclose(parameter.grad, gradients[name], atol=1e-5), name
    return found


def assert_parameters_are_theirs(config: RunConfig, published: int) -> None:
    """In number, name and shape, as ModelShape has them, too."""
    assert ModelShape.of(config).n_params == published
    with torch.device("meta"):
        own, others = make_model(config), theirs(config)
    assert sum(p.numel() for p in others.parameters()) == published
    shapes = {name: tuple(p.shape) for name, p in own.named_parameters()}
    assert shapes == {p.name: p.shape for p in ModelShape.of(config).parameters()}
    assert shapes == {name: tuple(p.shape) for name, p in others.named_parameters()}


def flops_in_matmuls(config: RunConfig) -> int:
    """Of a step's forward and backward passes a token, as PyTorch counts them, with attention as plain matmuls: the
    counter knows no formula for the CPU's flash kernel."""
    model, idx = make_model(config), tokens(config)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(idx, idx).backward()
    assert counter.get_total_flops() % idx.numel() == 0
    return counter.get_total_flops() // idx.numel()


def assert_the_estimate_is_near_the_trace(config: RunConfig, card: str) -> None:
    """What is kept for backward within 0.01%, what is allocated in each phase within half a percent."""
    estimated = plan(config, find(card))
    found = traced(estimated)
    assert found.exact, found.notes
    expected, ours = found.memory[0], estimated.memory[0]
    assert expected.source == "traced"
    assert ours.saved_bytes == pytest.approx(expected.saved_bytes, rel=1e-4)
    for phase in expected.phases:
        if phase.phase != "resume":
            predicted = ours.phase(phase.phase).allocated_bytes
            assert predicted == pytest.approx(phase.allocated_bytes, rel=5e-3), phase.phase


def assert_operations_have_the_flops_that_pytorch_counts(config: RunConfig, dtype: str, *, training: bool) -> None:
    measured = counted(config, getattr(torch, dtype), train=training)
    for compiled in (False, True):
        found = flops(micro_batch(way(config, dtype, train=training, compiled=compiled)))
        assert found == pytest.approx(measured, rel=1e-3)


def assert_a_run_resumes_exactly(config: RunConfig) -> None:
    """Twelve steps, or seven and then the rest."""
    parts = config.model_copy(update={"out_dir": "parts"})
    train(config.model_copy(update={"out_dir": "whole"}))
    train(parts.model_copy(update={"max_iters": 7}))
    record = train(parts, resume=True)
    assert record.resumed_from == (7,)
    assert_same(final_tensors(Path("whole")), final_tensors(Path("parts")))


def loaded(init_from: str, **values: Any) -> tuple[RunConfig, Any]:
    """(config, model) of a run that starts from these weights, before its first step."""
    unsaid = {key: value for key, value in TINY.items() if key not in ("n_layer", "n_head", "n_embd", "vocab_size")}
    config = from_values({**unsaid, "init_from": init_from, **values}).config
    state = build(config, torch.device("cpu"), torch.float32, compile=False)
    found = starting.find(init_from)
    assert found
    starting.put(found, state, Path())
    return config, state.model.eval()


def assert_it_learns_and_samples(config: RunConfig) -> None:
    """Each token of the dataset is the one before it and 1 or 2 (write_dataset)."""
    train(config)
    config, model = loaded(export(Path(config.out_dir), "safetensors").path)
    made = list(generate(model, [1, 2, 3], 6, temperature=0, top_k=0, seed=0, vocab_size=config.vocab_size))
    assert all(0 < b - a <= 3 for a, b in zip([3, *made], made, strict=False))


def assert_weights_come_in_and_go_out(config: RunConfig) -> tuple[RunConfig, RunConfig]:
    """Both ways: their folder trains here, and what is exported is theirs again, with the same logits.

    Returns the configs of the run that starts from theirs, and of one that starts from what was exported.
    """
    transformers = pytest.importorskip("transformers")
    others, idx = theirs(config), tokens(config)
    others.save_pretrained("theirs")
    expected = others(idx).logits
    brought, model = loaded("./theirs")
    assert (model.lm_head(model.hidden(idx)) - expected).abs().max() < 1e-5
    train(brought.model_copy(update={"max_iters": 1, "eval_interval": 1, "out_dir": "out"}))
    assert export(Path("out"), "hf", Path("ours")).notes in ((), ("no_tokenizer",))
    again = transformers.AutoModelForCausalLM.from_pretrained("ours").eval()
    assert type(again) is type(others)
    weights = final_tensors(Path("out"))
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, weights[f"model/{name}"]), name
    back, model = loaded("./ours")
    assert (model.lm_head(model.hidden(idx)) - again(idx).logits).abs().max() < 1e-5
    return brought, back


def started_from_a_run(config: RunConfig) -> RunConfig:
    train(config)
    found, model = loaded(f"./{config.out_dir}")
    assert_same(
        {f"model/{name}": p.detach() for name, p in model.named_parameters()},
        {name: t for name, t in final_tensors(Path(config.out_dir)).items() if name.startswith("model/")},
    )
    return found


def problems(**values: Any) -> Any:
    with pytest.raises(ConfigError) as error:
        from_values(values)
    return error.value.problems


def why_not_started(**values: Any) -> str:
    (found,) = problems(init_from="./theirs", **values)
    assert found.id == "config.init_from_unusable"
    return found.values["reason"]
