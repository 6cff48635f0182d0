"""Training logs and MFU: formats as the programs print them, closed forms, hostile input, case B1 through the CLI."""

import io
import json
import math
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.analysis.log_analysis import analyse
from foretrain.analysis.log_checks import peak_at_clock, utilization
from foretrain.base.errors import UserError
from foretrain.base.quantities import parse_clock_ghz, parse_rate, parse_seconds
from foretrain.config.resolve import resolve
from foretrain.hardware.catalogue import find
from foretrain.runs import training_log
from foretrain.runs.formats.log_format import number
from foretrain.runs.training_log import EVALUATED, SAVED, parse_log, read_log, read_stream
from tests.kit.command import REPO, foretrain

B1 = str(REPO / "examples" / "real-cases" / "b1.py")
GPU = find("RTX 4070")
B1_FLOPS = (6 * 40_560_000 + 12 * 12 * 384 * 1024) * 524_288  # nanoGPT's estimate_mfu, an iteration
HEADER = """tokens per iteration will be: 524,288
defaulting to vocab_size of GPT-2 to 50304 (50257 rounded up for efficiency)
number of parameters: 40.56M
num decayed parameter tensors: 50, with 40,943,616 parameters
num non-decayed parameter tensors: 25, with 9,600 parameters
using fused AdamW: True
"""


def nanogpt(seconds: list[float], *, flops: float = B1_FLOPS, evaluate: int = 0, save: bool = True) -> str:
    """What nanoGPT's train.py prints for these iteration times (train.py, model.py; mfu from iteration 5 on)."""
    lines, mfu = [], -1.0
    for i, dt in enumerate(seconds):
        if evaluate and i % evaluate == 0:
            lines.append(f"step {i}: train loss {5 - i / 1e3:.4f}, val loss {5.1 - i / 1e3:.4f}")
            lines += ["saving checkpoint to out"] if i and save else []
        if i >= 5:
            now = flops / dt / 312e12
            mfu = now if mfu == -1.0 else 0.9 * mfu + 0.1 * now
        lines.append(f"iter {i}: loss {5 - i / 1e3:.4f}, time {dt * 1000:.2f}ms, mfu {mfu * 100:.2f}%")
    return HEADER + "\n".join(lines) + "\n"


def log_of(text: str) -> training_log.TrainingLog:
    return parse_log(text.splitlines(keepends=True))


def columns(log: training_log.TrainingLog) -> list[bytes]:
    return [bytes(column) for column in vars(log.steps).values()]


@pytest.mark.parametrize(
    ("line", "format", "step", "time_s", "loss", "mfu", "rate", "of"),
    [
        ("iter 10: loss 4.2031, time 135.21ms, mfu 12.90%", "nanogpt", 10, 0.13521, 4.2031, 0.129, None, None),
        ("iter 1631: loss 4.0863, time 561.94ms", "nanogpt", 1631, 0.56194, 4.0863, None, None, None),
        ("iter 0: loss 10.98, time 32000.10ms, mfu -100.00%", "nanogpt", 0, 32.0001, 10.98, None, None, None),
        (
            "step 04245/21400 (19.84%) | loss: 3.012123 | lrm: 1.00 | dt: 13776.73ms | tok/sec: 594 | mfu: 13.44 | "
            "total time: 971.74m", "nanochat", 4245, 13.77673, 3.012123, 0.1344, 594, 21400,
        ),
        (
            "step 00011/21400 (0.05%) | loss: 3.012123 | lrm: 1.00 | dt: 500.00ms | tok/sec: 1,048,576 | "
            "bf16_mfu: 48.10 | epoch: 1 pq: 0 rg: 3 | total time: 0.01m | eta: 178.2m",
            "nanochat", 11, 0.5, 3.012123, 0.481, 1_048_576, 21400,
        ),
        (
            "step     3 | loss: 10.955029 | lr 6.0000e-05 | norm: 15.3659 | dt: 3500.12ms | tok/sec: 149796.22",
            "build-nanogpt", 3, 3.50012, 10.955029, None, 149796.22, None,
        ),
        ("step 3, loss: 10.9, dt: 1000.00ms, tok/sec: 16000.00", "build-nanogpt", 3, 1, 10.9, None, 16000, None),
        (
            "step   42/74 | loss 3.364718 (+nanz)| norm 1.5494 (+nanz)| lr 3.00e-04 | 168.70 ms | 39.0% bf16 MFU | "
            "24333 tok/s", "llm.c", 42, 0.1687, 3.364718, 0.39, 24333, 74,
        ),
        ("step 1/74: train loss 4.367631 (80.639749 ms, 50795 tok/s)", "llm.c", 1, 0.0806, 4.367631, None, 50795, 74),
        ("step 0: train loss 5.356189 (took 26.500000 ms)", "llm.c", 0, 0.0265, 5.356189, None, None, None),
    ],
)  # fmt: skip
def test_lines_of_each_program(line, format, step, time_s, loss, mfu, rate, of) -> None:
    log = log_of(line)
    assert (log.format, log.steps.number[0], log.header.total_steps) == (format, step, of)
    assert log.steps.time_s[0] == pytest.approx(time_s, rel=1e-3)
    assert log.steps.loss[0] == pytest.approx(loss)
    for found, wanted in ((log.steps.logged_mfu[0], mfu), (log.steps.tokens_per_s[0], rate)):
        assert math.isnan(found) if wanted is None else found == pytest.approx(wanted)


