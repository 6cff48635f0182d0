"""What a fine-tuning plan says beside its figures: what was taken for granted, and what it leaves out. No torch."""

from foretrain.base.records import Note
from foretrain.config.finetune.options import FineTune
from foretrain.config.hub.facts import LIGER_VERSION, UNKNOWN, WITHOUT, ModelFacts, ModelSource, kernels_of
from foretrain.hardware.catalogue import Gpu
from foretrain.predict.finetune import unsloth
from foretrain.predict.finetune.compiled import is_known
from foretrain.predict.finetune.expert_notes import expert_notes
from foretrain.predict.finetune.four_bits import four_bit_notes
from foretrain.predict.finetune.memory import FineTuneLedger
from foretrain.predict.finetune.saved import saved_notes
from foretrain.predict.finetune.targets import MOST_NAMED, unknown_names


def notes_of(
    source: ModelSource, facts: ModelFacts, tune: FineTune, gpu: Gpu, others_bytes: int, ledger: FineTuneLedger
) -> list[Note]:
    """All of them, in the order in which they are shown. `ledger`: the memory of the run."""
    found: list[Note] = []

    def note(id: str, **values: object) -> None:
        found.append(Note(id=id, values=values))

    if not others_bytes:
        note("others_unknown")
    found += gpu.notes
    if source.code:
        note("remote_code")
    if names := unknown_names(facts, tune):
        note("finetune_no_modules", names=", ".join(names[:MOST_NAMED]), model=facts.model_type)
    if tune.seq_len > facts.max_positions:
        note("seq_beyond_trained", seq_len=tune.seq_len, most=facts.max_positions)
    if tune.optim.startswith("paged"):
        note("paged_optimizer")
    if facts.vision:
        note("vision_frozen")
    if tune.compile and not is_known(facts, tune, gpu):
        note("finetune_compile")
    if tune.joined and tune.attn != "flash_attention_2":
        _, tokens = tune.rows(tune.batch_size)
        note("packed_mask", tokens=tokens, size=tokens**2)
    found += saved_notes(facts, tune)
    found += _liger_notes(facts, tune) if tune.liger else []
    found += unsloth.notes(facts, tune) if tune.unsloth else []
    return [*found, *four_bit_notes(ledger, tune), *expert_notes(facts, tune)]


def _liger_notes(facts: ModelFacts, tune: FineTune) -> list[Note]:
    """Which of Liger's kernels the figures are with, by stand-ins."""
    loop = "unsloth" if tune.unsloth else tune.loop
    own = facts.liger_kernels(loop)
    if own is None:
        what = loop if loop in WITHOUT else facts.model_type
        id = "finetune_liger_unknown" if what in UNKNOWN else "finetune_liger_none"
        return [Note(id=id, values={"version": LIGER_VERSION, "what": what})]
    kernels = ", ".join(kernels_of(own, facts.activation))
    notes = [Note(id="finetune_liger", values={"version": LIGER_VERSION, "kernels": kernels})]
    return [*notes, *([] if own.loss else [Note(id="finetune_liger_trl", values={})])]
