"""The catalogue: every figure derivable a second way; names; detection; unknown cards."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from foretrain.base.errors import UserError
from foretrain.base.units import GIB, MIB
from foretrain.config.resolve import resolve
from foretrain.hardware.catalogue import Gpu, catalogue, detect, find, given_gib, match, nearest
from foretrain.hardware.cpu import cpu_device, nominal_cpu
from foretrain.predict.plan import plan
from foretrain.predict.spec import StepSpec
from foretrain.predict.speed.time import step_time
from foretrain.reports import html
from foretrain.reports.views import plan as plan_view
from tests import machines
from tests.kit.cards import assert_figures_follow_a_second_way, assert_ratios_between_dtypes
from tests.kit.command import foretrain, refused
from tests.kit.nvml import FakeNvml

CARDS = list(catalogue().values())


def test_the_catalogue_is_whole() -> None:
    assert CARDS
    for gpu in CARDS:
        assert gpu.source, gpu.name
        assert gpu.bandwidth_gb_per_s, gpu.name


@pytest.mark.parametrize("gpu", CARDS, ids=lambda gpu: gpu.name)
def test_figures_follow_a_second_way(gpu: Gpu) -> None:
    assert_figures_follow_a_second_way(gpu)


@pytest.mark.parametrize("gpu", CARDS, ids=lambda gpu: gpu.name)
def test_ratios_between_dtypes(gpu: Gpu) -> None:
    assert_ratios_between_dtypes(gpu)


def test_figures_from_elsewhere() -> None:
    """Spot checks against figures quoted outside of the catalogue's own source (reference notes, section 7)."""
    assert find("4070").peak_flop_per_s("float16") == 58.3e12
    assert find("4090").bf16_dense_tflops == 165.2
    assert find("L4").bandwidth_gb_per_s == 300  # PyTorch 2.13 has 3350
    assert find("RTX 3090").bf16_dense_tflops == 71  # nanochat's table; Lightning's has 35.6
    assert find("RTX 4070").peak_flop_per_s("float32") == 29.1e12
    assert not find("T4").supports_bf16
    assert find("3060").supports_bf16


