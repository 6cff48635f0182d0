"""The compiled estimate: the graph that is traced, what is kept of it, in what order it runs."""

import json
from collections import Counter
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._inductor.virtualized import V

from foretrain.config.families import family_of
from foretrain.config.options import RunConfig
from foretrain.config.resolve import from_values
from foretrain.hardware.catalogue import find
from foretrain.model.language_model import make_model
from foretrain.predict.abstract import autograd
from foretrain.predict.abstract import tensors as m
from foretrain.predict.abstract.passage import Recorder
from foretrain.predict.compiled import operations
from foretrain.predict.compiled.graph import REDUCTION, Compiler, Graph
from foretrain.predict.compiled.halves import joint
from foretrain.predict.compiled.partition import Network
from foretrain.predict.compiled.step import LOADER
from foretrain.predict.plan import plan
from tests.kit.command import foretrain

SIZES: dict[str, Any] = {"n_layer": 3, "n_head": 4, "n_embd": 64, "block_size": 32, "vocab_size": 96, "batch_size": 5}
LEAST = 256  # elements of what is compared: not what a row or a weight has one of


def kept_by_torch(config: RunConfig) -> Counter[tuple[str, int]]:
    found: list[Any] = []

    def partition(graph: Any, inputs: Any, **named: Any) -> Any:
        with V.set_fake_mode(inputs[0][0].fake_mode):
            joint_graph_passes(graph)  # Inductor's own, which drop views of views
        forward, backward = min_cut_rematerialization_partition(graph, inputs, **named)
        output = next(node for node in forward.graph.nodes if node.op == "output")
        found.extend(node for node in output.args[0][1:] if node.op != "placeholder")
        return forward, backward

    run = lambda graph, inputs: make_boxed_func(graph.forward)  # noqa: E731
    backend = aot_autograd(
        fw_compiler=run, bw_compiler=run, partition_fn=partition, decompositions=select_decomp_table()
    )
    torch._dynamo.reset()
    model = torch.compile(make_model(config), backend=backend, dynamic=False)
    idx = torch.zeros(config.batch_size, config.block_size, dtype=torch.int64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(idx, idx).backward()
    return Counter(
        (str(node.meta["val"].dtype).removeprefix("torch."), int(node.meta["val"].numel()))
        for node in found
        if isinstance(node.meta["val"], torch.Tensor) and node.meta["val"].is_floating_point()
        and node.meta["val"].numel() >= LEAST
    )  # fmt: skip


def kept_by_the_estimate(config: RunConfig) -> Counter[tuple[str, int]]:
    model = LOADER.model(*family_of(config).model, config)
    machine = Compiler(cuda=False, low=m.bfloat16, attention=lambda learns: "flash", functional=operations)
    machine.t = Recorder({"n": 0})
    with m.running(machine):
        idx, targets = (machine.input((config.batch_size, config.block_size), m.int64) for _ in range(2))
        for module in model.modules():
            for each, value in list(vars(module).items()):
                if type(value) is m.Tensor:
                    module.__dict__[each] = operations.traced(value)
        with machine.autocast():
            loss = model(idx, targets)
        output = loss.value
        autograd.backward([loss])
    halves = joint(machine, [output], whole=True)
    sizes = [(node.dtype.name, node.nbytes // node.dtype.itemsize) for node in halves.saved if node.inputs]
    return Counter((dtype, count) for dtype, count in sizes if count >= LEAST)


@pytest.mark.parametrize(
    "changes",
    [{}, {"bias": True}, {"n_layer": 1}, {"recipe": "modern"}, {"batch_size": 1}, {"activation_checkpointing": True}],
    ids=str,
)
def test_what_is_kept_is_what_pytorch_keeps(changes: dict[str, Any]) -> None:
    config = RunConfig(**{**SIZES, "bias": False, "dropout": 0.0, **changes})
    assert kept_by_the_estimate(config) == kept_by_torch(config)


def test_a_cut_is_the_one_nearest_to_the_sink() -> None:
    """Of two minimal cuts networkx.minimum_cut gives the one behind which least remains."""
    network = Network(4)
    for a, b, room in ((0, 1, 5), (1, 2, 5), (2, 3, 9)):
        network.join(a, b, room)
    assert network.behind_cut(0, 3) == {2, 3}


def test_equal_operations_are_one_node() -> None:
    machine = Compiler(cuda=True, low=None, attention=lambda learns: "flash", functional=operations)
    machine.t = Recorder({})
    with m.running(machine):
        x = machine.input((4, 8), m.float32)
        assert operations.mul(x, 2).value is operations.mul(x, 2).value  # type: ignore[attr-defined]
        assert operations.mul(x, 2).value is not operations.mul(x, 3).value  # type: ignore[attr-defined]
        total = operations.along(x, 0)
    assert isinstance(machine.graph, Graph)
    assert total.value.kind == REDUCTION  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"recipe": "nanochat", "activation_checkpointing": True}, True),
        ({"recipe": "nanochat", "dtype": "float32"}, True),
        ({"recipe": "modern", "activation_checkpointing": True}, True),
        ({"recipe": "nanochat"}, False),
        ({"recipe": "llama", "activation_checkpointing": True}, False),
    ],
    ids=str,
)
def test_a_plan_says_where_the_compiled_estimate_is_rough(knobs: dict[str, Any], said: bool) -> None:
    config = from_values({**SIZES, "device": "cuda", "dtype": "bfloat16", **knobs}).config
    for compiled in (True, False):
        made = plan(config.model_copy(update={"compile": compiled}), find("RTX 4070"))
        assert any(note.id == "compiled_roughly" for note in made.notes) == (said and compiled)


def test_long_fusion_is_in_memory_and_reused_by_logit_gradients() -> None:
    """A softcap in fp32 under the loss: beside the logits, backward has the gradient of the capped ones. In 16 bits the
    one that stays is fp32, of another size, so the logits themselves are written over."""

    def logits(**changes: Any) -> str:
        config = {"n_embd": 64, "block_size": 256, "vocab_size": 16000, "batch_size": 4, "n_layer": 2, **changes}
        knobs = [f"--{key}={value}" for key, value in config.items()]
        done = foretrain("plan", "--gpu=RTX 4070", "--n_head=4", "--compile=true", *knobs, "--json")
        (steady,) = (p for p in json.loads(done.stdout)["memory"][0]["phases"] if p["phase"] == "steady_step")
        (part,) = (part for part in steady["components"] if part["id"] == "logits")
        return str(part["formula"])

    assert logits(recipe="nanochat", dtype="float32") == "2 × 4·B·T·V"
    assert logits(recipe="nanochat", dtype="bfloat16") == "2·B·T·V"
    assert logits(recipe="modern", dtype="float32") == "4·B·T·V"


def test_a_plan_does_not_depend_on_what_was_planned_before() -> None:
    """In which order kernels run, and whose memory they use again, follows from bytes."""
    before = [
        "shakespeare-char",
        "--gpu",
        "RTX 3090 Ti",
        "--recipe=modern",
        "--activation_checkpointing=true",
        "--block_size=16384",
    ]
    asked = ["plan", "gpt2-30m", "--gpu", "RTX 4070 Ti", "--n_head=16", "--json"]
    foretrain("plan", *before)
    after, alone = foretrain(*asked), foretrain(*asked, apart=True)
    assert after.returncode == 0
    assert json.loads(after.stdout)["memory"] == json.loads(alone.stdout)["memory"]
