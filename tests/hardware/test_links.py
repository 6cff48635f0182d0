"""Links of the catalogue: every figure a second way, and each card's link."""

import pytest

from foretrain.hardware.catalogue import catalogue
from foretrain.hardware.links import find_link, link_of, links


@pytest.mark.parametrize("name", links())
def test_a_link_has_its_figures_twice_and_their_source(name: str) -> None:
    link = links()[name]
    assert link.derived_gb_per_s == pytest.approx(link.wire_gb_per_s, rel=0.005)
    assert 0 < link.reached_share < 1
    assert link.least_share is None or link.least_share <= link.reached_share
    assert link.switch_share is None or link.switch_share > link.reached_share
    assert "reached" in link.source
    assert (link.ll_gb_per_s is not None) == (link.kind == "nvlink")


def test_names_and_aliases_mean_one_link_each() -> None:
    for link in links().values():
        for name in (link.name, *link.aliases):
            assert find_link(name.upper()) == link
    assert find_link("token ring") is None


def test_each_named_card_is_in_the_catalogue_once() -> None:
    named = [card for link in links().values() for card in link.cards]
    assert len(named) == len(set(named))
    assert set(named) <= set(catalogue())


def test_card_gets_its_own_link_or_a_named_assumption() -> None:
    assert link_of("RTX 4090").link.name == "pcie4x16"
    assert link_of("RTX 4090").link.through_host
    assert link_of("RTX 4060").link.lanes == 8
    assert not link_of("L40S").link.through_host
    assert link_of("H200 SXM 141GB").link.switch_share
    unknown = link_of("a card of tomorrow")
    assert unknown.assumed
    assert unknown.link.name == "pcie4x16"


def test_only_laptops_and_unified_memory_lack_a_link() -> None:
    """Nor have cards that --gpus does not take, and Grace Hopper, whose GPU is alone with its processor."""
    without = [gpu for name, gpu in catalogue().items() if link_of(name).assumed]
    alone = {gpu.name for gpu in without if gpu.kind == "cuda" and not gpu.is_laptop}
    assert alone == {"GB10", "GH200 96GB", "GH200 144GB"}
