"""Plans for several cards: what is asked, what each strategy takes, and whether more cards pay."""

import pytest

from foretrain.base.errors import UserError
from foretrain.config.options import RunConfig
from foretrain.config.ranks import of_rank


def test_ranks_share_the_micro_batches_of_a_step() -> None:
    config = RunConfig(batch_size=8, gradient_accumulation_steps=64)
    for world in (1, 2, 8, 64):
        assert of_rank(config, world).tokens_per_step * world == config.tokens_per_step


def test_a_world_that_does_not_divide_names_the_same_tokens_or_the_nearest() -> None:
    with pytest.raises(UserError) as found:
        of_rank(RunConfig(batch_size=12, gradient_accumulation_steps=1, block_size=64), 8)
    assert found.value.id == "config.ranks_indivisible_near"
    assert "8 (6,144)" in str(found.value)
    with pytest.raises(UserError) as found:
        of_rank(RunConfig(batch_size=12, gradient_accumulation_steps=2, block_size=64), 8)
    assert "--batch_size=3 --gradient_accumulation_steps=8" in str(found.value)
    assert int(found.value.exit_code) == 2