def test_evaluations_and_saves_belong_to_the_next_iteration() -> None:
    log = log_of(nanogpt([3.9] * 12, evaluate=5))
    assert list(log.steps.happened) == [EVALUATED, 0, 0, 0, 0, EVALUATED | SAVED, 0, 0, 0, 0, EVALUATED | SAVED, 0]
    assert [e.step for e in log.evaluations] == [0, 5, 10]
    assert log.header.decayed_params == 40_943_616
    assert log.header.n_params_millions == 40.56


@pytest.mark.parametrize(
    "dress",
    [
        lambda line: f"2026-11-20 10:00:01,123 INFO {line}",
        lambda line: f"[default0]:{line}",
        lambda line: f"\x1b[32m{line[:6]}\x1b[0m{line[6:]}",
        lambda line: f"downloading 10%|█▏ | 3/30\r downloading 20%\r{line}",
        lambda line: f"{line}\n[rank1]: {line}" if "iter" in line else line,
        lambda line: f"{line}\n{line}" if "iter" in line else line,  # two processes without a name
        lambda line: line.replace("iter ", "noise ms 3.iter "),
    ],
)
def test_what_stands_around_the_lines_does_no_harm(dress) -> None:
    plain = nanogpt([3.9 + i % 7 / 1e3 for i in range(60)], evaluate=20)
    dressed = "\r\n".join(dress(line) for line in plain.splitlines())
    stream = io.BufferedReader(io.BytesIO(dressed.encode()))  # type: ignore[arg-type]
    found, wanted = read_stream(stream, "x"), log_of(plain)
    assert columns(found) == columns(wanted)
    assert (found.header, found.evaluations) == (wanted.header, wanted.evaluations)


