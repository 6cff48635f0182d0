"""A real step by torch.profiler: seconds of each group of operations, as in predict/speed/limit.py.

What an operation does itself counts for its group; views, allocations, wrappers, the autograd engine and Python are
excluded. Compiled kernels show with Inductor's `cpp.enable_kernel_profile`.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from foretrain.predict.speed.limit import Group

LONGEST = 20
STEP, ENGINE, OPTIMIZER = "one step", "autograd::engine::evaluate_function", "Optimizer."
WORK = re.compile(r"^(aten::|mkldnn::|onednn::|graph_\d+_cpp_|cpp_fused|foretrain::)")
# What makes or looks at a tensor and touches none of its elements, and Python functions registered as operations.
NO_WORK = re.compile(
    r"^aten::(empty\w*|new_empty\w*|view\w*|_unsafe_view|_reshape_alias|t|transpose|permute|as_strided\w*|slice|select|"
    r"narrow|split\w*|unbind|expand\w*|unsqueeze|squeeze|alias|detach\w*|chunk|resize_|set_|lift_fresh|resolve_conj|"
    r"resolve_neg|result_type|is_nonzero|item|_local_scalar_dense|to|_to_copy|reshape|contiguous|clone|linear|matmul|"
    r"_foreach_\w+|random_|empty_like|zeros|zeros_like|ones_like|stack|layer_norm|embedding|"
    r"scaled_dot_product_attention|zero_|log_softmax|softmax|nll_loss|nll_loss_nd|cross_entropy_loss|embedding_backward)$|^foretrain::"
)
MATMULS = re.compile(r"^(aten::(mm|addmm|bmm|baddbmm|_addmm_activation)|mkldnn::_linear_pointwise\w*)$")
LOSS = re.compile(r"log_?softmax|nll_loss|cross_entropy|logsumexp")
ATTENTION = re.compile(r"attention", re.IGNORECASE)


@dataclass(frozen=True)
class StepOperations:
    groups: dict[Group, float]
    operations: dict[Group, int]
    profiled_step_s: float
    longest: dict[str, float]  # seconds by the operation's name

    def rest_s(self, step_s: float) -> float:
        """Return the time that no operation explains: launching, Python, the autograd engine."""
        return step_s - sum(self.groups.values())


def profiled(step: Callable[[], Any], steps: int, weights: Iterable[tuple[int, ...]]) -> StepOperations:
    """Return the mean of so many steps. `weights`: the shapes of the model's matrices, which identify a weight's
    gradient.
    """
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True) as found:
        for _ in range(steps):
            with record_function(STEP):
                step()
    events: Any = found.events()
    shapes = [shape for shape in weights if len(shape) == 2]
    results, widths = {frozenset(shape) for shape in shapes}, {shape[1] for shape in shapes}
    groups: dict[Group, float] = defaultdict(float)
    names: dict[str, float] = defaultdict(float)
    counts: Counter[Group] = Counter()
    spans = [e for e in events if e.name == STEP]
    for span in spans:
        inside = [
            e for e in events if e.time_range.start >= span.time_range.start and e.time_range.end <= span.time_range.end
        ]
        engine = [e.time_range for e in inside if e.name.startswith(ENGINE)]
        end = max((t.end for t in engine), default=float("inf"))
        for event in inside:
            if is_work(event):
                group, seconds = _group(event, end, results, widths), event.self_cpu_time_total / 1e6
                counts[group] += 1
                groups[group] += seconds / len(spans)
                names[event.name] += seconds / len(spans)
    longest = sorted(names.items(), key=lambda pair: -pair[1])[:LONGEST]
    return StepOperations(
        dict(groups), {group: round(count / len(spans)) for group, count in counts.items()},
        sum(s.time_range.elapsed_us() for s in spans) / 1e6 / len(spans),
        dict(longest),
    )  # fmt: skip


def is_work(event: Any) -> bool:
    """Return whether it touches elements itself."""
    return bool(WORK.match(event.name)) and not NO_WORK.match(event.name)


def _group(event: Any, end: float, weights: set[frozenset[int]], widths: set[int]) -> Group:
    ancestors = [event.name]
    parent = event.cpu_parent
    while parent is not None and parent.name != STEP:
        ancestors.append(parent.name)
        parent = parent.cpu_parent
    if any(ATTENTION.search(name) for name in ancestors):
        return "attention"
    if event.time_range.start >= end or any(name.startswith(OPTIMIZER) for name in ancestors):
        return "optimizer"
    if MATMULS.match(event.name):
        rows, inner, columns = sides_of(event)
        if {rows, columns} in weights:
            return "weight_gradient"
        # A chunked loss makes its gradients in the forward pass, which never sums over the vocabulary.
        backward = any(name.startswith(ENGINE) for name in ancestors) or inner not in widths
        return "input_gradient" if backward else "forward"
    return "loss" if LOSS.search(event.name) else "pointwise"


def sides_of(event: Any) -> tuple[int, int, int]:
    """Return rows of a matmul's result, the summed dimension, columns; zeros where it is batched. An added term is
    before its two matrices, `out` behind them.
    """
    first = 1 if "addmm" in event.name else 0
    left, right = [*event.input_shapes[first : first + 2], (), ()][:2]
    if len(left) != 2 or len(right) != 2:
        return 0, 0, 0
    return left[0], left[1], right[1]


def show_compiled_kernels() -> None:
    """Let Inductor's kernels report to the profiler. Before anything is compiled."""
    import torch._inductor.config as inductor

    inductor.cpp.enable_kernel_profile = True
