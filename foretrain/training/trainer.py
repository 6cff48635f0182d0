"""The training loop: steps, evaluation, progress, checkpoints, exact resume, a clean stop. It does not print."""

import contextlib
import math
import time
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from foretrain.base.errors import UserError
from foretrain.base.signals import StopFlag
from foretrain.config.microbatches import sequences_of, smaller_micro_batch, with_micro_batch, with_original_micro_batch
from foretrain.config.options import RunConfig
from foretrain.config.shape import ModelShape
from foretrain.data.batches import Batch, TokenFile, evaluation_batches
from foretrain.data.dataset import DatasetInfo
from foretrain.model import precision_check
from foretrain.model.graphed import GraphedStep, graphed_step
from foretrain.model.low_precision import fp16_accumulation
from foretrain.model.step import StepResult, TrainState, build, evaluation_loss, learning_rate, train_step
from foretrain.runs.folder import EvaluationMetrics, Listener, Note, RunDirectory, StepMetrics, now
from foretrain.runs.record import RankFigures, TrainedRun
from foretrain.training import attempts, checkpoint, cpu_threads, nonfinite, starting
from foretrain.training.checkpoint import Progress
from foretrain.training.contention import Contention, Event, Unwatched
from foretrain.training.cpu_threads import Waiting
from foretrain.training.device import TORCH_DTYPES, Placement
from foretrain.training.feed import Feed, token_files
from foretrain.training.memory_limit import HostGuard, Watch, kept
from foretrain.training.meter import WARM_STEPS, Meter, Pace
from foretrain.training.nonfinite import Guard, Reading
from foretrain.training.ranks import Ranks, Together
from foretrain.training.saver import Saver
from foretrain.training.starting import config_digest
from foretrain.training.vitals import Vitals


