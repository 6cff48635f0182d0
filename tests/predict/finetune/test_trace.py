"""Fine-tuning, traced: against the real CPU allocator, PyTorch's own arithmetic and closed forms; and why there is none.

The code that is traced is that of transformers, peft and bitsandbytes, so without them these tests are skipped.
"""

import math
from pathlib import Path
from typing import Any

import pytest

from foretrain.config.finetune.options import FineTune
from foretrain.config.presets import models
from foretrain.hardware.catalogue import find
from foretrain.predict.allocator.replay import replay
from foretrain.predict.finetune.memory import PHASES
from foretrain.predict.trace import elsewhere, interpreter, service
from foretrain.predict.trace.finetune.request import FineTuneRequest, FineTuneTrace, answered
from foretrain.predict.trace.record import Trace
from foretrain.predict.trace.service import TraceUnavailable
from tests.kit.finetune import FAMILIES, MIXTURES, small, source_of

pytest.importorskip("transformers", minversion="5")
pytest.importorskip("accelerate")
pytest.importorskip("peft")

from foretrain.predict.finetune.traced import exact_finetune
from foretrain.predict.trace.finetune import drive
from tests.kit import finetune_proof as proof

# Each takes a second or two.
pytestmark = pytest.mark.slow

GPU = find("RTX 4090")
SMALL = FineTune(seq_len=64, batch_size=2, lora_r=8, optim="adamw_torch", merge=True)
KEPT = {"evaluate": True, "keeps_logits": True, "eval_batch_size": 2, "eval_batches": 3}


def tune(**changes: object) -> FineTune:
    return FineTune.model_validate({**SMALL.model_dump(), **changes})


def request(name: str = "qwen3-0.6b", gpu: str = "RTX 4090", **changes: object) -> FineTuneRequest:
    return FineTuneRequest(source_of(small(name)), tune(**changes), find(gpu))


def traced(name: str = "qwen3-0.6b", **changes: object) -> Trace:
    asked = request(name, **changes)
    return asked.whole(drive.trace(asked.job()))


def answer(name: str = "qwen3-0.6b", available_bytes: int | None = None, **changes: object) -> FineTuneTrace:
    return answered([traced(name, **changes)], tune(**changes), GPU, available_bytes)


def component(found: FineTuneTrace, phase: str, id: str) -> int:
    return sum(row.size_bytes for row in found.memory.phase(phase).components if row.id == id)


