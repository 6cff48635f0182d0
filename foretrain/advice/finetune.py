"""What to change in a fine-tuning run, each change planned: memory, time, and whether it fits then."""

from collections.abc import Callable, Iterator

from foretrain.base.errors import UserError
from foretrain.base.records import Record
from foretrain.config.finetune.options import FineTune
from foretrain.predict.finetune.attention import has_flash_2
from foretrain.predict.finetune.plan import FineTunePlan, replanned
from foretrain.predict.memory import Verdict

LEAST_RANK = 8  # of an adapter: advice goes no lower
MOST_TOGETHER = 3  # answers of several changes at once; then no more are looked for


class FineTuneChange(Record):
    """A change and what it comes to. `ids`: of its texts; `changed`: options with their new values; `longer`: of the
    time of a token, less where negative; None where the card's speed is not known."""

    ids: tuple[str, ...]
    changed: dict[str, bool | int | str]
    verdict: Verdict | None
    needed_bytes: int
    available_bytes: int | None
    saved_bytes: int
    longer: float | None
    learns_otherwise: bool  # what is trained is no longer the same


_ADAMW = ("adamw_torch_fused", "adamw_torch")
Values = dict[str, bool | int | str]
Try = Callable[[FineTune], Values]


def _checkpointing(tune: FineTune) -> Values:
    return {} if tune.gradient_checkpointing else {"gradient_checkpointing": True}


def _smaller_batch(tune: FineTune) -> Values:
    if tune.batch_size == 1:
        return {}
    return {"batch_size": 1, "grad_accum": tune.grad_accum * tune.batch_size}