@pytest.mark.parametrize(
    ("name", "card"),
    [
        ("RTX 4070", "RTX 4070"), ("rtx4070", "RTX 4070"), ("4070", "RTX 4070"), ("GeForce RTX 4070", "RTX 4070"),
        ("NVIDIA GeForce RTX 4070", "RTX 4070"), ("4070 ti super", "RTX 4070 Ti SUPER"), ("3060", "RTX 3060 12GB"),
        ("4060 ti 16gb", "RTX 4060 Ti 16GB"), ("h200", "H200 SXM 141GB"), ("Tesla T4", "T4"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM5 80GB"), ("NVIDIA A100-SXM4-80GB", "A100 SXM4 80GB"),
        ("RTX 4060 Laptop", "RTX 4060 Laptop"), ("4070 laptop gpu", "RTX 4070 Laptop"), ("4090 mobile", "RTX 4090 Laptop"),
        ("NVIDIA GeForce RTX 3060 Laptop GPU", "RTX 3060 Laptop"), ("3080 laptop 16gb", "RTX 3080 Laptop 16GB"),
        ("A800", "A100 SXM4 80GB"), ("H800", "H100 SXM5 80GB"), ("A100 80GB", "A100 SXM4 80GB"), ("titan xp", "TITAN Xp"),
    ],
)  # fmt: skip
def test_names(name: str, card: str) -> None:
    assert find(name).name == card


@pytest.mark.parametrize("gpu", CARDS, ids=lambda gpu: gpu.name)
def test_every_card_is_found_by_its_name(gpu: Gpu) -> None:
    assert find(gpu.name) is gpu


def test_one_name_two_cards() -> None:
    with refused("gpu.ambiguous") as caught:
        find("RTX 4060 Ti")
    assert caught.value.values["choices"] == ["RTX 4060 Ti 8GB", "RTX 4060 Ti 16GB"]


@pytest.mark.parametrize("name", ["RTX 4071", "radeon vii", "mx 450", "cuda", "", "💥", "x" * 300])
def test_unknown_name_is_one_sentence_with_near_names_only(name: str) -> None:
    with pytest.raises(UserError) as caught:
        find(name)
    said = str(caught.value)
    assert "\n" not in said
    assert "--gpu-file" in said
    if name == "RTX 4071":
        assert caught.value.id == "gpu.unknown_name_near"
        assert nearest(name)[0].startswith("RTX 407")
    else:
        assert (caught.value.id, nearest(name)) == ("gpu.unknown_name", [])


def test_detection_tells_twins_apart_by_memory() -> None:
    for gib, card in ((7.996, "RTX 4060 Ti 8GB"), (15.99, "RTX 4060 Ti 16GB")):
        nvml = FakeNvml("NVIDIA GeForce RTX 4060 Ti", gib, 34 * 128)
        found = detect(nvml=nvml)
        assert found.gpu.name == card
        assert found.gpu.memory_gib == round(gib)
        assert found.gpu.memory_bytes == pytest.approx(given_gib(gib) * GIB)
        assert found.used_bytes == pytest.approx((2 - (gib - given_gib(gib))) * GIB)  # without what the driver keeps
        assert found.driver == "575.64"
        assert nvml.shut_down


def test_detection_tells_laptop_and_desktop_cards_apart() -> None:
    for name, card in (
        ("NVIDIA GeForce RTX 4060", "RTX 4060"),
        ("NVIDIA GeForce RTX 4060 Laptop GPU", "RTX 4060 Laptop"),
    ):
        found = detect(nvml=FakeNvml(name, 8, 24 * 128))
        assert found.gpu.name == card


def test_laptop_range_reaches_down_to_the_least_power() -> None:
    config = resolve(["gpt2-124m"]).config
    laptop = find("RTX 4060 Laptop")
    alike = laptop.model_copy(update={"lowest_boost_clock_ghz": None, "lowest_board_power_w": None})
    wide, narrow = (step_time(StepSpec.of(config, gpu, dtype="bfloat16", compiled=True)) for gpu in (laptop, alike))
    assert wide.expected_s == narrow.expected_s
    assert wide.high_s == pytest.approx(narrow.high_s * 2.370 / 1.470)
    with_both = [gpu for gpu in CARDS if gpu.lowest_boost_clock_ghz]
    assert len(with_both) >= 10
    for gpu in with_both:
        by_power = gpu.model_copy(update={"lowest_boost_clock_ghz": None}).slowest_share
        assert by_power / gpu.slowest_share - 1 == pytest.approx(0, abs=0.20), gpu.name


OWN_CARD = """
["RTX 4071"]
compute_capability = "8.9"
memory_gib = 14
bandwidth_gb_per_s = 504
fp16_dense_tflops = 61.4
bf16_dense_tflops = 61.4
board_power_w = 200
"""


def test_gpu_file_adds_cards_to_every_command(tmp_path: Path) -> None:
    own = tmp_path / "cards.toml"
    own.write_text(OWN_CARD)
    for words in (
        ["plan", "gpt2-124m", "--gpu", "4071", "--json"],
        ["gpus", "4071", "--json"],
        ["advise", "gpt2-124m", "--gpu", "4071", "--json"],
    ):
        assert foretrain(*words).returncode == 2
        done = foretrain(*words, "--gpu-file", str(own), code=0)
        assert "RTX 4071" in done.stdout
    assert foretrain("gpus", "4071").returncode == 2  # nothing of it is left for the next command


def test_gpu_file_may_correct_a_card_of_the_catalogue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "cards.toml"
    own.write_text(OWN_CARD.replace("RTX 4071", "RTX 4070"))
    monkeypatch.setenv("FORETRAIN_GPU_FILE", str(own))
    assert find("4070").memory_gib == 14
    monkeypatch.delenv("FORETRAIN_GPU_FILE")
    assert find("4070").memory_gib == 12


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = [", "Invalid"), ("[a]", "memory_gib is missing"), ("a = 1", "is not a block"),
        ("[a]\nmemory_gib = 12", "compute_capability is missing"),
        ('[a]\nmemory_gib = -1\ncompute_capability = "8.9"', "memory_gib = -1 must be above 0"),
        ('[a]\nmemory_gib = 1\ncompute_capability = "8.9"\nspeed = 3', "speed"),
        ('[a]\nmemory_gib = "x"\ncompute_capability = "8.9"', "memory_gib"), ('[a]\nname = "b"', "name"),
    ],
)  # fmt: skip
def test_bad_gpu_file_is_one_sentence(tmp_path: Path, text: str, says: str) -> None:
    own = tmp_path / "cards.toml"
    own.write_text(text)
    for place in (own, tmp_path / "none.toml", tmp_path, Path("/dev/zero")):
        done = foretrain("gpus", "--gpu-file", str(place), code=2)
        assert done.stderr.count("\n") == 1
        assert str(place) in done.stderr
        if place == own:
            assert says in done.stderr
        assert "Errno" not in done.stderr
    own.write_bytes(b"\xf2\x00")
    assert "it is not UTF-8 text" in foretrain("gpus", "--gpu-file", str(own)).stderr