def test_a_powershell_log_is_utf_16(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text(nanogpt([3.9] * 20), "utf-16")
    assert len(read_log(path).steps) == 20


def test_decimal_commas_and_glued_lines() -> None:
    log = log_of("step 500: train loss 4,1031, val loss 4,2031iter 500: loss 4,2031, time 135,21ms, mfu 12,90%")
    assert log.steps.time_s[0] == pytest.approx(0.13521)
    assert log.evaluations[0].val_loss == pytest.approx(4.2031)
    assert [number(text) for text in ("1,048,576", "33,785.52", "1,234", "12,90")] == [1048576, 33785.52, 1234, 12.9]


def test_resumed_runs_are_segments_and_other_models_other_runs() -> None:
    once = nanogpt([30.0, *[3.9] * 30])
    resumed = log_of(once + once)
    assert len(resumed.steps.starts) == 2
    found = analyse(resumed)
    assert {d.kind: d.count for d in found.disturbances} == {"compilation": 2}
    other = log_of(once.replace("524,288", "491,520") + once)
    assert (other.earlier_runs, len(other.steps), other.header.tokens_per_step) == (1, 31, 524_288)


def test_a_cut_line_zero_times_and_nan_losses() -> None:
    text = nanogpt([3.9] * 20).replace("time 3900.00ms", "time 0.00ms", 1).replace("loss 4.9900", "loss nan", 1)
    log = log_of(text + "iter 20: loss 4.2, time 39")
    assert (log.last_step, log.bad_times, len(log.steps)) == (19, 1, 20)
    ids = {f.id for f in analyse(log).findings}
    assert {"bad_times", "loss_not_finite"} <= ids
    with pytest.raises(UserError, match="possible time"):
        analyse(log_of("iter 0: loss 1.0, time -5.00ms, mfu 1.00%"))


def test_memory_stays_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_log, "MAX_STEPS", 50)
    log = log_of(nanogpt([3.9] * 80))
    assert (len(log.steps), log.uncounted, log.last_step) == (50, 30, 79)
    analyse(log)


NOISE = st.one_of(st.text(max_size=60), st.sampled_from([
    "iter 1: loss", "val loss 3", "step 5: train loss 1.0, val loss nan", "iter 9: loss 1.0, time 1e400ms, mfu 1%",
    "iter 999999999999: loss 1, time 1ms", "tokens per iteration will be: 0", "number of parameters: 9M", "|dt: 3ms",
    "num decayed parameter tensors: 0, with , parameters", "Overriding: n_layer = __import__('os')", "[rank3]: ms",
    "step 1/0 (nan%) | loss: 1 | dt: 5ms | tok/sec: 0", "GPU: x | Peak FLOPS (BF16): nan", "saving checkpoint to",
    "iter 3: loss 1.2.3, time 1.2.3ms, mfu 1,2,3%", "| device | |", "iter 2: loss -inf, time 12.0ms, mfu nan%",
]))  # fmt: skip


@given(st.lists(NOISE, max_size=30))
def test_any_text_is_read_or_refused_with_a_sentence(lines: list[str]) -> None:
    try:
        found = analyse(parse_log(lines), config=resolve([B1]).config, gpu=GPU)
    except UserError as error:
        assert str(error)
    else:
        json.dumps(found.to_json(), allow_nan=False)


@given(st.binary(max_size=400))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    try:
        read_stream(io.BufferedReader(io.BytesIO(data)), "x")  # type: ignore[arg-type]
    except UserError as error:
        assert error.exit_code == 7


@given(st.lists(st.text(alphabet="abcdefghij 0123456789|=-\t", max_size=40), min_size=1, max_size=20))
def test_noise_between_the_lines_is_ignored(noise: list[str]) -> None:
    plain = nanogpt([3.9] * 20, evaluate=10).splitlines()
    mixed = [line for i, one in enumerate(plain) for line in (one, noise[i % len(noise)])]
    assert columns(parse_log(mixed)) == columns(parse_log(plain))


# -- what it means -----------------------------------------------------------------------------------------


def test_steady_step_and_what_took_longer() -> None:
    """Each disturbance put in is found again with its size, at its place."""
    seconds = [3.9 + 0.01 * math.sin(i * i) for i in range(600)]
    seconds[0] += 70
    for i in (200, 400):
        seconds[i] += 40
    for i in range(450, 520):
        seconds[i] *= 1.12
    seconds[123] += 2
    found = analyse(log_of(nanogpt(seconds, evaluate=200)), config=resolve([B1]).config, gpu=GPU)
    assert found.steady_s == pytest.approx(3.9, rel=2e-3)
    assert 3.889 <= found.steady_low_s <= found.steady_high_s <= 3.911
    by_kind = {d.kind: d for d in found.disturbances}
    assert set(by_kind) == {"compilation", "evaluation_and_saving", "slow_down", "spike"}
    assert by_kind["compilation"].lost_s == pytest.approx(70, abs=0.05)
    assert by_kind["evaluation_and_saving"].lost_s == pytest.approx(80, abs=0.1)
    assert by_kind["spike"].first_step == by_kind["spike"].last_step == 123
    slow = by_kind["slow_down"]
    assert (slow.first_step, slow.last_step) == (450, 519)
    assert slow.slower_factor == pytest.approx(1.12, abs=0.005)
    assert found.lost_s == pytest.approx(sum(seconds) - 600 * found.steady_s, rel=0.01)


