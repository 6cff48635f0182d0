"""The estimate's reserved memory: its lifetimes, replayed."""

from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrain.advice.planner import Planner
from foretrain.advice.rules.base import State
from foretrain.config.options import RunConfig
from foretrain.hardware.catalogue import find
from foretrain.predict.allocator.replay import replay
from foretrain.predict.allocator.settings import Settings
from foretrain.predict.estimate.simulated_run import SimulatedRun
from foretrain.predict.plan import plan
from foretrain.predict.spec import StepSpec
from foretrain.predict.timeline import Timeline


def events_of(config: RunConfig, step: str) -> SimulatedRun:
    run = SimulatedRun(StepSpec.of(config, find("RTX 4070"), step, dtype="bfloat16"))  # type: ignore[arg-type]
    run.peaks()
    return run


def test_every_tensor_dies_once_and_sums_are_the_peaks() -> None:
    for config in (
        RunConfig(),
        RunConfig(compile=False),
        RunConfig(optimizer="muon"),
        RunConfig(optimizer="adamw8bit"),
        RunConfig(optimizer="adamw4bit"),
        RunConfig(optimizer_in_backward=True, gradient_accumulation_steps=1, grad_clip=0.0, compile=False),
        RunConfig(optimizer_in_backward=True, gradient_accumulation_steps=1, grad_clip=0.0, compile_blocks=True),
    ):
        t = events_of(config, "foretrain").t
        alive, now, top = set(), 0, 0
        for event in t.events:
            if event >= 0:
                alive.add(event)
                now += t.sizes[event]
            else:
                alive.remove(~event)
                now -= t.sizes[~event]
            top = max(top, now)
        assert abs(top / max(peak.nbytes for peak in t.peaks.values()) - 1) < 1e-4  # sums round once, parts each


@settings(max_examples=25)
@given(
    st.sampled_from(["nanogpt", "modern"]), st.sampled_from(["foretrain", "nanogpt"]), st.booleans(), st.integers(1, 5),
    st.fixed_dictionaries(
        {}, optional={
            "activation_checkpointing": st.just(True), "loss_chunk_size": st.sampled_from([200, 1024]),
            "optimizer": st.sampled_from(["adamw8bit", "adamw4bit", "muon"]), "optimizer_offload": st.just(True), "dropout": st.just(0.1),
        },
    ),
)  # fmt: skip
def test_what_repeats_is_what_would_have_happened(
    recipe: str, step: str, compiled: bool, accumulation: int, knobs: dict[str, Any]
) -> None:
    config = RunConfig.model_validate(
        {"recipe": recipe, "n_layer": 3, "n_embd": 256, "n_head": 4, "block_size": 256, "batch_size": 8,
         "gradient_accumulation_steps": accumulation, "compile": compiled, **knobs}
    )  # fmt: skip
    repeated = events_of(config, step)
    with mock.patch.object(Timeline, "repeat", return_value=None):
        whole = events_of(config, step)
    assert (repeated.t.events, repeated.t.sizes) == (whole.t.events, whole.t.sizes)
    assert repeated.t.nbytes == whole.t.nbytes
    for phase, peak in whole.t.peaks.items():
        own = repeated.t.peaks[phase]
        assert (own.nbytes, own.moment) == (peak.nbytes, peak.moment)
        assert sorted((k.component, n) for k, n in own.alive.items()) == sorted(
            (k.component, n) for k, n in peak.alive.items()
        )


def test_expandable_segments_live_from_less() -> None:
    """Traces of case C, eager, live from 1.33 times their tensors, with expandable segments from 1.01 times."""
    run = events_of(RunConfig(batch_size=16, compile=False, dropout=0.0), "nanogpt")
    tensors = max(peak.nbytes for peak in run.t.peaks.values())
    joined = Settings(expandable_segments=True)
    assert not replay(run.t, None, round(1.12 * tensors), physical=True).survives
    assert replay(run.t, joined, round(1.03 * tensors), physical=True).survives
    assert not replay(run.t, joined, round(0.98 * tensors), physical=True).survives
    assert replay(run.t, None, replay(run.t).peak_reserved_bytes, physical=True).survives


def test_settings_of_their_own_are_replayed() -> None:
    t = events_of(RunConfig(batch_size=2, n_layer=3), "foretrain").t
    rounded = replay(t, Settings.parse("roundup_power2_divisions:2"))
    assert rounded.peak_reserved_bytes > replay(t).peak_reserved_bytes


def test_a_fraction_of_the_card_caps_the_run() -> None:
    """per_process_memory_fraction is one of the whole card, and memory_limit takes its place."""
    config = RunConfig(batch_size=8, compile=False, dtype="bfloat16")
    halved = config.model_copy(update={"allocator_settings": "per_process_memory_fraction:0.3"})
    limited = halved.model_copy(update={"memory_limit": "23GiB"})
    card = find("RTX 4090")
    worst = [step.verdict for each in (config, halved, limited) for step in plan(each, card).memory]
    assert worst == ["fits", "fits", "does_not_fit", "does_not_fit", "fits", "fits"]
    advised = Planner().outcome(State(halved, card, "nanogpt", 0))
    assert advised.verdict == "does_not_fit"


@pytest.mark.parametrize(("batch", "block"), [(1_000_000, 100_000), (100_000, 100_000), (1_000_000, 4_194_304)])
def test_sizes_that_no_card_has_are_planned_too(batch: int, block: int) -> None:
    """All within the limits of the options. Simulated addresses of petabytes ran into each other."""
    config = RunConfig(batch_size=batch, block_size=block)
    made = plan(config, find("RTX 4070"))
    assert made.verdict == "does_not_fit"
    logits = 2 * batch * block * config.vocab_size
    assert made.memory_of("foretrain").needed_bytes > logits
