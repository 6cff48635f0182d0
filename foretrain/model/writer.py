"""Text from a model, token by token, with a KV cache; when the context is full, its oldest quarter is dropped."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from foretrain.model.language_model import LanguageModel
from foretrain.model.layers import RotaryModel
from foretrain.model.sampling import Sampling

# Attention is the only part that looks back, so it alone is replaced: it appends new keys and values and attends to
# all. Shapes: B micro-batch (1 here), T new tokens, S tokens so far, H heads of queries, K heads of keys and values, D
# width of a head.


class KvCache:
    """Keys and values of up to `capacity` tokens, B x K x S x D per layer, allocated at the first token."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def forget(self) -> None:
        self.length = 0

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if layer not in self._layers:
            B, K, _, D = k.shape
            self._layers[layer] = (k.new_empty(B, K, self.capacity, D), v.new_empty(B, K, self.capacity, D))
        keys, values = self._layers[layer]
        end = self.length + k.shape[2]
        keys[:, :, self.length : end], values[:, :, self.length : end] = k, v
        return keys[:, :, :end], values[:, :, :end]

    @property
    def nbytes(self) -> int:
        return sum(keys.nbytes + values.nbytes for keys, values in self._layers.values())


class _CachedAttention(TorchFunctionMode):
    """Attends from a layer's new queries to all keys and values. `groups`: heads of queries per head of keys."""

    def __init__(self, cache: KvCache, groups: int) -> None:
        super().__init__()
        self.cache, self.groups = cache, groups
        self.layer = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        q, k, v = args
        few = slice(None, None, self.groups if k.shape[1] == q.shape[1] else 1)  # a copy for each head of queries
        keys, values = self.cache.extend(self.layer, k[:, few], v[:, few])
        T, S = q.shape[2], keys.shape[2]
        if T == S:  # nothing before: as the model has it
            return func(*args, **kwargs)
        mask = None if T == 1 else torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
        return func(q, keys, values, attn_mask=mask, scale=kwargs.get("scale"), enable_gqa=self.groups > 1)


class Reader:
    def __init__(self, model: LanguageModel) -> None:
        self.model = model.eval()
        self.cache = KvCache(model.block_size)
        attention = getattr(model.layers()[0], "self_attn", None)
        self._attend = _CachedAttention(self.cache, int(getattr(attention, "groups", 1)))
        self._last: list[int] = []  # the last token read, which some families mix into the next one

    def forget(self) -> None:
        self.cache.forget()
        self._last = []

    @torch.no_grad()
    def read(self, ids: list[int]) -> Tensor:
        """Return the logits, V, of the token after `ids`, which follow what was read before."""
        start, end = self.cache.length, self.cache.length + len(ids)
        assert len(ids) > 0, "no tokens"
        assert end <= self.cache.capacity, f"{end} tokens, the model has {self.cache.capacity} positions"
        device = next(self.model.parameters()).device
        idx = torch.tensor([[*self._last, *ids]], device=device)
        with _plain_attention(self.model), self._attend:
            hidden = self._hidden(idx, start, end)
        self.cache.length = end
        self._last = ids[-1:]
        return self.model.lm_head(hidden[:, -1])[0]

    def _hidden(self, idx: Tensor, start: int, end: int) -> Tensor:
        """Return the last hidden states of positions start to end. `idx`: their tokens, with the one before if any."""
        if isinstance(self.model, RotaryModel):
            return self._rotary(self.model, idx, start, end)
        parts: Any = self.model.transformer
        positions = torch.arange(start, end, device=idx.device)
        x = parts["wte"](idx[:, start - end :]) + parts["wpe"](positions)
        return parts["ln_f"](self._through(x))

    def _rotary(self, model: RotaryModel, idx: Tensor, start: int, end: int) -> Tensor:
        embedded = model.embed(idx)[:, start - end :]
        device = idx.device.type
        low = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else embedded.dtype
        tables: Any = model.cos, model.sin
        cos, sin = (table[start:end].to(low) for table in tables)
        x, *beside = model.enter(embedded)
        return model.leave(self._through(x, *beside, cos, sin), low)

    def _through(self, x: Tensor, *beside: Tensor) -> Tensor:
        for layer, block in enumerate(self.model.layers()):
            self._attend.layer = layer
            x = block(x, *beside)
        return x


@contextmanager
def _plain_attention(model: LanguageModel) -> Iterator[None]:
    """Run GPT-2's attention through the one function that is replaced, not as matmuls (attention.py)."""
    parts: list[Any] = [block.attn for block in model.layers() if getattr(getattr(block, "attn", None), "matmuls", 0)]
    for part in parts:
        part.matmuls = False
    try:
        yield
    finally:
        for part in parts:
            part.matmuls = True


LEAST_TEMPERATURE = 1e-6  # below it logits overflow fp32; only the likeliest is ever drawn long before


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    if sampling.temperature < LEAST_TEMPERATURE:
        return int(logits.argmax())
    kept = torch.topk(logits, min(sampling.top_k or len(logits), len(logits)))
    probabilities = torch.softmax(kept.values / sampling.temperature, dim=0)
    if sampling.top_p < 1:
        outside = probabilities.cumsum(0) - probabilities >= sampling.top_p
        outside[0] = False
        probabilities = probabilities.masked_fill(outside, 0.0)
    return int(kept.indices[torch.multinomial(probabilities, 1, generator=generator)])


DROPPED_SHARE = 4  # each token costs 3 / 4 · T / (T / 4), about three tokens of prefill, once it is full


def kept_of(block_size: int) -> int:
    return max(1, block_size - max(1, block_size // DROPPED_SHARE))


class Writer:
    def __init__(self, model: LanguageModel, vocab_size: int, seed: int) -> None:
        self._reader = Reader(model)
        self._generator = torch.Generator().manual_seed(seed)
        self._window: list[int] = []
        self._unread: list[int] = []
        self.vocab_size = vocab_size
        self.block_size = model.block_size

    def __len__(self) -> int:
        return len(self._window) + len(self._unread)

    def forget(self) -> None:
        self._reader.forget()
        self._window, self._unread = [], []

    def append(self, ids: list[int]) -> int:
        """Append `ids`; return how many of the oldest tokens leave the context for them."""
        total = len(self) + len(ids)
        if total <= self.block_size:
            self._unread += ids
            return 0
        kept = self.block_size if not len(self) else kept_of(self.block_size)  # a first text may fill the context
        text = [*self._window, *self._unread, *ids][-kept:]
        self.forget()
        self._unread = text
        return total - len(text)

    def write(self, sampling: Sampling) -> tuple[int, int]:
        """Return the next token, now part of the text, and how many of the oldest left the context for it."""
        logits = self._reader.read(self._unread)
        self._window += self._unread
        self._unread = []
        chosen = choose(logits.float().cpu()[: self.vocab_size], sampling, self._generator)
        return chosen, self.append([chosen])


def generate(
    model: LanguageModel,
    ids: list[int],
    count: int,
    *,
    temperature: float,
    top_k: int,
    seed: int,
    vocab_size: int,
    top_p: float = 1.0,
) -> Iterator[int]:
    writer = Writer(model, vocab_size, seed)
    writer.append(list(ids))
    sampling = Sampling(temperature, top_k, top_p)
    for _ in range(count):
        yield writer.write(sampling)[0]
