"""Modules of allocations, forward and backward, by hooks that every nn.Module calls."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_iter

from foretrain.predict.trace.tracer import Tracer


class Names:
    """Module names by identity, learned from a model's root; tensors are tagged at the optimizer's step."""

    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer
        self.before_a_root: Callable[[], None] = lambda: None  # called before a model runs for the first time
        self.module_names = WeakKeyDictionary[nn.Module, str]()
        self.parameter_names: dict[int, str] = {}
        self.weight_shapes: set[tuple[int, ...]] = set()

    def learn(self, root: nn.Module) -> None:
        for name, module in root.named_modules():
            self.module_names.setdefault(module, name or type(root).__name__)
        for name, parameter in root.named_parameters():
            self.parameter_names.setdefault(id(parameter), name)
            self.tracer.tag(parameter, "weights", name)
            self.weight_shapes.add(tuple(parameter.shape))
        for name, buffer in root.named_buffers():
            self.tracer.tag(buffer, "buffers", name)

    def _before(self, module: nn.Module, args: Any) -> None:
        if module not in self.module_names:
            self.before_a_root()
            self.learn(module)
        self.tracer.modules.append(self.module_names[module])

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        """Also called after an exception in forward, as in a checkpointed block's second one."""
        name = self.tracer.modules.pop()
        nodes = [t.grad_fn for t in tree_iter(output) if isinstance(t, Tensor) and t.grad_fn is not None]
        while nodes:
            node = nodes.pop()
            metadata = cast(dict[str, str], node.metadata)
            if "module" not in metadata:
                metadata["module"] = name
                nodes.extend(n for n, _ in node.next_functions if n is not None)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.tracer.stepping = True
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                # Not seen in a forward pass where the model is compiled, or was made on `meta`.
                self.tracer.tag(parameter, "weights", self.parameter_names.get(id(parameter), ""))
                if parameter.grad is not None:
                    self.tracer.tag(parameter.grad, "gradients", self.parameter_names.get(id(parameter), ""))

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.tracer.stepping = False
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    name = f"{self.parameter_names.get(id(parameter), '')}.{key}"
                    self.tracer.tag(value, "optimizer", name)

    @contextlib.contextmanager
    def hooked(self, *, modules: bool = True) -> Iterator[None]:
        """`modules` off under torch.compile, which would see the hooks as part of the model."""
        uncompiled: Any = torch.compiler.disable
        with contextlib.ExitStack() as stack:
            handles = [
                register_optimizer_step_pre_hook(uncompiled(self._before_step)),
                register_optimizer_step_post_hook(uncompiled(self._after_step)),
            ]
            if modules:
                handles += [
                    nn.modules.module.register_module_forward_pre_hook(self._before),
                    nn.modules.module.register_module_forward_hook(self._after, always_call=True),
                ]
            for handle in handles:
                stack.callback(handle.remove)
            yield
