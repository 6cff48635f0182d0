"""CUDA's numbers of cards against NVML's, under CUDA_VISIBLE_DEVICES, with stand-ins for NVML and for torch."""

from types import SimpleNamespace

import pytest

from foretrain.base.units import GIB
from foretrain.hardware.card import VARIABLE, Cards, Load, identity, visible
from foretrain.hardware.catalogue import detect, find, given_gib
from foretrain.hardware.devices import used_here_bytes
from tests.kit.nvml import FakeNvml

KEPT_GIB = 12 - given_gib(12)  # by the driver, where it does not say
UUIDS = ["GPU-0aaa", "GPU-0bbb", "GPU-1ccc"]


class ThreeCards(FakeNvml):
    def __init__(self) -> None:
        super().__init__("NVIDIA GeForce RTX 4070", 12, 5888)

    def nvmlDeviceGetCount(self) -> int:
        return 3

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(total=self.total, used=(handle + 1) * GIB)

    def nvmlDeviceGetUUID(self, handle: int) -> bytes:
        return UUIDS[handle].encode()

    def nvmlDeviceGetPciInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(busId=f"00000000:{16 * handle + 10:02X}:00.0".encode())

    def nvmlDeviceGetClockInfo(self, handle: int, which: int) -> int:
        return 1000 * (handle + 1)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return 100_000


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (None, (0, 1, 2)), ("0,1,2", (0, 1, 2)), ("1", (1,)), ("2,0", (2, 0)), (" 2 , 1", (2, 1)), ("", ()),
        ("-1", ()), ("0,-1,1", (0,)), ("1,7,0", (1,)), ("0,x,1", (0,)), ("1gpu,0", (1, 0)), ("1,1", ()),
        ("GPU-1ccc", (2,)), ("GPU-1,GPU-0a", (2, 0)), ("GPU-0", ()), ("GPU-1ccc,0", (2,)), ("GPU-no", ()),
        ("MIG-aaa,MIG-bbb", (None, None)), ("0,GPU-1ccc", (0,)),
    ],
)  # fmt: skip
def test_what_cuda_shows(said: str | None, shown: tuple[int | None, ...]) -> None:
    assert visible(UUIDS, {} if said is None else {VARIABLE: said}) == shown


def test_it_reads_the_variable_as_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.cuda counts cards without CUDA by the same rules."""
    cuda = pytest.importorskip("torch.cuda")
    for said in ("", "1", "2,0", "0,-1,1", "0,x,1", "1gpu,0", "1,1", " 2 , 1"):
        monkeypatch.setenv(VARIABLE, said)
        known = [number for number in cuda._parse_visible_devices() if number < len(UUIDS)]
        assert list(visible(UUIDS, {VARIABLE: said})) == known, said
    for said in ("GPU-1ccc", "GPU-1,GPU-0a", "GPU-0", "GPU-no"):
        monkeypatch.setenv(VARIABLE, said)
        assert list(visible(UUIDS, {VARIABLE: said})) == cuda._transform_uuid_to_ordinals(
            cuda._parse_visible_devices(), UUIDS
        ), said


def test_the_card_that_cuda_shows_is_the_one_that_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "2,1")
    for cuda, used_gib in ((0, 3), (1, 2)):
        found = detect(cuda, ThreeCards())
        assert (found.index, found.used_bytes) == (cuda, pytest.approx((used_gib - KEPT_GIB) * GIB))
    assert detect(2, ThreeCards()) is None
    monkeypatch.setenv(VARIABLE, "GPU-0bbb")
    with Load(0, ThreeCards()) as load:
        while not load.clocks_ghz:
            pass
    assert load.clock_ghz == 2
    monkeypatch.setenv(VARIABLE, "")
    assert detect(0, ThreeCards()) is None
    monkeypatch.setenv(VARIABLE, "MIG-aaa")
    cards = Cards(ThreeCards())
    assert cards.index_of(0) is cards.one(None, ()) is cards.held_bytes(None, ()) is cards.load(None) is None


def test_what_torch_knows_of_a_card_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's own order may be another one than NVML's; the id and the PCI address are certain."""
    monkeypatch.setenv(VARIABLE, "0,1")
    cards = Cards(ThreeCards())
    properties = SimpleNamespace(uuid="1ccc", pci_domain_id=0, pci_bus_id=26, pci_device_id=0)
    assert identity(properties) == {"uuid": "GPU-1ccc", "bus_id": "00000000:1a:00.0"}
    assert cards.index_of(0, **identity(properties)) == 2
    assert cards.index_of(0, bus_id="00000000:1a:00.0") == 1
    assert cards.index_of(0, uuid="GPU-gone", bus_id="00000000:ff:00.0") == 0
    assert identity(SimpleNamespace()) == {"uuid": "", "bus_id": ""}


def test_others_memory_is_that_of_the_card_that_cuda_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    import pynvml

    stand_in = ThreeCards()
    for name in dir(stand_in):
        if name.startswith("nvml"):
            monkeypatch.setattr(pynvml, name, getattr(stand_in, name))
    monkeypatch.setenv(VARIABLE, "1")
    assert used_here_bytes(find("RTX 4070")) == pytest.approx((2 - KEPT_GIB) * GIB)
