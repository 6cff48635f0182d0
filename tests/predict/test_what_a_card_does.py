"""What a card gives, what fits in it, and what it cannot run: memory below the label, verdicts about the whole range."""

import json

import pytest

from foretrain.base.units import GIB
from foretrain.config.resolve import resolve
from foretrain.hardware.catalogue import Gpu, find
from foretrain.predict.memory import FAILING, PhaseMemory, of_range
from foretrain.predict.plan import Plan
from tests.kit.command import REPO, foretrain

NANOGPT = str(REPO / "examples" / "nanogpt" / "config" / "train_gpt2.py")


def planned(*words: str, gpu: str) -> Plan:
    result = foretrain("plan", *words, "--gpu", gpu, "--json", code=0)
    return Plan.from_json(result.stdout)


def phases_hold(phases: tuple[PhaseMemory, ...], room: int) -> None:
    """`fits` only where the whole range is within; what is expected beyond the card is never `fits`."""
    for phase in phases:
        low, expected, high = phase.needed_span
        assert (phase.verdict == "fits") == (max(high, expected + 200 * 2**20) <= room), phase
        if low > room:
            assert phase.verdict != "fits"
        if expected <= room:
            assert phase.verdict in ("fits", "tight")


# -- what a card gives -------------------------------------------------------------------------------------------------


def test_a_range_has_one_of_four_verdicts() -> None:
    span = (10 * GIB, 11 * GIB, 12 * GIB)
    words = {gib: of_range(span, gib * GIB) for gib in (9, 10, 11, 12)}
    assert words == {9: "does_not_fit", 10: "may_not_fit", 11: "tight", 12: "fits"}
    assert of_range((GIB, GIB, GIB), GIB) == "tight"  # without 200 MiB to spare


@pytest.mark.parametrize(("gpu", "step"), [("T4", "nanogpt"), ("RTX 4090", "foretrain")])
def test_a_verdict_is_about_the_whole_range(gpu: str, step: str) -> None:
    card = find(gpu)
    for batch_size in (8, 12, 16, 32):
        made = planned("gpt2-124m", f"--batch_size={batch_size}", "--trainer", step, gpu=gpu)
        assert made.available_bytes == card.memory_bytes
        phases_hold(made.memory_of(made.step).phases, card.memory_bytes)


def test_the_largest_is_the_largest_in_what_cuda_gives() -> None:
    """15.23 of 16 GiB was said to fit a T4, which gives 14.56."""
    found = json.loads(foretrain(
        "plan", "gpt2-124m", "--trainer", "nanogpt", "--dtype=float16", "--gpu", "T4", "--largest", "batch_size", "--json"
    ).stdout)  # fmt: skip
    fitting = [probe for probe in found["probes"] if probe["verdict"] == "fits"]
    assert fitting
    assert len(found["probes"]) < 9  # of 4,096, from the run as it is
    assert max(probe["needed_expected_bytes"] for probe in fitting) < 14.36 * GIB
    after = planned("gpt2-124m", f"--batch_size={found['value']}", "--trainer", "nanogpt", "--dtype=float16", gpu="T4")
    assert after.verdict == "fits"


def test_own_card_is_calculated_with_what_its_file_says(tmp_path) -> None:
    block = '["Mine RTX"]\ncompute_capability = "8.9"\nmemory_gib = 12\n'
    (tmp_path / "cards.toml").write_text(block)
    (tmp_path / "stated.toml").write_text(block + "cuda_memory_gib = 11.2\n")
    rooms = [
        json.loads(foretrain("plan", "baby", "--gpu-file", str(tmp_path / name), "--gpu", "Mine RTX", "--json").stdout)
        for name in ("cards.toml", "stated.toml")
    ]
    assert rooms[0]["available_bytes"] == pytest.approx(11.47 * GIB, rel=1e-3)
    assert rooms[1]["available_bytes"] == pytest.approx(11.2 * GIB, rel=1e-9)


