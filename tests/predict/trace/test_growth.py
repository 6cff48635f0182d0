"""A trace of few layers grows to that of all: the requests of each layer repeat, whatever frees them."""

from collections.abc import Callable

import pytest

from foretrain.predict.trace.growth import Cut, grown
from foretrain.predict.trace.record import Recorder, Trace

Nbytes = Callable[[int], int]


def traced(layers: int, nbytes: Nbytes = lambda layer: 4096) -> Trace:
    """A step: weights, a forward pass that keeps one tensor per layer, backward, and a norm of all gradients."""
    record, names = Recorder(), [f"model.layers.{layer}" for layer in range(layers)]
    record.phase("load")
    for name in names:
        record.tag(record.alloc(64, "empty", "", (16,), "float32"), "weights", f"{name}.weight")
    record.phase("step")
    starts = [len(record.events)]
    state, kept, gradients = record.alloc(32, "embedding", "model.embed", (8,), "float32"), [], []
    for layer, name in enumerate(names):
        kept.append(record.alloc(nbytes(layer), "mul", f"{name}.mlp", (nbytes(layer) // 4,), "float32"))
        before, state = state, record.alloc(32, "add", name, (8,), "float32")
        record.free(before)
    record.moment("backward")
    for name in reversed(names):
        gradients.append(record.alloc(64, "mm", name, (16,), "float32"))
        record.tag(gradients[-1], "gradients", f"{name}.weight")
        record.free(kept.pop())
    record.moment("optimizer")
    norms = [record.alloc(4, "norm", "", (), "float32") for _ in names]
    record.free(record.alloc(4 * layers, "stack", "", (layers,), "float32"))
    for id in (*norms, *gradients):
        record.free(id)
    found = record.finish()
    found.facts = {
        "micro_batches": starts, "counts": {"n_params": 100 + 16 * layers}, "matmul_dtypes": {"float32": layers},
        "paged_bytes": 0, "attention": ["flash"],
        "work": [["forward", "add", (8,), "float32", 0, 64, 32, layers], ["forward", "add", (layers,), "float32", 0, 4 * layers, 0, 1]],
    }  # fmt: skip
    return found


@pytest.mark.parametrize("group", [1, 2])
def test_trace_of_few_layers_grows_to_that_of_all(group: int) -> None:
    kinds = lambda layer: 4096 * (1 + layer % group)  # noqa: E731
    few, times = 3 * group, 5
    cut = Cut(("model.layers",), first=group, group=group, times=times)
    found = grown(traced(few, kinds), traced(few + group, kinds), cut)
    assert found.to_json() == traced(few + times * group, kinds).to_json()


def test_layers_that_are_not_alike_do_not_grow() -> None:
    cut = Cut(("model.layers",), first=1, group=1, times=4)
    taller = lambda layer: 4096 * (layer + 1)  # noqa: E731
    assert grown(traced(3, taller), traced(4, taller), cut) is None


def test_counts_that_do_not_grow_with_layers_are_refused() -> None:
    shorter, longer = traced(3), traced(4)
    longer.facts["work"] = [*longer.facts["work"], ["backward", "fill", (1,), "float32", 0, 4, 4, 1]]
    assert grown(shorter, longer, Cut(("model.layers",), first=1, group=1, times=4)) is None
