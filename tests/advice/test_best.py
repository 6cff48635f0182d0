"""Scaling laws against the papers' own numbers, and the search for the best model."""

import json
import math
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrain.advice.best import MOST_ASPECT, Best, best, shapes
from foretrain.base.errors import UserError
from foretrain.base.quantities import parse_limit
from foretrain.config.resolve import resolve
from foretrain.config.shape import ModelShape
from foretrain.hardware.catalogue import find
from foretrain.predict import scaling as s
from foretrain.predict.plan import Plan, plan, timing
from foretrain.predict.spec import StepSpec
from tests.kit.command import foretrain

CHINCHILLA_FLOPS = 5.76e23  # Hoffmann et al. 2022, section 4: Gopher's budget

# -- the laws ------------------------------------------------------------------------------------------------


def test_chinchilla_and_gopher_as_published() -> None:
    """With the rounded figures of the paper's text Chinchilla gets 1.936 and Gopher 1.993 (both often quoted)."""
    rounded = s.Fit("rounded", "", 1.69, 406.4, 410.7, 0.34, 0.28)
    assert rounded.loss(70e9, 1.4e12) == pytest.approx(1.936, abs=0.001)
    assert rounded.loss(280e9, 300e9) == pytest.approx(1.993, abs=0.001)


def optimum(fit: s.Fit, flops: float) -> tuple[float, float]:
    """(N, D) that `optimal_params` gives for a budget of 6·N·D FLOPs."""
    low, high = 1.0, flops
    for _ in range(200):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if 6 * fit.optimal_params(middle) * middle < flops else (low, middle)
    return fit.optimal_params(low), low


def test_tokens_a_parameter_as_published() -> None:
    """The corrected fit agrees with Chinchilla's 70 B on 1.4 T (20 a parameter); the first fit does not (2404.10102)."""
    n_params, tokens = optimum(s.BESIROGLU, CHINCHILLA_FLOPS)
    assert n_params == pytest.approx(70e9, rel=0.1)
    assert tokens / n_params == pytest.approx(20, rel=0.15)
    n_params, tokens = optimum(s.HOFFMANN, CHINCHILLA_FLOPS)
    assert n_params == pytest.approx(40e9, rel=0.05)  # Hoffmann et al. 2022, approach 3
    # Muennighoff et al. 2023, equation 17: U_N = 0.051 · U_D, and L = 1.87 + 521 / N^0.353 + 1488 / D^0.353.
    assert s.MUENNIGHOFF.optimal_params(1e9) == pytest.approx(0.051e9, rel=0.005)
    assert pytest.approx((1.87, 521, 1488), rel=0.002) == (s.MUENNIGHOFF.E, s.MUENNIGHOFF.A, s.MUENNIGHOFF.B)


def test_exponents_as_published() -> None:
    """a = β / (α + β) = 0.5126 of the corrected fit (Besiroglu et al. 2024)."""
    assert s.BESIROGLU.beta / (s.BESIROGLU.alpha + s.BESIROGLU.beta) == pytest.approx(0.5126, abs=5e-5)
    small, large = optimum(s.BESIROGLU, 1e20)[0], optimum(s.BESIROGLU, 1e22)[0]
    assert large / small == pytest.approx(100**0.5126, rel=1e-3)


@pytest.mark.parametrize("fit", s.FITS, ids=lambda fit: fit.name)
@given(st.floats(15, 25))
def test_the_optimum_is_one(fit: s.Fit, exponent: float) -> None:
    flops = 10**exponent
    n_params, tokens = optimum(fit, flops)
    assert 6 * n_params * tokens == pytest.approx(flops)
    lowest = fit.loss(n_params, tokens)
    assert lowest <= fit.loss(n_params * 1.05, tokens / 1.05)
    assert lowest <= fit.loss(n_params / 1.05, tokens * 1.05)
    assert fit.optimal_params(tokens) == pytest.approx(n_params, rel=1e-6)


def test_repeated_data_as_published() -> None:
    """Nearly fresh for 4 epochs, never worth more than 1 + 15.39 epochs, 1 − 1/e of fresh after 15.39 repeats."""
    assert s.effective_tokens(4e9, 1e9) == pytest.approx(3.726e9, rel=0.001)
    assert s.effective_tokens(1e14, 1e9) == pytest.approx(16.387756e9)
    assert s.effective_tokens(16.387756e9, 1e9) == pytest.approx(1e9 * (1 + s.R_D * (1 - 1 / 2.718281828)))
    assert s.effective_tokens(0.5e9, 1e9) == 0.5e9
    assert s.effective_tokens(1e10, None) == 1e10


