from collections.abc import Mapping, Sequence
from typing import Any

from foretrain.config.options import RunConfig
from foretrain.hardware.catalogue import Gpu
from foretrain.model.techniques.technique import Options, Technique


class ActivationMemoryBudget(Technique):
    id = "activation_memory_budget"
    options: Mapping[str, Any] = {"activation_memory_budget": 0.5}
    saves = "what Inductor's partitioner finds cheapest to recompute; below 0.5 the peak can rise, so measure"
    costs = "about a tenth of the step at 0.7"
    source = "torch._functorch.config.activation_memory_budget"
    needs_compile = needs_trace = True
    refuses = (
        (
            ("activation_memory_budget", "compile"),
            lambda c: c.activation_memory_budget < 1 and not c.compile,
            "budget_without_compile",
        ),
    )
    place = 100

    def tell_compiler(self, config: RunConfig) -> None:
        import torch._functorch.config as functorch

        functorch.activation_memory_budget = config.activation_memory_budget

    def not_estimated(self, config: RunConfig) -> str:
        budget = config.activation_memory_budget
        return f"activation_memory_budget = {budget}" if budget < 1 else ""

    def changes(self, c: RunConfig, gpu: Gpu, half: bool) -> Sequence[Options]:
        return [{"activation_memory_budget": 0.7}] if c.compile and c.activation_memory_budget == 1 else []

    def idle(self, c: RunConfig, gpu: Gpu, half: bool) -> str:
        return ""


TECHNIQUES = (ActivationMemoryBudget(),)
