"""Links between cards and machines, per direction (`links.toml`), and which of them a card has."""

import tomllib
from functools import cache
from importlib import resources
from typing import Literal

from foretrain.base.records import Record

WHERE_UNKNOWN, NETWORK_UNKNOWN, NVLINK = "pcie4x16", "tcp-10", "nvlink"
PINNED_SHARE = 0.8  # assumed, not measured: of the wire, by one large copy between a card and pinned host memory


class Link(Record):
    """One kind of link. `wire_gb_per_s` is the standard's rate in a direction; of a network, of one NIC.
    `reached_share` is NCCL's bus bandwidth, `least_share` that of the worst published machine, `switch_share` with
    NVLS. `joins`: cards that a bridge fits. `between`: cards whose machines usually have this network."""

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
        """Return GB per second and direction from lanes, links or bits, to check `wire_gb_per_s`."""
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
    """Return the usual link between cards of this name; assumed PCIe 4.0 x16 where links.toml has none."""
    for link in links().values():
        if card in link.cards:
            return CardLink(link=link)
    return CardLink(link=links()[WHERE_UNKNOWN], assumed=True)


def pinned_bytes_per_s(card: str) -> float:
    """Return the rate of copies between this card and pinned host memory, a share of its PCIe link; SXM cards too."""
    own = link_of(card).link
    return PINNED_SHARE * (own if own.kind == "pcie" else links()[WHERE_UNKNOWN]).wire_gb_per_s * 1e9


def network_of(card: str) -> CardLink:
    """Return the usual network of machines with these cards: NVIDIA's own for SXM cards, else an assumed 10 GbE."""
    for link in links().values():
        if card in link.between:
            return CardLink(link=link)
    return CardLink(link=links()[NETWORK_UNKNOWN], assumed=True)


def nvlink_of(card: str) -> Link | None:
    own = link_of(card).link
    if own.kind == NVLINK:
        return own
    return next((link for link in links().values() if card in link.joins), None)
