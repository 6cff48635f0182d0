"""A Trainer's run with ForetrainCallback, forecast, measured, recorded. Nothing here may end or slow the training."""

import atexit
import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

import torch

from foretrain.analysis.run import TrainerRunExplanation, explain_trainer_run
from foretrain.app import trainer_forecast
from foretrain.app.trainer_forecast import new_record, run_directory
from foretrain.base import oom_message
from foretrain.base.errors import UserError
from foretrain.model.allocated import storage_bytes
from foretrain.predict.finetune.plan import FineTunePlan
from foretrain.predict.plan import SCHEMA as PLAN_SCHEMA
from foretrain.runs.folder import Phase, RunDirectory, now
from foretrain.runs.record import PLAN, TrainerRun, source_of
from foretrain.training.attempts import is_out_of_memory
from foretrain.training.trainer_meter import Hooks, PhaseMeter, calling_trainer

WRITE_EVERY_S = 1.0  # lines of steps wait so long, so that a quick run is not slowed by its own diary
ASIDE = {"evaluate": "evaluation_s", "save": "save_s"}  # parts that are no part of a step, and their figures
PHASES: dict[str, Phase] = {"evaluate": "evaluating", "save": "saving"}  # all else is training
MOMENTS = {"micro_batch": "forward", "optimizer": "optimizer", "evaluate": "forward", "save": "saving"}


class Show(Protocol):
    def forecast(self, plan: FineTunePlan | None, problem: str, cards: int) -> None: ...

    def out_of_memory(self, found: TrainerRunExplanation, folder: str) -> None: ...

    def ended(self, found: TrainerRunExplanation, folder: str) -> None: ...

    def broken(self, reason: str) -> None: ...


@dataclass(frozen=True)
class Wishes:
    """What the user asked of the callback. `folder`: '' for foretrain/ in the Trainer's output_dir."""

    seq_len: int | None = None
    exact: bool = False
    folder: str = ""
    measure: bool = True


class _Tally:
    """What is counted of a run. `aside_s`: of the step that runs, spent in evaluations and saves."""

    def __init__(self, resumed: int) -> None:
        self.resumed = resumed
        self.began_s = self.last_s = self.flushed_s = time.monotonic()
        self.asked_s = self.aside_s = 0.0
        self.tokens = self.step_tokens = self.longest = 0
        self.first_step_s: float | None = None
        self.steps: list[tuple[float, int]] = []  # seconds and tokens of each, without the first
        self.lines: list[dict[str, Any]] = []  # that are not written yet
        self.failures: list[dict[str, Any]] = []
        self.forecasted = False

    @property
    def first(self) -> bool:
        return self.first_step_s is None

    def step(self) -> tuple[float, int]:
        now_s = time.monotonic()
        step_s, tokens = now_s - self.last_s - self.aside_s, self.step_tokens
        self.last_s, self.aside_s, self.step_tokens = now_s, 0.0, 0
        if self.first:
            self.first_step_s = step_s
        else:
            self.steps.append((step_s, tokens))
        self.tokens += tokens
        return step_s, tokens

    def found(self) -> dict[str, Any]:
        whole_s, tokens = sum(step_s for step_s, _ in self.steps), sum(count for _, count in self.steps)
        known = {
            "tokens": self.tokens, "seq_len": self.longest or None, "first_step_s": self.first_step_s,
            "step_s": median(step_s for step_s, _ in self.steps) if self.steps else None,
            "tokens_per_s": tokens / whole_s if whole_s and tokens else None,
        }  # fmt: skip
        return {key: value for key, value in known.items() if value is not None}