def _half_batch(tune: FineTune) -> Values:
    if tune.batch_size % 2 or tune.batch_size == 2:
        return {}
    return {"batch_size": tune.batch_size // 2, "grad_accum": tune.grad_accum * 2}


def _optimizer(tune: FineTune) -> Values:
    return {"optim": "adamw_8bit"} if tune.optim in _ADAMW else {}


def _attention(tune: FineTune) -> Values:
    return {"attn": "sdpa"} if tune.attn == "eager" else {}


def _flash(tune: FineTune) -> Values:
    """A padded batch needs a mask, and so do rows that are joined; flash attention in sdpa takes none, FlashAttention 2
    does, or needs none."""
    half = tune.dtype != "float32" or tune.amp != "no"
    masked = tune.joined or (tune.padded and not tune.packing)
    return {"attn": "flash_attention_2"} if masked and tune.attn == "sdpa" and half else {}


def _liger(tune: FineTune) -> Values:
    return {} if tune.liger or tune.unsloth else {"liger": True}


def _paged(tune: FineTune) -> Values:
    """Its states lie in managed memory, which is the computer's while the card is full."""
    return {"optim": "paged_adamw_8bit"} if tune.optim in (*_ADAMW, "adamw_8bit") else {}


def _lower_rank(tune: FineTune) -> Values:
    return {"lora_r": max(LEAST_RANK, tune.lora_r // 2)} if tune.adapters and tune.lora_r > LEAST_RANK else {}


def _fewer_targets(tune: FineTune) -> Values:
    return {"lora_targets": "q_proj,v_proj"} if tune.adapters and tune.lora_targets == "all-linear" else {}


def _unpadded(tune: FineTune) -> Values:
    return {"padded": False, "packing": True} if tune.padded and not tune.packing else {}


def _lora(tune: FineTune) -> Values:
    return {"method": "lora"} if tune.method == "full" else {}


def _qlora(tune: FineTune) -> Values:
    if tune.method not in ("full", "lora"):
        return {}
    amp = tune.amp if tune.amp != "no" else "fp16" if tune.dtype == "float16" else "bf16"
    return {"method": "qlora", "amp": amp}


def _shorter(tune: FineTune) -> Values:
    return {"seq_len": tune.seq_len // 2} if tune.seq_len >= 512 else {}


# The training stays the same with the first ones, and is another one with the others.
SAME: dict[str, Try] = {
    "checkpointing": _checkpointing, "half_batch": _half_batch, "batch_of_one": _smaller_batch,
    "attention": _attention, "flash": _flash, "packing": _unpadded, "liger": _liger,
}  # fmt: skip
OTHER: dict[str, Try] = {
    "optimizer_8bit": _optimizer, "paged": _paged, "lower_rank": _lower_rank, "fewer_targets": _fewer_targets,
    "lora": _lora, "qlora": _qlora, "shorter": _shorter,
}  # fmt: skip


def _whole_activations(tune: FineTune) -> Values:
    ways: Values = {name: False for name in ("offload_checkpoints", "reentrant") if getattr(tune, name)}
    return {"gradient_checkpointing": False, **ways} if tune.gradient_checkpointing else {}


def _larger_batch(tune: FineTune) -> Values:
    if tune.grad_accum % 2:
        return {}
    return {"batch_size": 2 * tune.batch_size, "grad_accum": tune.grad_accum // 2}


def _fused(tune: FineTune) -> Values:
    return {"optim": "adamw_torch_fused"} if tune.optim == "adamw_torch" else {}


# What takes more memory and less time; the training stays the same.
SPENDING: dict[str, Try] = {
    "whole_activations": _whole_activations, "larger_batch": _larger_batch, "fused": _fused,
}  # fmt: skip
FASTER = (*SPENDING, "attention", "flash", "packing", "liger", "fewer_targets", "lora")  # what can be quicker
TRIES = {**SAME, **OTHER, **SPENDING}


def changes(plan: FineTunePlan) -> tuple[FineTuneChange, ...]:
    """The changes that save memory, best first: those that fit before others, then those after which the same is
    learned, then by time."""
    return list(search(plan))[-1]


def search(plan: FineTunePlan) -> Iterator[tuple[FineTuneChange, ...]]:
    """What `changes` has found so far, after each change that was planned: for who shows them as they come."""
    found: list[FineTuneChange] = []
    for id in (*SAME, *OTHER):
        change = planned(plan, (id,))
        found += [change] if change and change.saved_bytes > 0 else []
        yield tuple(sorted(found, key=_rank))
    if any(change.verdict == "fits" for change in found):
        return
    together = 0
    for change in _together(plan):
        if change.verdict == "fits":
            found.append(change)
            together += 1
        yield tuple(sorted(found, key=_rank))
        if together == MOST_TOGETHER:
            return


# What is tried together where nothing alone makes it fit, from what costs least to what changes most.
LADDER: tuple[tuple[str, ...], ...] = (
    ("checkpointing", "liger"),
    ("checkpointing", "batch_of_one", "liger"),
    ("checkpointing", "batch_of_one"),
    ("checkpointing", "batch_of_one", "optimizer_8bit"),
    ("checkpointing", "lora"),
    ("checkpointing", "batch_of_one", "lora"),
    ("checkpointing", "batch_of_one", "qlora"),
    ("checkpointing", "batch_of_one", "shorter"),
    ("checkpointing", "batch_of_one", "qlora", "shorter"),
)


def _together(plan: FineTunePlan) -> Iterator[FineTuneChange]:
    """Several at once; of each step of the ladder what is not there yet."""
    seen: set[tuple[str, ...]] = set()
    for step in LADDER:
        ids = tuple(id for id in step if TRIES[id](plan.tune))
        if len(ids) < 2 or ids in seen:
            continue
        seen.add(ids)
        if change := planned(plan, ids):
            yield change


def planned(plan: FineTunePlan, ids: tuple[str, ...]) -> FineTuneChange | None:
    """The plan with these changes; None where one of them changes nothing."""
    changed: Values = {}
    for id in ids:
        values = TRIES[id](plan.tune)
        if not values:
            return None
        changed |= values
    if changed.get("amp") == "bf16" and not plan.gpu.supports_bf16:
        changed["amp"] = "fp16"
    if changed.get("attn") == "flash_attention_2" and not has_flash_2(plan.gpu):
        return None
    if "liger" in changed and plan.facts.liger_kernels(plan.tune.loop) is None:
        return None
    try:
        other = replanned(plan, **changed)
    except UserError:  # this model cannot have it, such as modules that its layers are not called
        return None
    longer, paged = None, str(changed.get("optim", "")).startswith("paged")  # how often it pages, nobody can say
    if plan.timing is not None and other.timing is not None and not paged:
        longer = plan.timing.tokens_per_s / other.timing.tokens_per_s - 1
    return FineTuneChange(
        ids=ids, changed=changed, verdict=other.verdict, needed_bytes=other.needed_bytes,
        available_bytes=plan.available_bytes, saved_bytes=plan.needed_bytes - other.needed_bytes, longer=longer,
        learns_otherwise=any(id in OTHER for id in ids),
    )  # fmt: skip


def _rank(change: FineTuneChange) -> tuple[object, ...]:
    order = {"fits": 0, "tight": 1, "does_not_fit": 2, None: 3}
    if change.verdict == "fits":
        return order[change.verdict], change.learns_otherwise, len(change.ids), change.longer or 0.0
    return order[change.verdict], change.needed_bytes
