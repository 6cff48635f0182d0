"""What connects cards, and machines: the links of `links.toml`, and which of them a card of the catalogue has.

Figures are a direction. The time of a collective over them is predict/speed/collectives.py.
"""

import tomllib
from functools import cache
from importlib import resources
from typing import Literal

from foretrain.base.records import Record

WHERE_UNKNOWN, NETWORK_UNKNOWN, NVLINK = "pcie4x16", "tcp-10", "nvlink"
PINNED_SHARE = 0.8  # assumed, not measured: of the wire, by one large copy between a card and pinned host memory


class Link(Record):
    """One kind of link. `wire_gb_per_s` is what the standard allows in a direction; of a network, of one NIC.

    `reached_share` is what NCCL reaches of it as bus bandwidth with large messages, `least_share` what it reached on
    the worst machine that was published, `switch_share` the same of an all-reduce that the switch sums (NVLS). `joins`:
    cards that a bridge can be put on. `between`: cards whose machines usually have this network.
    """

    name: str
    aliases: tuple[str, ...] = ()
    kind: Literal["pcie", "nvlink", "network"]
    through_host: bool = False
    lanes: int | None = None
    gt_per_s: float | None = None
    links: int | None = None
    gb_per_s_per_link: float | None = None
    gbit_per_s: float | None = None
    wire_gb_per_s: float
    reached_share: float
    least_share: float | None = None
    switch_share: float | None = None
    ll_gb_per_s: float | None = None
    cards: tuple[str, ...] = ()
    joins: tuple[str, ...] = ()
    between: tuple[str, ...] = ()
    nics_per_node: int = 1
    source: str

    @property
    def derived_gb_per_s(self) -> float:
        """Return GB a second and direction from lanes, links or bits: a second way to `wire_gb_per_s`."""
        if self.lanes and self.gt_per_s:
            return self.lanes * self.gt_per_s * 128 / 130 / 8
        if self.links and self.gb_per_s_per_link:
            return self.links * self.gb_per_s_per_link
        return (self.gbit_per_s or 0) / 8

    @property
    def bytes_per_s(self) -> float:
        return self.wire_gb_per_s * self.reached_share * 1e9

    @property
    def least_bytes_per_s(self) -> float:
        return self.wire_gb_per_s * (self.least_share or self.reached_share) * 1e9

    @property
    def switch_bytes_per_s(self) -> float | None:
        return self.wire_gb_per_s * self.switch_share * 1e9 if self.switch_share else None


class CardLink(Record):
    link: Link
    assumed: bool = False


@cache
def links() -> dict[str, Link]:
    text = (resources.files("foretrain.hardware") / "links.toml").read_text("utf-8")
    return {name: Link(name=name, **block) for name, block in tomllib.loads(text).items()}


def _key(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def find_link(name: str) -> Link | None:
    """Return the link of a name or alias in any case and spacing: 'pcie4x16', 'PCIe 4.0 x16', 'ndr'."""
    key = _key(name)
    for link in links().values():
        if key in {_key(known) for known in (link.name, *link.aliases)}:
            return link
    return None


def link_of(card: str) -> CardLink:
    """Return what connects several cards of this name when nobody says otherwise.

    A card that links.toml does not name gets PCIe 4.0 x16 through the host, and says that this is assumed.
    """
    for link in links().values():
        if card in link.cards:
            return CardLink(link=link)
    return CardLink(link=links()[WHERE_UNKNOWN], assumed=True)


def pinned_bytes_per_s(card: str) -> float:
    """Return what copies between this card and pinned host memory reach, a share of its PCIe link; SXM cards too."""
    own = link_of(card).link
    return PINNED_SHARE * (own if own.kind == "pcie" else links()[WHERE_UNKNOWN]).wire_gb_per_s * 1e9


def network_of(card: str) -> CardLink:
    """Return what usually connects machines with these cards: of SXM cards what NVIDIA's own boxes have.

    Others get 10 GbE, and say that this is assumed.
    """
    for link in links().values():
        if card in link.between:
            return CardLink(link=link)
    return CardLink(link=links()[NETWORK_UNKNOWN], assumed=True)


def nvlink_of(card: str) -> Link | None:
    own = link_of(card).link
    if own.kind == NVLINK:
        return own
    return next((link for link in links().values() if card in link.joins), None)
