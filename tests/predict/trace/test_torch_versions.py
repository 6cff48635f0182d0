"""Notes on what other versions of torch allocate otherwise: only what the step meets, with its size."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

import foretrain
from foretrain.base.messages import say
from foretrain.predict.software import Software
from foretrain.predict.trace import forecast
from foretrain.predict.trace.interpreter import Norm
from foretrain.predict.trace.session import Tracing
from foretrain.predict.trace.traced import StandInError

ROWS, WIDTH = 512, 1024
NORMED_MIB = ROWS * WIDTH * 4 / 2**20  # of one call's input in fp32


def normed(on: Tracing) -> None:
    model = torch.nn.Sequential(*(torch.nn.RMSNorm(WIDTH, device=on.device) for _ in range(3)))
    with torch.autocast("cuda", torch.bfloat16):
        model(torch.empty(ROWS, WIDTH, device=on.device, dtype=torch.bfloat16, requires_grad=True)).sum().backward()


def sliced(on: Tracing) -> None:
    weight = torch.empty(ROWS, WIDTH, device=on.device, requires_grad=True)
    (weight * 2)[:, 1:].square().sum().backward()
    with torch.no_grad():
        torch.empty(ROWS, 4 * WIDTH, device=on.device, requires_grad=True)[:]


def plain(on: Tracing) -> None:
    weight = torch.empty(ROWS, WIDTH, device=on.device, requires_grad=True)
    F.layer_norm(weight[1], (WIDTH,)).sum().backward()


def test_a_step_that_meets_nothing_has_no_note() -> None:
    assert foretrain.trace(plain).notes == foretrain.trace(plain, torch_version="2.6").notes == ()


def test_norms_are_told_with_what_they_keep_in_each_version() -> None:
    (note,) = foretrain.trace(normed).notes
    assert f"traced with torch {torch.__version__}, which is taken to be the one that trains" in note
    assert "calls of rms_norm at the peak keep about" in note
    assert "torch 2.8 and before" in note


def test_only_the_version_that_trains_is_told_where_it_is_known() -> None:
    (note,) = foretrain.trace(normed, torch_version="2.9.1").notes
    assert "with torch 2.9;" in note
    assert "taken to be" not in note
    assert foretrain.trace(normed, torch_version=torch.__version__).notes == ()


@pytest.mark.parametrize("inside", [False, True], ids=("around the call", "in the compiled function"))
def test_compiled_norms_are_noted_where_autocast_casts_them(inside: bool) -> None:
    def code(on: Tracing, *, enabled: bool) -> None:
        def norm(x: torch.Tensor) -> torch.Tensor:
            if not inside:
                return F.rms_norm(x, (WIDTH,))
            with torch.autocast("cuda", torch.bfloat16, enabled=enabled):
                return F.rms_norm(x, (WIDTH,))

        x = torch.empty(ROWS, WIDTH, device=on.device, dtype=torch.bfloat16, requires_grad=True)
        with torch.autocast("cuda", torch.bfloat16, enabled=enabled or inside):
            torch.compile(norm)(x).sum().backward()

    (note,) = foretrain.trace(partial(code, enabled=True), compile=True).notes
    assert "the results of the 1 calls of rms_norm under autocast" in note
    assert "take up to 2 bytes of each element less with torch 2.8 and before and torch 2.9 to 2.11" in note
    assert foretrain.trace(partial(code, enabled=False), compile=True).notes == ()


@pytest.mark.parametrize(
    ("narrow", "weight", "autocast", "bytes_per_element"),  # torch 2.8, 2.11 and 2.12, as each was seen to keep
    [
        (False, "none", False, (0, 0, 0)),
        (False, "same", False, (4, 0, 0)),
        (False, "same", True, (4, 0, 0)),
        (True, "none", False, (4, 0, 0)),
        (True, "same", False, (6, 0, 0)),
        (True, "other", False, (6, 8, 8)),
        (True, "none", True, (4, 0, 4)),
        (True, "other", True, (6, 8, 4)),
    ],
)
def test_what_a_norm_keeps(narrow: bool, weight: str, autocast: bool, bytes_per_element: tuple[int, int, int]) -> None:
    norm = Norm(0, 2, 10, narrow, weight, autocast)
    assert tuple(norm.kept_bytes(Software(2, minor)) // 10 for minor in (8, 11, 12)) == bytes_per_element


def test_slices_of_whole_dimensions_are_noted_with_gradients() -> None:
    (note,) = foretrain.trace(sliced, torch_version="2.6").notes
    assert f"up to {NORMED_MIB:.1f} MiB more with torch 2.6" in note
    assert foretrain.trace(sliced, torch_version="2.10").notes == ()


@pytest.mark.parametrize(
    ("torch_version", "compiled", "id"),
    [
        ("2.6", False, "trace_other_torch"),
        ("2.5", False, "trace_unknown_torch"),
        ("2.11", True, "trace_unknown_torch"),
        ("", False, ""),
        (torch.__version__, False, ""),
    ],
)
def test_a_plan_says_that_another_torch_will_train(torch_version: str, compiled: bool, id: str) -> None:
    found = forecast.other_torch(torch_version, torch.__version__, compiled=compiled)
    assert [note.id for note in found] == ([id] if id else [])
    assert all(torch_version in say(f"note.{note.id}", **note.values) for note in found)


def test_the_answer_names_its_torch() -> None:
    assert f"with torch {torch.__version__}:" in str(foretrain.trace(plain))


def test_a_version_that_is_none_is_refused() -> None:
    with pytest.raises(StandInError, match="torch_version='new' is not a version of torch"):
        foretrain.trace(plain, torch_version="new")