def test_detection_uses_the_true_memory() -> None:
    found = detect(nvml=FakeNvml("NVIDIA GeForce RTX 4070", 11.994, 5888))
    assert found.gpu.name == "RTX 4070"
    assert found.gpu.label_bytes == 12 * GIB
    assert found.gpu.memory_bytes == pytest.approx(given_gib(11.994) * GIB)
    assert "derived" in found.gpu.cuda_memory_source


def test_detection_takes_away_what_the_driver_reserves() -> None:
    """12,282 MiB of an RTX 4070 less the 380 that a driver keeps; NVML counts those as used, too."""

    class Reserving(FakeNvml):
        nvmlMemory_v2 = 0x2000028

        def nvmlDeviceGetMemoryInfo(self, handle: int, version: int | None = None) -> SimpleNamespace:
            kept = {} if version is None else {"reserved": 380 * MIB}
            return SimpleNamespace(total=12282 * MIB, used=(380 + 100) * MIB, **kept)

    found = detect(nvml=Reserving("NVIDIA GeForce RTX 4070", 12, 5888))
    assert found.gpu.memory_bytes == pytest.approx((12282 - 380) * MIB)
    assert found.used_bytes == 100 * MIB
    assert "reserves" in found.gpu.cuda_memory_source
    idle = detect(nvml=FakeNvml("NVIDIA GeForce RTX 4070", 12, 5888, used_gib=0.3))
    assert idle.used_bytes == 0  # what the driver keeps is no other program


SEEN_GIB = {  # the least "total capacity" of public out-of-memory messages on Linux
    "T4": 14.56, "A10": 22.04, "L4": 22.03, "A40": 44.34, "L40S": 44.34, "V100 SXM2 16GB": 15.75, "RTX 3060 12GB": 11.63,
    "V100 SXM2 32GB": 31.73, "A30": 23.53, "A100 SXM4 40GB": 39.38, "A100 SXM4 80GB": 79.14, "H100 SXM5 80GB": 79.11,
    "RTX 4090": 23.52, "RTX 3090": 23.56, "RTX 4070": 11.56, "RTX 5090": 31.36, "RTX PRO 6000": 94.96, "RTX 3080 10GB": 9.62,
    "RTX 3050 Laptop 4GB": 3.63, "RTX 4050 Laptop": 5.60, "RTX 4060": 7.60, "RTX 5070": 11.49, "RTX 5080": 15.48,
}  # fmt: skip


def test_memory_is_what_cuda_gives_never_more_than_was_seen() -> None:
    for name, gib in SEEN_GIB.items():
        gpu = find(name)
        assert gpu.memory_bytes
        assert 0.98 * gib * GIB <= gpu.memory_bytes <= gib * GIB + 1, name
    for gpu in CARDS:
        if gpu.kind == "cuda":
            assert gpu.label_bytes
            assert gpu.memory_bytes
            assert 0.85 * gpu.label_bytes < gpu.memory_bytes < gpu.label_bytes, gpu.name
            assert gpu.cuda_memory_source, gpu.name


