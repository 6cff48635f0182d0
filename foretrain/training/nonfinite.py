"""Steps that are not finite: seen late, judged once, and by `on_nonfinite` the end of the run or passed over.

The update of such a step is never made (model/update.py). With `stop`, no later one is either until the host has read
the step's numbers, so the state is then still that from before the step.
"""

import contextlib
import json
import math
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

import torch

from foretrain.base.errors import UserError
from foretrain.base.messages import say
from foretrain.config.options import RunConfig
from foretrain.data.batches import TRAIN, Batch, starts
from foretrain.data.dataset import DatasetInfo
from foretrain.model.optimizer import learning_rate
from foretrain.model.step import StepResult, TrainState
from foretrain.training import checkpoint, divergence
from foretrain.training.attempts import Generators
from foretrain.training.checkpoint import Progress
from foretrain.training.failure_report import SCHEMA, FailureReport, first_not_finite
from foretrain.training.ranks.group import Ranks
from foretrain.training.store import RunDirectory

MOST_SKIPS, SKIP_WINDOW = 10, 1000  # steps passed over, of the last so many
MOST_OVERFLOWS = 20  # one after the other: each halves the scale, which begins at 65536


class Reading:
    """A step's numbers on their way to the host. Reading waits for that step, not for what was queued behind it."""

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
        self.asked = False  # once it is read: whether one of several ranks has something to tell the others

    def read(self) -> tuple[float, float, bool]:
        """(loss, norm of the gradient, whether the update was held back)."""
        if self._done is not None:
            self._done.synchronize()
        loss, norm, held, *asked = self._numbers.tolist()
        self.asked = any(asked)
        return loss, norm, bool(held)


class Guard:
    """Judges the steps of a run. `saved`: waits for the save under way, so that it counts as what is safe.

    `ranks`: all judge the same numbers, and the first report that found something is that of all.
    """

    def __init__(
        self, directory: RunDirectory, info: DatasetInfo, note: Callable[..., None],
        saved: Callable[[], None] = lambda: None, ranks: Ranks | None = None,
    ) -> None:  # fmt: skip
        self.ranks = ranks or Ranks()
        self.directory, self.info, self.note, self.saved = directory, info, note, saved
        self._before: dict[int, Generators] = {}

    def before(self, step: int, state: TrainState) -> None:
        """Remember what dropout draws from in this step and in the one before, which may not be read yet.

        With on_nonfinite = stop all updates after a bad one are held back.
        """
        if state.config.on_nonfinite == "stop" and state.latch is None:
            state.latch = torch.zeros((), device=next(state.trained.parameters()).device)
        self._before = {n: g for n, g in self._before.items() if n == step - 1}
        self._before[step] = Generators.now(state.device)

    def judge(
        self, state: TrainState, progress: Progress, step: int, numbers: tuple[float, float, bool],
        again: Callable[[int], Iterable[Batch]],
    ) -> tuple[bool, Progress]:  # fmt: skip
        """(whether the step counts, the progress with it). Raises UserError 'diverged.…'.

        `again`: the micro-batches of a step, to look into it.
        """
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
        """With a loss more; one that leaps is told, once in a while."""
        recent, update = progress.recent_losses, {"overflows": 0}
        leaps = loss > max(recent, default=loss) and divergence.spike_score(recent, loss)
        if leaps and leaps >= divergence.LEAST_SCORE and step - progress.last_spike >= divergence.FEWEST:
            self.note("loss_spike", step=step, loss=loss, usual=median(recent), score=leaps)
            update["last_spike"] = step
        return progress.model_copy(update={**update, "recent_losses": divergence.with_loss(recent, loss)})

    def _saved(self) -> str:
        """What is safe, for the message."""
        with contextlib.suppress(Exception):  # that a save failed does not count beside what ends the run
            self.saved()
        return checkpoint.kept_in(self.directory.checkpoints)

    def _agreed(self, report: FailureReport) -> FailureReport:
        """That of the first rank in whose rows something was found."""
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
