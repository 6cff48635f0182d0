"""What FSDP's passes wait for, in closed form: each collective takes a second, each pass as many as it says."""

import pytest

from foretrain.predict.speed.ranks import Unit, shared_passes_s


def seconds(what: str, size_bytes: float) -> float:
    return size_bytes


@pytest.mark.parametrize(
    ("outer_sent", "expected"),
    [
        (0.0, 1 + 1 + 10 + 10 + 1),  # outer and block are gathered, both passes, the block's gradients are sent
        (3.0, 1 + 1 + 10 + 10 + 1 + 3),  # then those of what is around it, in one queue
    ],
)
def test_gradients_are_sent_behind_the_last_pass(outer_sent: float, expected: float) -> None:
    outer = Unit(1.0, outer_sent, 0.0, 0.0, reshards=False, outer=True)
    block = Unit(1.0, 1.0, 10.0, 10.0, reshards=False)
    assert shared_passes_s([block, outer], seconds) == expected
