"""What a stack says of an allocation: what made it, where in the user's code, and what kind of memory it probably is.

Frames are those of PyTorch's memory snapshots, innermost first: {"name", "filename", "line"}. The kind is a guess by
the names of modules, functions and files, and is told as one. Standard library only.
"""

import re
from typing import Any, NamedTuple

MAX_FRAMES, MAX_NAME = 80, 100
# The first pattern that any frame matches, tried in this order, as inner frames of several kinds look alike.
_KINDS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (kind, re.compile(pattern, re.IGNORECASE))
    for kind, pattern in (
        ("workspace", r"workspace|cublas|cudnn.*plan"),
        ("optimizer", r"[/\\]optim[/\\]|_init_group|exp_avg|zeros_like_optim|\boptimizer\.step|_multi_tensor_adam"),
        ("logits", r"cross_entropy|nll_loss|log_softmax|logits|lm_head|loss_function"),
        ("gradients", r"accumulategrad|accumulate_grad|grad_bucket|param_and_grad"),
        ("backward", r"\bbackward\b|run_backward|autograd::engine|evaluate_function|_engine_run"),
        ("batch", r"get_batch|dataloader|pin_memory|collate|next_batch|data_loader"),
        (
            "weights",
            r"nn[/\\]modules[/\\]module\.py:(?:_apply|convert|to|cuda|load_state_dict)\b|load_state_dict|reset_parameters"
            r"|_init_weights|empty_parameter|from_pretrained",
        ),
        ("attention", r"attention|attn|scaled_dot_product|softmax|flash"),
        (
            "activations",
            r"forward|_call_impl|nn[/\\]functional\.py|torchinductor|output_code|compiled_fn|call_function",
        ),
    )
)
KINDS = (*(kind for kind, _ in _KINDS), "unknown")
_PROFILED = re.compile(r"(.{1,80}?)\((\d{1,7})\): (.{1,80})", re.ASCII)
_LIBRARY = re.compile(
    r"site-packages|dist-packages|[/\\]torch[/\\]|^torch|\.(?:cpp|h|cu|cc)$|^\?\?|^<frozen|libc|^$", re.IGNORECASE
)
# foretrain's own snapshots say the kind themselves, by the ledger's ids, and those that PyTorch makes of a profile
# (torch/cuda/_memory_viz.py, _profile_to_snapshot) by torch.profiler's categories.
_CATEGORIES = {
    "weights": "weights", "gradients": "gradients", "optimizer": "optimizer", "batch": "batch", "logits": "logits",
    "activations": "activations", "weight_copies": "weights", "workspace": "workspace",
    "parameter": "weights", "gradient": "gradients", "optimizer_state": "optimizer", "input": "batch",
    "activation": "activations", "autograd_detail": "backward",
}  # fmt: skip


class Place(NamedTuple):
    """Where an allocation was made. `made_by` is the innermost function, `where` the user's nearest line."""

    kind: str
    made_by: str
    where: str


def place_of(frames: Any, category: str = "") -> Place:
    """From a list of frames, and the category that a snapshot may state; whatever is malformed counts as nothing."""
    found: list[tuple[str, str, int]] = []
    for frame in frames[:MAX_FRAMES] if isinstance(frames, list) else ():
        if isinstance(frame, dict):
            name, file, line = frame.get("name"), frame.get("filename"), frame.get("line")
            found.append(_of_profile(_text(name), _text(file), line if isinstance(line, int) else 0))
    kind = _CATEGORIES.get(category) or _CATEGORIES.get(category.partition(".")[0]) or _guess(found)
    if not found:
        return Place(kind, "", "")
    if found[0][1] == "foretrain":  # names of tensors, not of functions; layers are counted together
        name = re.sub(r"\d+", "*", found[0][0])
        return Place(kind, found[1][0] if len(found) > 1 else "", name)
    own = next(((n, f, line) for n, f, line in found if f and not _LIBRARY.search(f)), None)
    made_by = next((n for n, f, _ in found if n and not _LIBRARY.fullmatch(f)), found[0][0])
    return Place(kind, made_by, _line(*own) if own else "")


def _of_profile(name: str, file: str, line: int) -> tuple[str, str, int]:
    """A profile's frames have all of it in the name, as 'model.py(88): forward', and no file."""
    match = _PROFILED.fullmatch(name) if file == "none" else None
    if match is not None:
        return match[3], match[1], int(match[2])
    return name, "" if file == "none" else file, line


def _guess(frames: list[tuple[str, str, int]]) -> str:
    texts = [f"{file}:{name}" for name, file, _ in frames]
    for kind, pattern in _KINDS:
        if any(pattern.search(text) for text in texts):
            return kind
    return "unknown"


def _line(name: str, file: str, line: int) -> str:
    return f"{file.replace(chr(92), '/').rpartition('/')[2]}:{line} {name}"[:MAX_NAME]


def _text(value: Any) -> str:
    return value[:MAX_NAME] if isinstance(value, str) else ""
