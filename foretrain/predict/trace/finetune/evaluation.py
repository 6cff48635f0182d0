"""A batch of an evaluation that is like one before: its allocations are written down again, and no op runs.

An evaluation that collects logits holds more with each batch, and what a batch takes and gives back between decides
where the allocator finds room for them: left out, a small model of 16,000 tokens reserved a tenth too little.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from foretrain.predict.trace.tracer import Tracer

MOST = 100  # batches that are written down whole; of later ones the results alone


class Batch:
    """What a batch allocated since event `start` of the record, and its results, by the memory that they lie in."""

    def __init__(self, tracer: Tracer, start: int, inputs: Mapping[str, Any], results: Any) -> None:
        self.tracer, self.done = tracer, 0
        self.events = tracer.record.events[start:]
        born = {event for event in self.events if event >= 0}
        given = {tracer.id_of(value): name for name, value in inputs.items() if isinstance(value, Tensor)}
        kept = [tensor for tensor in tree_leaves(results) if isinstance(tensor, Tensor)]
        self.kept = sorted({id for tensor in kept if (id := tracer.id_of(tensor)) in born and id is not None})
        self.results = tree_map_only(Tensor, lambda tensor: Place.of(tensor, tracer.id_of(tensor), given), results)
        # What lives on and is no result is made once: a workspace.
        self.passing = born & {~event for event in self.events if event < 0}

    def again(self, inputs: Mapping[str, Any]) -> Any:
        """The results of the next batch, whose allocations are those of this one."""
        record, alive, storages = self.tracer.record, {}, {}
        self.done += 1
        record.moment("forward")
        for event in self.events if self.done <= MOST else self.kept:
            if event in self.kept:
                storages[event] = self._storage(event)
            elif event in self.passing:
                alive[event] = record.alloc(record.sizes[event], *record.labels[event])
                if event in record.tags:
                    record.tag(alive[event], *record.tags[event])
            elif event < 0 and ~event in alive:
                record.free(alive.pop(~event))
        return tree_map_only(Place, lambda place: place.filled(storages, inputs), self.results)

    def _storage(self, like: int) -> Tensor:
        """Memory as large as that of an allocation, told as that one is."""
        record = self.tracer.record
        found = torch.empty(record.sizes[like], dtype=torch.uint8, device=self.tracer.device_type)
        id = self.tracer.id_of(found)
        assert id is not None
        record.labels[id] = record.labels[like]
        return found


class Place:
    """Where a result lies: in which memory, and how."""

    def __init__(self, source: int | str | None, tensor: Tensor) -> None:
        self.source, self.dtype, self.device = source, tensor.dtype, tensor.device
        self.sizes, self.strides, self.offset = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()

    @classmethod
    def of(cls, tensor: Tensor, id: int | None, given: Mapping[int | None, str]) -> "Place":
        """That of a tensor, which may be one of the batch's inputs."""
        return cls(given.get(id, id), tensor)

    def filled(self, storages: Mapping[int, Tensor], inputs: Mapping[str, Any]) -> Tensor:
        """The tensor of the next batch at this place."""
        if isinstance(self.source, str):
            return inputs[self.source].detach()
        if self.source is None or self.source not in storages:  # on the host
            return torch.empty(self.sizes, dtype=self.dtype, device=self.device)
        return storages[self.source].view(self.dtype).as_strided(self.sizes, self.strides, self.offset)
