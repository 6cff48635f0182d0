"""NCCL's time for a collective: latency of its steps, and bytes over the bandwidth that the link reaches.

NCCL takes the fastest algorithm by a model (NVIDIA/nccl src/graph/tuning.cc, ncclTopoTuneModel and
ncclTopoGetAlgoTime). This is that model with its latencies, bandwidths from hardware/links.toml and one term more: the
pipeline has to fill (`_filled`), chosen for the rows `fitted` of benchmarks/published_nccl_tests.csv and tested on the
others by benchmarks/collectives_measured.py.

Left out: waits for other ranks and kernels, sums in switches (SHARP), and NCCL's table that slows trees.
"""

import math
from typing import Literal, NamedTuple

from foretrain.base.records import Record
from foretrain.hardware.links import Link

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast"]
Algorithm = Literal["ring", "tree", "nvls", "nvls_tree", "none"]
Protocol = Literal["LL", "LL128", "Simple"]

PROTOCOLS: tuple[Protocol, ...] = ("LL", "LL128", "Simple")
# Microseconds of LL, LL128 and Simple: before the first step, and of each step (tuning.cc baseLat and hwLat, as torch
# 2.13 has them; of nvls and nvls_tree in tuning.cc at commit b647562).
BASE_US = {"ring": (6.6, 14.0, 8.4), "tree": (6.8, 14.0, 8.4)}
HOP_US = {
    ("nvlink", "ring"): (0.6, 1.9, 3.4),
    ("nvlink", "tree"): (0.6, 1.25, 4.0),
    ("pcie", "ring"): (1.0, 2.5, 5.7),
    ("pcie", "tree"): (1.0, 1.9, 4.0),
    ("network", "ring"): (2.7, 4.0, 14.0),
    ("network", "tree"): (5.0, 8.5, 14.0),
}
SWITCH_US, SWITCH_NETWORK_US = 23.0, 14.0
POST_US = (1.0, 1.0, 3.0)  # a step inside a node is not shorter than handing a message to the network (NetOverhead)
# Share of the bandwidth: LL sends a flag of 4 bytes with each 4 of data, LL128 one of 8 with 120.
RING_SHARE = (1 / 2, 120 / 128, 1.0)
TREE_SHARE = (0.92 / 3.8, 0.92 * 7 / 9, 0.92)
LL_BETWEEN_NODES = 1 / 4  # of what LL reaches in one node: 22.5 of 87.7 GB/s (tuning.cc llMaxBws, Ampere)
LEAST_SWITCH_RANKS = 3  # two cards gain nothing from a sum in the switch


class Group(Record):
    """Communicating ranks, a card each. `network`: one NIC, of `nics_per_node`; `worst`: the worst published link."""

    ranks_per_node: int
    link: Link
    nodes: int = 1
    network: Link | None = None
    nics_per_node: int = 1
    worst: bool = False

    @property
    def ranks(self) -> int:
        return self.ranks_per_node * self.nodes

    @property
    def inside_bytes_per_s(self) -> float:
        if self.ranks_per_node == 1:
            return math.inf
        return self.link.least_bytes_per_s if self.worst else self.link.bytes_per_s

    @property
    def network_bytes_per_s(self) -> float:
        """Return a node's NICs' bytes/s in a direction; unlimited in one node. Raises ValueError without a network."""
        if self.nodes == 1:
            return math.inf
        if self.network is None:
            raise ValueError(f"{self.nodes} nodes need a network")
        return self.network.bytes_per_s * self.nics_per_node


class CollectiveTime(Record):
    """Seconds of one collective, its bus bandwidth in bytes per second (as nccl-tests counts it), and its algorithm."""

    seconds: float
    bus_bytes_per_s: float
    algorithm: Algorithm
    protocol: Protocol


class _Algorithm(NamedTuple):
    seconds: float
    algorithm: Algorithm
    protocol: Protocol


def bus_factor(collective: Collective, ranks: int) -> float:
    """Return bus bandwidth over size / time (nccl-tests doc/PERFORMANCE.md): all-reduce 2 (n - 1) / n, broadcast 1,
    others (n - 1) / n."""
    if collective == "broadcast":
        return 1.0 if ranks > 1 else 0.0
    return (2 if collective == "all_reduce" else 1) * (ranks - 1) / ranks