def weights_of(name: str, **changes: object) -> dict[str, Any]:
    """Shapes and dtypes of what transformers and peft make of a config, on meta."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = small(name)
    with torch.device("meta"), drive.quiet():
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.bfloat16)
        if changes.get("method", "full") != "full":
            model = drive.with_adapters(model, tune(**changes))
    return dict(model.named_parameters())


# -- against the real allocator -----------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "method", "checkpointing"), [
    ("llama-3.2-1b", "full", False), ("qwen3-0.6b", "lora", True), ("gpt2", "full", True),
])  # fmt: skip
def test_a_traced_run_takes_what_the_real_one_does(name: str, method: str, checkpointing: bool) -> None:
    truth = proof.compare(small(name), tune(method=method, gradient_checkpointing=checkpointing))
    assert abs(truth.traced_bytes - truth.real_bytes) <= max(64, 0.001 * truth.real_bytes)


def test_quantized_weights_take_what_the_real_ones_do() -> None:
    pytest.importorskip("bitsandbytes")
    truth = proof.compare(small("qwen3-0.6b"), tune(method="qlora", gradient_checkpointing=True))
    assert abs(truth.traced_bytes - truth.real_bytes) <= max(64, 0.001 * truth.real_bytes)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("method", ["full", "lora", "dora", "qlora"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_and_method_takes_what_the_real_one_does(name: str, method: str, checkpointing: bool) -> None:
    if method == "qlora":
        pytest.importorskip("bitsandbytes")
    truth = proof.compare(small(name), tune(method=method, gradient_checkpointing=checkpointing, **KEPT))
    assert abs(truth.traced_bytes - truth.real_bytes) <= max(64, 0.001 * truth.real_bytes)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("changes", [
    {"method": "full"}, {"method": "lora"}, {"method": "lora", "lora_targets": "q_proj,k_proj,v_proj,o_proj"},
    {"method": "qlora", "amp": "bf16"}, {"method": "full", "dtype": "float32"},
])  # fmt: skip
@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_of_experts_takes_what_the_real_one_does(name: str, changes: Any, checkpointing: bool) -> None:
    """Routing is even in the trace's eyes and as the weights have it in the real run: the bytes are the same."""
    if changes["method"] == "qlora":
        pytest.importorskip("bitsandbytes")
    truth = proof.compare(small(name), tune(gradient_checkpointing=checkpointing, **changes))
    assert abs(truth.traced_bytes - truth.real_bytes) <= max(128, 0.001 * truth.real_bytes)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [
    {"grad_accum": 3}, {"optim": "adafactor"}, {"optim": "sgd"}, {"amp": "bf16"}, {"dtype": "float32", "amp": "bf16"},
    {"method": "lora", "gradient_checkpointing": True, "reentrant": True}, {"max_grad_norm": 0}, {"padded": True},
    {"attn": "eager"}, {"method": "lora", "lora_targets": "q_proj,v_proj", "lora_saved": "lm_head"},
    {**KEPT, "eval_accumulation_steps": 2, "eval_batches": 6}, {"method": "qlora", "double_quant": False},
    {"method": "lora", "lora_dropout": 0.1},
])  # fmt: skip
def test_every_option_takes_what_it_really_does(changes: dict[str, Any]) -> None:
    truth = proof.compare(small("llama-3.2-1b"), tune(**changes))
    assert abs(truth.traced_bytes - truth.real_bytes) <= max(64, 0.001 * truth.real_bytes)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_the_loop_of_trl_takes_what_it_really_does(method: str) -> None:
    pytest.importorskip("trl")
    pytest.importorskip("bitsandbytes")
    changes = {**KEPT, "loop": "trl", "method": method, "amp": "bf16", "gradient_checkpointing": True}
    truth = proof.compare(small("qwen3-0.6b"), tune(**changes))
    assert abs(truth.traced_bytes - truth.real_bytes) <= max(64, 0.001 * truth.real_bytes)


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["axolotl", "llama-factory"])
@pytest.mark.parametrize("name", ["qwen3-0.6b", "gpt2"])
def test_4_bits_in_the_loop_of_another_take_what_they_really_do(name: str, loop: str) -> None:
    pytest.importorskip("bitsandbytes")
    truth = proof.compare(small(name), tune(method="qlora", loop=loop, gradient_checkpointing=True))
    assert abs(truth.traced_bytes - truth.real_bytes) <= max(64, 0.001 * truth.real_bytes)


# -- on a card ----------------------------------------------------------------------------------------------


def test_phases_and_components_of_a_run() -> None:
    changes = {"method": "lora", "amp": "bf16", **KEPT}
    trace = traced(**changes)
    found = answered([trace], tune(**changes), GPU, None)
    assert [phase.phase for phase in found.memory.phases] == list(PHASES)
    shapes = weights_of("qwen3-0.6b", method="lora")
    frozen = sum(p.numel() * 2 for name, p in shapes.items() if "lora_" not in name)
    adapters = sum(p.numel() * 4 for name, p in shapes.items() if "lora_" in name)
    assert component(found, "steady_step", "weights") == frozen
    assert component(found, "steady_step", "adapters") == adapters
    assert component(found, "steady_step", "optimizer") >= 2 * adapters  # two moments in fp32, and step counts
    assert trace.facts["attention"] == ["flash"]
    for phase in found.memory.phases:
        assert sum(row.size_bytes for row in phase.components) == phase.allocated_bytes <= (phase.reserved_bytes or 0)


def test_logits_that_are_kept_grow_with_the_batches() -> None:
    few, more = (answer(**{**KEPT, "eval_batches": n}) for n in (8, 16))
    batch = 2 * 64 * 512 * 2  # rows, vocabulary, bf16
    # what is collected is joined anew with each batch: twice as many bytes for each
    assert component(more, "evaluate", "logits") - component(few, "evaluate", "logits") == 2 * 8 * batch