def test_noise_alone_is_no_slow_down() -> None:
    source = random.Random(7)
    seconds = [source.gauss(0.1, 0.006) for _ in range(2000)]
    kinds = {d.kind for d in analyse(log_of(nanogpt(seconds))).disturbances}
    assert "slow_down" not in kinds


def test_a_slow_down_to_the_end_sets_the_pace_of_the_rest() -> None:
    seconds = [3.9] * 300 + [4.5] * 100
    config = resolve([B1, "--max_iters=1000", "--lr_decay_iters=1000", "--warmup_iters=10"]).config
    left = analyse(log_of(nanogpt(seconds)), config=config, gpu=GPU).remaining
    assert left.steps == 601
    assert left.time_s.expected_s == pytest.approx(601 * 4.5, rel=1e-3)
    assert left.time_s.low_s == pytest.approx(601 * 3.9, rel=1e-3)
    assert left.energy_expected_j == pytest.approx(200 * 0.97 * 601 * 4.5, rel=1e-3)  # a GeForce at its limit


def test_evaluations_without_lines_are_known_from_the_config() -> None:
    seconds = [3.9 + (40 if i and i % 50 == 0 else 0) for i in range(200)]
    config = resolve([B1, "--eval_interval=50"]).config
    found = analyse(log_of(nanogpt(seconds)), config=config)
    assert {d.kind: d.count for d in found.disturbances} == {"evaluation": 3}


def test_the_config_of_the_log_agrees_to_the_digit() -> None:
    found = analyse(log_of(nanogpt([3.9] * 50)), config=resolve([B1]).config, gpu=GPU)
    assert {f.id for f in found.findings} == {"config_agrees", "mfu_agrees"}
    assert found.utilization.mfu == pytest.approx(0.692, abs=0.001)
    assert found.predicted_step_s


def test_another_config_is_told_with_both_numbers() -> None:
    other = resolve([str(REPO / "examples" / "real-cases" / "a.py")]).config
    found = {f.id: f.values for f in analyse(log_of(nanogpt([3.9] * 50)), config=other, gpu=GPU).findings}
    assert found["differs.tokens_per_step"] == {"log": 524_288, "config": 32_768}
    assert found["differs.n_params_millions"] == {"log": 40.56, "config": 29.94}
    assert found["differs.decayed_tensors"] == {"log": 50, "config": 26}
    assert "mfu_differs" in found
    assert "not_this_config" in found


def test_printed_mfu_shows_another_config_or_several_cards() -> None:
    bare = nanogpt([3.9] * 50).removeprefix(HEADER)
    deeper = resolve([B1, "--n_layer=14"]).config
    assert "mfu_differs" in {f.id for f in analyse(log_of(bare), config=deeper).findings}
    of_two = nanogpt([3.9] * 50, flops=B1_FLOPS / 2)
    found = {f.id: f.values for f in analyse(log_of(of_two), config=resolve([B1]).config).findings}
    assert found["mfu_of_one_of"]["processes"] == 2
    of_none = nanogpt([3.9] * 50, flops=B1_FLOPS / 50)
    assert "mfu_differs" in {f.id for f in analyse(log_of(of_none), config=resolve([B1]).config).findings}


def test_overrides_in_the_log_are_held_against_the_config() -> None:
    text = "Overriding: batch_size = 8\nOverriding: out_dir = x\nOverriding: n_layer = 12\n" + nanogpt([3.9] * 20)
    found = [f.values for f in analyse(log_of(text), config=resolve([B1]).config).findings if f.id.endswith("override")]
    assert found == [{"key": "batch_size", "log": "8", "config": 16}]


