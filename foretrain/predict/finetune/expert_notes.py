"""What a plan of a mixture of experts says of itself: what its figures rest on, and what libraries do with experts.
No torch."""

from foretrain.base.records import Note
from foretrain.config.finetune.options import FineTune
from foretrain.config.hub.facts import ModelFacts
from foretrain.config.hub.parameters import parameters_of
from foretrain.predict.finetune.program import DTYPES, widens
from foretrain.predict.finetune.targets import adapted_roles

EXPERTS = {"expert_gate_up", "expert_down"}  # roles of their adapters


def expert_notes(facts: ModelFacts, tune: FineTune) -> list[Note]:
    """None where the model is no mixture. Memory follows from how many tokens and experts there are; only time rests
    on an even split. The bound: a token takes an expert once, so one expert has at most all tokens."""
    if not facts.n_expert:
        return []
    tokens = tune.batch_size * tune.seq_len
    rows = tokens * facts.experts_per_token
    values = {"taken": facts.experts_per_token, "experts": facts.n_expert, "rows": rows, "most": tokens}
    found = [Note(id="experts_even", values={**values, "even": -(-rows // facts.n_expert)})]
    elements = sum(each.elements for each in parameters_of(facts) if each.role == "expert")
    item_bytes = 4 if widens(tune) else DTYPES[tune.dtype].itemsize
    if tune.method == "qlora":
        found.append(Note(id="experts_not_packed", values={"count": elements, "size": item_bytes * elements}))
    if adapted_roles(facts, tune) & EXPERTS:
        found.append(Note(id="experts_copied", values={"size": item_bytes * elements}))
    return found
