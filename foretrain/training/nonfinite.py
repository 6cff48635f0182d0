"""Steps that are not finite: read late, judged once, and by `on_nonfinite` the end of the run or skipped. Such an
update is never made (model/update.py), and with `stop` no later one until the host has read the numbers."""

import contextlib
import json
import math
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from foretrain.base.errors import UserError
from foretrain.base.messages import say
from foretrain.base.records import Record
from foretrain.config.options import RunConfig
from foretrain.data.batches import TRAIN, Batch, starts
from foretrain.data.dataset import DatasetInfo
from foretrain.model.step import StepResult, TrainState, learning_rate
from foretrain.runs.folder import RunDirectory
from foretrain.training import checkpoint
from foretrain.training.attempts import Generators, is_out_of_memory
from foretrain.training.checkpoint import Progress
from foretrain.training.ranks import Ranks

SCHEMA = "foretrain.nonfinite/1"


class Culprit(Record):
    """The first tensor that is not finite; `kind`: no_memory or failed where the step could not be repeated.
    `not_a_number`, `infinite`: how many of its `numbers` are.
    """

    kind: str
    name: str = ""
    micro: int | None = None
    numbers: int = 0
    not_a_number: int = 0
    infinite: int = 0


class FailureReport(Record):
    """One step that was not finite. `loss`, `grad_norm`: texts, since JSON has no nan; `rows`: their first tokens."""

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
    """Repeat a step's micro-batches, uncompiled and without an update; None where all is finite."""
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
    except Exception as error:  # the run's end must be reported, even where this fails
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
        if search.found:  # its consequences would only hide it
            return
        state.scaler.scale(loss / count).backward()
        if search.found:
            return


# Divergence is judged by training loss alone: the validation loss of a model that overfits rises too. Nothing stops in
# the middle of a run, as losses recover. A spike is reported and never acted on: a loss is compared with the median of
# earlier steps and the spread around it, so that neither a spike nor the slope of a young run makes the next spike look
# small. The losses are part of a checkpoint, so a resumed run reports what the whole one would have.

FAR_ABOVE = 1.5  # times the loss of a model that knows nothing: worse than that is not chance
LEAST_GAIN, MOST_LOST = 0.5, 0.5  # nats gained at all, and the share of them that is lost again


def knows_nothing(losses: Sequence[float], vocab_size: int) -> float:
    """Return the loss of a guess among all tokens, or the run's first loss where it is higher."""
    return max(math.log(vocab_size), losses[0])


def diverging(losses: Sequence[float], vocab_size: int) -> bool:
    return losses[-1] > FAR_ABOVE * knows_nothing(losses, vocab_size)


def at_the_end(losses: Sequence[float], vocab_size: int) -> tuple[str, dict[str, Any]] | None:
    """Return (id of the error, its values) of a run that ends with these training losses; None: it went well."""
    if len(losses) < 2:
        return None
    first, best, last = losses[0], min(losses), losses[-1]
    if diverging(losses, vocab_size):
        return "diverged.worse", {"loss": last, "start": knows_nothing(losses, vocab_size)}
    if first - best >= LEAST_GAIN and last - best > MOST_LOST * (first - best):
        return "diverged.lost", {"loss": last, "best": best, "start": first}
    return None


WINDOW, FEWEST = 100, 30  # steps
LEAST_SCORE = 8.0  # standard deviations; a run of a million steps with normal noise has none beyond 5
_NORMAL = 1.4826
_SMALLEST = 1e-3  # of the median: the spread of a nearly constant loss means nothing


def spike_score(recent: tuple[float, ...], loss: float) -> float | None:
    """Return a loss's distance from recent ones in standard deviations; None where there are too few."""
    if len(recent) < FEWEST:
        return None
    middle = median(recent)
    spread = max(_NORMAL * median(abs(x - middle) for x in recent), _SMALLEST * abs(middle), 1e-9)
    return (loss - middle) / spread


def with_loss(recent: tuple[float, ...], loss: float) -> tuple[float, ...]:
    return (*recent[-(WINDOW - 1) :], loss)


MOST_SKIPS, SKIP_WINDOW = 10, 1000  # skipped steps, of the last so many
MOST_OVERFLOWS = 20  # in a row: each halves the scale, which begins at 65536


