"""What a fine-tuning run allocates outside of its steps. transformers modeling_utils.py (caching_allocator_warmup),
bitsandbytes functional.py (quantize_4bit), peft utils/other.py (prepare_model_for_kbit_training), tuners/lora."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from foretrain.predict.abstract.autograd import Parameter
from foretrain.predict.abstract.dims import factors
from foretrain.predict.estimate.kernel_buffers import Dimension, Processors, reduction_bytes
from foretrain.predict.finetune.program import Places, Program
from foretrain.predict.finetune.targets import own_words
from foretrain.predict.timeline import Size, Tensor, Timeline

BLOCK, OUTER_BLOCK = 64, 256  # weights that share a scale in 4 bits, and scales that share one of theirs
CODE_BYTES, SCALE_CODE_BYTES = 4 * 16, 4 * 256  # the values that 4 bits, and the 8 of a scale, stand for
ORDER = "VXFMHKGDCrTBE"  # of letters in the formula of a weight


def formula_of(item_bytes: int, shape: Sequence[int]) -> str:
    """The bytes of a weight by the letters of its sizes, whichever side is first: '2·F·C'."""
    coefficient, *letters = factors(item_bytes, shape, together=False)
    return "·".join([str(coefficient), *sorted(letters, key=ORDER.index)])


class Outside:
    """The weights of a run, and what comes and goes with them."""

    def __init__(self, program: Program, t: Timeline) -> None:
        self.program, self.t, self.tune, self.facts = program, t, program.tune, program.facts
        self.places = Places(program, t, self.alloc)
        self.quantized, self.in_8_bits = self.tune.quantized, self.tune.load_in_8bit
        self.there: dict[str, Tensor] = {}
        self.workspaces: list[Tensor] = []  # cuBLAS's, where a matmul runs before the first step

    def alloc(self, component: str, nbytes: int, formula: str = "") -> Tensor:
        granule = self.t.granule
        return self.t.alloc(component, Size(formula or str(nbytes), -(-nbytes // granule) * granule))

    # -- before ------------------------------------------------------------------------------------------

    def load(self) -> None:
        """Load one weight after the other; in 4 bits each is there in its own dtype until it is packed."""
        self.t.at("build")
        self.t.phase("load")
        kept = {name: p for name, p in self.program.weights.items() if ".lora_" not in name}
        if self.facts.tied:  # one weight, also where a copy of it is trained
            kept.pop("lm_head.weight", None)
        if self.quantized:
            self._warm_up(kept)
        for name in sorted({*kept, *self.program.packed}, key=self._natural) if self.quantized else kept:
            if name in kept:
                self.there[name] = self.weight(kept[name], self.program.dtype.itemsize)
            else:
                self.pack(self.program.packed[name], self.program.dtype.itemsize, "weights")
        self.buffers()

    def _natural(self, name: str) -> list[Any]:
        """The order in which transformers reads a checkpoint: by the words of its names, numbers as numbers."""
        words = own_words(self.facts.model_type, name)
        return [int(word) if word.isdigit() else word for word in words]

    def _warm_up(self, kept: dict[str, Parameter]) -> None:
        """As much as the weights will take, given back to the allocator, which keeps it."""
        if self.program.cuda:
            total = sum(self.program.dtype.itemsize * p.numel() for p in kept.values())
            a_byte = 1 if self.in_8_bits else 2  # weights in it
            total += sum(math.prod(shape) // a_byte for shape in self.program.packed.values())
            self.t.free(self.alloc("temporaries", total))

    def buffers(self) -> None:
        if self.quantized and self.tune.double_quant and not self.in_8_bits:  # which all others are copies of
            self.alloc("buffers", SCALE_CODE_BYTES)
        if self.facts.positions == "rotary":  # rates of the positions, and the same unchanged
            width = self.facts.rotary_dim or self.facts.head_dim
            for _ in range(2):
                self.alloc("buffers", 4 * (width // 2))
        if self.facts.model_type == "gpt_bigcode":  # its causal mask, which sdpa does not read
            self.alloc("buffers", self.facts.max_positions**2, "W·W")

    def pack(self, shape: Sequence[int], itemsize: int, component: str) -> list[Tensor]:
        """A weight in 4 bits, of one in this dtype, which comes and goes. Its scales are fp32, or 8 bits with scales of
        their own. Returns what stays."""
        elements = math.prod(shape)
        source = [self.alloc("temporaries", itemsize * elements)]
        if self.facts.conv1d and component == "weights":  # turned to out x in first
            source.append(self.alloc("temporaries", itemsize * elements))
        if self.in_8_bits:  # of one in fp16, with a scale a row
            halved = self.alloc("temporaries", 2 * elements)
            found = [self.alloc(component, elements, formula_of(1, shape)), self.alloc(component, 4 * shape[0])]
            self.t.free(*source, halved)
            return found
        scales = -(-elements // BLOCK)
        nested = self.tune.double_quant
        found = [self.alloc(component, -(-elements // 2), formula_of(1, shape).removeprefix("1·") + "/2")]
        first = self.alloc("temporaries" if nested else component, 4 * scales)
        found.append(self.alloc(component, CODE_BYTES))
        if nested:
            found.append(self.alloc(component, 4))  # their mean
            moved = self.alloc("temporaries", 4 * scales)
            sizes = scales, 4 * -(-scales // OUTER_BLOCK), SCALE_CODE_BYTES
            found += [self.alloc(component, nbytes) for nbytes in sizes]
            self.t.free(*source, first, moved)
        else:
            found.append(first)
            self.t.free(*source)
        return found

    def prepare(self) -> None:
        """What is not in 4 bits becomes fp32; adapters are made in the dtype of the weights, then become fp32 as well,
        where the program has them so. Of modules that are trained whole peft copies the weights, and keeps both."""
        if self.tune.adapters or self.tune.references:
            self.t.phase("prepare")
        if self.tune.copies_reference:
            own = self.program.dtype.itemsize
            for weight in [self.program.weights[name] for name in self.there]:
                self.alloc("reference", own * weight.numel(), formula_of(own, weight.shape))
            self.buffers()
        if not self.tune.adapters:
            return
        weights, loaded = self.program.weights, self.program.dtype.itemsize
        passing = [name for name in weights if name in self.there and self.program.converts_back(name)]
        for name in passing:
            self._convert(name, 4)
        for name, weight in weights.items():  # in the order of the model's code
            itemsize = loaded if name in self.program.saved and self.program.halved else weight.dtype.itemsize
            if name in self.there and itemsize != loaded:
                self._convert(name, itemsize)
        if self.program.widened and self.program.cuda:  # peft's auto_clear_cache
            self.t.empty_cache()
        for name in passing:
            self._convert(name, loaded)
        made = dict(self._made_adapters())
        for weight in self.program.saved.values():
            self.weight(weight, weight.dtype.itemsize)
        wide = 4 if self.program.wide else loaded
        for itemsize in (wide, 2) if self.program.halved else (wide,):
            for parameter, tensor in made.items():
                if itemsize != loaded:
                    made[parameter] = self.weight(parameter, itemsize)
                    self.t.free(tensor)
            loaded = itemsize

    def _convert(self, name: str, itemsize: int) -> None:
        before, self.there[name] = self.there[name], self.weight(self.program.weights[name], itemsize)
        self.t.free(before)

    def _made_adapters(self) -> Iterator[tuple[Parameter, Tensor]]:
        """In the dtype of the weights. DoRA begins with the lengths of a weight's rows (dora.py, update_layer)."""
        own = self.program.dtype.itemsize
        adapters = {name: p for name, p in self.program.weights.items() if ".lora_" in name}
        for name, parameter in adapters.items():
            if not name.endswith("lora_magnitude"):
                yield parameter, self.weight(parameter, own)
            magnitude = name.endswith("lora_B.weight") and adapters.get(
                name.removesuffix("lora_B.weight") + "lora_magnitude"
            )
            if magnitude:
                n_out, n_in = parameter.shape[0], adapters[name.replace("lora_B", "lora_A")].shape[1]
                yield magnitude, self._lengths(magnitude, (int(n_out), int(n_in)))

    def _lengths(self, magnitude: Parameter, shape: tuple[int, int]) -> Tensor:
        weight_bytes = self.program.dtype.itemsize * math.prod(shape)
        product = self.alloc("temporaries", weight_bytes)
        if not self.workspaces:
            self.workspaces.append(self.t.alloc("workspace", self.t.size(1, "cuBLAS")))
        scaled, summed = self.alloc("temporaries", weight_bytes), self.alloc("temporaries", weight_bytes)
        self.t.free(scaled)
        found = self.weight(magnitude, self.program.dtype.itemsize)
        self.t.free(product, summed, *self._norm_parts(shape))
        return found

    def _norm_parts(self, shape: Sequence[int]) -> list[Tensor]:
        """What the norm of each row of a weight, out x in, takes for itself: GPT-2's lie apart in memory."""
        card, (n_out, n_in) = self.program.card, shape
        if not self.program.cuda:
            return []
        steps = (1, n_out) if self.facts.conv1d else (n_in, 1)  # from row to row, from column to column
        rows, columns = Dimension(n_out, steps[0]), Dimension(n_in, steps[1])
        sizes = reduction_bytes(Processors.of(card.capability, card.processors), [columns], [rows], 4)
        return [self.alloc("temporaries", nbytes) for nbytes in sizes]

    def weight(self, parameter: Parameter, itemsize: int, shape: Sequence[int] = ()) -> Tensor:
        component, shape = "adapters" if ".lora_" in parameter.name else "weights", shape or parameter.shape
        return self.alloc(component, itemsize * math.prod(shape), formula_of(itemsize, shape))

    # -- after -------------------------------------------------------------------------------------------

    def save(self) -> None:
        self.t.at("save")
        self.t.phase("save")

    def merge(self) -> None:
        """The product of each adapter, which is added to its weight; one in 4 bits is unpacked, and packed again. The
        first module, whose copy was trained, lets its original go before that, unless the head has the same."""
        self.t.at("merge")
        self.t.phase("merge")
        if "embed_tokens.weight" in self.program.saved and not self.facts.tied:
            self.t.free(self.there["embed_tokens.weight"])
        for shape in self.program.adapted:
            self.t.free(*self._merged(shape, self.quantized))
        for shape in self.program.folded:
            self.t.free(*self._merged(shape, quantized=False))

    def _merged(self, shape: Sequence[int], quantized: bool) -> Iterator[Tensor]:
        elements = math.prod(shape)
        if quantized:
            nested = self.tune.double_quant and not self.in_8_bits
            scales = self.alloc("temporaries", 4 * -(-elements // BLOCK)) if nested else None
            yield self.alloc("temporaries", self.program.dtype.itemsize * elements)
            self.t.free(scales)
        wide = self.program.adapter_dtype.itemsize
        product = self.alloc("temporaries", wide * elements)
        yield self.alloc("temporaries", wide * elements)  # scaled
        self.t.free(product)
        if self.tune.method == "dora":
            yield from self._turned(shape)
        if quantized:
            summed = max(wide, self.program.dtype.itemsize)
            yield self.alloc("temporaries", summed * elements)  # their sum
            yield from self.pack(shape, summed, "temporaries")

    def _turned(self, shape: Sequence[int]) -> Iterator[Tensor]:
        """A copy of the weight, the lengths of the sum's rows, the sum, that turned, and in the weight's dtype."""
        own, elements = self.program.dtype.itemsize, math.prod(shape)
        yield self.alloc("temporaries", own * elements)
        scaled, summed = (self.alloc("temporaries", 4 * elements) for _ in range(2))
        self.t.free(scaled)
        yield self.alloc("temporaries", 4 * shape[0])
        self.t.free(summed, *self._norm_parts(shape))
        for nbytes in (4, 4, *((own,) if own == 2 else ())):
            yield self.alloc("temporaries", nbytes * elements)


# The logits that an evaluation collects on the card (transformers trainer_pt_utils.py, EvalLoopContainer): each batch
# is joined in a new tensor, and a variable holds the last one's.

WRITTEN = 64  # batches that are written out; of more the first ones and the last two


def numbers(batches: int) -> Iterator[int]:
    """The numbers of the batches that are written out, from 1."""
    if batches <= WRITTEN:
        yield from range(1, batches + 1)
    else:
        yield from range(1, WRITTEN - 1)
        yield from (batches - 1, batches)


class Collected:
    """What was collected of all cards. `most`: batches until it goes to the host (eval_accumulation_steps)."""

    def __init__(self, t: Timeline, item_bytes: int, most: int, cards: int = 1, letters: str = "BTV") -> None:
        self.t, self.item_bytes, self.most, self.letters = t, cards * item_bytes, most, letters
        self.count = 0
        self.joined: list[Tensor] = []
        self.last: list[Tensor] = []  # after the first batch the same tensor as `joined`

    def add(self, number: int) -> None:
        place = (number - 1) % self.most + 1
        if place - 1 != self.count:  # batches that are not written out
            self.release()
            self.count, self.joined = place - 1, [self._of(place - 1)]
        new = self._of(1)
        if self.last != self.joined:
            self.t.free(*self.last)
        before, self.joined = self.joined, [self._of(place)] if self.count else [new]
        self.t.free(*before)
        self.count, self.last = place, [new]
        if place == self.most:
            self.release()

    def release(self) -> None:
        self.t.free(*self.joined)
        if self.last != self.joined:
            self.t.free(*self.last)
        self.count, self.joined, self.last = 0, [], []

    def _of(self, batches: int) -> Tensor:
        return self.t.alloc("logits", self.t.size(batches * self.item_bytes, *self.letters))
