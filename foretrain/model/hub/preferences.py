"""Models that learn from preferences, as TRL's trainers run them (trl 1.16), and classifiers of sequences.

A reward model or classifier has scores of each sequence in the place of its head: transformers 5.23
(modeling_layers.py, GenericForSequenceClassification), and RewardTrainer.compute_loss. A policy's log-probabilities are
compared with a reference's: DPOTrainer._compute_loss. A batch has the chosen sequences of all pairs, then the rejected
ones; KTOTrainer's, of single ones, comes with each prompt beside another's answer.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretrain.model.hub.decoder import Build, Decoder
from foretrain.model.hub.experts import Folded, balance
from foretrain.model.hub.kernels import launch
from foretrain.model.hub.linear import Lora
from foretrain.model.hub.tiles import IGNORED

Autocast = Callable[[], AbstractContextManager[Any]]
BETA, GAMMA = 0.1, 0.5
CLIPPED = 0.2  # GRPO's epsilon


class Others(NamedTuple):
    """The prompts of samples with answers of others. `signs`: 1 where the sample is desirable, else -1."""

    idx: Tensor
    mask: Tensor
    signs: Tensor


class Written(NamedTuple):
    """Completions of the model's own. `mask`: of the sequences' tokens, B x T. `old`, `reference`: log-probabilities,
    B x L, of the model that wrote them, None where it is this one, and of the reference, None where there is none.
    `whole`: of all tokens together, as RLOO compares them, whose reference is in the advantages."""

    mask: Tensor
    advantages: Tensor
    length: int
    old: Tensor | None = None
    reference: Tensor | None = None
    whole: bool = False


class RewardModel(Decoder):
    def __init__(self, facts: Any, build: Build | None = None, **ways: bool) -> None:
        super().__init__(facts, build, **ways)
        self.lm_head = nn.Linear(facts.n_embd, facts.scores, bias=False)

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


class Classifier(RewardModel):
    def forward(self, idx: Tensor, labels: Tensor) -> Any:
        """Return the mean loss of the classes of sequences, transformers' ForSequenceClassificationLoss."""
        return F.cross_entropy(self.rewards(idx), labels)


class _LogProbs(torch.autograd.Function):
    """The log-probability of each label by whole logits: TRL's selective_log_softmax, which saves them."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        ctx.save_for_backward(logits, labels)
        if logits.device.type == "cuda":  # kernels/logprob_entropy.py
            found, *logged = (logits.new_empty(labels.shape, dtype=torch.float32) for _ in range(4))
            launch("triton_softmax", (found, *logged), logits, labels)
            return found
        return torch.log(F.softmax(logits.float(), -1).gather(-1, labels.unsqueeze(-1)).squeeze(-1))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels = ctx.saved_tensors
        if logits.device.type == "cuda":
            found = logits.new_empty(logits.shape, dtype=logits.dtype)
            launch("triton_softmax_backward", found, logits, labels, grads[0])
            return found, None
        found = F.softmax(logits.float(), -1) * -grads[0].unsqueeze(-1)
        found.scatter_add_(-1, labels.unsqueeze(-1), grads[0].unsqueeze(-1))
        return found.to(logits.dtype), None


class Pair(Decoder):
    """A model that learns from pairs alone: ORPO's, or CPO's and SimPO's."""

    def compared(self, idx: Tensor, mask: Tensor, autocast: Autocast, *, odds: bool, predicts: bool) -> Tensor:
        """Return the mean loss. `odds`: that of ORPO; `predicts`: with that of the next tokens of what was chosen."""
        idx, mask = torch.cat(idx.chunk(2)), torch.cat(mask.chunk(2))
        with autocast():
            logits = self.logits(idx)
            if torch.is_autocast_enabled(logits.device.type):
                logits = logits.float()  # accelerate's convert_outputs_to_fp32
        labels = idx if odds else idx.masked_fill(mask == 0, IGNORED)
        nll = shifted_loss(logits.chunk(2)[0], labels.chunk(2)[0]) if predicts else None
        counted = mask[:, 1:].contiguous()
        log_probs = _LogProbs.apply(logits[:, :-1], idx[:, 1:].contiguous()) * counted
        sums = log_probs.sum(-1) / counted.sum(-1) if odds or not predicts else log_probs.sum(-1)
        if odds:
            sums = sums - torch.log(1 - torch.exp(sums))
        chosen, rejected = sums.chunk(2)
        better = F.logsigmoid(chosen - rejected if odds else (chosen - rejected) * BETA - (0 if predicts else GAMMA))
        loss = -better.mean() * (BETA if odds else 1)
        return loss if nll is None else loss + nll


def shifted_loss(logits: Tensor, labels: Tensor) -> Tensor:
    V = logits.shape[-1]
    return F.cross_entropy(logits[:, :-1].contiguous().view(-1, V), labels[:, 1:].contiguous().view(-1))


