"""A reward model: a decoder with a score of each sequence in the place of its head, which learns from pairs of them.

transformers 5.23 (modeling_layers.py, GenericForSequenceClassification) with one label, and the loss of TRL's
RewardTrainer (trl 1.16, compute_loss): a batch has the chosen sequences of all pairs, then the rejected ones.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from foretrain.model.hub.decoder import Build, Decoder


class RewardModel(Decoder):
    def __init__(self, facts: Any, build: Build | None = None, **ways: bool) -> None:
        super().__init__(facts, build, **ways)
        self.lm_head = nn.Linear(facts.n_embd, 1, bias=False)

    def forward(self, idx: Tensor, labels: Tensor) -> Any:
        """Return the mean loss of Bradley and Terry, whose labels are the order of the rows."""
        rewards = self.rewards(idx)
        chosen, rejected = rewards.chunk(2)
        return -F.logsigmoid(chosen - rejected).mean()

    def rewards(self, idx: Tensor) -> Tensor:
        """Return the score of each sequence at its last token."""
        states = self.states(idx)
        scores = self.lm_head(states)
        return scores[:, -1].float()
