"""lm-eval's tasks: their names, requirements (each a sentence where missing), and metrics as records; loaded late."""

import contextlib
import difflib
import importlib.metadata
import importlib.util
import logging
import os
import random
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import urlsplit

from foretrain.base.errors import UserError
from foretrain.base.installation import Later
from foretrain.runs.record import TaskScore

_constants: Any = Later("huggingface_hub.constants")
_READS_FLAG = ("huggingface_hub.constants", "datasets.config")  # where HF_HUB_OFFLINE is looked up
_LOGGERS = ("lm_eval", "datasets", "evaluate", "transformers", "huggingface_hub", "filelock")
# lm-eval's bootstrap stays in this process: others would be forks of one that runs torch.
_VARIABLES = {"DISABLE_MULTIPROC": "1", "TRANSFORMERS_VERBOSITY": "error"}
_TIMEOUT_S = 5.0  # of the first contact with the Hub


@contextlib.contextmanager
def quiet(*, bars: bool) -> Iterator[None]:
    """Send what lm-eval prints to stderr, and report only errors of what is logged. Without `bars` none are drawn."""
    before = {name: os.environ.get(name) for name in _VARIABLES}
    os.environ.update(_VARIABLES)
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    shown: Any = sys.stderr if bars else _WithoutBars(sys.stderr)
    try:
        with contextlib.redirect_stderr(shown), contextlib.redirect_stdout(shown):
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class _WithoutBars:
    """A stream that leaves out tqdm's bars, each of which begins with a carriage return, and what ends them."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._in_bar = stream, False

    def write(self, text: str) -> int:
        if text.startswith("\r"):
            self._in_bar = True
        elif text.strip():
            self._in_bar = False
        if not self._in_bar:
            self._stream.write(text)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def offline_without_network() -> Iterator[None]:
    """Let the Hub's libraries use their cache at once, without retries, where the Hub cannot be reached."""
    if _reached():
        yield
        return
    flags = [(module, module.HF_HUB_OFFLINE) for module in map(import_module, _READS_FLAG)]
    try:
        for module, _ in flags:
            module.HF_HUB_OFFLINE = True  # type: ignore[attr-defined]
        yield
    finally:
        for module, value in flags:
            module.HF_HUB_OFFLINE = value  # type: ignore[attr-defined]


def _reached() -> bool:
    """Return whether the Hub takes a connection; True where this process cannot find out."""
    if _constants.HF_HUB_OFFLINE or any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY")):
        return True
    address = urlsplit(_constants.ENDPOINT)
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        socket.create_connection((address.hostname or "", port), timeout=_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "")[:200].rstrip(".") or type(error).__name__


PACKAGE = "lm_eval"
# Resamples for the standard error of a metric that is not a mean. A thousand give it to about 2%; lm-eval's hundred
# thousand take minutes for a task of 5,000 documents.
RESAMPLES = 1000
_MOST_NEAR = 3
_lm_eval: Any = Later("lm_eval")
_tasks: Any = Later("lm_eval.tasks")
_defaults: Any = Later("lm_eval.defaults")
_registry: Any = Later("lm_eval.api.registry")
np: Any = Later("numpy")
torch: Any = Later("torch")


def need_harness() -> None:
    if importlib.util.find_spec(PACKAGE) is None:
        raise UserError("environment.missing_lm_eval")


