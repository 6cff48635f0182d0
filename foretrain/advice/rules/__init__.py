"""All rules, in the order in which users can afford them: the first cost nothing, the last another model or card."""

from foretrain.advice.rules import batch, cards, learning, memory, others
from foretrain.advice.rules.base import Rule

RULES: tuple[Rule, ...] = (
    *cards.SHARING, *batch.RULES, batch.LARGER, *memory.RULES, others.UNNEEDED, *cards.CARDS,
    *others.MODEL, others.CARD, *others.FOLKLORE, *learning.RULES,
)  # fmt: skip
BY_ID = {rule.id: rule for rule in RULES}
ORDER = {rule.id: number for number, rule in enumerate(RULES)}
