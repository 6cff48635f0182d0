"""The work of a fine-tuning step: its FLOPs against what PyTorch counts in transformers' and peft's own models."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from foretrain.config.finetune.options import FineTune
from foretrain.config.hub.source import facts_of, find_source
from foretrain.hardware.catalogue import find_gpu
from foretrain.predict.finetune.plan import FineTunePlan, plan
from foretrain.predict.finetune.time import LAUNCHES, StepWork, timing
from foretrain.predict.speed.ops import flops
from foretrain.predict.timing import PRICES
from tests.kit.finetune import MIXTURES, small

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
# peft asks for names that transformers 5.23 calls old.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*checkpointing. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning"),
]
BATCH, TOKENS = 2, 64


def counted(config: dict[str, Any], tune: FineTune) -> int:
    made = transformers.AutoConfig.for_model(**{**config, "use_cache": False, "attn_implementation": "eager"})
    made._experts_implementation = "eager"  # a loop over experts, whose matmuls the counter knows
    model = transformers.AutoModelForCausalLM.from_config(made)
    if tune.adapters:
        options = {"r": tune.lora_r, "target_modules": tune.lora_targets.split(",")}
        model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **options))
    if tune.gradient_checkpointing:
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": tune.reentrant})
    model.train()
    ids = torch.zeros((BATCH, TOKENS), dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    return counter.get_total_flops()


LORA = {"method": "lora", "lora_r": 8, "lora_targets": "q_proj,v_proj,down_proj"}
AGAIN = {"gradient_checkpointing": True}
WAYS: dict[str, dict[str, Any]] = {
    "full": {}, "full, checkpointing": AGAIN, "full, reentrant": {**AGAIN, "reentrant": True},
    "lora": LORA, "lora, checkpointing": {**LORA, **AGAIN}, "lora, reentrant": {**LORA, **AGAIN, "reentrant": True},
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *(("llama-3.2-1b", way) for way in WAYS),
        ("qwen3-0.6b", "full"),
        ("qwen3-0.6b", "lora, reentrant"),
        *((name, way) for name in MIXTURES for way in ("full, checkpointing", "lora, checkpointing")),
    ],
)
def test_flops_are_those_that_pytorch_counts(name: str, way: str) -> None:
    config = small(name)
    tune = FineTune.model_validate(
        {"dtype": "float32", "batch_size": BATCH, "seq_len": TOKENS, "attn": "eager", **WAYS[way]}
    )
    facts = facts_of(config)
    assert facts is not None
    assert flops(StepWork(facts, tune, find_gpu("RTX 4090")).micro) == counted(config, tune)


def test_experts_are_multiplied_in_one_kernel_or_in_turn() -> None:
    """The same work; an H100 has a grouped matmul in bfloat16, an RTX 4090 none."""
    facts = facts_of(small("qwen3-30b-a3b"))
    assert facts is not None
    tune = FineTune(batch_size=BATCH, seq_len=TOKENS, dtype="bfloat16", attn="eager")
    once, looped = (StepWork(facts, tune, find_gpu(gpu)).micro for gpu in ("H100 SXM5 80GB", "RTX 4090"))
    assert flops(once) == flops(looped)
    runs = [sum(op.runs for op in each if op.kind.startswith("matmul")) for each in (once, looped)]
    passes, matrices = 3, 2  # forward and each of two gradients, of gate with up and of down
    assert runs[1] - runs[0] == facts.n_layer * passes * matrices * (facts.n_expert - 1)


class Kernels(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not (func.is_view or "record_function" in str(func) or "_to_copy" in str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("optim", ["adafactor", "muon"])
def test_optimizer_of_single_weights_launches_as_many_kernels(optim: str) -> None:
    weight = torch.nn.Parameter(torch.randn(16, 8))
    if optim == "muon":
        optimizer: Any = torch.optim.Muon([weight], lr=1e-3)
    else:
        kwargs = {"scale_parameter": False, "relative_step": False, "lr": 1e-3}
        optimizer = transformers.optimization.Adafactor([weight], **kwargs)
    for _ in range(2):
        weight.grad = torch.randn(16, 8)
        with Kernels() as kernels:
            optimizer.step()
    assert kernels.count == LAUNCHES[optim]  # type: ignore[index]


def work(gpu: str, **options: Any) -> StepWork:
    facts = facts_of(small("llama-3.2-1b"))
    assert facts is not None
    tune = FineTune.model_validate({"batch_size": 2, "seq_len": 64, "dtype": "float16", **options})
    return StepWork(facts, tune, find_gpu(gpu))


def test_half_precision_is_that_of_the_run() -> None:
    """A T4 has fast matmuls in fp16 and none in bf16. Attention that is written out there runs in fp32."""
    for options in ({}, {"dtype": "float32", "amp": "fp16"}):
        products = [op for op in work("T4", **options).micro if op.flops and op.name != "attention"]
        assert {op.dtype for op in products} == {"float16"}
    assert {op.dtype for op in work("RTX 4090", amp="bf16").micro if op.flops} == {"bfloat16"}


def test_compiled_step_has_fewer_kernels_and_bytes() -> None:
    eager, compiled = (work("RTX 4090", compile=on, dtype="bfloat16").micro for on in (False, True))
    assert flops(compiled) == flops(eager)
    assert sum(op.runs for op in compiled) < 0.7 * sum(op.runs for op in eager)
    assert sum(op.runs * op.nbytes for op in compiled) < 0.8 * sum(op.runs * op.nbytes for op in eager)


def test_energy_and_money_follow_the_prices_that_are_given() -> None:
    facts = facts_of(small("llama-3.2-1b"))
    assert facts is not None
    tune = FineTune.model_validate({"dtype": "bfloat16", "batch_size": 2, "seq_len": 64, "max_steps": 1000})
    rented = PRICES.model_copy(update={"price_per_hour": 2.0, "co2_per_kwh": 400.0})
    bought, hired = (timing(StepWork(facts, tune, find_gpu("RTX 4090")), prices) for prices in (PRICES, rented))
    assert hired.rent_expected == pytest.approx(2.0 * bought.total_s.expected_s / 3600)
    assert (hired.cost_expected, bought.rent_expected, bought.co2_expected_g) == (None, None, None)
    assert bought.cost_expected == pytest.approx(PRICES.price_per_kwh * bought.energy_expected_j / 3.6e6)
    assert hired.co2_expected_g == pytest.approx(400.0 * bought.energy_expected_j / 3.6e6)


def test_tensors_without_elements_are_no_kernels() -> None:
    """What Phi-3 leaves unrotated, where that is nothing: autocast would cast it."""
    facts = facts_of(small("phi-3.5-mini"))
    assert facts is not None
    tune = FineTune.model_validate({"batch_size": 2, "seq_len": 64, "dtype": "float32", "amp": "bf16"})
    assert timing(StepWork(facts, tune, find_gpu("RTX 4090")), PRICES) is not None


def planned(tune: FineTune, card: str = "RTX 4070") -> FineTunePlan:
    return plan(find_source("qwen3-0.6b"), tune, find_gpu(card))


def test_rows_of_a_usual_length_change_the_time_and_no_memory() -> None:
    whole, usual, short = (
        planned(FineTune(method="qlora", max_steps=60, seq_len=length, row_tokens=row_tokens))
        for length, row_tokens in ((1024, 0), (1024, 256), (256, 0))
    )
    assert usual.memory == whole.memory
    assert usual.timing == short.timing
    noted = [any(note.id == "finetune_rows" for note in made.notes) for made in (whole, usual)]
    assert noted == [True, False]


def test_unsloth_computes_in_what_the_card_has() -> None:
    asked = FineTune(method="qlora", loop="unsloth", amp="bf16")
    assert [planned(asked, card).tune.amp for card in ("T4", "L4")] == ["fp16", "bf16"]