class Reading:
    """A step's numbers on their way to the host. Reading waits for that step, not for later ones."""

    def __init__(self, result: StepResult) -> None:
        held = result.held if result.held is not None else torch.zeros(())
        device = result.loss.device
        scalars = (result.loss, result.grad_norm, held, *([] if result.asked is None else [result.asked]))
        numbers = torch.stack([x.to(device) for x in scalars])
        self._done: Any = None
        if device.type == "cuda":
            kept = torch.empty(len(scalars), pin_memory=True)
            kept.copy_(numbers, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record()
            numbers = kept
        self._numbers = numbers
        self.asked = False  # once it is read: whether one of several ranks has a message

    def read(self) -> tuple[float, float, bool]:
        if self._done is not None:
            self._done.synchronize()
        loss, norm, held, *asked = self._numbers.tolist()
        self.asked = any(asked)
        return loss, norm, bool(held)


class Guard:
    """Judges the steps of a run; all `ranks` judge the same. `saved`: waits for the save under way."""

    def __init__(
        self, directory: RunDirectory, info: DatasetInfo, note: Callable[..., None],
        saved: Callable[[], None] = lambda: None, ranks: Ranks | None = None,
    ) -> None:  # fmt: skip
        self.ranks = ranks or Ranks()
        self.directory, self.info, self.note, self.saved = directory, info, note, saved
        self._before: dict[int, Generators] = {}

    def before(self, step: int, state: TrainState) -> None:
        """Remember dropout's generators for this step and the one before, which may not be read yet."""
        if state.config.on_nonfinite == "stop" and state.latch is None:
            state.latch = torch.zeros((), device=next(state.trained.parameters()).device)
        self._before = {n: g for n, g in self._before.items() if n == step - 1}
        self._before[step] = Generators.now(state.device)

    def judge(
        self, state: TrainState, progress: Progress, step: int, numbers: tuple[float, float, bool],
        again: Callable[[int], Iterable[Batch]],
    ) -> tuple[bool, Progress]:  # fmt: skip
        """Return (whether the step counts, the progress with it). Raises UserError 'diverged.…'."""
        loss, norm, held = numbers
        if not held and math.isfinite(loss):
            return True, self._counted(progress, step, loss)
        if state.scaler.is_enabled() and math.isfinite(loss):
            count = progress.overflows + 1
            if count >= MOST_OVERFLOWS:
                scale = float(state.scaler.get_scale())
                raise UserError("diverged.scaler", step=step, count=count, scale=scale, saved=self._saved())
            return True, progress.model_copy(update={"overflows": count})
        bad_loss = not math.isfinite(loss)
        what = say("nonfinite.loss" if bad_loss else "nonfinite.norm", value=loss if bad_loss else norm)
        values = {"step": step, "what": what}
        recent = (*(s for s in progress.skipped if s > step - SKIP_WINDOW), step)
        if state.config.on_nonfinite == "skip" and len(recent) <= MOST_SKIPS:
            self.note("step_skipped", **values, count=len(recent), most=MOST_SKIPS, window=SKIP_WINDOW)
            return False, progress.model_copy(update={"skipped": recent})
        report = self._agreed(self._report(state, step, numbers, again(step)))
        path = self.directory.path / f"nonfinite-{step}.json"
        self.directory.write(path.name, json.dumps(report.to_json(schema=SCHEMA), indent=1) + "\n")
        values |= {"path": str(path), "saved": self._saved()}
        if report.first is None:
            raise UserError("diverged.transient", **values)
        first = say(f"nonfinite.{report.first.kind}", name=report.first.name, micro=report.first.micro)
        if state.config.on_nonfinite == "skip":
            raise UserError("diverged.skips", **values, first=first, count=len(recent), window=SKIP_WINDOW)
        raise UserError("diverged.step", **values, first=first)

    def _counted(self, progress: Progress, step: int, loss: float) -> Progress:
        recent, update = progress.recent_losses, {"overflows": 0}
        leaps = loss > max(recent, default=loss) and spike_score(recent, loss)
        if leaps and leaps >= LEAST_SCORE and step - progress.last_spike >= FEWEST:
            self.note("loss_spike", step=step, loss=loss, usual=median(recent), score=leaps)
            update["last_spike"] = step
        return progress.model_copy(update={**update, "recent_losses": with_loss(recent, loss)})

    def _saved(self) -> str:
        with contextlib.suppress(Exception):  # a failed save matters less than what ends the run
            self.saved()
        return checkpoint.kept_in(self.directory.checkpoints)

    def _agreed(self, report: FailureReport) -> FailureReport:
        if self.ranks.world == 1:
            return report

        def choose(words: list[str]) -> str:
            return next((word for word in words if json.loads(word)["first"]), words[0])

        return FailureReport.from_json(self.ranks.agree(report.model_dump_json(), choose))

    def _report(
        self, state: TrainState, step: int, numbers: tuple[float, float, bool], batches: Iterable[Batch]
    ) -> FailureReport:
        c: RunConfig = state.config
        rows = c.batch_size * c.gradient_accumulation_steps * self.ranks.world
        first = first_not_finite(state, batches, self._before.get(step) or Generators.now(state.device))
        places = starts(c.seed, TRAIN, step, rows, self.info.train_tokens - c.block_size)
        return FailureReport(
            step=step, loss=str(numbers[0]), grad_norm=str(numbers[1]), learning_rate=learning_rate(c, step),
            batch_size=c.batch_size, block_size=c.block_size, rows=tuple(places.tolist()), dataset=self.info.path,
            transient=first is None, first=first,
        )  # fmt: skip