def test_the_rule_of_a_label_takes_ecc_from_data_centre_cards() -> None:
    """Of a card that nobody has seen, the less favourable is taken."""
    blocks = {"RTX Own": 16, "Own A16": 16}
    display, server = (Gpu(name=name, memory_gib=gib, memory_bus_bits=128) for name, gib in blocks.items())
    assert display.memory_bytes == pytest.approx(given_gib(16) * GIB)
    assert server.memory_bytes == pytest.approx(given_gib(15) * GIB)
    assert Gpu(name="Own HBM", memory_gib=24, memory_bus_bits=3072).memory_bytes == pytest.approx(23.52 * GIB)
    assert Gpu(name="Own", memory_gib=24, cuda_memory_gib=23.9).memory_bytes == pytest.approx(23.9 * GIB)


@pytest.mark.parametrize(
    ("name", "gib", "cores"),
    [("NVIDIA GeForce RTX 3060", 8, 28 * 128), ("NVIDIA GeForce RTX 4070", 12, 4608), ("NVIDIA Titan Z", 6, 2880)],
    ids=["8 GB twin that the catalogue lacks", "laptop part of the same name", "unknown"],
)
def test_detection_never_takes_another_card(name: str, gib: float, cores: int) -> None:
    with refused("gpu.unknown") as caught:
        detect(nvml=FakeNvml(name, gib, cores))
    assert f"sm_count = {cores // 128}" in str(caught.value)


def test_no_driver_no_card() -> None:
    class Broken(FakeNvml):
        def nvmlInit(self) -> None:
            raise self.NVMLError("driver not loaded")

    assert detect(nvml=Broken("x", 1, 1)) is None
    assert detect(index=3, nvml=FakeNvml("NVIDIA GeForce RTX 4070", 12, 5888)) is None
    assert match("RTX 4070", 12, None).name == "RTX 4070"


def test_this_machine() -> None:
    gpu = cpu_device()
    assert gpu.kind == "cpu"
    assert gpu.peak_flop_per_s("float32")
    assert gpu.memory_bytes
    assert "derived" in gpu.source


@pytest.mark.parametrize("machine", machines.FILES)
def test_any_machine_is_planned_for(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its name is, that is text; an instruction set, a number of cores and a clock make the peak."""
    monkeypatch.setenv(machines.VARIABLE, str(machines.FILES[machine]))
    gpu = cpu_device()
    cores, gflops = {"intel": (2, 173.6), "intel-amx": (8, 1075.2), "arm": (1, 96.0), "hostile": (3, 288.0)}[machine]
    assert gpu.name.endswith(f", {cores} core{'s' if cores > 1 else ''})")
    assert gpu.name.isascii()
    assert gpu.name.isprintable()
    assert gpu.peak_flop_per_s("float32") == pytest.approx(gflops * 1e9, rel=1e-3)
    assert gpu.peak_flop_per_s("bfloat16") / gpu.peak_flop_per_s("float32") == (32 if machine == "intel-amx" else 1)
    shown = foretrain("plan", "baby", "--gpu", "cpu", code=0)
    assert gpu.name in " ".join(shown.stdout.split())  # [bold red] is no markup
    config = resolve(["baby"]).config
    assert "<script>alert" not in html.render(plan_view.document(plan(config, gpu)))


def test_gpus_command() -> None:
    result = foretrain("gpus", "4070")
    assert "58.3" in result.stdout
    assert "llm.c" in result.stdout
    result = foretrain("gpus", "4071", code=2)
    assert "RTX 4070" in result.stderr


def test_cpus_of_one_model_with_and_without_amx_have_two_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with_amx = json.loads(machines.FILES["intel-amx"].read_text("utf-8"))
    without = with_amx | {"cpuinfo": re.sub(r" amx_\w+", "", with_amx["cpuinfo"])}
    names = []
    for description in (with_amx, without):
        path = tmp_path / "machine.json"
        path.write_text(json.dumps(description), "utf-8")
        monkeypatch.setenv(machines.VARIABLE, str(path))
        names.append(nominal_cpu().name)
    assert names == ["CPU (Intel(R) Xeon(R) Processor, AMX, 8 cores)", "CPU (Intel(R) Xeon(R) Processor, 8 cores)"]