def test_old_nanochat_printed_one_micro_batch() -> None:
    """karpathy/nanochat#157: 594 tok/sec at 13.8 s a step of 524,288 tokens; mfu of an H100 on every card."""
    line = (
        "step {:05d}/21400 (0.1%) | loss: 3.0 | lrm: 1.00 | dt: 13776.73ms | tok/sec: 594 | mfu: 13.44 | total time: 1m"
    )
    text = "Total batch size 524,288 => gradient accumulation steps: 64\nStep 00000 | Validation bpb: 3.3000\n"
    found = analyse(log_of(text + "\n".join(line.format(i) for i in range(30))), gpu=find("RTX 4090"))
    assert found.tokens_per_s == pytest.approx(524_288 / 13.77673)
    assert {"nanochat_rate", "nanochat_h100"} == {f.id for f in found.findings}
    assert found.nanochat_mfu == pytest.approx(0.1344 * 989e12 / find("RTX 4090").peak_flop_per_s("bfloat16"))  # type: ignore[operator]
    assert found.losses.val_unit == "bits a byte"
    assert found.remaining.steps == 21_399 - 29


# -- MFU ---------------------------------------------------------------------------------------------------


def test_mfu_closed_forms() -> None:
    config = resolve([B1, "--activation_checkpointing=true"]).config
    used = utilization(config, GPU, 524_288 / 134_000, clock_ghz=2.63)
    n, layers, width, context = 40_560_000, 12, 384, 1024
    full, causal = 6 * n + 12 * layers * width * context, 6 * n + 6 * layers * width * context
    again = layers * (2 * 12 * width**2 + 4 * width * context)
    assert used.mfu == pytest.approx(134_000 * full / 58.3e12)
    assert used.mfu == pytest.approx(0.69, abs=0.002)
    assert used.nanogpt_mfu == pytest.approx(0.129, abs=0.0005)
    assert used.causal_mfu == pytest.approx(134_000 * causal / 58.3e12)
    assert used.hfu == pytest.approx(134_000 * (full + again) / 58.3e12)
    assert used.clock_mfu == pytest.approx(134_000 * full / (46 * 512 * 2.63e9))
    assert not used.impossible
    assert utilization(config, GPU, 0.1).impossible


@pytest.mark.parametrize("name", ["RTX 4070", "RTX 3060 12GB", "A100 SXM4 40GB", "H100 SXM5 80GB", "T4", "L4"])
def test_the_peak_at_the_makers_clock_is_the_makers_peak(name: str) -> None:
    gpu = find(name)
    for dtype in ("float16", "float32"):
        clock = gpu.boost_clock_ghz if dtype == "float16" or gpu.tf32_dense_tflops else gpu.fp32_clock_ghz
        peak = peak_at_clock(gpu, dtype, clock or gpu.boost_clock_ghz or 0)
        assert peak == pytest.approx(gpu.peak_flop_per_s(dtype), rel=0.02)


def test_a_step_twice_as_long_is_half_the_share() -> None:
    config = resolve([B1]).config
    once, twice = utilization(config, GPU, 3.9), utilization(config, GPU, 7.8)
    assert once.mfu == pytest.approx(2 * twice.mfu)  # type: ignore[operator]


def test_numbers_as_people_type_them() -> None:
    assert [parse_rate(t) for t in ("134k", "1.2M", "134,433", "39000 tok/s", "1e5")] == [
        134e3,
        1.2e6,
        134433,
        39e3,
        1e5,
    ]
    times = ("3.9", "3900ms", "3.9 s", "2min", "1m30s", ".5", "1,000us")
    assert [parse_seconds(t) for t in times] == pytest.approx([3.9, 3.9, 3.9, 120, 90, 0.5, 1e-3])
    assert [parse_clock_ghz(t) for t in ("2.63GHz", "2630 MHz")] == pytest.approx([2.63, 2.63])
    for parse, text in ((parse_rate, "1,2M"), (parse_rate, ""), (parse_rate, "-3"), (parse_seconds, "nan"),
                        (parse_clock_ghz, "2630"), (parse_rate, "٣k")):  # fmt: skip
        with pytest.raises(ValueError):
            parse(text)


# -- the command line --------------------------------------------------------------------------------------