@given(st.floats(6, 10), st.floats(6, 13), st.floats(6, 13))
def test_repetition_never_helps_and_more_never_hurts(size: float, tokens: float, data: float) -> None:
    n, d, u = 10**size, 10**tokens, 10**data
    fit = s.BESIROGLU
    assert fit.loss(n, d, u) >= fit.loss(n, d) - 1e-12
    assert fit.loss(n, 1.1 * d, u) <= fit.loss(n, d, u) + 1e-12
    assert fit.loss(n, d, 1.1 * u) <= fit.loss(n, d, u) + 1e-12


def test_a_batch_as_published() -> None:
    """DeepSeek's fit at the edges of what it was made on, from 1e17 to 2e19 FLOPs."""
    assert s.good_tokens_per_step(1e17) == pytest.approx(106_000, rel=0.02)
    assert s.good_tokens_per_step(2e19) == pytest.approx(600_000, rel=0.05)


# -- the search ----------------------------------------------------------------------------------------------


def test_the_grid_is_of_gpts() -> None:
    found = list(shapes())
    assert {"n_layer": 12, "n_head": 12, "n_embd": 768} in found
    for shape in found:
        assert shape["n_embd"] == 64 * shape["n_head"]
        assert shape["n_embd"] / shape["n_layer"] <= MOST_ASPECT


@cache
def answer(
    *words: str, gpu: str = "RTX 4070", limit: str = "20h", others: int = 0, data: int | None = None
) -> tuple[Plan, Best]:
    base = plan(resolve(list(words)).config, find(gpu), used_by_others_bytes=others, dataset_tokens=data)
    return base, best(base, parse_limit(limit))


def test_the_best_fits_and_is_the_lowest() -> None:
    base, found = answer(data=3_680_000_000)
    winner = found.candidates[0]
    assert len(found.candidates) == 6
    assert winner.loss <= min(c.loss for c in found.candidates) + 0.0021
    for c in found.candidates:
        made = plan(c.config, base.gpu, dataset_tokens=3_680_000_000)
        assert made.verdict_of("foretrain") == "fits"
        assert made.timing.total_s.expected_s <= 20 * 3600
        assert made.timing == c.timing
        assert made.work.tokens == c.tokens
        assert c.n_params == ModelShape.of(c.config).n_params
        assert c.loss_low <= c.loss <= c.loss_high
        assert c.config.lr_decay_iters == c.config.max_iters == c.steps
        assert c.config.tokens_per_step == winner.config.tokens_per_step
    assert found.binds == ("time",)
    assert 8 < winner.tokens / winner.n_params < 60  # about compute-optimal