class Policy(Decoder):
    """A model that is compared with what it was: a copy, or, with adapters, itself without them."""

    def __init__(self, facts: Any, build: Build | None = None, **ways: bool) -> None:
        super().__init__(facts, build, **ways)
        self.copy: Any = None

    def compared(
        self, idx: Tensor, mask: Tensor, autocast: Autocast, *, reference: bool, others: Others | None = None
    ) -> Tensor:
        """Return the mean loss of pairs, or of single samples with `others`, which is KTO's. `mask`: of completions;
        `reference`: it runs, too, else its log-probabilities came with the batch."""
        drift = self.drift(others, autocast) if others else None
        labels = idx.masked_fill(mask == 0, IGNORED)
        routed: list[Tensor] = []
        with autocast():
            log_probs, *logged = self.scores(idx, labels, routed if self.facts.balanced else None)
            counted = mask.reshape(-1).to(torch.float32) if routed else None
            balanced = balance(routed, self.facts.experts_per_token, counted) if routed else None
        del counted
        routed.clear()
        ratios = log_probs.sum(1)
        if reference:
            own, other = self.before(idx, labels, autocast, others)
            ratios = ratios - own
            drift = drift - other if drift is not None and other is not None else drift
        if others is None or drift is None:
            chosen, rejected = ratios.chunk(2)
            loss = -F.logsigmoid((chosen - rejected) * BETA).mean()
        else:
            kl = drift.mean().clamp(min=0)
            loss = 1 - torch.sigmoid((ratios - kl) * others.signs * BETA).mean()
        if balanced is not None:
            loss = loss + balanced * 0.001
        del logged
        if self.keeps_logits and not self.training:
            with autocast():
                self.logits(idx)
        return loss

    def scores(self, idx: Tensor, labels: Tensor, routed: list[Tensor] | None = None) -> tuple[Tensor, ...]:
        """Return the log-probability of each label, its entropy, and whether it is the likeliest."""
        states = self.states(idx) if routed is None else self.watched(idx, routed)
        found: tuple[Tensor, ...] = self.chunked_loss(
            states, self.lm_head.weight, self.lm_head.bias, labels, self.turn(), apart=True
        )
        return found

    @torch.no_grad()
    def drift(self, others: Others, autocast: Autocast) -> Tensor:
        """Return the log-probability of each sequence, which nothing learns from."""
        with autocast():
            return self.scores(others.idx, others.idx.masked_fill(others.mask == 0, IGNORED))[0].sum(1)

    @torch.no_grad()
    def before(
        self, idx: Tensor, labels: Tensor, autocast: Autocast, others: Others | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the log-probability of each sequence, and of the others, in the reference, which keeps nothing."""
        model: Policy = self.copy or self
        with self.original():
            drift = model.drift(others, autocast) if others else None
            with autocast():
                found = model.scores(idx, labels)
        return found[0].sum(1), drift

    @contextmanager
    def original(self, *, adapters: bool = False) -> Iterator[None]:
        """Within it nothing is checkpointed, and `adapters` are off or not."""
        checkpointing, self.checkpointing = self.checkpointing, False
        parts = [part for part in (self.copy or self).modules() if isinstance(part, Lora | Folded) and not adapters]
        for part in parts:
            part.off = True
        yield
        for part in parts:
            part.off = False
        self.checkpointing = checkpointing


class Group(Policy):
    """A model that learns from completions of its own: GRPOTrainer._compute_loss, with dapo's mean."""

    def learned(self, idx: Tensor, given: Written, autocast: Autocast, beta: float) -> Tensor:
        """Return the loss of completions."""
        labels, counted = idx.masked_fill(given.mask == 0, IGNORED), given.mask[:, -given.length :]
        routed: list[Tensor] = []
        with autocast():
            found, entropy, _ = self.scores(idx, labels, routed if self.facts.balanced else None)
            counts = (given.mask >= 0).reshape(-1).to(torch.float32) if routed else None
            balanced = balance(routed, self.facts.experts_per_token, counts) if routed else None
        del counts, labels
        routed.clear()
        log_probs, entropy = (torch.cat([each[:, -given.length :]]) for each in (found, entropy))
        del found
        change = log_probs - (log_probs.detach() if given.old is None else given.old)
        ratio = torch.exp((change * counted).sum(1).unsqueeze(1) if given.whole else change)
        now = ratio.detach()
        held = now.clamp(1 - CLIPPED, 1 + CLIPPED)
        cut = (held * given.advantages < now * given.advantages).to(torch.float32)
        loss = -(ratio * (1 - cut) + held * cut) * given.advantages
        if given.reference is not None:
            apart = given.reference - log_probs
            loss = loss + (torch.exp(apart) - apart - 1) * ratio * beta
        loss = loss.mean() if given.whole else (loss * counted).sum() / counted.sum()
        return loss if balanced is None else loss + balanced * 0.001

    @torch.no_grad()
    def scored(self, idx: Tensor, mask: Tensor, length: int, autocast: Autocast, *, reference: bool) -> Tensor:
        """Return the log-probability of each token of the completions, in the reference or in the model itself."""
        model: Policy = self.copy or self if reference else self
        with self.original(adapters=not reference), autocast():
            found = model.scores(idx, idx.masked_fill(mask == 0, IGNORED))
        return torch.cat([found[0][:, -length:]])

    @torch.no_grad()
    def begun(self, idx: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return the keys and values of prompts, once the first token of each completion was drawn."""
        parts: list[Any] = [block.self_attn for block in self.layers]
        for part in parts:
            part.cached = (True, False)
        with self.original(adapters=True):
            positions = torch.arange(idx.shape[1], device=idx.device)[None].expand(*idx.shape) + 0  # of each prompt
            logits = self.head(self.states(idx, positions)[:, -1:]).float()
        F.softmax(logits, -1)
        kept = [part.__dict__.pop("kept") for part in parts]
        for part in parts:
            part.cached = ()
        return kept
