"""How a model generates text in the memory that is free: as it is, in half precision, with a shorter context."""

from foretrain.base.errors import UserError
from foretrain.base.records import Note
from foretrain.config.inference.options import Inference
from foretrain.hardware.catalogue import Gpu
from foretrain.predict.inference.memory import InferenceMemory, memory_of
from foretrain.predict.inference.model import InferenceModel
from foretrain.predict.memory import MARGIN_BYTES

_LEAST_CONTEXT = 16  # tokens; with fewer a model says nothing of what it has learned
_DEVICE = Gpu(name="this device", kind="cpu")  # its context is taken already, where it has one


class Fitted:
    """How a model is run in the memory that is free, what it needs there, and what had to give way."""

    def __init__(self, model: InferenceModel, room_bytes: int | None, *, half: bool) -> None:
        self.dtype, self.context = "f32", model.max_positions
        self.notes: tuple[Note, ...] = ()
        whole = self._memory(model, self.dtype, self.context)
        if room_bytes is None or _needed(whole) <= room_bytes:
            self.memory = whole
            return
        values = {"needed": _needed(whole), "room": room_bytes}
        if half:
            self.dtype = "bf16"
            self.notes += (Note(id="sample_half", values=values),)
        if _needed(self._memory(model, self.dtype, self.context)) > room_bytes:
            self.context = self._longest(model, room_bytes)
            self.notes += (Note(id="sample_context", values={**values, "context": self.context}),)
        if self.context < min(_LEAST_CONTEXT, model.max_positions):
            raise UserError("memory.sample", **values)
        self.memory = self._memory(model, self.dtype, self.context)

    def _memory(self, model: InferenceModel, dtype: str, context: int) -> InferenceMemory:
        asked = Inference(context=context, prompt=context, weights=dtype, kv=dtype)
        return memory_of(model, asked, "pytorch", _DEVICE)

    def _longest(self, model: InferenceModel, room_bytes: int) -> int:
        context = self.context
        while context and _needed(self._memory(model, self.dtype, context)) > room_bytes:
            context //= 2
        return context


def _needed(memory: InferenceMemory) -> int:
    return memory.needed_high_bytes + MARGIN_BYTES