@pytest.mark.parametrize("method", ["full", "qlora"])
def test_a_batch_that_is_written_down_again_is_as_one_that_runs(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {**KEPT, "eval_batches": 5, "method": method, "amp": "bf16"}
    written = traced("llama-3.2-1b", **changes)
    monkeypatch.setattr(drive, "Batch", lambda *args: None)
    ran = traced("llama-3.2-1b", **changes)

    def evaluation(trace: Trace) -> list[int]:
        """Signed sizes of births and deaths, in blocks, until the checkpoint is saved."""
        sizes = [-(-nbytes // 512) for nbytes in trace.sizes]
        events = [event for phase, a, b in trace.spans() if phase == "evaluate" for event in trace.events[a:b]]
        return [sizes[event] if event >= 0 else -sizes[~event] for event in events]

    assert evaluation(written) == evaluation(ran)
    assert replay(written).phases == replay(ran).phases


def test_the_phase_that_runs_out_of_memory() -> None:
    free = answer(**KEPT)
    tight = answer(available_bytes=free.memory.context.low_bytes + free.memory.worst.allocated_bytes // 2, **KEPT)
    assert free.failure is None
    assert tight.memory.phase(tight.failure.phase).verdict == "does_not_fit"


def test_micro_batches_that_are_left_out_change_no_tensor() -> None:
    made = drive.trace(request(grad_accum=3).job())
    three, many = (request(grad_accum=n).whole(made) for n in (3, 12))
    assert len(many.events) > len(three.events)
    peaks = [{phase: peak for phase, (peak, _) in trace.peaks().items()} for trace in (three, many)]
    assert peaks[0] == peaks[1]


def test_quantized_weights_have_half_a_byte_and_their_scales() -> None:
    pytest.importorskip("bitsandbytes")
    found = answer(method="qlora", amp="bf16", gradient_checkpointing=True)
    shapes = weights_of("qwen3-0.6b")
    packed = [p.numel() for name, p in shapes.items() if "proj" in name]
    rest = sum(p.numel() * 4 for name, p in shapes.items() if "proj" not in name)  # fp32 by prepare_model_for_kbit
    blocks = [math.ceil(n / 64) for n in packed]
    scales = sum(b + 4 * math.ceil(b / 256) + 4 for b in blocks)  # a byte each, fp32 for 256 of them, one offset
    codes = len(packed) * 4 * (16 + 256)  # NF4's values and those of a scale's byte, a copy for each weight
    assert component(found, "steady_step", "weights") == sum(packed) // 2 + rest + scales + codes


def test_paged_states_are_no_memory_of_the_allocator() -> None:
    pytest.importorskip("bitsandbytes")
    big = {**small("llama-3.2-1b"), "vocab_size": 4096}
    asked = FineTuneRequest(source_of(big), tune(optim="paged_adamw_32bit"), GPU)
    found = answered([drive.trace(asked.job())], asked.tune, GPU, None)
    # bitsandbytes pages states from 100,000 elements on: here those of the embedding
    assert found.memory.paged_bytes == 2 * 4 * 4096 * 128
    assert "traced_paged" in [note.id for note in found.notes]
    assert component(found, "save", "optimizer") < found.memory.paged_bytes


@pytest.mark.slow
def test_the_loss_of_trl_is_made_in_tiles_on_a_card() -> None:
    """4,096 tokens of 32,768 words at most, in the dtype of the products, where the Trainer's logits are all in fp32."""
    pytest.importorskip("trl", minversion="1.13")
    config = {**small("llama-3.2-1b"), "vocab_size": 65536}
    asked = FineTuneRequest(source_of(config), tune(loop="trl", amp="bf16"), GPU)
    trace = drive.trace(asked.job())
    tokens = 2 * 63  # the last one of a sequence has no label
    tiles = {a.shape for a in trace.allocations if len(a.shape) == 2 and a.shape[0] == tokens and a.shape[1] > 256}
    assert tiles == {(tokens, 32768)}


@pytest.mark.slow
def test_bitsandbytes_can_be_imported_within_a_trace(tmp_path: Path) -> None:
    """Its kernels ask torch._C for a stream when they are imported where a card is."""
    pytest.importorskip("bitsandbytes")
    script = tmp_path / "own.py"
    script.write_text(
        "def main(on):\n"
        "    import bitsandbytes, torch\n"
        "    weight = torch.nn.Parameter(torch.empty(512, 256, device=on.device))\n"
        "    optimizer = bitsandbytes.optim.AdamW8bit([weight])\n"
        "    weight.sum().backward()\n"
        "    optimizer.step()\n"
    )
    found = elsewhere.trace(f"{script}:main", "RTX 4090")
    states = sum(a.nbytes for a in found.trace.allocations if a.category == "optimizer")
    assert states == 2 * (512 * 256 + 4 * 512) + 2 * 1024  # a byte each, fp32 for 256 of them, two codes


# -- requests -----------------------------------------------------------------------------------------------


def test_what_changes_no_trace_changes_no_key() -> None:
    key = request().key()
    same = ({"epochs": 7.0}, {"max_steps": 3}, {"lora_r": 32}, {"eval_batches": 5}, {"max_grad_norm": 0.5})
    assert {request(**changes).key() for changes in same} == {key}
    assert request(grad_accum=3).key() == request(grad_accum=64).key()
    others = ({"seq_len": 128}, {"method": "lora"}, {"optim": "sgd"}, {"evaluate": True}, {"max_grad_norm": 0})
    keys = [request(**changes).key() for changes in others]
    assert len({key, *keys, request("gpt2").key(), request(gpu="RTX 3060 12GB").key()}) == len(others) + 3


def test_other_versions_are_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    key = request().key()
    there = {**interpreter.now().versions(), "peft": "0.1"}
    monkeypatch.setattr(interpreter.Interpreter, "versions", lambda self: there)
    assert request().key() != key


@pytest.mark.parametrize(("lacks", "changes", "said"), [
    ("transformers", {}, "needs transformers (pip install 'foretrain[hf]')"),
    ("peft", {"method": "lora"}, "needs peft"),
    ("bitsandbytes", {"method": "qlora"}, "needs bitsandbytes (pip install 'foretrain[hf]' bitsandbytes)"),
    ("bitsandbytes", {"optim": "adamw_8bit"}, "needs bitsandbytes"),
    ("trl", {"loop": "trl"}, "needs trl"),
])  # fmt: skip
def test_a_missing_package_is_a_sentence(
    lacks: str, changes: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = dict.fromkeys(interpreter.FINE_TUNING, "5.0") | {lacks: ""}
    monkeypatch.setattr(interpreter.Interpreter, "versions", lambda self: there)
    with pytest.raises(TraceUnavailable) as error:
        service.traces([request(**changes)])
    assert said in str(error.value)


@pytest.mark.parametrize(("changes", "said"), [
    ({"loop": "unsloth"}, "unsloth"), ({"loop": "torchtune"}, "torchtune"), ({"optim": "muon"}, "muon"),
    ({"attn": "flash_attention_2"}, "flash-attn"),
])  # fmt: skip
def test_what_cannot_be_traced_is_refused_with_a_sentence(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(TraceUnavailable) as error:
        service.traces([request(**changes)])
    assert said in str(error.value)


def test_code_of_the_model_is_never_run() -> None:
    source = source_of({**small("gpt2"), "auto_map": {"AutoModelForCausalLM": "own.Model"}})
    with pytest.raises(TraceUnavailable, match="never run"):
        service.traces([FineTuneRequest(source, SMALL, GPU)])


@pytest.mark.slow
def test_an_answer_comes_from_a_worker_and_is_kept() -> None:
    heard: list[str] = []
    source = source_of(small("llama-3.2-1b"))
    first = exact_finetune(source, SMALL, GPU, GPU.memory_bytes, heard.append)
    assert exact_finetune(source, SMALL, GPU, GPU.memory_bytes, heard.append) == first
    assert FineTuneTrace.from_json(first.model_dump_json()) == first
    built_on = exact_finetune(source, tune(loop="axolotl"), GPU, GPU.memory_bytes, heard.append)
    assert built_on.memory == first.memory
    assert [note.id for note in built_on.notes] == [*(note.id for note in first.notes), "traced_loop"]


@pytest.mark.slow
def test_a_model_that_transformers_does_not_know_is_a_sentence() -> None:
    with pytest.raises(TraceUnavailable, match="knows no model_type 'nothing'"):
        exact_finetune(source_of({"model_type": "nothing"}), SMALL, GPU, None)


@pytest.mark.slow
def test_a_published_model_is_traced_at_its_size() -> None:
    """Weights in bf16 and two moments of each, as published; the head is tied to the embedding."""
    preset = models()["llama-3.2-1b"]
    found = exact_finetune(
        source_of(dict(preset.config)), tune(seq_len=512, batch_size=1, optim="adamw_torch_fused"), GPU, None
    )
    assert component(found, "steady_step", "weights") == 2 * preset.parameters
    assert component(found, "save", "optimizer") == pytest.approx(4 * preset.parameters, rel=1e-3)
