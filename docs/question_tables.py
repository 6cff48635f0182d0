"""The table of docs/questions.md: what is often advised, planned for the real case C."""

from typing import Any

from results import ROOT

from foretrain.base.quantities import parse_bytes
from foretrain.base.units import format_bytes
from foretrain.config.resolve import resolve
from foretrain.hardware.catalogue import find
from foretrain.predict.memory import StepName
from foretrain.predict.plan import Plan, plan

OTHERS_BYTES = parse_bytes("2.1GB")
VERDICTS = {"fits": "fits", "tight": "tight", "does_not_fit": "does not fit", None: "–"}

# (what is said, the options of case C that it means, whether nanoGPT has them, what it does to what is learned)
ADVICE: tuple[tuple[str, dict[str, Any], bool, str], ...] = (
    ("halve `batch_size`, double accumulation", {"batch_size": 8, "gradient_accumulation_steps": 64}, True, "nothing"),
    ("fewer `eval_iters`: 20", {"eval_iters": 20}, True, "a noisier validation loss"),
    ("a narrower model: `n_embd` 384", {"n_embd": 384}, True, "a smaller model"),
    (
        "`block_size` 256, same tokens per step",
        {"block_size": 256, "gradient_accumulation_steps": 128}, True, "the model sees a quarter of the context",
    ),
    ("a smaller evaluation batch: 4", {"eval_batch_size": 4}, False, "nothing"),
    ("a shorter context in evaluation: 256", {"eval_block_size": 256}, False, "a validation loss at a shorter context"),
    ("activation (“gradient”) checkpointing", {"activation_checkpointing": True}, False, "nothing"),
    ("the loss in chunks of 1,024 tokens", {"loss_chunk_size": 1024}, False, "nothing"),
)  # fmt: skip


def _plan(changes: dict[str, Any]) -> Plan:
    config = resolve([str(ROOT / "examples" / "real-cases" / "c.py")]).config
    return plan(config.model_copy(update=changes), find("RTX 4070"), used_by_others_bytes=OTHERS_BYTES)


def _row(said: str, made: Plan, base: Plan, step: StepName, learning: str) -> str:
    memory, before = made.memory_of(step), base.memory_of(step)
    timing = made.timing_of(step)
    was = base.timing_of(step)
    assert timing is not None
    assert was is not None
    needs, saves = memory.worst.needed_expected_bytes, before.worst.needed_expected_bytes
    hours = f"{(timing.total_s.expected_s / was.total_s.expected_s - 1) * 100:+.1f} %" if made is not base else ""
    verdict = VERDICTS[made.verdict_of(step)]
    less = format_bytes(saves - needs) if made is not base else ""
    return f"| {said} | {format_bytes(needs)} | {less} | {verdict} | {hours} | {learning} |"


def circulating() -> str:
    base = _plan({})
    lines = [
        "| advice | needs about | saves | verdict | time of the run | changes in the result |",
        "| --- | ---: | ---: | --- | ---: | --- |",
        _row("**nanoGPT's step, current config**", base, base, "nanogpt", ""),
    ]
    for said, changes, theirs, learning in ADVICE:
        if theirs:
            lines.append(_row(said, _plan(changes), base, "nanogpt", learning))
    lines.append(_row("**foretrain's step, current config**", base, base, "foretrain", "nothing"))
    for said, changes, theirs, learning in ADVICE:
        if not theirs:
            lines.append(_row(said, _plan(changes), base, "foretrain", learning))
    return "\n".join(lines)
