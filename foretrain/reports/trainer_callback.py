"""`ForetrainCallback`: one line in somebody's script, and their Trainer's run is forecast, measured and recorded."""

from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import TrainerCallback

from foretrain.analysis.run import TrainerRunExplanation
from foretrain.app.trainer_session import TrainerSession, Wishes
from foretrain.predict.finetune.plan import FineTunePlan
from foretrain.reports import text
from foretrain.reports.document import Document, Message
from foretrain.reports.views import trainer_run as run_view


class ForetrainCallback(TrainerCallback):
    """A callback for transformers' Trainer and TRL's trainers: `Trainer(..., callbacks=[ForetrainCallback()])`.

    Before the first step it prints the forecast: memory by phase, whether it fits, the time of a step. While the run
    trains it measures each phase; memory that runs out is explained, and the exception goes on. The folder
    `foretrain/` in the Trainer's output_dir is a run for `foretrain explain`, `compare` and `report`.

    `seq_len`: tokens of a sequence in the forecast; None: those of the first batch, or the trainer's own with packing.
    `exact`: trace the Trainer's loop for the forecast, in a process of its own, before the first step; on a card only.
    `folder`: another folder. `measure_cpu`: on a CPU, let PyTorch's profiler watch the first three steps, one
    evaluation and one save; False where the script runs a profiler of its own. `quiet`: print nothing.

    On a card torch.cuda.reset_peak_memory_stats() is called between the phases (not where skip_memory_metrics is
    False, as the Trainer itself measures then), so max_memory_allocated() is afterwards that of the last phase. Several
    processes: the first one measures its own card. Whatever fails in here is one line, and the training goes on.
    """

    def __init__(
        self,
        seq_len: int | None = None,
        *,
        exact: bool = False,
        folder: str | Path | None = None,
        measure_cpu: bool = True,
        quiet: bool = False,
    ) -> None:
        wishes = Wishes(seq_len=seq_len, exact=exact, folder=str(folder or ""), measure=measure_cpu)
        self._session = TrainerSession(wishes, _Terminal(quiet))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._session.begin(args, state, kwargs.get("model"), kwargs.get("optimizer"))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._session.step_ended(state)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self._session.logged(state, logs)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._session.evaluated(state, kwargs.get("metrics"))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._session.finish(state)


class _Terminal:
    """Tells the user on stderr, where a Trainer's own log goes."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._console = Console(stderr=True, highlight=False)

    def forecast(self, plan: FineTunePlan | None, problem: str, cards: int) -> None:
        self._print(run_view.before(plan, problem, cards))

    def out_of_memory(self, found: TrainerRunExplanation, folder: str) -> None:
        self._print(run_view.ran_out(found))
        self._line(Message("callback.folder", {"path": folder}).text() if folder else "")

    def ended(self, found: TrainerRunExplanation, folder: str) -> None:
        self._print(run_view.document(found))
        self._line(Message("callback.folder", {"path": folder}).text() if folder else "")

    def broken(self, reason: str) -> None:
        self._line(Message("callback.broken", {"reason": reason}).text())

    def _line(self, line: str) -> None:
        if line and not self._quiet:
            self._console.print(line, soft_wrap=True, markup=False)

    def _print(self, document: Document) -> None:
        if not self._quiet:
            self._console.print()
            text.render(document, self._console)
            self._console.print()
