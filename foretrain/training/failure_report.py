"""What went wrong in a step whose numbers are not finite: the step is done again and each tensor is looked at.

The state is as before the step, since its update was not made (model/update.py), and dropout draws as it did. So the
first tensor that is not finite is found again; where none is, the fault was the machine's.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from foretrain.base.records import Record
from foretrain.data.batches import Batch
from foretrain.model.step import TrainState
from foretrain.training.attempts import Generators, is_out_of_memory

SCHEMA = "foretrain.nonfinite/1"


class Culprit(Record):
    """The first tensor that is not finite. `kind`: weight, moment, activation, its_loss, gradient, sum.

    Where the step could not be done again: no_memory, failed.

    `not_a_number`, `infinite`: how many of its `numbers` are; `micro`: the micro-step, where it is of one.
    """

    kind: str
    name: str = ""
    micro: int | None = None
    numbers: int = 0
    not_a_number: int = 0
    infinite: int = 0


class FailureReport(Record):
    """One step that was not finite. `loss`, `grad_norm`: as texts, since JSON has no nan.

    `rows`: first tokens of its rows in the training split, in order; `block_size` tokens of each were inputs.
    """

    step: int
    loss: str
    grad_norm: str
    learning_rate: float
    batch_size: int
    block_size: int
    rows: tuple[int, ...]
    dataset: str
    transient: bool
    first: Culprit | None


class _Search:
    """Remembers the first tensor that is not finite."""

    def __init__(self) -> None:
        self.found: Culprit | None = None
        self.micro: int | None = None

    def look(self, kind: str, name: str, tensor: object) -> None:
        if self.found is None and isinstance(tensor, Tensor) and tensor.is_floating_point():
            tensor = tensor.detach()
            if not bool(torch.isfinite(tensor).all()):
                nan, infinite = int(tensor.isnan().sum()), int(tensor.isinf().sum())
                self.found = Culprit(
                    kind=kind, name=name, micro=self.micro, numbers=tensor.numel(), not_a_number=nan, infinite=infinite
                )

    def watch(self, model: nn.Module) -> list[Any]:
        """Hooks on the outputs of all modules, and on the gradients of these and of the weights."""

        def on_output(name: str) -> Any:
            def hook(_: object, __: object, output: object) -> None:
                for tensor in output if isinstance(output, tuple) else (output,):
                    self.look("activation", name, tensor)
                    if isinstance(tensor, Tensor) and tensor.requires_grad:
                        tensor.register_hook(lambda g: self.look("gradient", f"the output of {name}", g))

            return hook

        hooks: list[Any] = [m.register_forward_hook(on_output(name)) for name, m in model.named_modules() if name]
        for name, parameter in model.named_parameters():
            hooks.append(parameter.register_hook(lambda g, name=name: self.look("gradient", name, g)))
        return hooks


def first_not_finite(state: TrainState, batches: Iterable[Batch], generators: Generators) -> Culprit | None:
    """Do a step's micro-batches again, uncompiled and without an update; None where all is finite.

    Leaves weights, moments and the generators as they are, and no gradients.
    """
    now, search = Generators.now(state.device), _Search()
    for name, parameter in state.trained.named_parameters():
        search.look("weight", name, parameter)
        for kind, value in state.optimizer.state.get(parameter, {}).items():
            search.look("moment", f"{kind} of {name}", value)
    if search.found:
        return search.found
    if state.parallel and state.parallel.sharing.way.shards_weights:  # a pass needs all ranks, to its end
        return Culprit(kind="failed", name="FSDP")
    hooks = search.watch(state.model)
    try:
        generators.restore(state.device)
        _again(state, batches, search)
        norms = [p.grad.float().norm() for p in state.model.parameters() if p.grad is not None]
        if search.found is None and norms and not bool(torch.isfinite(torch.stack(norms).norm())):
            search.found = Culprit(kind="sum")
    except Exception as error:  # what ended the run must be said, even where it cannot be looked into
        search.found = Culprit(kind="no_memory" if is_out_of_memory(error) else "failed", name=type(error).__name__)
    finally:
        for hook in hooks:
            hook.remove()
    state.optimizer.zero_grad(set_to_none=True)
    if state.masters:
        state.masters.drop_gradients()
    now.restore(state.device)
    return search.found


def _again(state: TrainState, batches: Iterable[Batch], search: _Search) -> None:
    count = state.config.gradient_accumulation_steps
    state.model.train()
    for search.micro, (idx, targets) in enumerate(batches):
        with state.autocast():
            loss = state.model(idx, targets)
        search.look("its_loss", "", loss)
        if search.found:  # what follows from it would only hide it
            return
        state.scaler.scale(loss / count).backward()
        if search.found:
            return
