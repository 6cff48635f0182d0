"""Corrections for libraries that act differently on fake tensors."""

import sys
from collections.abc import Callable
from typing import Any

from foretrain.predict.trace.card.patches import Patches
from foretrain.predict.trace.kernels.values import Values


def _seen_as_real(patches: Patches, module: Any, values: Values) -> None:
    """Keep transformers from building masks as for an export: its attention would take another kernel."""
    patches.set(module, "is_fake_tensor", lambda x: False)


def _unpacked(patches: Patches, module: Any, values: Values) -> None:
    """Answer its test whether positions that count up belong to several sequences, which it would mask."""
    find = module.find_packed_sequence_indices

    def found(position_ids: Any) -> Any:
        if not values.counts(position_ids):
            return find(position_ids)
        with values.planned([True]):
            return find(position_ids)

    patches.set(module, "find_packed_sequence_indices", found)


def _unasked(patches: Patches, module: Any, values: Values) -> None:
    """Skip its look for padding in the tokens, which only warns."""
    patches.set(module.PreTrainedModel, "warn_if_padding_and_no_attention_mask", lambda *args, **kwargs: None)


WAYS: dict[tuple[str, str], Callable[[Patches, Any, Values], None]] = {
    ("transformers.utils.import_utils", "is_fake_tensor"): _seen_as_real,
    ("transformers.modeling_utils", "PreTrainedModel"): _unasked,
    ("transformers.masking_utils", "find_packed_sequence_indices"): _unpacked,
}


def real_ways(patches: Patches, values: Values) -> Callable[[], None]:
    """Return a function that corrects the libraries imported by now; call it again for later ones."""
    done = set[tuple[str, str]]()

    def patch() -> None:
        for place, way in WAYS.items():
            module: Any = sys.modules.get(place[0])
            if module is not None and place not in done and hasattr(module, place[1]):
                done.add(place)
                way(patches, module, values)

    patch()
    return patch
