"""What libraries do otherwise when they see fake tensors, put right: a trace is of what they do with real ones."""

import sys
from collections.abc import Callable
from typing import Any

from foretrain.predict.trace.card.patches import Patches
from foretrain.predict.trace.kernels.values import Values


def _seen_as_real(patches: Patches, module: Any, values: Values) -> None:
    """transformers builds masks for what it takes to be an export, and its attention then takes another kernel."""
    patches.set(module, "is_fake_tensor", lambda x: False)


def _unpacked(patches: Patches, module: Any, values: Values) -> None:
    """It looks whether positions that count up are those of several sequences in a row, and masks them if so."""
    find = module.find_packed_sequence_indices

    def found(position_ids: Any) -> Any:
        if not values.counts(position_ids):
            return find(position_ids)
        with values.planned([True]):
            return find(position_ids)

    patches.set(module, "find_packed_sequence_indices", found)


def _unasked(patches: Patches, module: Any, values: Values) -> None:
    """It looks for padding in the tokens, to warn of it and no more."""
    patches.set(module.PreTrainedModel, "warn_if_padding_and_no_attention_mask", lambda *args, **kwargs: None)


WAYS: dict[tuple[str, str], Callable[[Patches, Any, Values], None]] = {
    ("transformers.utils.import_utils", "is_fake_tensor"): _seen_as_real,
    ("transformers.modeling_utils", "PreTrainedModel"): _unasked,
    ("transformers.masking_utils", "find_packed_sequence_indices"): _unpacked,
}


def real_ways(patches: Patches, values: Values) -> Callable[[], None]:
    """Return a function that lets the libraries imported by now go their usual way; call it again for later ones."""
    done = set[tuple[str, str]]()

    def patch() -> None:
        for place, way in WAYS.items():
            module: Any = sys.modules.get(place[0])
            if module is not None and place not in done and hasattr(module, place[1]):
                done.add(place)
                way(patches, module, values)

    patch()
    return patch