def collective_time(collective: Collective, size_bytes: float, group: Group) -> CollectiveTime:
    """Return NCCL's fastest algorithm for `size_bytes`: an all-gather's output, a reduce-scatter's input. Raises
    ValueError for several nodes without a network."""
    if group.ranks <= 1:
        return CollectiveTime(seconds=0, bus_bytes_per_s=0, algorithm="none", protocol="Simple")
    ways = [_ring(collective, size_bytes, group, i) for i in _protocols(group)]
    if collective == "all_reduce":
        ways += [_tree(size_bytes, group, i) for i in _protocols(group)]
        if group.link.switch_share and group.ranks_per_node >= LEAST_SWITCH_RANKS:
            ways.append(_switch(size_bytes, group))
    best = min(ways)
    rate = size_bytes * bus_factor(collective, group.ranks) / best.seconds
    return CollectiveTime(seconds=best.seconds, bus_bytes_per_s=rate, algorithm=best.algorithm, protocol=best.protocol)


def _protocols(group: Group) -> tuple[int, ...]:
    """Return which of PROTOCOLS NCCL takes: LL128 needs NVLink, whose stores of 128 bytes arrive whole."""
    return (0, 1, 2) if group.link.kind == "nvlink" else (0, 2)


def _capped(rate: float, group: Group, protocol: int) -> float:
    if PROTOCOLS[protocol] != "LL" or group.link.ll_gb_per_s is None:
        return rate
    return min(rate, group.link.ll_gb_per_s * 1e9 * (LL_BETWEEN_NODES if group.nodes > 1 else 1))


def _filled(latency_us: float, carried_s: float, step_us: float) -> float:
    """Return latency + T + 2 root(a T), T the bytes at full rate, a the longest step's latency. k pieces over p stages
    take (k + p - 1) (a + T / k); this is with the best k, and a for (p - 1) a."""
    return latency_us * 1e-6 + carried_s + 2 * math.sqrt(step_us * 1e-6 * carried_s)


def _ring(collective: Collective, size_bytes: float, group: Group, protocol: int) -> _Algorithm:
    """Steps x latency + bus_factor x size / bandwidth. All-reduce has 2 (n - 1) steps, others n - 1, by node across."""
    rounds = 2 if collective == "all_reduce" else 1
    crossing = rounds * (group.nodes - 1)
    inside = rounds * (group.ranks - 1) - crossing
    step = HOP_US[group.link.kind, "ring"][protocol]
    if group.nodes > 1:
        step = max(step, POST_US[protocol])
    outside = HOP_US["network", "ring"][protocol]
    us = BASE_US["ring"][protocol] + inside * step + crossing * outside
    rate = min(group.inside_bytes_per_s, group.network_bytes_per_s) * RING_SHARE[protocol]
    carried = bus_factor(collective, group.ranks) * size_bytes / _capped(rate, group, protocol)
    return _Algorithm(_filled(us, carried, outside if crossing else step), "ring", PROTOCOLS[protocol])


def _tree(size_bytes: float, group: Group, protocol: int) -> _Algorithm:
    """Up and down a chain in the node and a tree between nodes: each link carries the size twice; between two nodes
    each half goes up one tree and down the other, so the network carries it once."""
    levels = math.floor(math.log2(group.nodes))
    step, outside = HOP_US[group.link.kind, "tree"][protocol], HOP_US["network", "tree"][protocol]
    us = BASE_US["tree"][protocol] + 2 * ((group.ranks_per_node - 1) * step + levels * outside)
    inside, network = group.inside_bytes_per_s, group.network_bytes_per_s
    rate = inside if group.nodes <= 2 else min(inside, network)
    longest = 2 * size_bytes / _capped(rate * TREE_SHARE[protocol], group, protocol)
    if group.nodes == 2:
        longest = max(longest, size_bytes / (network * RING_SHARE[protocol]))
    return _Algorithm(_filled(us, longest, outside if levels else step), "tree", PROTOCOLS[protocol])


def _switch(size_bytes: float, group: Group) -> _Algorithm:
    rate = (group.link.switch_bytes_per_s or 0) * (group.inside_bytes_per_s / group.link.bytes_per_s)
    inside = bus_factor("all_reduce", group.ranks) * size_bytes / rate
    if group.nodes == 1:
        return _Algorithm(_filled(SWITCH_US, inside, SWITCH_US / 2), "nvls", "Simple")
    us = SWITCH_US + 2 * math.floor(math.log2(group.nodes)) * SWITCH_NETWORK_US
    between = (1 if group.nodes == 2 else 2) * size_bytes / group.network_bytes_per_s
    return _Algorithm(_filled(us, max(inside, between), SWITCH_NETWORK_US), "nvls_tree", "Simple")