def test_fine_tuning_and_generation_are_judged_by_the_same_rule() -> None:
    for name, method, gpu in (("1.5b", "qlora", "RTX 4060"), ("1.5b", "qlora", "T4"), ("7b", "lora", "A10")):
        made = json.loads(foretrain("plan", f"qwen2.5-{name}", "--method", method, "--gpu", gpu, "--json").stdout)
        assert made["available_bytes"] == find(gpu).memory_bytes
        phases_hold(tuple(PhaseMemory.model_validate(p) for p in made["memory"]["phases"]), made["available_bytes"])
    for gpu in ("RTX 4060", "T4", "A10", "RTX 4090"):
        made = json.loads(foretrain("plan", "qwen2.5-7b", "--inference", "--gpu", gpu, "--json").stdout)
        (memory,) = made["memory"]["phases"]
        span = (memory["needed_low_bytes"], memory["needed_expected_bytes"], memory["needed_high_bytes"])
        assert made["verdict"] == of_range(span, find(gpu).memory_bytes or 0)


def test_check_fails_where_it_may_not_fit_and_passes_if_tight() -> None:
    """A process that may take what is expected, and one that may take less than that."""
    model = ("gpt2-124m", "--n_layer=2")
    whole = planned(*model, gpu="RTX 4070")
    low, expected, _ = whole.memory_of("foretrain").neediest.needed_span
    for limit, word, code in ((expected, "tight", 0), ((low + expected) // 2, "may_not_fit", 3), (low // 2, "does_not_fit", 3)):  # fmt: skip
        words = ("plan", *model, "--gpu", "RTX 4070", f"--memory_limit={limit}B")
        made = Plan.from_json(foretrain(*words, "--json").stdout)
        assert made.verdict == word
        assert (made.verdict in FAILING) == (code == 3)
        result = foretrain(*words, "--check", code=code)
        if code:
            assert word.replace("_", " ") in result.stderr


def test_both_figures_of_memory_are_shown_with_their_sources() -> None:
    full = " ".join(foretrain("plan", "gpt2-124m", "--gpu", "T4", "--full").stdout.split())
    assert "Of the 16.00 GiB on the box of the T4, CUDA gives 14.56 GiB" in full
    assert "cuda_memory_source" in foretrain("gpus", "T4").stdout
    assert planned("gpt2-124m", gpu="T4").gpu.cuda_memory_gib == 14.56


# -- what it cannot run ------------------------------------------------------------------------------------------------


def test_nanogpts_compiled_step_does_not_run_without_triton() -> None:
    words = ("plan", NANOGPT, "--trainer", "nanogpt", "--gpu", "P100 SXM2 16GB")
    result = foretrain(*words, "--check", code=3)
    said = " ".join(result.stdout.split())
    assert "Does not run. torch.compile needs compute capability 7.0" in said
    assert "with --compile=False it needs" in said
    assert "does not run" in result.stderr
    made = Plan.from_json(foretrain(*words, "--json").stdout)
    theirs = made.memory_of("nanogpt")
    assert (made.verdict, theirs.obstacle, theirs.compiled) == ("does_not_run", "compile", False)
    # What is said of eager is what a plan of the way on says.
    eager = Plan.from_json(foretrain(*words, "--compile=False", "--json").stdout)
    assert eager.verdict != "does_not_run"
    assert eager.memory_of("nanogpt").needed_bytes == theirs.needed_bytes


def test_a_p100_needs_17_gib_of_the_eager_step() -> None:
    theirs = planned("gpt2-124m", "--trainer", "nanogpt", gpu="P100 SXM2 16GB").memory_of("nanogpt")
    assert theirs.needed_bytes == pytest.approx(16.84 * GIB, rel=0.01)


def test_foretrains_trainer_goes_on_eagerly_there() -> None:
    made = planned("gpt2-124m", gpu="P100 SXM2 16GB")
    assert not made.compiled
    assert made.verdict in ("fits", "tight")
    assert "old_card_eager" in {note.id for note in made.notes}
    assert "nanoGPT's own train.py would not run here" in " ".join(
        foretrain("plan", "gpt2-124m", "--gpu", "P100 SXM2 16GB").stdout.split()
    )


def test_what_has_triton_is_compiled() -> None:
    for gpu in ("V100 SXM2 16GB", "T4", "RTX 2080 Ti", "RTX 4070"):
        made = planned("gpt2-124m", "--trainer", "nanogpt", gpu=gpu)
        assert made.memory_of("nanogpt").compiled
        assert not made.memory_of("nanogpt").obstacle
    assert Gpu(name="Unknown").has_triton


@pytest.mark.parametrize("words", [("--compile",), ("--unsloth",), ("--liger",)])
def test_fine_tuning_with_kernels_of_triton_is_refused_there(words: tuple[str, ...]) -> None:
    result = foretrain("plan", "qwen2.5-0.5b", "--method", "lora", *words, "--gpu", "GTX 1080 Ti", code=2)
    assert "needs compute capability 7.0 (Triton), and the GTX 1080 Ti has 6.1" in result.stderr
    assert foretrain("plan", "qwen2.5-0.5b", "--method", "lora", "--gpu", "GTX 1080 Ti").returncode == 0


# -- the dtype that nanoGPT takes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpu", ["T4", "V100 SXM2 32GB"])
def test_nanogpts_default_is_bfloat16_where_torch_emulates_it(gpu: str) -> None:
    made = planned("gpt2-124m", "--batch_size=12", "--trainer", "nanogpt", gpu=gpu)
    assert (made.dtype, made.dtype_reason) == ("bfloat16", "emulated_bf16")
    assert made.memory_of("nanogpt").needed_bytes == pytest.approx(18.35 * GIB, rel=0.01)
    assert "emulated_bf16" in {note.id for note in made.notes}
    older = planned("gpt2-124m", "--batch_size=12", "--trainer", "nanogpt", "--torch_version=2.2", gpu=gpu)
    assert (older.dtype, older.dtype_reason) == ("float16", "no_bf16")
    half = planned("gpt2-124m", "--batch_size=12", "--trainer", "nanogpt", "--dtype=float16", gpu=gpu)
    assert half.memory_of("nanogpt").needed_bytes == pytest.approx(10.71 * GIB, rel=0.01)
    assert made.nanogpt_timing.step_s.expected_s > 3 * half.nanogpt_timing.step_s.expected_s  # no tensor cores


def test_foretrains_own_default_and_newer_cards_stay_as_they_are() -> None:
    ours = planned("gpt2-124m", gpu="T4")
    assert (ours.dtype, ours.dtype_reason) == ("float16", "no_bf16")
    assert ours.spec("nanogpt").dtype == "bfloat16"
    newer = planned("gpt2-124m", "--trainer", "nanogpt", gpu="RTX 3060")
    assert (newer.dtype, newer.dtype_reason) == ("bfloat16", "has_bf16")


@pytest.mark.parametrize(
    ("gpu", "tflops"), [("RTX 2080 Ti", 6.95), ("GTX 1080 Ti", 5.38), ("GTX 1070 Ti", 4.05), ("GTX 1660 Ti", 2.84)]
)
def test_emulated_products_run_at_about_what_was_measured(gpu: str, tflops: float) -> None:
    assert find(gpu).peak_flop_per_s("bfloat16") == pytest.approx(tflops * 1e12, rel=0.1)


def test_the_first_screen_says_which_dtype_was_taken() -> None:
    said = " ".join(foretrain("plan", "gpt2-124m", "--trainer", "nanogpt", "--gpu", "T4").stdout.split())
    assert "bfloat16, which torch" in said
    assert "--dtype=float16 avoids it" in said
    assert resolve(["gpt2-124m"]).config.dtype == "auto"
