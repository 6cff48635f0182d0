"""Fine-tuning in the loops of others, by the files that people have: what stays in 16 bits there."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.kit.command import REPO, foretrain

FIELD = REPO / "tests/data/field/yaml"
GIB = 1 << 30


def planned(*words: str) -> dict[str, Any]:
    result = foretrain("plan", *words, "--gpu", "RTX 4090", "--json")
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def steady(plan: dict[str, Any]) -> dict[str, Any]:
    (found,) = (phase for phase in plan["memory"]["phases"] if phase["phase"] == "steady_step")
    return found


def component(plan: dict[str, Any], id: str) -> int:
    return sum(row["size_bytes"] for row in steady(plan)["components"] if row["id"] == id)


def weight_bytes(linear: int, rest: int, item_bytes: int = 2) -> float:
    """Of weights in 4 bits with scales in 8, and of the others."""
    return linear * (0.5 + 1 / 64 + 4 / (64 * 256)) + rest * item_bytes


# Weights of linear layers in blocks, and all others.
QWEN_7B = (28 * (2 * 3584 * 3584 + 2 * 3584 * 512 + 3 * 3584 * 18944), 2 * 152064 * 3584)
LLAMA_3B = (28 * (2 * 3072 * 3072 + 2 * 3072 * 1024 + 3 * 3072 * 8192), 128256 * 3072)
LLAMA_8B = (32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336), 2 * 128256 * 4096)
LLAMA_FACTORY = """model_name_or_path: meta-llama/Llama-3.1-8B-Instruct
stage: sft
do_train: true
finetuning_type: lora
quantization_bit: 4
lora_rank: 16
lora_target: q_proj,v_proj
template: llama3
cutoff_len: 1024
per_device_train_batch_size: 2
bf16: true
output_dir: out
"""
AXOLOTL = """base_model: Qwen/Qwen2.5-7B
adapter: qlora
load_in_4bit: true
sequence_len: 1024
micro_batch_size: 1
lora_r: 16
lora_target_linear: true
bf16: true
gradient_checkpointing: true
attn_implementation: sdpa
val_set_size: 0
output_dir: out
"""


@pytest.mark.parametrize(("file", "sizes"), [
    ("lf_qlora_qwen25_7b.yaml", QWEN_7B), ("ax_qlora_fa2.yml", LLAMA_3B), (LLAMA_FACTORY, LLAMA_8B), (AXOLOTL, QWEN_7B),
], ids=["LLaMA-Factory", "axolotl", "LLaMA-Factory, other targets", "axolotl, other attention"])  # fmt: skip
def test_embeddings_head_and_norms_stay_in_16_bits(file: str, sizes: tuple[int, int], tmp_path: Path) -> None:
    path = FIELD / file
    if "\n" in file:
        path = tmp_path / "run.yaml"
        path.write_text(file, "utf-8")
    plan = planned(str(path))
    assert component(plan, "weights") == pytest.approx(weight_bytes(*sizes), rel=0.005)
    in_fp32 = planned(str(path), "--loop", "trainer")
    assert component(in_fp32, "weights") == pytest.approx(weight_bytes(*sizes, item_bytes=4), rel=0.005)
    assert steady(plan)["allocated_bytes"] < steady(in_fp32)["allocated_bytes"]


def test_llama_factory_with_7b_in_4_bits_takes_below_11_gib() -> None:
    """What runs of this kind were reported to take; 15.28 GiB with everything beside 4 bits in fp32."""
    plan = planned(str(FIELD / "lf_qlora_qwen25_7b.yaml"))
    assert 10.4 * GIB < steady(plan)["needed_expected_bytes"] < 10.9 * GIB


CUT = """plugins:
  - axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin
"""


@pytest.mark.parametrize("text", [
    (FIELD / "ax_qlora_fa2.yml").read_text("utf-8"), AXOLOTL, AXOLOTL.replace("adapter: qlora\nload_in_4bit: true\n", "adapter: lora\n"),
], ids=["packed", "padded", "16 bits"])  # fmt: skip
def test_cut_cross_entropy_has_no_logits(text: str, tmp_path: Path) -> None:
    """Nothing as large as a batch of logits is there, and the rest is as without it."""
    paths = {name: tmp_path / f"{name}.yml" for name in ("whole", "cut", "off")}
    for name, more in (("whole", ""), ("cut", CUT), ("off", f"{CUT}cut_cross_entropy: false\n")):
        paths[name].write_text(text + more, "utf-8")
    whole, cut, off = (planned(str(path)) for path in paths.values())
    assert cut["bound"] == "exact"
    assert component(whole, "logits") > 1 * GIB
    assert component(cut, "logits") < 64 << 20
    assert component(cut, "weights") == component(whole, "weights")
    assert steady(cut)["allocated_bytes"] < steady(whole)["allocated_bytes"] - 1 * GIB
    assert steady(off)["allocated_bytes"] == steady(whole)["allocated_bytes"]


def test_plugin_of_a_file_is_planned_but_not_with_a_head_adapter(tmp_path: Path) -> None:
    assert planned(str(FIELD / "ax_qlora_cce.yml"))["bound"] == "exact"
    result = foretrain("plan", "qwen3-0.6b", "--method", "lora", "--lora-targets", "q_proj,lm_head",
                       "--cut-cross-entropy", "--gpu", "4090")  # fmt: skip
    assert (result.returncode, "cut cross-entropy" in result.stderr) == (2, True)
