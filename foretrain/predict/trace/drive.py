"""The traced runs, foretrain's and nanoGPT's, each with evaluation and saving: three optimizer steps of at most three
micro-steps, as the allocator's reserve settles in the third; with a CUDA graph one more after it is recorded."""

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from foretrain.config.options import RunConfig
from foretrain.hardware.catalogue import Dtype
from foretrain.model.gpt2 import NanoGPT
from foretrain.model.graphed import WARM_STEPS, GraphedStep
from foretrain.model.in_backward import BackwardUpdates
from foretrain.model.master import Masters
from foretrain.model.step import TrainState, build, evaluation_loss, make_optimizer, train_step
from foretrain.predict.spec import DISTINCT_MICRO_BATCHES
from foretrain.predict.trace.names import Names
from foretrain.predict.trace.tracer import Tracer

if TYPE_CHECKING:
    from foretrain.model.parallel import Share

STEPS, MICRO_STEPS, EVALUATION_BATCHES = 3, DISTINCT_MICRO_BATCHES, 2
DTYPES: dict[Dtype, torch.dtype] = {
    "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16,
}  # fmt: skip


@dataclass
class Job:
    config: RunConfig
    device: torch.device
    dtype: Dtype
    compiled: bool
    tracer: Tracer
    names: Names
    share: "Share | None" = None  # among the ranks of the process group (ranks.py); None: there is one

    @property
    def micro_steps(self) -> int:
        return min(MICRO_STEPS, self.config.gradient_accumulation_steps)

    def batch(self, rows: int, block: int, *, cut: bool = False) -> tuple[Tensor, Tensor]:
        """Return ids and targets, int64, one storage each; `cut` out of rows of block + 1, as in data/batches.py."""
        if cut:
            data = self._tokens(torch.zeros(rows, block + 1, dtype=torch.int64, device=self.device))
            return self._tokens(data[:, :-1].contiguous()), self._tokens(data[:, 1:].contiguous())
        inputs, targets = (torch.zeros(rows, block, dtype=torch.int64, device=self.device) for _ in range(2))
        return self._tokens(inputs), self._tokens(targets)

    def _tokens(self, tensor: Tensor) -> Tensor:
        self.tracer.tag(tensor, "batch", "token ids")
        return tensor


def foretrain_run(job: Job) -> bool:
    """Run foretrain in the trainer's order (training/trainer.py); return whether the scaler was on."""
    c = job.config
    short = c.model_copy(update={"gradient_accumulation_steps": job.micro_steps})
    state = build(short, job.device, DTYPES[job.dtype], compile=job.compiled, share=job.share)
    job.names.learn(state.model)
    if state.masters:
        job.names.learn(state.masters.model)
        _name_gradients(job, state, state.masters)
    if state.early:
        _name_updates(job, state, state.early)

    graphed = GraphedStep(state, _not_recorded) if c.cuda_graph == "on" else None
    take = graphed or functools.partial(train_step, state)
    judge = graphed.evaluate if graphed else functools.partial(evaluation_loss, state)
    unseen: list[tuple[Tensor, Tensor]] = []

    def evaluate(phase: str) -> None:
        job.tracer.enter(phase)
        total = torch.zeros((), device=job.device)
        for _ in ("train", "val"):
            for _ in range(min(EVALUATION_BATCHES, c.eval_iters)):
                total += judge(job.batch(c.eval_batch, c.eval_block, cut=True))

    evaluate("evaluate_first")
    steps, settled = (WARM_STEPS + 2, WARM_STEPS) if graphed else (STEPS, 1)
    for step in range(0 if c.eval_only else steps):
        job.tracer.enter("first_step" if step == 0 else "steady_step")
        micro = (job.batch(c.batch_size, c.block_size, cut=True) for _ in range(job.micro_steps))
        if graphed and step == WARM_STEPS:  # a graph has all batches of a step
            rest = c.gradient_accumulation_steps - job.micro_steps
            unseen += [job.batch(c.batch_size, c.block_size) for _ in range(rest)]
        take(micro, c.learning_rate)
        if step == settled:
            evaluate("evaluate_steady")
            _save(job, state)
    return state.scaler.is_enabled()


def _not_recorded(reason: str) -> None:
    raise RuntimeError(f"the step cannot be recorded: {reason}")


def _name_gradients(job: Job, state: TrainState, masters: Masters) -> None:
    """Name the gradients that go to an optimizer elsewhere; its hooks see them only there."""
    take = masters.take_gradients

    def tagged() -> None:
        for name, parameter in state.model.named_parameters():
            if parameter.grad is not None:
                job.tracer.tag(parameter.grad, "gradients", name)
        take()

    masters.take_gradients = tagged


def _name_updates(job: Job, state: TrainState, early: BackwardUpdates) -> None:
    update = early.update

    def tagged(parameter: Tensor) -> None:
        name = job.names.parameter_names.get(id(parameter), "")
        if parameter.grad is not None:
            job.tracer.tag(parameter.grad, "gradients", name)
        update(parameter)
        for key, value in state.optimizer.state[parameter].items():
            job.tracer.tag(value, "optimizer", f"{name}.{key}")

    early.update = tagged


def _save(job: Job, state: TrainState) -> None:
    job.tracer.enter("save")
    for parameter, moments in state.optimizer.state.items():
        for tensor in (parameter, *(value for value in moments.values() if isinstance(value, Tensor))):
            tensor.detach().cpu()


def nanogpt_run(job: Job) -> bool:
    """Run nanoGPT's train.py: prefetched batches, logits that live until the next ones, its estimate_loss."""
    c = job.config.as_nanogpt()
    model = NanoGPT(c).to(job.device)
    job.names.learn(model)
    scaler = torch.amp.GradScaler(job.device.type, enabled=job.dtype == "float16")
    optimizer = make_optimizer(model, c, job.device.type)
    called: Any = torch.compile(model) if job.compiled else model
    half = job.dtype != "float32"
    context: Any = torch.amp.autocast(job.device.type, DTYPES[job.dtype]) if half else contextlib.nullcontext()

    @torch.no_grad()
    def estimate_loss(phase: str) -> None:
        job.tracer.enter(phase)
        model.eval()
        for _ in ("train", "val"):
            for _ in range(min(EVALUATION_BATCHES, c.eval_iters)):
                X, Y = job.batch(c.batch_size, c.block_size)
                with context:
                    _logits, loss = called(X, Y)
                loss.item()
        model.train()

    X, Y = job.batch(c.batch_size, c.block_size)
    _logits = loss = None
    for step in range(STEPS):
        if step != 1:
            estimate_loss("evaluate_first" if step == 0 else "evaluate_steady")
        if c.eval_only:
            break
        job.tracer.enter("first_step" if step == 0 else "steady_step")
        for _ in range(job.micro_steps):
            with context:
                _logits, loss = called(X, Y)
                loss = loss / job.micro_steps
            X, Y = job.batch(c.batch_size, c.block_size)
            scaler.scale(loss).backward()
        if c.grad_clip != 0.0:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), c.grad_clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
    return scaler.is_enabled()


RUNS = {"foretrain": foretrain_run, "nanogpt": nanogpt_run}


@contextlib.contextmanager
def naming_allocations(tracer: Tracer, *, compiled: bool) -> Iterator[Names]:
    names = Names(tracer)
    with names.hooked(modules=not compiled):
        yield names
