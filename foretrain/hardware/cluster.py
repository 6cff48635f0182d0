"""Several cards that train one model, and their links: "2 x RTX 4090", "2 nodes x 8 x A100", or a count alone."""

import difflib
import re
from collections.abc import Callable
from typing import NamedTuple

from foretrain.base.errors import UserError
from foretrain.base.records import Record
from foretrain.hardware.catalogue import Gpu, find
from foretrain.hardware.links import NVLINK, Link, find_link, link_of, links, network_of, nvlink_of

MOST_RANKS = 16_384
A_MACHINE = 8  # cards of one machine, by default
BRIDGED = 2  # cards that an NVLink bridge joins
EXAMPLE = '"2 x RTX 4090"'

_TIMES = r"\s*[x×*]\s*"
_NODES = re.compile(rf"(?P<nodes>\d+)\s*(?:nodes?|machines?)(?:{_TIMES}|\s+of\s+|\s+)(?P<rest>.+)", re.IGNORECASE)
# Not '7900 XTX' or '6800xt', cards of AMD, nor '3090 x 2'.
_COUNTED = re.compile(rf"(?!\d+\s*xtx?\b)(?P<count>\d+){_TIMES}(?!\s*\d{{1,3}}$)(?P<name>.*\S)", re.IGNORECASE)
_BEHIND = re.compile(r"(?P<name>.*(?:[a-z]|\d{4}).*?)(?:\s+x|\s*[×*])\s*(?P<count>\d+)", re.IGNORECASE)
_PARTS = re.compile(r"\s*(?:\+|,|&| and )\s*")


class Cluster(Record):
    """Cards of one kind. `link` connects those of a node, `network` the nodes; None where there is one. `assumed`: ids
    of what is neither stated nor in links.toml. `choices`: the cards of the name `meant`."""

    gpu: Gpu
    nodes: int
    per_node: int
    link: Link
    network: Link | None = None
    nics_per_node: int = 1
    assumed: tuple[str, ...] = ()
    meant: str = ""
    choices: tuple[str, ...] = ()

    @property
    def world(self) -> int:
        return self.nodes * self.per_node

    @property
    def text(self) -> str:
        cards = f"{self.per_node} x {self.gpu.name}"
        return cards if self.nodes == 1 else f"{self.nodes} nodes x {cards}"

    @property
    def nvlink_to_add(self) -> Link | None:
        found = nvlink_of(self.gpu.name)
        if found is None or found == self.link or self.per_node == 1:
            return None
        return None if found.joins and self.per_node > BRIDGED else found

    def but(self, link: Link) -> "Cluster":
        return self.model_copy(update={"link": link})


class Count(NamedTuple):
    """A text's content, before a card is looked for. `nodes` is 0 and `name` empty where absent."""

    nodes: int
    per_node: int
    name: str


def parse(text: str) -> Count:
    """Parse how many cards of which name. Raises UserError 'usage.gpus', 'usage.mixed_cards' and others."""
    whole = " ".join(text.split())
    nodes, rest = 0, whole
    if found := _NODES.fullmatch(whole):
        nodes, rest = int(found["nodes"]), found["rest"]
    counts = [_counted(part, text) for part in _PARTS.split(rest)]
    names = list(dict.fromkeys(name for _, name in counts))
    if len(names) > 1:
        raise _mixed(names, text)
    count, name = sum(number for number, _ in counts), names[0]
    if not count or (found and not nodes):
        example = f'"2 x {name[:60]}"' if _is_card(name) else EXAMPLE
        raise UserError("usage.gpus", value=text[:80], example=example)
    world = count * max(1, nodes)
    if world > MOST_RANKS:
        raise UserError("usage.too_many_ranks", value=text[:80], most=MOST_RANKS)
    if world == 1:
        raise UserError("usage.one_card_cluster", value=text[:80])
    return Count(nodes, count, name)


def _counted(part: str, text: str) -> tuple[int, str]:
    """Return (count, name) of '2 x RTX 4090', 'RTX 4090 x 2' and '2'; a card without a count is one, or none."""
    if part.isascii() and part.isdigit() and len(part) < 4:  # '4090' is a card
        return int(part), ""
    for pattern in (_COUNTED, _BEHIND):
        if (found := pattern.fullmatch(part)) and len(found["count"]) <= 9:
            return int(found["count"]), found["name"]
    if not part:
        raise UserError("usage.gpus", value=text[:80], example=EXAMPLE)
    return (1 if _PARTS.search(" ".join(text.split())) else 0), part


def is_counted(text: str) -> bool:
    whole = " ".join(text.split())
    return any(pattern.fullmatch(whole) for pattern in (_NODES, _COUNTED, _BEHIND))


def _is_card(name: str) -> bool:
    try:
        find(name)
    except UserError as error:
        return error.id == "gpu.ambiguous"
    return True