@dataclass(frozen=True)
class Harness:
    manager: Any
    own: bool

    @property
    def version(self) -> str:
        return f"{PACKAGE} {importlib.metadata.version(PACKAGE)}"

    def load(self, name: str, shots: int | None) -> Any:
        """Load the tasks and groups of a name with their data; one for no examples keeps none. Raises UserError."""
        _seed()
        try:
            found = self.manager.load([name])
            for task in found["tasks"].values():
                own = task.get_config("num_fewshot")
                if own is None or (shots is not None and own != 0):
                    task.set_config(key="num_fewshot", value=shots or 0)
                task.set_fewshot_seed(seed=_defaults.DEFAULT_OTHER_SEED)
        except Exception as error:  # of lm-eval, datasets, huggingface_hub, or code that belongs to the task
            raise _not_loaded(name, error) from None
        return found

    def run(
        self, model: Any, name: str, loaded: Any, *, documents: int | None, shared: Mapping[str, Any]
    ) -> tuple[TaskScore, ...]:
        """Run the tasks of one name as lm-eval's `simple_evaluate`, which asks git and pip for each name. `shared`:
        fields that all records have. Raises UserError."""
        _seed()
        if hasattr(model, "logits_cache"):
            # Of two windows in a batch that end alike and are cut at other places, lm-eval 0.4.13 scores other tokens.
            kinds = {task.OUTPUT_TYPE for task in loaded["tasks"].values()}
            model.logits_cache = "loglikelihood_rolling" not in kinds
        try:
            found = _lm_eval.evaluate(
                lm=model, task_dict=loaded, limit=documents, bootstrap_iters=RESAMPLES, log_samples=False
            )
        except (AssertionError, ValueError, KeyError, ImportError, OSError, RuntimeError) as error:
            if type(error).__name__ == "OutOfMemoryError":  # torch's
                raise
            reason = first_line(error)
            if reason == "AssertionError":  # lm-eval's own have no text; most often it is this one
                reason = "AssertionError; an answer may be longer than the model's context"
            raise UserError("environment.task_failed", task=name, reason=reason) from None
        return scores_of(found, {"harness": self.version, **shared})


def _seed() -> None:
    random.seed(_defaults.DEFAULT_RANDOM_SEED)
    np.random.seed(_defaults.DEFAULT_OTHER_SEED)
    torch.manual_seed(_defaults.DEFAULT_OTHER_SEED)


def find(names: Sequence[str], include_path: Path | None) -> Harness:
    """Find the tasks of these names, lm-eval's own only where needed. Raises UserError with the nearest names."""
    if include_path is not None and not include_path.is_dir():
        raise UserError("data.no_task_folder", path=str(include_path))
    if include_path is not None:
        own = _tasks.TaskManager(include_path=str(include_path), include_defaults=False)
        if set(names) <= set(own.all_subtasks):
            return Harness(own, True)
    manager = _tasks.TaskManager(include_path=None if include_path is None else str(include_path))
    known = manager.all_tasks
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, _MOST_NEAR, 0.6)
            id = "usage.no_task_near" if near else "usage.no_task"
            raise UserError(id, name=name[:80], near=near)
    return Harness(manager, False)


def hugging_face(folder: Path, device: str, batch_size: int) -> Any:
    made = {"pretrained": str(folder), "dtype": "float32", "batch_size": batch_size, "device": device}
    return _registry.get_model("hf").create_from_arg_obj(made)


def scores_of(found: Mapping[str, Any], shared: Mapping[str, Any]) -> tuple[TaskScore, ...]:
    scores = []
    for task, metrics in found["results"].items():
        counted = found.get("n-samples", {}).get(task, {})
        better = found.get("higher_is_better", {}).get(task, {})
        for key, value in metrics.items():
            metric, comma, filter = key.partition(",")
            if not comma or metric.endswith("_stderr") or not _is_number(value):
                continue
            error = metrics.get(f"{metric}_stderr,{filter}")
            scores.append(
                TaskScore(
                    task=task, metric=metric, filter=filter, value=float(value),
                    standard_error=float(error) if _is_number(error) else None, higher_is_better=better.get(metric),
                    shots=found.get("n-shot", {}).get(task), documents=counted.get("effective"),
                    documents_in_all=counted.get("original"), version=str(found.get("versions", {}).get(task, "")),
                    **shared,
                )
            )  # fmt: skip
    return tuple(scores)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")


# Parts of the names of network errors in requests, httpx, huggingface_hub and datasets.
_NO_NETWORK = ("Connect", "Timeout", "Offline", "LocalEntryNotFound", "MaxRetry", "Proxy", "HTTPError", "SSL")


def _not_loaded(name: str, error: Exception) -> UserError:
    chain: list[BaseException] = []
    each: BaseException | None = error
    while each is not None and each not in chain:
        chain.append(each)
        each = each.__cause__ or each.__context__
    if isinstance(error, ImportError):
        return UserError("environment.task_package", task=name, reason=first_line(error))
    unreached = [
        found for found in chain if any(word in kind.__name__ for kind in type(found).__mro__ for word in _NO_NETWORK)
    ]
    if unreached:
        return UserError("environment.task_network", task=name, reason=first_line(unreached[0]))
    return UserError("environment.task_failed", task=name, reason=first_line(error))
