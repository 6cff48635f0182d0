"""One rank of many: traced on fake tensors, and the same on real ones, both in a process group that talks to nobody."""

import pytest

from foretrain.config.options import RunConfig
from foretrain.config.sharing import STRATEGIES, Sharing
from foretrain.model.parallel import Share
from foretrain.predict.trace import ranks, self_test
from foretrain.predict.trace.record import Trace

SMALL = RunConfig(n_layer=2, n_head=2, n_embd=64, block_size=32, vocab_size=256, batch_size=2)
MESH_BYTES = 4  # a rank in a mesh's tensor, which is on the host where there is a card


def traced(config: RunConfig, share: Share) -> Trace:
    return self_test.traced_on_cpu(config, "float32", "foretrain", compiled=False, share=share)


def compared(config: RunConfig, sharing: Sharing, rank: int = 0, *, compiled: bool = False) -> tuple[int, int]:
    with ranks.group(sharing, rank) as share:
        truth = self_test.compare(config, "float32", "foretrain", compiled=compiled, share=share)
    return truth.traced_bytes, truth.real_bytes


def sharing_of(strategy, world: int, **options) -> Sharing:
    per_node = max(1, world // 2) if strategy == "hsdp" and world % 2 == 0 else world
    return Sharing(strategy, world, per_node, **options)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_traced_rank_takes_what_the_real_tensors_take(strategy):
    world = 4 if strategy == "hsdp" else 3  # by which no weight here can be divided evenly
    found, real = compared(SMALL, sharing_of(strategy, world))
    assert abs(found - real) <= MESH_BYTES * world


@pytest.mark.parametrize("rank", [0, 2])
def test_ranks_with_uneven_shares(rank):
    """The last of three ranks has less of each weight than the first."""
    config = SMALL.model_copy(update={"n_embd": 80, "gradient_accumulation_steps": 3})
    found, real = compared(config, sharing_of("fsdp", 3, syncs_each=False), rank)
    assert abs(found - real) <= MESH_BYTES * 3


def test_each_way_holds_what_it_says():
    """Against the closed forms of the ZeRO paper (section 3, figure 1): 4 bytes a weight, 4 a gradient, 8 of Adam's."""
    params, world = 256 * 64, 8  # what the bytes of a weight matrix are shared into
    sizes = {}
    for strategy in STRATEGIES:
        with ranks.group(sharing_of(strategy, world)) as share:
            trace = traced(SMALL, share)
        alive = trace.alive_at(next(m.position for m in reversed(trace.phases) if m.name == "steady_step") - 1)
        sizes[strategy] = {
            kind: sum(a.nbytes for a in alive if a.category == kind) for kind in ("weights", "optimizer")
        }  # fmt: skip
    whole = sizes["ddp"]
    assert whole["weights"] >= 4 * params
    assert 7.9 < whole["optimizer"] / (whole["weights"] / 4) < 8.1
    assert sizes["zero1"]["weights"] == whole["weights"]
    assert sizes["zero1"]["optimizer"] < 0.35 * whole["optimizer"]  # whole parameters are dealt, the largest first
    for strategy in ("fsdp", "fsdp_no_reshard"):
        assert sizes[strategy]["optimizer"] == pytest.approx(whole["optimizer"] / world, rel=0.01)
    assert sizes["hsdp"]["optimizer"] == pytest.approx(whole["optimizer"] / 4, rel=0.01)


WORLDS = (1, 2, 3, 8)
FAMILIES = {"gpt2": {}, "llama": {"recipe": "llama"}}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("strategy", [*STRATEGIES, "ddp without views", "fsdp held back"])
def test_every_way_family_and_world(strategy, world, family):
    name, _, other = strategy.partition(" ")
    options = {"without views": {"bucket_view": False}, "held back": {"syncs_each": False}}.get(other, {})
    config = SMALL.model_copy(
        update={"gradient_accumulation_steps": 3, "n_layer": 4, "n_embd": 128, **FAMILIES[family]}
    )
    found, real = compared(config, sharing_of(name, world, **options))
    assert abs(found - real) <= MESH_BYTES * world


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # Dynamo asks
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("world", [1, 2, 8])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_blocks_that_are_compiled(strategy, world, family):
    config = SMALL.model_copy(update={"compile_blocks": True, **FAMILIES[family]})
    found, real = compared(config, sharing_of(strategy, world), compiled=True)
    assert abs(found - real) <= MESH_BYTES * world


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_thousand_ranks(strategy):
    """What a rank keeps of the optimizer falls with their number, and a trace of them is as quick."""
    with ranks.group(Sharing(strategy, 1024, 8)) as share:
        trace = traced(SMALL, share)
    assert max(peak for peak, _ in trace.peaks().values()) > 0
