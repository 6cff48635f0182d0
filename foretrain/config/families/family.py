"""A family of models (a `recipe`), without torch. C width, H heads, D width of a head, V vocabulary, W context."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from foretrain.config.nanogpt_checkpoint import Refused
from foretrain.config.options import RunConfig

Shape = tuple[int, ...]
Named = Iterator[tuple[str, Shape]]
# Options, whether a config breaks the rule, and the id of its text.
Rule = tuple[tuple[str, ...], Callable[[RunConfig], bool], str]
EXCLUDED = "excluded"  # the text for options of which one can be on


def exclude(*names: str) -> Rule:
    """Return the rule that switches are not all on together; a choice that is auto is not on."""
    return names, lambda c: all(getattr(c, name) in (True, "on") for name in names), EXCLUDED


class Family:
    """One family. A subclass says what differs; configs that it gets are resolved ones."""

    name: str  # the value of `recipe`
    model: tuple[str, str]  # the module of its PyTorch code, and the class
    called: str  # what sentences about the weights of others call its model
    blocks: str  # its list of blocks, as the names of parameters begin
    tokens: tuple[str, ...]  # its matrices with a row for each token of the vocabulary
    # Last words of its modules' names: what their activations count for, and the moment of the step that they begin.
    parts: Mapping[str, tuple[str, str]] = {}
    # Sizes of its own that formulas have letters for: attributes of a config. H heads of D that are not C: see dims.py.
    letters: Mapping[str, str] = {}
    legend = ""  # the id of a text that explains them
    positions = ""  # its matrix with a row for each position
    sets: Mapping[str, Any] = {}  # options unless the user writes them
    rates: Mapping[str, Any] = {}  # the same, with the optimizer that it sets alone
    rules: tuple[Rule, ...] = ()
    beside_nanogpt = True  # whether plans show the step of nanoGPT's model of the same sizes, too
    # model_type of a config.json of Hugging Face's that is one of this family; none: it has no form there.
    hugging_face: tuple[str, ...] = ()
    transposed: tuple[str, ...] = ()  # ends of names of matrices that Hugging Face keeps in x out

    # -- parameters, in the order of the model's state dict -------------------------------------------------

    def before(self, c: RunConfig) -> Named:
        raise NotImplementedError

    def block(self, c: RunConfig) -> Named:
        raise NotImplementedError

    def after(self, c: RunConfig) -> Named:
        raise NotImplementedError

    def buffers(self, c: RunConfig) -> Iterator[Shape]:
        yield from ()

    def looked_up(self, c: RunConfig) -> int:
        """Return how many parameters no matmul reads: rows are taken out of them."""
        raise NotImplementedError

    def head_dim(self, c: RunConfig) -> int:
        return c.n_embd // c.n_head

    def n_kv_head(self, c: RunConfig) -> int:
        return c.n_head

    def roughly_compiled(self, c: RunConfig) -> str:
        """Say what of a config makes the memory of its compiled step an approximation; '': nothing does."""
        return ""

    def is_timed(self, *, compiled: bool) -> bool:
        return True

    # -- weights of others ----------------------------------------------------------------------------------

    def owns(self, names: Mapping[str, Any]) -> bool:
        return f"{self.blocks}.0." in "\n".join(names)

    def read_shape(self, shapes: Mapping[str, Shape], config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options that a folder's tensors and Hugging Face's config.json say. Raises Refused."""
        raise Refused(f"weights of recipe = {self.name} can only be resumed from their own run")

    def compare(self, c: RunConfig, shapes: Mapping[str, Shape], more: Sequence[str] = ()) -> None:
        """Raise Refused where tensors are not those of a config; `more`: names that may be there, too."""
        wanted = {**dict(self.before(c)), **dict(self.after(c))}
        block = dict(self.block(c))
        for i in range(c.n_layer):
            wanted |= {f"{self.blocks}.{i}.{name}": shape for name, shape in block.items()}
        for name in [*wanted, *shapes]:
            if name not in shapes:
                raise Refused(f"it lacks {name[:80]}")
            if name not in wanted and name not in more:
                raise Refused(f"it has {name[:80]}, which {self.called} has not")
            if name in wanted and tuple(shapes[name]) != wanted[name]:
                given, own = (" x ".join(map(str, shape)) or "a number" for shape in (shapes[name], wanted[name]))
                raise Refused(f"{name[:80]} is {given} instead of {own}")

    def write_config(self, c: RunConfig, separator: int | None) -> dict[str, Any]:
        """Return config.json of Hugging Face's model that computes the same; `separator`: between documents."""
        raise NotImplementedError

    def gguf_architecture(self, c: RunConfig) -> str:
        return ""

    def write_gguf(self, c: RunConfig) -> dict[str, int | float]:
        """Return the keys of GGUF that say the model's sizes, without the architecture's name before them."""
        raise NotImplementedError

    def gguf_rotated(self, c: RunConfig) -> Mapping[str, int]:
        """Return {end of a matrix's name: its heads} where llama.cpp turns neighbouring rows of a head."""
        return {}


def count_layers(shapes: Mapping[str, Shape], blocks: str) -> int:
    """Count the blocks that tensors are named after. A number beyond that of all tensors does not count."""
    found = (re.match(rf"{re.escape(blocks)}\.([0-9]{{1,9}})\.", name) for name in shapes)
    return 1 + max((number for each in found if each and (number := int(each[1])) < len(shapes)), default=-1)


def own_options(config: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return what our own config (run.json, or beside exported safetensors) says of these options. Raises Refused."""
    values = {name: config[name] for name in names if name in config}
    try:
        checked = RunConfig.model_validate(values)
    except ValidationError as error:
        name = str(error.errors()[0]["loc"][0])
        raise Refused(f"its config says {name} = {str(values[name])[:40]}, which is not possible") from None
    return {name: getattr(checked, name) for name in values}


# Rules that several families share.
NO_DROPOUT: Rule = (("dropout", "recipe"), lambda c: c.dropout > 0, "recipe_without_dropout")
NO_BIAS: Rule = (("bias", "recipe"), lambda c: c.bias, "recipe_without_bias")
EVEN_HEADS: Rule = (
    ("n_embd", "n_head", "recipe"),
    lambda c: c.n_embd % c.n_head == 0 and c.n_embd // c.n_head % 2 == 1,
    "recipe_odd_heads",
)