class Trainer:
    """Trains one run in its directory, whose lock the caller holds. `expected`: seconds of a step and of an evaluation
    by the forecast. `contention`: watches a CPU's other programs."""

    def __init__(
        self,
        config: RunConfig,
        info: DatasetInfo,
        directory: RunDirectory,
        placement: Placement,
        listen: Listener = lambda event: None,
        name: str = "run",
        expected: tuple[float, float] | None = None,
        contention: Contention | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.ranks = ranks or Ranks()
        self.info, self.directory, self.placement = info, directory, placement
        self.listen, self.name = listen, name
        self.flag = StopFlag(together=self.ranks.world > 1)
        self.together = Together(self.ranks, self.flag, self._note)
        self._take(config)
        self.meter = Meter(placement.device, config.memory_limit_bytes)
        self.watch = Watch(config.memory_limit_bytes)
        self.vitals = Vitals(directory, placement.device)
        self.shape = ModelShape.of(config)
        self.train_tokens, self.val_tokens = token_files(config, info)
        self.feed = Feed(self.train_tokens, placement.device, self.ranks.rank, self.ranks.world)
        devices = self.ranks.world // (self.ranks.place.local_world if placement.device.type == "cpu" else 1)
        self.peak = (placement.gpu.peak_flop_per_s(placement.dtype) or 0.0) * devices
        self.pace = Pace(expected)
        self.contention, self.waiting = contention or Unwatched(), Waiting()
        self.end_process = attempts.end_process if self.ranks.first else attempts.end_quietly
        self.resumed_from: tuple[int, ...] = ()
        self.worlds: tuple[tuple[int, int], ...] = ()
        self.skipped_checkpoints: tuple[str, ...] = ()
        self.shrunk_from: int | None = None
        self.threads: int | None = None
        self.former: TrainedRun | None = None  # as a resume found it
        self.started_at = now()
        self.clock = time.monotonic
        self.state: TrainState
        self.graphed: GraphedStep | None = None  # the step as one CUDA graph, where the config asks for it
        self._graph_reported = False
        self.progress = Progress(step=0, config_digest=config_digest(config), dataset_fingerprint=info.fingerprint)
        self._elapsed_before_s = 0.0
        self._diverging = False
        self.reads_late = placement.device.type == "cuda"
        self._open: tuple[int, Reading] | None = None  # a step whose numbers are not read yet
        self._passed: set[str] = set()  # "training", "evaluating": what has run once, and so is compiled
        self.saver = Saver(
            directory.checkpoints, config.keep_checkpoints, self._note, config.memory_limit_bytes, self.ranks.peers
        )
        self.guard = Guard(directory, info, self._note, self.saver.finish, self.ranks)
        self.ranks.ends = self._another_ended

    def _take(self, config: RunConfig) -> None:
        self.config, self.own = config, self.together.part_of(config)

    def run(self, *, resume: bool = False) -> TrainedRun:
        """Train to the end or to a signal; the record is written unless a resume is refused."""
        with self.flag:
            return self._run(resume)

    def _run(self, resume: bool) -> TrainedRun:
        self._started = self.clock()
        self._entered = not resume
        self.directory.tell("starting")
        try:
            if not resume:
                self._write_record("running")
            guard = (
                HostGuard(self._machine_is_full) if self.placement.device.type == "cpu" else contextlib.nullcontext()
            )
            fp16 = fp16_accumulation(self.config.matmul == "fp16_accumulation")
            with self.feed, self.saver, guard, fp16, self.waiting:
                self._begin(resume)
                finished = self._loop()
            self._restore_folder()
            if finished and self.ranks.first:
                self._judge_end()
        except BaseException as raised:
            error = self.ranks.explained(raised)
            self.vitals.ran_out(error, getattr(self, "state", None), self.progress.step)
            ending = attempts.ending_of(error, self.directory.path, self.progress.step, self._out_of_memory)
            if isinstance(error, UserError) and ending.status == "diverged":  # another step was begun, but not finished
                self.progress = self.progress.model_copy(update={"step": error.values.get("step", self.progress.step)})
            # This rank's, or another's.
            if isinstance(ending.error, UserError) and ending.reason in attempts.SMALLER_AT_RESUME:
                self._take_smaller(ending.error.values["smaller"])
            self._write_fault(ending.status, ending.reason)
            if ending.error is raised:
                raise
            raise ending.error from None
        return self._write_record("finished" if finished else "interrupted", self.flag.signal_name)

    def _restore_folder(self) -> None:
        """Restore the run's first files, where somebody removed its folder, and report it."""
        if lost := self.directory.restore_removed():
            self._note("files_missing", files=list(lost), path=str(self.directory.path))

    def _judge_end(self) -> None:
        if found := nonfinite.at_the_end(self._training_losses(), self.config.vocab_size):
            id, values = found
            saved = checkpoint.kept_in(self.directory.checkpoints)
            raise UserError(id, step=self.progress.step, saved=saved, **values)

    def _training_losses(self) -> list[float]:
        lines = self.directory.read_lines("metrics")
        return [line["train_loss"] for line in lines if line["kind"] == "evaluation"]

    def _machine_is_full(self, held: int, free: int, total: int) -> None:
        values = {"held": held, "free": free, "total": total, "step": self.progress.step}
        error = UserError("memory.machine_full", **values)
        with contextlib.suppress(Exception):
            self.directory.event("machine_full", **values)
            self._write_fault("failed", error.id)
            self.ranks.tell(error)
        self.end_process(error)

    def _another_ended(self, error: UserError) -> None:
        with contextlib.suppress(Exception):
            self._write_fault("failed", error.id)
        self.end_process(error)

    def _write_fault(self, status: Any, reason: str) -> None:
        """Write it unless the resume was refused: the record has the run's config."""
        if self._entered:
            with contextlib.suppress(OSError):  # a full disk takes the record too; the error is what counts
                self._write_record(status, reason)

    def _out_of_memory(self, id: str) -> UserError:
        c = self.config
        smaller = smaller_micro_batch(c.batch_size, sequences_of(self.own)) or 1
        return UserError(
            id, step=self.progress.step, batch_size=c.batch_size, accumulation=c.gradient_accumulation_steps,
            smaller=smaller, more=sequences_of(c) // smaller,
        )  # fmt: skip

    def _begin(self, resume: bool) -> None:
        for id, values in self.placement.notes:
            self._note(id, **values)
        if (capped := kept(self.placement, self.config.memory_limit_bytes)) is not None:
            self._note(capped[0], **capped[1])
        before = self.directory.read_record() if resume else None
        if before:
            self._take(starting.keep_origin(self.config, before, self.directory))
        if self.placement.device.type == "cpu":
            self.threads = cpu_threads.set_threads(self.config, before.threads if before else None)
        dtype = TORCH_DTYPES[self.placement.dtype]
        share = self.together.share(self.config)
        self.state = build(self.own, self.placement.device, dtype, compile=self.placement.compiled, share=share)
        self.together.begin(self.state)
        if self.ranks.first:
            checkpoint.sweep(self.directory.checkpoints)
        checkpoint.check_shared(self.directory.checkpoints, self.ranks.peers)
        if resume:
            self._resume()
        else:
            self._start()
        self._record_graph()
        if self.config.matmul != "dtype":
            precision_check.check_before(self.state, self.train_tokens, self.placement.dtype, self._note)

    def _start(self, sha256: str | None = None) -> None:
        """Start from the weights that init_from names, if any; `sha256`: theirs when the run first began."""
        if (weights := starting.find(self.config.init_from)) is None:
            return
        start = starting.put(weights, self.state, self.directory.scratch)
        if sha256 not in (None, start.sha256):
            raise UserError("data.weights_changed", path=start.path)
        self.progress = self.progress.model_copy(update={"step": start.step})
        self._note("started_from", path=start.path, step=start.step, sha256=start.sha256)

    def _resume(self) -> None:
        loaded = checkpoint.load(self.directory.checkpoints, self.state, self._check_compatible, self.ranks.peers)
        previous = self.directory.read_record()
        self.ranks.agree(None, lambda words: None)  # all have read it, before the first one writes another
        self.started_at, self.resumed_from = previous.started_at, previous.resumed_from
        if loaded is None:  # nothing was saved yet, but the log belongs to its config all the same
            digest, fingerprint = config_digest(previous.config), previous.dataset.fingerprint
            start = Progress(step=0, config_digest=digest, dataset_fingerprint=fingerprint)
            self._check_compatible(start)
            self._start(starting.known_digest(self.directory.read_lines("events")))
        else:
            world = self.ranks.world
            for id, values in starting.differences(loaded, previous, self.config, self.placement, self.threads, world):
                self._note(id, **values)
            self.skipped_checkpoints = tuple(f"{name}: {problem}" for name, problem in loaded.skipped)
            self.progress = loaded.progress
            self.together.by_number |= loaded.progress.dropout_by_number
            if self.config.eval_only:  # once more, perhaps with more batches
                self.progress = self.progress.model_copy(update={"evaluated": False})
        step = self.progress.step
        self._entered, self.former = True, previous
        self._elapsed_before_s = self.progress.elapsed_s
        self.resumed_from += (step,)
        self.worlds = starting.worlds(previous, step, self.ranks.world)
        self._resume_split(previous)
        self.directory.drop_metrics_from(step, keep_evaluation=self.progress.evaluated)
        self.directory.write_config(self.config)
        self._note("resumed", step=step)
        self._write_record("running")

    def _resume_split(self, previous: TrainedRun) -> None:
        """Resume with the micro-batch that memory had forced, unless another one is asked for; report its effect."""
        self.shrunk_from = previous.shrunk_from
        config, id, values = starting.resumed_split(self.config, previous)
        if id:
            self._use(config)
            self._note(id, **values)

    def _use(self, config: RunConfig) -> None:
        self._take(config)
        self.graphed = None
        attempts.use_split(self.state, self.own, compiled=self.placement.compiled)
        self._record_graph()

    def _record_graph(self) -> None:
        """Record steps as one graph again, where config/checks.py allows it and no part of them is on the host."""
        self.graphed = None
        if not self.together.several and not (self.config.dropout and self.together.by_number):
            asked = with_original_micro_batch(self.config, self.shrunk_from)
            self.graphed = graphed_step(self.state, self.placement.gpu, self._not_recorded, asked)
            if self.graphed and self.config.cuda_graph == "auto" and not self._graph_reported:
                self._graph_reported = True
                self._note("one_graph")
        elif self.config.cuda_graph == "on" and self.placement.device.type == "cuda":
            self._not_recorded("several ranks share the run")

    def _not_recorded(self, reason: str) -> None:
        self._take(self.config.model_copy(update={"cuda_graph": "off"}))  # so it continues, and so does a resume
        self._note("not_recorded", reason=reason)

    def _check_compatible(self, progress: Progress) -> None:
        starting.check_compatible(progress, self.config, self.info, self.directory)

    def _loop(self) -> bool:
        """Take steps until max_iters (true) or a signal (false). On a card a step's loss is read during the next step,
        so that the card never waits for the host."""
        c = self.config
        self.pace.begin(self.clock(), self.progress.step)
        self._first_step = self.progress.step
        self._tell_load(self.contention.begin())
        while not self.flag.stopping:
            step = self.progress.step
            done = c.eval_only or step >= c.max_iters
            if (step % c.eval_interval == 0 or done) and not self.progress.evaluated:
                self._settle()
                before = self.clock()
                self._evaluate_and_save(step, force=done)
                self.pace.pause(self.clock() - before)
                if self.flag.stopping:
                    break
            if done:
                self._settle()
                return True
            before = self.clock()
            if (result := self._train_one(step)) is None:
                break
            if step - self._first_step >= (WARM_STEPS if self.placement.compiled else 1):
                self._tell_load(self.contention.step(self.clock() - before))
            self.saver.poll()
            self._settle()
            self.progress = self.progress.model_copy(update={"step": step + 1, "evaluated": False})
            self._open = step, Reading(result)
            del result  # while the next step is recorded its tensors would hold a segment
            if not self.reads_late:
                self._settle()
        self._settle()
        self._save(wait=True)
        return False

    def _settle(self) -> None:
        """Read, judge and log the open step, if any. Raises UserError 'diverged.…'."""
        if self._open is None:
            return
        (step, reading), self._open = self._open, None
        numbers = reading.read()  # waits for that step
        if reading.asked:
            self._confer(step)
        again = partial(self._again, self.own)
        counts, self.progress = self.guard.judge(self.state, self.progress, step, numbers, again)
        if not counts or (step % self.config.log_interval and step + 1 != self.config.max_iters):
            return
        self._log(step, numbers[0], numbers[1], self.pace.step_s(self.clock(), step))

    def _again(self, config: RunConfig, step: int) -> Iterable[Batch]:
        return self.together.dealt(self.feed.again(config, step), config, step)

    def _train_one(self, step: int) -> StepResult | None:
        """Do one optimizer step, in as small micro-batches as memory asks for; None where a stop came in its middle."""
        rate, phase = learning_rate(self.config, step), "first_step" if step == 0 else "steady_step"

        def carry_out(batches: Iterable[Batch]) -> StepResult:
            if step and self.meter.gradients_bytes is None and self.meter.wants("steady_step"):
                self.meter.watch(self.state, compiled=self.placement.compiled)
            # Of steps that become a graph the recorded one shows the run's memory from then on, if there is one.
            waits = step and self.graphed and 0 < self.graphed.left < self.config.max_iters - step
            with contextlib.nullcontext() if waits else self.meter.phase(phase, self.state):
                return self.graphed(batches, rate) if self.graphed else train_step(self.state, batches, rate)

        self.guard.before(step, self.state)
        self._tell("training", step)
        while True:
            batches, events = self.feed.batches(self.own, step), self.vitals.watching(self.state, phase, step)
            batches = self.together.dealt(batches, self.own, step)
            result = attempts.attempt(self.state, batches, carry_out, events, lambda: self.flag.stopping)
            if isinstance(result, StepResult):
                self._passed.add("training")
                return result
            if result == "stopped":
                return None
            if result == "optimizer":
                raise self._smaller_at_resume("memory.optimizer_step")
            if result == "sent":
                raise self._smaller_at_resume("memory.others_wait")
            if isinstance(result, attempts.NotCompiled):
                self._go_eager(result)
            else:
                self._shrink(step)

    def _smaller_at_resume(self, id: str) -> UserError:
        """Record a smaller micro-batch for a resume from the last checkpoint, where the work cannot be repeated."""
        return self._out_of_memory("memory.one_sequence" if self.own.batch_size == 1 else id)

    def _take_smaller(self, batch_size: int) -> None:
        self.shrunk_from = self.shrunk_from or self.config.batch_size
        self._take(with_micro_batch(self.config, batch_size))

    def _go_eager(self, failed: attempts.NotCompiled) -> None:
        if failed.sent:
            id = "rank_not_compiled" if self.together.several else "step_not_compiled"
            raise UserError(f"environment.{id}", reason=failed.reason)
        self.placement = replace(self.placement, compiled=False)
        attempts.go_eager(self.state)
        self._record_graph()
        self._note("not_compiled", reason=failed.reason)

    def _shrink(self, step: int) -> None:
        """Take a smaller micro-batch for the same rows; of several ranks all follow. Raises UserError at one."""
        c = self.config
        if self.together.several:
            own = self.state.config
            smaller = smaller_micro_batch(own.batch_size, own.batch_size)
            if smaller is not None:
                self.together.smaller = smaller
                attempts.use_split(self.state, with_micro_batch(own, smaller), compiled=self.placement.compiled)
                return
        elif (smaller := smaller_micro_batch(c.batch_size, sequences_of(c))) is not None:
            self._shrink_to(step, smaller)
            return
        raise self._out_of_memory("memory.one_sequence")

    def _shrink_to(self, step: int, batch_size: int) -> None:
        old = self.config.batch_size
        self.shrunk_from = self.shrunk_from or old
        self._use(with_micro_batch(self.config, batch_size))
        self._keep_config()
        more = self.config.gradient_accumulation_steps
        self._note("micro_batch_shrunk", step=step, old=old, new=batch_size, accumulation=more)

    def _confer(self, step: int) -> None:
        """Agree after the same step on all ranks, as one of them has a message."""
        batch_size = self.together.confer(self.config.batch_size)
        if batch_size != self.config.batch_size:
            self._shrink_to(step, batch_size)

    def _keep_config(self) -> None:
        with contextlib.suppress(OSError):  # a full disk: only a resume would miss it, and find the same split again
            self.directory.write_config(self.config)
            self._write_record("running")

    def _log(self, step: int, loss: float, grad_norm: float, step_s: float) -> None:
        tokens_per_s = self.config.tokens_per_step / step_s
        metrics = StepMetrics(
            step=step,
            loss=loss,
            grad_norm=grad_norm if math.isfinite(grad_norm) else -1.0,
            learning_rate=learning_rate(self.config, step),
            step_s=step_s,
            tokens_per_s=tokens_per_s,
            mfu=tokens_per_s * self.shape.flops_per_token / self.peak if self.peak else None,
            memory_bytes=self.meter.device_bytes(),
            elapsed_s=self._elapsed_s(),
            eta_s=self.pace.eta_s(step, step_s, self.config.max_iters, self.config.eval_interval),
            data_wait_s=self.feed.take_wait_s(),
        )
        self.directory.append("metrics", metrics.to_json() | self.vitals.now() | self._of_others())
        self.listen(metrics)
        for id, values in self.vitals.odd():
            self._note(id, **values)
        if (peak := self.watch.exceeded(self.meter)) is not None:
            self._note("memory_exceeded", peak=peak, limit=self.watch.limit_bytes)

    def _of_others(self) -> dict[str, float]:
        """Return `others_cores`, used by other programs since the last line of metrics.jsonl, on a CPU."""
        others = self.contention.take_others()
        return {} if others is None else {"others_cores": round(others, 2)}

    def _tell_load(self, events: list[Event]) -> None:
        for id, values in events:
            self._note(id, step=self.progress.step, **values)
            if id == "machine_busy":
                self.pace.expected = None  # the forecast is of a quiet machine; measurements now tell more
        if self.contention.gives_way != self.waiting.asleep:
            self.waiting.sleep() if self.contention.gives_way else self.waiting.spin()
        if self.waiting.asleep and any(id == "machine_busy" for id, _ in events):
            self._note("threads_sleep")

    def _evaluate_and_save(self, step: int, *, force: bool) -> None:
        before = self.clock()
        self._tell("evaluating", step)
        losses = {}
        phase = "evaluate_first" if step == 0 else "evaluate_steady"
        for split, tokens in (("train", self.train_tokens), ("val", self.val_tokens)):
            while isinstance(loss := self._mean_loss(split, tokens, phase), str | attempts.NotCompiled):
                self._go_eager(loss) if isinstance(loss, attempts.NotCompiled) else self._shrink_evaluation(step)
            if loss is None:  # a signal came; the evaluation is repeated after the resume
                return
            losses[split] = loss
        if not math.isfinite(losses["val"]):
            raise UserError("diverged.loss", step=step, loss=losses["val"])
        best = self.progress.best_val_loss is None or losses["val"] < self.progress.best_val_loss
        took = self.clock() - before
        self.pace.evaluation_times.append(took)
        metrics = EvaluationMetrics(
            step=step, train_loss=losses["train"], val_loss=losses["val"], evaluation_s=took, best=best
        )
        self.directory.append("metrics", metrics.to_json())
        update: dict[str, Any] = {"evaluated": True, "val_loss": losses["val"]}
        if best:
            update |= {"best_val_loss": losses["val"], "best_step": step}
        if self.progress.first_val_loss is None:
            update["first_val_loss"] = losses["val"]
        self.progress = self.progress.model_copy(update=update)
        self.listen(metrics)
        if self.together.several:
            self.together.gather(self._figures())
        start = self.progress.first_val_loss or losses["val"]
        if nonfinite.diverging([start, losses["train"]], self.config.vocab_size) and not self._diverging:
            self._diverging = True  # reported once
            self._note("diverging", step=step, loss=losses["train"])
        if step and (best or force or self.config.always_save_checkpoint):
            self._save(wait=force)

    def _shrink_evaluation(self, step: int) -> None:
        """Take smaller batches for the same sequences. Raises UserError where it is one sequence already."""
        attempts.free_memory(self.placement.device)
        old = self.config.eval_batch
        if old == 1:
            raise self._out_of_memory("memory.one_sequence")
        self._use(self.config.model_copy(update={"eval_batch_size": old // 2}))
        self._keep_config()
        self._note("evaluation_shrunk", step=step, old=old, new=old // 2)

    def _mean_loss(self, split: str, tokens: TokenFile, phase: str) -> attempts.Mean:
        before = self.clock()
        while isinstance(own := self._own_losses(split, tokens, phase), attempts.NotCompiled):
            if not self.together.several:
                return own
            self._go_eager(own)
        weight = own[1] if isinstance(own, tuple) else 0.0
        self.together.evaluated(self.clock() - before, round(weight * self.config.eval_batch * self.config.eval_block))
        found = self.together.mean(own, self.placement.device)
        if found is None and self.together.several:
            self._confer(self.progress.step)
        return found

    def _own_losses(self, split: str, tokens: TokenFile, phase: str) -> attempts.Sum:
        c = self.config
        batches = evaluation_batches(
            tokens, c.seed, split, rows=c.eval_rows, batch_size=c.eval_batch, block=c.eval_block,
            device=self.placement.device, part=self.together.part(self.state),
        )  # fmt: skip
        return attempts.sum_of_losses(
            batches, self._evaluate,
            batch_size=c.eval_batch,
            measure=self.meter.phase(phase, self.state) if self.meter.wants(phase) else None,
            stopping=lambda: bool(self.flag.asked),
            failed=self.vitals.watching(self.state, phase, self.progress.step),
        )  # fmt: skip

    def _evaluate(self, batch: Batch) -> Any:
        found = self.graphed.evaluate(batch) if self.graphed else evaluation_loss(self.state, batch)
        self._passed.add("evaluating")
        self._tell("evaluating", self.progress.step)
        return found

    def _figures(self) -> RankFigures:
        phases = self.meter.phases.values()
        return RankFigures(
            rank=self.ranks.rank, card=self.placement.gpu.name,
            allocated_bytes=max((p.allocated_bytes or 0 for p in phases), default=0) or None,
            reserved_bytes=max((p.reserved_bytes or 0 for p in phases), default=0) or None,
            process_bytes=self.meter.process_peak(), step_s=self.pace.median_step_s,
            data_wait_s=self.feed.mean_wait_s,
        )  # fmt: skip

    def _save(self, *, wait: bool) -> None:
        self._tell("saving", self.progress.step)
        more = {"elapsed_s": self._elapsed_s(), "dropout_by_number": self.together.by_number}
        self.progress = self.progress.model_copy(update=more)
        self._restore_folder()
        self.saver.save(self.state, self.progress, wait=wait)

    def _elapsed_s(self) -> float:
        return self._elapsed_before_s + self.clock() - self._started

    def _tell(self, phase: Literal["training", "evaluating", "saving"], step: int) -> None:
        compiles = self.placement.compiled and phase != "saving" and phase not in self._passed
        self.directory.tell("compiling" if compiles else phase, step)

    def _note(self, id: str, /, **values: Any) -> None:
        self.directory.event(id, **values)
        self.listen(Note(id, **values))

    def _write_record(self, status: Any, reason: str = "") -> TrainedRun:
        step_s = self.pace.median_step_s
        tokens_per_s = self.config.tokens_per_step / step_s if step_s else None
        flop_per_s = tokens_per_s * self.shape.flops_per_token if tokens_per_s else None
        record = TrainedRun(
            id=self.directory.id, name=self.name, status=status, reason=reason, started_at=self.started_at,
            ended_at=None if status == "running" else now(), config=self.config, gpu=self.placement.gpu,
            dtype=self.placement.dtype, compiled=self.placement.compiled, threads=self.threads, dataset=self.info,
            n_params=self.shape.n_params, steps_done=self.progress.step, resumed_from=self.resumed_from,
            skipped_checkpoints=self.skipped_checkpoints, shrunk_from=self.shrunk_from,
            first_val_loss=self.progress.first_val_loss, val_loss=self.progress.val_loss,
            best_val_loss=self.progress.best_val_loss, step_s=step_s, tokens_per_s=tokens_per_s,
            mfu=flop_per_s / self.peak if flop_per_s and self.peak else None,
            evaluation_s=self.pace.median_evaluation_s,
            wall_s=self._elapsed_s(), data_wait_s=self.feed.mean_wait_s,
            machine=self.contention.result(),
            memory=self.meter.result(self.state) if hasattr(self, "state") else self.meter.empty(),
            world=self.ranks.world, ranks=self.together.figures, worlds=self.worlds,
        )  # fmt: skip
        record = starting.with_former(record, self.former)
        self.directory.write_record(record)
        return record