class TrainerSession:
    tally: _Tally
    record: TrainerRun
    meter: PhaseMeter
    hooks: Hooks
    trainer: Any
    arguments: Any
    state: Any
    model: Any

    def __init__(self, wishes: Wishes, show: Show) -> None:
        self.wishes, self.show = wishes, show
        self.active = False
        self.directory: RunDirectory | None = None
        self.plan: FineTunePlan | None = None

    # -- from the callback -----------------------------------------------------------------------------------

    def begin(self, arguments: Any, state: Any, model: Any, optimizer: Any) -> None:
        with self._safely():
            self._begin(arguments, state, model, optimizer)

    def _begin(self, arguments: Any, state: Any, model: Any, optimizer: Any) -> None:
        kept = self.directory if self.active else None  # of a try that memory ended
        self._leave()
        if not state.is_world_process_zero:
            return
        self.trainer, self.arguments, self.state, self.model = calling_trainer(), arguments, state, model
        self.tally, self.plan = _Tally(int(state.global_step or 0)), None
        device = next(iter(model.parameters())).device
        self.record = new_record(self.trainer, arguments, state, model, device)
        self.meter = PhaseMeter(
            model, device, resets=bool(getattr(arguments, "skip_memory_metrics", True)), on_cpu=self.wishes.measure
        )
        self.meter.optimizer = getattr(optimizer, "optimizer", optimizer)
        self._take_folder(kept)
        self.meter.load()
        self.hooks = Hooks(self.trainer, getattr(self.trainer, "optimizer", None) or optimizer, self)
        self.active = True
        atexit.register(self._at_exit)
        self._write()
        self._enter(self._phase())

    def _enter(self, part: str) -> None:
        self.meter.begin(part)
        if self.directory is not None:
            self.directory.tell(PHASES.get(part, "training"), int(self.state.global_step or 0))

    def _phase(self) -> str:
        """Return the next step's phase: an optimizer's states are there from the second on, and after a resume."""
        return "first_step" if self.tally.first and not self.tally.resumed else "steady_step"

    def _take_folder(self, kept: RunDirectory | None) -> None:
        """Take the run's folder; without one it is still forecast and measured."""
        try:
            if kept is not None:
                kept.acquire()
            self.directory = kept or run_directory(self.wishes.folder, self.arguments, resumed=self.tally.resumed > 0)
        except UserError as error:
            self.directory = None
            self.show.broken(str(error))
            return
        self.record = self.record.model_copy(update={"id": self.directory.id})
        if source_of(self.directory.path) == "trainer":
            self._go_on(self.directory)

    def _go_on(self, directory: RunDirectory) -> None:
        before = directory.record_of(TrainerRun)
        directory.drop_metrics_from(self.tally.resumed + 1, keep_evaluation=False, whole=False)
        if self.tally.resumed:
            directory.event("resumed", step=self.tally.resumed)
        self.record = self.record.model_copy(
            update={
                "started_at": before.started_at, "resumed_from": (*before.resumed_from, self.tally.resumed),
                "wall_s": before.wall_s, "memory": before.memory, "first_loss": before.first_loss,
                "best_val_loss": before.best_val_loss,
            }
        )  # fmt: skip

    def step_ended(self, state: Any) -> None:
        with self._safely():
            if not self.active:
                return
            was_first = self.tally.first
            step_s, tokens = self.tally.step()
            self._line({"kind": "step", "step": int(state.global_step), "step_s": round(step_s, 6),
                        "tokens": tokens or None, "elapsed_s": self._elapsed_s()})  # fmt: skip
            self.meter.done()
            if was_first and not self.tally.resumed:
                self._enter("steady_step")
            self.tally.last_s = time.monotonic()  # what this took is not part of a step

    def logged(self, state: Any, logs: dict[str, Any] | None) -> None:
        with self._safely():
            if not self.active or not logs or "loss" not in logs:
                return
            values = {name: _finite(logs.get(name)) for name in ("loss", "learning_rate", "grad_norm")}
            self._line({"kind": "log", "step": int(state.global_step), **values, "elapsed_s": self._elapsed_s(),
                        "memory_bytes": self.meter.held_bytes()})  # fmt: skip
            if values["loss"] is not None:
                first = self.record.first_loss if self.record.first_loss is not None else values["loss"]
                self.record = self.record.model_copy(update={"first_loss": first, "last_loss": values["loss"]})

    def evaluated(self, state: Any, metrics: dict[str, Any] | None) -> None:
        with self._safely():
            if not self.active:
                return
            loss = _finite((metrics or {}).get("eval_loss"))
            asked_s = self.tally.asked_s
            took = time.monotonic() - asked_s if asked_s else _finite((metrics or {}).get("eval_runtime"))
            self._line({"kind": "evaluation", "step": int(state.global_step), "val_loss": loss,
                        "evaluation_s": took, "elapsed_s": self._elapsed_s()})  # fmt: skip
            if loss is not None:
                best = min(loss, self.record.best_val_loss if self.record.best_val_loss is not None else loss)
                self.record = self.record.model_copy(update={"val_loss": loss, "best_val_loss": best})

    def finish(self, state: Any) -> None:
        with self._safely():
            if self.active:
                self.state = state
                self._end("finished", "")
                self.show.ended(self._explained(), self._folder())

    # -- from the hooks --------------------------------------------------------------------------------------

    def entered(self, part: str, args: tuple[Any, ...]) -> None:
        with self._safely():
            if self.active and part == "micro_batch":
                if self.record.status != "running":  # somebody caught what had ended it
                    self.record = self.record.model_copy(update={"status": "running", "reason": "", "ended_at": None})
                self._micro_batch(args)
            elif self.active and part in ASIDE and self.record.status == "running":
                self.tally.asked_s = time.monotonic()
                self._enter(part)

    def left(self, part: str) -> None:
        with self._safely():
            if not (self.active and part in ASIDE and self.record.status == "running"):
                return
            took_s = round(time.monotonic() - self.tally.asked_s, 6)
            self.tally.aside_s += took_s
            if part == "save" and self.directory is not None:
                step = int(self.state.global_step)
                self.directory.event("saved", name=f"checkpoint-{step}", step=step, save_s=took_s)
            self.record = self.record.model_copy(update={ASIDE[part]: took_s})
            self.meter.done()
            self._enter(self._phase())
            self._write()
            self.tally.asked_s = 0.0

    def failed(self, part: str, error: BaseException) -> None:
        with self._safely():
            if not self.active or isinstance(error, StopIteration | GeneratorExit):
                return
            reason = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"[:300].rstrip(": ")
            if is_out_of_memory(error):
                self._ran_out(part, error)
                self._end("failed", reason, leaves=False)
                self.show.out_of_memory(self._explained(), self._folder())
            else:
                stopped = isinstance(error, KeyboardInterrupt | SystemExit)
                self._end("stopped" if stopped else "failed", reason, leaves=False)

    # -- inside ----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _safely(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever it is, it is ours, and no reason to end somebody's training
            with contextlib.suppress(Exception):
                self._leave()
            self.active = False
            with contextlib.suppress(Exception):
                text = next(iter(str(error).splitlines()), "")
                self.show.broken(f"{type(error).__name__}: {text}" if text else type(error).__name__)

    def _micro_batch(self, args: tuple[Any, ...]) -> None:
        inputs = next((one for one in args if hasattr(one, "get") and "input_ids" in one), None)
        ids = inputs["input_ids"] if inputs is not None else None
        if ids is not None and hasattr(ids, "shape") and len(ids.shape) == 2:
            self.tally.step_tokens += int(ids.shape[0]) * int(ids.shape[1])
            rows = int(self.arguments.per_device_train_batch_size) if trainer_forecast.joins_rows(self.trainer) else 1
            self.tally.longest = max(self.tally.longest, -(-int(ids.shape[1]) // rows))
        if not self.tally.forecasted:
            self.tally.forecasted, began_s = True, time.monotonic()
            self._forecast(inputs)
            self.tally.last_s += time.monotonic() - began_s

    def _forecast(self, inputs: Any) -> None:
        """Make the forecast, show it and keep it; one made before a resume stays."""
        mask: Any = inputs.get("attention_mask") if inputs is not None else None
        seq_len, problem = self.wishes.seq_len or self._seq_len(), ""
        if not seq_len:
            problem = str(UserError("usage.callback_seq_len"))
        else:
            padded = isinstance(mask, torch.Tensor) and mask.dim() == 2 and not bool(mask.all())
            try:
                run = trainer_forecast.live_run(
                    self.trainer, self.model, self.arguments, self.state, seq_len=seq_len, padded=padded,
                    batch_size=int(getattr(self.state, "train_batch_size", 0) or 0),
                )  # fmt: skip
                n_params = 0 if run.four_bit is not None else self.record.n_params
                self.plan = trainer_forecast.forecast(
                    run, self.meter.device, n_params, self.record.n_trained, exact=self.wishes.exact
                )
            except UserError as error:
                problem = str(error)
        settings = self.record.settings | (trainer_forecast.settings_of(self.plan.tune) if self.plan else {})
        self.record = self.record.model_copy(update={"forecast_problem": problem, "settings": settings})
        if self.directory is not None and self.plan is not None:
            text = json.dumps(self.plan.to_json(schema=PLAN_SCHEMA), indent=1) + "\n"
            self.directory.write(PLAN, text)
        self._write()
        self.show.forecast(self.plan, problem, self.record.cards)

    def _seq_len(self) -> int:
        """Return the length by the trainer's own options, else that of the first batch."""
        length = getattr(self.arguments, "max_length", None) or getattr(self.arguments, "max_seq_length", None)
        return int(length) if length and getattr(self.arguments, "packing", False) else self.tally.longest

    def _ran_out(self, part: str, error: BaseException) -> None:
        found = oom_message.parse(f"{type(error).__name__}: {error}")
        values: dict[str, Any] = found.figures() if found else {}
        device = self.meter.device
        if self.meter.cuda:
            values.setdefault("allocated_bytes", torch.cuda.memory_allocated(device))
            values.setdefault("reserved_bytes", torch.cuda.memory_reserved(device))
            values.setdefault("card_bytes", torch.cuda.get_device_properties(device).total_memory)
        values["weights_bytes"] = storage_bytes(iter(self.model.parameters()))
        grads = (p.grad for p in self.model.parameters() if p.grad is not None)
        values["gradients_bytes"] = storage_bytes(grads)
        states = (v for s in getattr(self.meter.optimizer, "state", {}).values() for v in s.values())
        values["optimizer_bytes"] = storage_bytes(v for v in states if isinstance(v, torch.Tensor))
        values |= {"phase": self.meter.phase, "moment": MOMENTS.get(part, "other"), "step": self.state.global_step}
        values["batch_size"] = int(getattr(self.arguments, "per_device_train_batch_size", 0) or 0)
        values["accumulation"] = int(getattr(self.arguments, "gradient_accumulation_steps", 0) or 0)
        self.tally.failures.append({"id": "out_of_memory", "values": values})
        if self.directory is not None:
            self.directory.event("out_of_memory", **values)

    def _folder(self) -> str:
        return str(self.directory.path) if self.directory else ""

    def _explained(self) -> TrainerRunExplanation:
        if self.directory is None:
            return explain_trainer_run(self.record, self.plan, [], self.tally.failures)
        metrics, events = self.directory.read_lines("metrics", whole=False), self.directory.read_lines("events")
        return explain_trainer_run(self.record, self.plan, metrics, events)

    def _end(self, status: Any, reason: str, *, leaves: bool = True) -> None:
        """Write how it ended. A run that raised may be tried again, and stays ready for that."""
        self.meter.end()
        self._write(status=status, reason=reason, ended_at=now())
        if self.directory is not None:
            self.directory.event("ended", status=status, step=self.record.steps_done)
        if leaves:
            self._leave()

    def _leave(self) -> None:
        """Take everything of ours out of the Trainer, and free the folder."""
        if not self.active:
            return
        self.active = False
        self.hooks.remove()
        atexit.unregister(self._at_exit)
        self.meter.end()
        if self.directory is not None:
            self._flush()
            self.directory.release()

    def _at_exit(self) -> None:
        with self._safely():
            if self.active and self.record.status == "running":
                self._end("stopped", "")

    def _elapsed_s(self) -> float:
        return round(self.record.wall_s + time.monotonic() - self.tally.began_s, 3)

    def _line(self, line: dict[str, Any]) -> None:
        self.tally.lines.append(line)
        if line["kind"] != "step" or time.monotonic() - self.tally.flushed_s >= WRITE_EVERY_S:
            self._flush()

    def _flush(self) -> None:
        lines, self.tally.lines, self.tally.flushed_s = self.tally.lines, [], time.monotonic()
        if self.directory is not None:
            for line in lines:
                self.directory.append("metrics", line)

    def _write(self, **changed: Any) -> None:
        found = {
            **self.tally.found(), "steps_done": int(self.state.global_step or 0),
            "memory": self.meter.memory(self.record.memory),
        }  # fmt: skip
        self.record = self.record.model_copy(update={**found, **changed})
        shown = self.record.model_copy(update={"wall_s": self._elapsed_s()})
        if "ended_at" in changed:
            self.record, self.tally.began_s = shown, time.monotonic()
        if self.directory is not None:
            self._flush()
            self.directory.write_record(shown)


def _finite(value: Any) -> float | None:
    try:
        found = float(value)
    except (TypeError, ValueError):
        return None
    return found if abs(found) < 1e300 else None