def test_nothing_in_the_grid_beats_it() -> None:
    """Against a plain walk over every shape, without the search's short cuts."""
    base, found = answer(limit="1h")
    winner = found.candidates[0]
    lowest = winner.loss
    for shape in shapes():
        for batch in (1, 4, 16, 64):
            rest = {"batch_size": batch, "gradient_accumulation_steps": winner.config.tokens_per_step // 1024 // batch}
            if not rest["gradient_accumulation_steps"]:
                continue
            config = winner.config.model_copy(update={**shape, **rest, "eval_iters": max(1, winner.config.eval_iters)})
            if 16 * ModelShape.of(config).n_params > 12 * 2**30:
                continue
            took = timing(StepSpec.of(config, base.gpu, dtype=base.dtype))
            steps = 3600 / took.step_s.expected_s
            loss = s.BESIROGLU.loss(ModelShape.of(config).n_params, steps * config.tokens_per_step)
            if loss < lowest - 0.01 and plan(config, base.gpu).verdict_of("foretrain") == "fits":
                # More steps than fit beside compilation and evaluations were counted: only a lower loss by far counts.
                pytest.fail(f"{shape} {batch}: {loss} is below {lowest}")


ALL = pytest.mark.slow


@pytest.mark.parametrize("limits", [("1h", "20h"), pytest.param(("1h", "5h", "1d", "5d"), marks=ALL)])
def test_more_time_never_makes_it_worse(limits: tuple[str, ...]) -> None:
    losses = [answer(limit=limit)[1].candidates[0].loss for limit in limits]
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize("cards", [("3060", "RTX 4070"), pytest.param(("3060", "RTX 4070", "4090", "H200"), marks=ALL)])
def test_a_larger_card_never_makes_it_worse(cards: tuple[str, ...]) -> None:
    losses = [answer(gpu=gpu)[1].candidates[0].loss for gpu in cards]
    assert losses == sorted(losses, reverse=True)


def test_what_binds_is_said() -> None:
    assert "memory" in answer(limit="10d", others=10 * 2**30)[1].binds
    worn = answer(limit="30d", data=20_000_000)[1]
    assert "epochs" in worn.binds
    assert worn.candidates[0].epochs == pytest.approx(40, abs=1)
    assert "data" in answer(limit="3d", data=500_000_000)[1].binds
    assert answer(limit="0.3EUR")[1].binds[0] == "money"


def test_what_the_user_set_is_kept() -> None:
    base = plan(resolve(["--eval_iters=50", "--batch_size=8", "--block_size=512"]).config, find("4070"))
    found = best(base, parse_limit("2h"), given=frozenset({"eval_iters", "batch_size", "block_size"}))
    config = found.candidates[0].config
    assert config.block_size == 512
    assert config.eval_iters * config.batch_size == pytest.approx(400, rel=0.1)


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(st.floats(2, 7.5), st.sampled_from(["T4", "4090"]), st.sampled_from([None, 10**7, 10**9]))
def test_whatever_the_limit_the_answer_is_within_it(exponent: float, gpu: str, data: int | None) -> None:
    seconds = 10**exponent
    base = plan(resolve([]).config, find(gpu), dataset_tokens=data)
    limit = parse_limit("1h").model_copy(update={"amount": seconds})
    try:
        found = best(base, limit)
    except UserError as error:
        assert error.id == "check.best_nothing"
        return
    for c in found.candidates:
        assert c.timing.total_s.expected_s <= seconds
        assert c.epochs is None or c.epochs <= 40.01 or c.steps == 1


def test_on_the_command_line() -> None:
    words = ("plan", "--gpu", "RTX 4070", "--best", "--within", "20h", "--data-tokens", "3.68B", "--full")
    shown = foretrain(*words)
    assert shown.returncode == 0, shown.stderr
    for said in ("estimate", "the fits say", "arXiv:2404.10102", "layers", "What limits the loss", "2GB"):
        assert said in " ".join(shown.stdout.split())
    made = json.loads(foretrain(*words, "--write", "best.toml", "--json").stdout)
    assert made["schema"] == "foretrain.plan/1#best"
    assert resolve(["best.toml"]).config.n_layer == made["candidates"][0]["config"]["n_layer"]
    planned = json.loads(foretrain("plan", "best.toml", "--gpu", "RTX 4070", "--json").stdout)
    assert planned["timing"] == made["candidates"][0]["timing"]
    assert planned["work"]["epochs"] == pytest.approx(made["candidates"][0]["epochs"])


def test_two_cards_reach_a_lower_loss_in_the_same_time(tmp_path: Path) -> None:
    words = ("plan", "--best", "--within", "10min", "--json")
    alone = json.loads(foretrain(*words, "--gpu", "RTX 3060").stdout)
    path = tmp_path / "pair.toml"
    found = json.loads(foretrain(*words, "--gpus", "2 x RTX 3060", "--strategy=ddp", "--write", str(path)).stdout)
    one, two = alone["candidates"][0], found["candidates"][0]
    assert two["loss"] < one["loss"]
    flops = [each["tokens"] * each["n_params"] for each in (one, two)]
    assert 1.5 < flops[1] / flops[0] < 2.4  # a larger model makes better use of a card
    planned = json.loads(foretrain("plan", str(path), "--gpus", "2 x RTX 3060", "--json").stdout)
    assert (planned["verdict"], planned["chosen"]) == ("fits", "ddp")
    assert planned["timing"] == two["timing"]
    assert planned["needed_bytes"] == two["needed_bytes"]


def test_what_is_no_loss_is_not_called_one() -> None:
    """A law that gives more than blind guessing does not hold."""
    words = ("plan", "--gpu", "4070", "--best", "--within")
    for form in ((), ("--full",)):
        shown = " ".join(foretrain(*words, "28s", *form).stdout.split())
        assert "No loss can be estimated" in shown
    bytes_ = " ".join(foretrain(*words, "5h", "--vocab_size=256", "--full").stdout.split())
    assert "tens of thousands of tokens" in bytes_


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--best"], 2, "give --within"),
        (["--best", "--tokens", "5B"], 2, "give --within"),
        (["--best", "--within", "4s"], 3, "no GPT in the grid"),
        (["--best", "--within", "5h", "--memory_limit=300MiB"], 3, "no GPT in the grid"),
        (["--best", "--within", "5h", "--step-time", "3"], 2, "--step-time"),
        (["--best", "--within", "5h", "--data-tokens", "0"], 2, "--data-tokens"),
        (["--best", "--within", "5USD"], 2, "EUR"),
        (["--best", "--within", "5h", "--gpu", "Apple M1 Pro"], 2, "--memory_limit"),
    ],
)
def test_what_cannot_be_searched(words: list[str], code: int, says: str) -> None:
    foretrain("plan", "--gpu", "4070", *words, code=code, says=says)
