"""What others published: every record has a source, a card of the catalogue, and a config that can be planned."""

import json
import math
import re

import pytest

from foretrain.config.resolve import resolve
from foretrain.config.shape import ModelShape
from foretrain.hardware.catalogue import find
from tests.kit.command import REPO

DOCUMENT = json.loads((REPO / "benchmarks" / "published_logs.json").read_text("utf-8"))
LOGS = DOCUMENT["logs"]
RATES = json.loads((REPO / "benchmarks" / "published_rates.json").read_text("utf-8"))
SHAPE = {"n_layer", "n_head", "n_embd", "block_size", "vocab_size", "batch_size", "gradient_accumulation_steps"}


def test_origin_is_on_one_side_and_logged_4070_only_judged() -> None:
    origins = {log["origin"] for log in LOGS}
    assert set(DOCUMENT["looked_at"]) < origins
    for log in LOGS:
        if log["gpu"] == "RTX 4070" or log["origin"] == "lzwjava":
            assert log["origin"] not in DOCUMENT["looked_at"]
    repositories: dict[str, set[str]] = {}
    for log in LOGS:
        if repository := re.match(r"[\w.-]+/[\w.-]+", log["source"]):
            repositories.setdefault(repository[0], set()).add(log["origin"])
    for name, found in repositories.items():
        assert len(found) == 1, f"{name}: rows of one source stand on one side"


def test_ids_are_unique() -> None:
    assert len({log["id"] for log in LOGS}) == len(LOGS)


@pytest.mark.parametrize("log", LOGS, ids=lambda log: log["id"])
def test_record(log: dict) -> None:
    assert set(log) == set(DOCUMENT["fields"])
    assert log["kind"] in ("nanogpt", "pytorch", "other")
    assert log["source"]
    assert any(character.isdigit() for character in log["logged"])
    assert log["gpus"] >= 1
    assert isinstance(log["compiled"], bool)
    assert all(isinstance(line, str) and line for line in [*log["assumed"], *log["differs"]])
    assert log["kind"] == "nanogpt" or log["differs"] or log["doubtful"], "what differs from nanoGPT's step?"

    gpu = find(log["gpu"])
    assert gpu.name == log["gpu"]
    assert set(log["config"]) >= SHAPE
    config = resolve([f"--{key}={value}" for key, value in log["config"].items()]).config
    peak = gpu.peak_flop_per_s(log["dtype"])
    assert peak
    mfu = log["tokens_per_s"] * ModelShape.of(config).flops_per_token / peak
    assert 0.01 < mfu < 1, "no card passes its peak: the figure, the shape or the card is wrong"


RATE_ROWS = [
    (name, row) for name, rows in RATES.items() if isinstance(rows, list) and name != "not_found" for row in rows
]


@pytest.mark.parametrize(("name", "row"), RATE_ROWS, ids=lambda value: value if isinstance(value, str) else "")
def test_rate(name: str, row: dict) -> None:
    assert row["source"]
    assert "gpu" in row or name == "eager_overhead"
    numbers = [value for value in row.values() if isinstance(value, int | float)]
    numbers += list(row.get("tflops_by_n", {}).values())
    assert numbers
    assert all(math.isfinite(value) and value > 0 for value in numbers)


def test_derived_rates_follow_from_their_figures() -> None:
    for row in RATES["compile"]:
        assert row["compile_s"] == pytest.approx(row["first_step_s"] - row["of_it_other_s"], abs=0.1)
    for row in RATES["compiled_launch"]:
        each = [1e3 * ms / kernels for ms, kernels in zip(row["step_ms"], row["kernels"], strict=True)]
        assert row["launch_us"] == pytest.approx(sorted(each)[1], abs=4)
    for row in RATES["host_bound_inference"]:
        kernels = row["blocks"] * row["kernels_per_block"]
        assert row["launch_us"] == pytest.approx(1e6 / row["tokens_per_s"] / kernels, abs=0.1)
    for row in RATES["bandwidth"]:
        assert row["measured_gb_per_s"] < row["nominal_gb_per_s"]