def test_mfu_of_case_b1() -> None:
    result = foretrain("mfu", B1, "--tokens-per-s", "134k", "--gpu", "RTX 4070")
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert lines[:4] == [
        "MFU: b1 RTX 4070 · float16", "", "Share of the card's peak",
        "throughput 134,000 tokens/s: 524,288 tokens per step in 3.91 s",
    ]  # fmt: skip
    assert lines[4].startswith("MFU 68.9%: 40.2 TFLOP/s with full attention")
    assert any(line.startswith("MFU, causal 62.4% with 6·N + 6·L·C·T") for line in lines)
    assert "nanoGPT would print 12.9%: it divides by an A100's 312 TFLOP/s on every card" in lines
    made = json.loads(
        foretrain("mfu", B1, "--step-time", "3900ms", "--gpu", "4070", "--dtype=bfloat16", "--json").stdout
    )
    assert made["schema"] == "foretrain.mfu/1"
    assert made["dtype"] == "bfloat16"
    assert made["mfu"] == pytest.approx(0.692, abs=0.001)


def test_explain_of_case_b1(tmp_path: Path) -> None:
    path = tmp_path / "b1.log"
    path.write_text(nanogpt([32.0, *[3.9] * 299], evaluate=0))
    words = ("explain", str(path), "--config", B1, "--gpu", "4070", "--max_iters=20000", "--lr_decay_iters=20000")
    shown = " ".join(foretrain(*words).stdout.split())
    for says in (
        "Log: b1.log nanoGPT · 300 steps, 0 to 299, every 1 · measured", "steady step 3.9 s: the median of 295",
        "134,433 tokens/s", "MFU 69.2%: 40.3 TFLOP/s with full attention", "nanoGPT would print 12.9%",
        "The printed mfu matches the config (12.9% printed, 12.9% expected).",
        "first steps: compilation,", "28.1 s (×", "for 19,701 steps up to 20,000",
    ):  # fmt: skip
        assert says in shown, says
    made = json.loads(foretrain(*words, "--json").stdout)
    assert made["schema"] == "foretrain.explain/1#log"
    assert made["utilization"]["mfu"] == pytest.approx(0.692, abs=0.001)
    alone = foretrain("explain", str(path)).stdout
    assert "Add --config" in alone
    assert "134,433 tokens/s" in alone


def test_explain_reads_stdin_and_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom foretrain.cli import app\ntry: app(['explain', '-', '--config', 'gpt2-124m', '--gpu', '4070'])\n"
        "except SystemExit as e: assert e.code in (0, None), e.code\nassert not {'torch', 'numpy'} & set(sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], input=nanogpt([3.9] * 20), capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "does not match" in result.stdout


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "No such file"), (b"", "is empty"), (b"\n \n", "is empty"), (b"\x00\x01\x02" * 50, "is not text"),
        (b"epoch 1 loss 3\n", "no training step"), (b"iter 0: loss 1.0, time 0.00ms, mfu 1%\n", "possible time"),
    ],
)  # fmt: skip
def test_what_is_no_log_is_said_in_a_sentence(tmp_path: Path, content: bytes | None, says: str) -> None:
    path = tmp_path / "x.log"
    if content is not None:
        path.write_bytes(content)
    foretrain("explain", str(path), code=7, says=says)
    assert foretrain("explain", str(tmp_path)).returncode == 7


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "How fast"), (["--tokens-per-s", "0"], "134k"), (["--tokens-per-s", "-5"], "134k"),
        (["--tokens-per-s", "1e400"], "134k"), (["--step-time", "0"], "3900ms"), (["--step-time", "nan"], "3900ms"),
        (["--tokens-per-s", "1k", "--step-time", "3"], "one of them"),
        (["--tokens-per-s", "1k", "--clock", "2630"], "with its unit"),
        (["--tokens-per-s", "1k", "--clock", "99GHz"], "10 GHz"),
    ],
)  # fmt: skip
def test_speeds_that_cannot_be(words: list[str], says: str) -> None:
    foretrain("mfu", B1, "--gpu", "4070", *words, code=2, says=says)
