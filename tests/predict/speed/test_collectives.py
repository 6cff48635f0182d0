"""Times of collectives: closed forms, and what others measured with nccl-tests."""

import sys
from itertools import pairwise
from typing import Any, get_args

import collectives_measured
import pytest

from foretrain.hardware.links import links
from foretrain.predict.speed.collectives import Collective, Group, bus_factor, collective_time
from foretrain.predict.speed.ranks import Unit, shared_passes_s
from tests.kit.command import REPO

sys.path.insert(0, str(REPO / "benchmarks"))


def group(link: str = "a100-sxm4", ranks: int = 8, nodes: int = 1, **more: Any) -> Group:
    network = links()["ib-200"] if nodes > 1 else None
    return Group(ranks_per_node=ranks, link=links()[link], nodes=nodes, network=network, **more)


def test_the_bus_factors_are_those_of_nccl_tests() -> None:
    assert bus_factor("all_reduce", 8) == 2 * 7 / 8
    assert bus_factor("all_gather", 4) == bus_factor("reduce_scatter", 4) == 3 / 4
    assert bus_factor("broadcast", 5) == 1


@pytest.mark.parametrize(("link", "ranks"), [("pcie4x16", 2), ("pcie3x8", 4), ("a100-sxm4", 8)])
def test_a_huge_all_reduce_takes_the_ring_formula(link: str, ranks: int) -> None:
    size = 1e15
    closed_form = 2 * (ranks - 1) / ranks * size / links()[link].bytes_per_s
    time = collective_time("all_reduce", size, group(link, ranks))
    assert time.algorithm == "ring"
    assert time.protocol == "Simple"
    assert time.seconds == pytest.approx(closed_form, rel=1e-3)
    assert time.bus_bytes_per_s == pytest.approx(links()[link].bytes_per_s, rel=1e-3)


def test_one_byte_takes_nccls_latency_of_ring_and_ll() -> None:
    # tuning.cc: 6.6 us and 2 (n - 1) steps of 1.0 us over PCIe, 0.6 us over NVLink
    assert collective_time("all_reduce", 1, group("pcie4x16", 4)).seconds == pytest.approx((6.6 + 6) * 1e-6, rel=0.01)
    assert collective_time("all_gather", 1, group(ranks=8)).seconds == pytest.approx((6.6 + 7 * 0.6) * 1e-6, rel=0.01)


@pytest.mark.parametrize("link", ["pcie4x16", "geforce-bridge", "a100-sxm4", "h100-sxm5", "b200-sxm"])
@pytest.mark.parametrize("collective", get_args(Collective))
def test_more_bytes_and_more_ranks_never_take_less_time(collective: Collective, link: str) -> None:
    sizes = [2**i for i in range(0, 36, 2)]
    for ranks in range(1, 9):
        times = [collective_time(collective, size, group(link, ranks)).seconds for size in sizes]
        assert all(a <= b for a, b in pairwise(times))
    for size in sizes:
        times = [collective_time(collective, size, group(link, ranks)).seconds for ranks in range(1, 9)]
        assert all(a <= b for a, b in pairwise(times)), (size, times)


def test_one_card_takes_no_time() -> None:
    assert collective_time("all_reduce", 1e9, group(ranks=1)).seconds == 0


def test_large_message_avoids_the_protocol_of_small_ones() -> None:
    small, large = (collective_time("all_reduce", size, group()).protocol for size in (1024, 4 << 30))
    assert (small, large) == ("LL", "Simple")
    ways = {collective_time("all_reduce", 2**i, group("pcie4x16", 2)).protocol for i in range(36)}
    assert ways == {"LL", "Simple"}  # LL128 needs NVLink


def test_the_switch_sums_an_all_reduce_only() -> None:
    h100 = group("h100-sxm5")
    assert collective_time("all_reduce", 1 << 30, h100).algorithm == "nvls"
    assert collective_time("all_gather", 1 << 30, h100).algorithm == "ring"
    without = collective_time("all_reduce", 1 << 30, group("h100-sxm5-ring"))
    assert without.seconds > collective_time("all_reduce", 1 << 30, h100).seconds


def test_nics_bound_what_several_nodes_reach() -> None:
    size = 64 << 30
    one = collective_time("all_gather", size, group(nodes=2, nics_per_node=1))
    eight = collective_time("all_gather", size, group(nodes=2, nics_per_node=8))
    assert one.bus_bytes_per_s == pytest.approx(25e9 * 0.96, rel=0.02)
    assert one.seconds == pytest.approx(8 * eight.seconds, rel=0.02)
    with pytest.raises(ValueError, match="need a network"):
        collective_time("all_reduce", 1, Group(ranks_per_node=1, nodes=2, link=links()["pcie4x16"]))


def test_the_worst_machine_is_slower_where_one_is_known() -> None:
    usual = collective_time("all_reduce", 1 << 30, group("pcie4x16", 2)).seconds
    worst = collective_time("all_reduce", 1 << 30, group("pcie4x16", 2, worst=True)).seconds
    assert worst > 2 * usual


def test_the_record_is_whole() -> None:
    rows = collectives_measured.cases()
    assert len({row["id"] for row in rows}) == len(rows) >= 100
    assert {row["half"] for row in rows} == {"fitted", "held out"}
    for row in rows:
        assert row["source"]
        assert row["link"] in links()
        if row["time_us"]:  # the bus bandwidth that nccl-tests printed is size / time x its factor
            ranks = int(row["ranks_per_node"]) * int(row["nodes"])
            rate = int(row["size_bytes"]) / float(row["time_us"]) / 1e3 * bus_factor(row["collective"], ranks)
            assert rate == pytest.approx(float(row["busbw_gb_per_s"]), rel=0.02, abs=0.01), row["id"]


def test_no_run_is_in_both_halves() -> None:
    rows = collectives_measured.cases()
    halves = {
        half: {row["id"].rpartition("-")[0] for row in rows if row["half"] == half} for half in ("fitted", "held out")
    }
    assert not halves["fitted"] & halves["held out"]


def test_held_out_runs_are_met_to_a_known_degree() -> None:
    totals = collectives_measured.summary([collectives_measured.compare(case) for case in collectives_measured.cases()])
    assert totals["held out"]["rows"] >= 60
    assert totals["held out, NVLink in one machine"]["median_abs_error"] < 0.08
    assert totals["held out, PCIe in one machine"]["median_abs_error"] < 0.25
    assert totals["held out, several machines"]["median_abs_error"] < 0.25
    assert totals["held out, from 64 MB"]["median_abs_error"] < 0.15


def seconds(what: str, size_bytes: float) -> float:
    return size_bytes


@pytest.mark.parametrize(
    ("outer_sent", "expected"),
    [
        (0.0, 1 + 1 + 10 + 10 + 1),  # outer and block are gathered, both passes, the block's gradients are sent
        (3.0, 1 + 1 + 10 + 10 + 1 + 3),  # then those of what is around it, in one queue
    ],
)
def test_gradients_are_sent_behind_the_last_pass(outer_sent: float, expected: float) -> None:
    outer = Unit(1.0, outer_sent, 0.0, 0.0, reshards=False, outer=True)
    block = Unit(1.0, 1.0, 10.0, 10.0, reshards=False)
    assert shared_passes_s([block, outer], seconds) == expected