def _mixed(names: list[str], text: str) -> UserError:
    cards = [find(name) for name in names]
    kinds = {gpu.name: gpu for gpu in cards}
    if len(kinds) == 1:
        return UserError("usage.gpus", value=text[:80], example=f'"{len(names)} x {cards[0].name}"')
    least = min(kinds.values(), key=lambda gpu: gpu.memory_bytes or 0)
    slowest = min(kinds.values(), key=lambda gpu: gpu.peak_flop_per_s("float16") or 0)
    return UserError(
        "usage.mixed_cards", cards=list(kinds), slowest=slowest.name, least=least.name, memory=least.memory_bytes or 0,
        count=len(names), named=",".join(name.removeprefix("RTX ") for name in kinds),
    )  # fmt: skip


def cluster(text: str, link: str = "", network: str = "", here: Callable[[], Gpu] | None = None) -> Cluster:
    """Return a text's cards, with links by name or usual. `here`: the card of a count alone. Raises UserError."""
    asked = parse(text)
    if asked.name:
        gpu = find(asked.name)
    elif here is not None:
        gpu = here()
    else:
        raise UserError("usage.gpus", value=text[:80], example=EXAMPLE)
    if gpu.kind != "cuda":
        raise UserError("usage.cluster_of_cuda", gpu=gpu.name)
    nodes, per_node, assumed = max(1, asked.nodes), asked.per_node, []
    if not asked.nodes and per_node > A_MACHINE and per_node % A_MACHINE == 0:
        nodes, per_node = per_node // A_MACHINE, A_MACHINE
        assumed.append("nodes")
    usual = link_of(gpu.name)
    inside = _link(link, gpu, per_node) if link else usual.link
    assumed += ["link"] if usual.assumed and not link else []
    between, nics, known = _network(network, gpu, nodes)
    assumed += [] if known else ["network"]
    assumed += ["card"] if gpu.choices else []
    return Cluster(
        gpu=gpu, nodes=nodes, per_node=per_node, link=inside, network=between, nics_per_node=min(nics, per_node),
        assumed=tuple(assumed), meant=asked.name if gpu.choices else "", choices=gpu.choices,
    )  # fmt: skip


def cluster_of(gpu: Gpu, world: int, per_node: int = 0, link: str = "", network: str = "") -> Cluster | None:
    """Return so many cards of one kind, `per_node` in a machine; 0: the usual number. None of one alone. Raises
    UserError."""
    if world == 1:
        return None
    per_node = per_node or (A_MACHINE if world > A_MACHINE and not world % A_MACHINE else world)
    if world % per_node:
        raise UserError("usage.finetune_without.per_node", world=world, per_node=per_node)
    nodes = world // per_node
    return cluster(f"{nodes} nodes x {per_node}" if nodes > 1 else str(per_node), link, network, here=lambda: gpu)


def _link(name: str, gpu: Gpu, per_node: int) -> Link:
    usual = link_of(gpu.name).link
    if name.strip().lower() == NVLINK:
        found = nvlink_of(gpu.name)
        if found is None:
            raise UserError("gpu.no_nvlink", gpu=gpu.name, usual=usual.name)
    else:
        found = _named_link(name, "--link", network=False)
    if found.joins and gpu.name not in found.joins:
        raise UserError("gpu.no_bridge", link=found.name, gpu=gpu.name, cards=list(found.joins), usual=usual.name)
    if found.joins and per_node > BRIDGED:
        raise UserError("gpu.bridge_of_two", link=found.name, count=per_node, usual=usual.name)
    if usual.kind == found.kind == "pcie" and (found.gt_per_s or 0) > (usual.gt_per_s or 0):
        raise UserError("gpu.slower_bus", link=found.name, gpu=gpu.name, usual=usual.name)
    return found


def _network(name: str, gpu: Gpu, nodes: int) -> tuple[Link | None, int, bool]:
    """Return (the network between nodes, NICs of a node, whether that is known). '8 x ib-200' has the NICs."""
    if nodes == 1:
        if name:
            raise UserError("usage.network_of_one", value=name[:80])
        return None, 1, True
    if not name:
        usual = network_of(gpu.name)
        return usual.link, usual.link.nics_per_node, not usual.assumed
    counted = _COUNTED.fullmatch(name.strip())
    if counted and len(counted["count"]) < 4 and int(counted["count"]) > 0:
        return _named_link(counted["name"], "--network", network=True), int(counted["count"]), True
    found = _named_link(name, "--network", network=True)
    return found, found.nics_per_node, True


def _named_link(name: str, option: str, *, network: bool) -> Link:
    fitting = [link for link in links().values() if (link.kind == "network") == network]
    found = find_link(name)
    if found is None:
        names = {known.lower(): link.name for link in fitting for known in (link.name, *link.aliases)}
        near = difflib.get_close_matches(name.strip().lower(), names, n=3, cutoff=0.4)
        nearest = list(dict.fromkeys(names[each] for each in near)) or [link.name for link in fitting]
        raise UserError("gpu.unknown_link", option=option, name=name[:80], near=nearest)
    if found not in fitting:
        other = "--link" if option == "--network" else "--network"
        raise UserError("gpu.other_link", option=option, link=found.name, other=other)
    return found
