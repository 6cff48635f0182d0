from collections.abc import Mapping, Sequence
from typing import Any

from foretrain.config.options import RunConfig
from foretrain.config.shape import NS_STEPS, ModelShape, is_block_matrix
from foretrain.hardware.catalogue import Dtype, Gpu
from foretrain.model.techniques.technique import Optimizer, Options, by_dimensions


class Muon(Optimizer):
    id = "muon"
    options: Mapping[str, Any] = {"optimizer": "muon"}
    saves = "one of the two moments of the blocks' matrices"
    costs = "Newton-Schulz iterations each step"
    source = "Jordan 2024, https://kellerjordan.github.io/posts/muon"
    place, drop_order, try_order = 120, 90, 6
    moments = ((8, "R"), (4, "M"))
    passing = "newton"

    def takes(self, name: str, shape: tuple[int, ...]) -> bool:
        return is_block_matrix(name, shape)

    def operations(self, ops: Any, config: RunConfig, dtype: Dtype) -> None:
        """Add momentum (fp32), and Newton-Schulz (half): 5·(4·rows²·columns + 2·rows³) FLOPs, rows <= columns."""
        low = 4 if dtype == "float32" else 2
        for shape, count in ModelShape.of(config).block_matrices.items():
            rows, columns = sorted(shape)
            numel = rows * columns
            ops.traffic("momentum", "add", numel, 8, 4, 2 * count)
            if config.weight_decay:
                ops.traffic("weight decay", "clip", numel, 4, 4, count)
            ops.traffic("matrices together", "add", numel, 4, 4, count)
            ops.traffic("matrices together", "add", numel, 4 + 2 * low, 2 * low, count)  # cast, length and division
            ops.traffic("matrices together", "add", numel, low, low, count)  # division by the nearer bound
            for m, n, k in ((rows, rows, columns), (rows, rows, rows), (rows, columns, rows)):
                ops.matmul("newton-schulz", m, n, k, NS_STEPS * count, dtype)
            ops.traffic("update", "add", numel, low + 8, 8, count)

    def letters(self, shape: ModelShape, granule: int) -> dict[str, int]:
        """M: parameters in matrices of the blocks; R: the rest; newton: what the iterations take."""
        matrices = shape.n_block_matrix_params
        return {"M": matrices, "R": shape.n_params - matrices, "newton": shape.newton_schulz_bytes}

    def make(self, named: Sequence[tuple[str, Any]], config: RunConfig, device_type: str) -> Any:
        """Each group's rate is the schedule's times its `lr_multiple` (default 1)."""
        from foretrain.model.muon import MuonAdamW

        groups = by_dimensions([p for name, p in named if not self.takes(name, tuple(p.shape))], config)
        matrices = [p for name, p in named if self.takes(name, tuple(p.shape))]
        multiple = config.muon_learning_rate / config.learning_rate
        groups.append({"params": matrices, "weight_decay": config.weight_decay, "muon": True, "lr_multiple": multiple})
        return MuonAdamW(groups, betas=(config.beta1, config.beta2), momentum=config.muon_momentum)

    def changes(self, c: RunConfig, gpu: Gpu, half: bool) -> Sequence[Options]:
        return [] if c.optimizer != "adamw" else [self.options]

    def idle(self, c: RunConfig, gpu: Gpu, half: bool) -> str:
        return ""


TECHNIQUES = (Muon(),)
