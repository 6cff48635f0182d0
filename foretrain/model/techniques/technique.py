"""One way to make a run smaller or faster: a file beside this one, and an option in config/options.py. No torch."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from foretrain.config.families.family import Rule
from foretrain.config.options import RunConfig
from foretrain.config.shape import ModelShape
from foretrain.hardware.catalogue import Dtype, Gpu

Exactness = Literal["exact", "rounding", "other optimizer"]
Options = Mapping[str, Any]


class Technique:
    """A subclass says what differs; tests/model/test_techniques.py checks each on its reference config."""

    id: str
    options: Mapping[str, Any]  # what switches it on
    saves: str
    costs: str
    # exact: the same sums, perhaps in another order; rounding: other half-precision rounding; other optimizer: other
    # updates.
    exactness: Exactness = "exact"
    source: str
    reference: Mapping[str, Any] = {}  # options of the config that the contract test traces
    beside: Mapping[str, Any] = {}  # options of other subjects that it needs
    needs_compile = False
    needs_trace = False  # neither the estimate nor the catalogue knows its effect, so advice traces it
    refuses: tuple[Rule, ...] = ()  # configs that are refused

    def applied(self, config: RunConfig) -> RunConfig:
        return config.model_copy(update=dict(self.options))

    def change(self, model: Any, config: RunConfig) -> None:
        """Change a model that was just built, where the config asks for it. It is called for every config."""

    def twin(self, config: RunConfig, dtype: Any) -> dict[str, Any]:
        """Return how the optimizer's fp32 twin is made (model/master.py); empty: it needs none."""
        return {}

    def tell_compiler(self, config: RunConfig) -> None:
        """Set Inductor's options before a model is compiled, for every config, as they are the process's."""

    @property
    def switches(self) -> tuple[str, ...]:
        """Return options that decide which kernels a pass runs, but for layers and tokens, which are counted."""
        changes = type(self).change is not Technique.change
        return tuple(name for name, value in self.options.items() if changes and isinstance(value, bool))

    def not_estimated(self, config: RunConfig) -> str:
        """Return what of a compiled run's config the estimate does not know; empty where it knows it."""
        return ""

    rule = ""  # the id of advice's rule, if it is not the technique's own
    advised = True
    place = 95  # of the rule among all, the smallest change first
    kind: Literal["memory", "both"] = "memory"
    # in sets of several changes, the highest is left out first; 0: it is in no set
    drop_order = 0
    try_order = 0  # it may need more memory than it saves, so both are tried, in this order; 0: it cannot
    instead_of: tuple[str, ...] = ()  # weaker rules that do nothing beside it
    milder: tuple[str, ...] = ()  # of these, those tried in its place where less is enough
    quick = False  # whether a plan's short list tries it
    lets_grow = False  # what it saves allows a larger micro-batch, so it is tried for speed, too

    def changes(self, c: RunConfig, gpu: Gpu, half: bool) -> Sequence[Options]:
        """Return what advice can change to have more of it, the smallest first; `half`: matmuls are half precision."""
        return () if all(getattr(c, name) == value for name, value in self.options.items()) else (self.options,)

    def idle(self, c: RunConfig, gpu: Gpu, half: bool) -> str:
        """Return the id of the reason why advice changes nothing; empty where nothing need be told."""
        return "already_on"

    def usual(self, found: Sequence[Options]) -> int:
        """Return which of `changes` shows its effect."""
        return 0

    def undone(self, c: RunConfig) -> Sequence[Options]:
        """Return what makes it cost less time where memory allows: off, then less of it."""
        return ()

    def with_layers(self, c: RunConfig, n_layer: int) -> Options:
        """Return what has to change with it where a model gets fewer layers."""
        return {}


class Optimizer(Technique):
    """An optimizer: the states that it keeps and how it is made; by default AdamW."""

    id = "adamw"
    options: Mapping[str, Any] = {"optimizer": "adamw"}
    exactness = "other optimizer"
    # (bytes, letter of predict/estimate) of the states: two fp32 moments of each of P parameters
    moments: tuple[tuple[int, str], ...] = ((8, "P"),)
    passing = ""  # the letter of a step's temporaries
    counts_on_device = True  # each parameter's step count is on the device

    def letters(self, shape: ModelShape, granule: int) -> dict[str, int]:
        """Return its own letters with their values; `granule`: bytes that the allocator rounds tensors up to."""
        return {}

    def tensors(self, numel: int) -> tuple[int, ...]:
        """Return bytes of each tensor of a parameter's moments, if the optimizer does not take it."""
        return (4 * numel, 4 * numel)

    def traffic(self, numel: int) -> tuple[float, float] | None:
        """Return the bytes per element that the update of a parameter reads and writes; None: AdamW's."""
        return None

    def launches(self, numel: int) -> int:
        return 0

    def operations(self, ops: Any, config: RunConfig, dtype: Dtype) -> None:
        """Add the kernels of its step to `ops` (predict/speed/ops.py); `dtype`: of half precision here."""

    def takes(self, name: str, shape: tuple[int, ...]) -> bool:
        return False

    def moments_bytes(self, numels: Mapping[int, int]) -> int:
        return sum(8 * numel * count for numel, count in numels.items())

    def make(self, named: Sequence[tuple[str, Any]], config: RunConfig, device_type: str) -> Any:
        from foretrain.model.update import AdamW

        groups, betas = by_dimensions([p for _, p in named], config), (config.beta1, config.beta2)
        return AdamW(groups, lr=config.learning_rate, betas=betas, fused=device_type in ("cuda", "cpu", "mps"))


def by_dimensions(parameters: Sequence[Any], config: RunConfig) -> list[dict[str, Any]]:
    """Return nanoGPT's two groups: tensors with two dimensions or more are decayed, the others are not."""
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
