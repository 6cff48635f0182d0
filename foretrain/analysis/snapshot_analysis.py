"""The memory snapshot of any PyTorch program: memory at the end, at the peak and at failures. The history is counted
backwards from the end; live tensors are grouped by the stack that made them, and their kinds are guesses."""

import re
from collections import Counter
from operator import index
from typing import Any, Literal, NamedTuple

from pydantic import Field

from foretrain.base.records import Record
from foretrain.predict.allocator.replay import replay
from foretrain.predict.allocator.settings import Settings
from foretrain.predict.snapshot import Recording, recording_of, requests_of

# Frames are those of PyTorch's memory snapshots, innermost first: {"name", "filename", "line"}. The kind is a guess by
# the names of modules, functions and files, and is shown as one.

MAX_FRAMES, MAX_NAME = 80, 100
# The first pattern that any frame matches, in this order, as inner frames of several kinds look alike.
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
# foretrain's own snapshots have the kind, by the estimate's ids, and PyTorch's from a profile
# (torch/cuda/_memory_viz.py, _profile_to_snapshot) torch.profiler's categories.
_CATEGORIES = {
    "weights": "weights", "gradients": "gradients", "optimizer": "optimizer", "batch": "batch", "logits": "logits",
    "activations": "activations", "weight_copies": "weights", "workspace": "workspace",
    "parameter": "weights", "gradient": "gradients", "optimizer_state": "optimizer", "input": "batch",
    "activation": "activations", "autograd_detail": "backward",
}  # fmt: skip


class Place(NamedTuple):
    kind: str
    made_by: str
    where: str


def place_of(frames: Any, category: str = "") -> Place:
    """Find the place in a list of frames; a snapshot may have a category. Malformed parts count as nothing."""
    found: list[tuple[str, str, int]] = []
    for frame in frames[:MAX_FRAMES] if isinstance(frames, list) else ():
        if isinstance(frame, dict):
            name, file, line = frame.get("name"), frame.get("filename"), frame.get("line")
            found.append(_of_profile(_text(name), _text(file), line if isinstance(line, int) else 0))
    kind = _CATEGORIES.get(category) or _CATEGORIES.get(category.partition(".")[0]) or _guess(found)
    if not found:
        return Place(kind, "", "")
    if found[0][1] == "foretrain":  # names of tensors, not of functions, of all layers
        name = re.sub(r"\d+", "*", found[0][0])
        return Place(kind, found[1][0] if len(found) > 1 else "", name)
    own = next(((n, f, line) for n, f, line in found if f and not _LIBRARY.search(f)), None)
    made_by = next((n for n, f, _ in found if n and not _LIBRARY.fullmatch(f)), found[0][0])
    return Place(kind, made_by, _line(*own) if own else "")


def _of_profile(name: str, file: str, line: int) -> tuple[str, str, int]:
    """Split a profile's frame, which has everything in its name, as 'model.py(88): forward'."""
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


SCHEMA = "foretrain.explain/1#snapshot"
GROUPS, SEGMENTS, FAILURES = 24, 8, 8
MOSTLY_EMPTY = 0.2  # of a segment in use
MAX_REPLAYED = 400_000  # events that the simulator repeats
_CHANGES = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
Advice = Literal[
    "expandable", "expandable_untried", "expandable_not_enough", "empty_segments", "logits", "activations", "optimizer",
    "no_history", "no_frames", "backward",
]  # fmt: skip


class LiveGroup(Record):
    kind: str
    made_by: str
    where: str
    count: int
    size_bytes: int
    largest_bytes: int


class Moment(Record):
    """Memory at one moment. `before_bytes`: from before the history. At the end with the allocator's rounding."""

    position: int
    allocated_bytes: int
    reserved_bytes: int
    before_bytes: int = 0
    groups: tuple[LiveGroup, ...] = ()
    by_kind_bytes: dict[str, int] = Field(default_factory=dict)


class Failure(Record):
    """A request that the card could not meet, by the history. `unused_bytes`: reserved and not allocated then.
    `fits_expandable`: whether expandable segments would meet it, simulated; None where the history is too short."""

    position: int
    asked_bytes: int
    free_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    unused_bytes: int
    kind: str
    made_by: str
    where: str
    fits_expandable: bool | None = None


class EmptySegment(Record):
    size_bytes: int
    used_bytes: int
    blocks: int
    held_by: LiveGroup | None


class StreamShare(Record):
    """`free_bytes` are reserved for one stream and unused, and no other stream can take them."""

    stream: int
    reserved_bytes: int
    free_bytes: int


class SnapshotAnalysis(Record):
    """One device of one snapshot. `split_bytes`: free parts of segments in use; `cached_bytes`: wholly free segments.
    `from_profile`: made by torch/cuda/_memory_viz.py of a profile, which knows no segments.
    """

    name: str
    device: int
    devices: int
    from_profile: bool
    entries: int
    segments: int
    allocated_bytes: int
    requested_bytes: int
    reserved_bytes: int
    pending_bytes: int
    split_bytes: int
    largest_split_bytes: int
    cached_bytes: int
    settings: str
    has_frames: bool
    end: Moment
    peak: Moment | None
    peak_reserved_bytes: int | None
    failures: tuple[Failure, ...]
    n_failures: int
    at_failure: Moment | None
    empty_segments: tuple[EmptySegment, ...]
    n_empty_segments: int
    empty_segments_bytes: int
    streams: tuple[StreamShare, ...]
    advice: tuple[Advice, ...]


class _Places:
    """Places by the identity of their list of frames: a snapshot shares them among thousands of entries."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, str], Place] = {}

    def of(self, item: dict[str, Any]) -> Place:
        frames = item.get("frames")
        if not frames and isinstance(item.get("history"), list) and item["history"]:  # as PyTorch 2.0 wrote them
            first = item["history"][0]
            frames = first.get("frames") if isinstance(first, dict) else None
        category = item.get("category")
        key = (id(frames), category if isinstance(category, str) else "")
        if key not in self._known:
            self._known[key] = place_of(frames, key[1])
        return self._known[key]


def _groups(alive: list[tuple[Place, int]]) -> tuple[tuple[LiveGroup, ...], dict[str, int]]:
    sizes: Counter[Place] = Counter()
    counts: Counter[Place] = Counter()
    largest: dict[Place, int] = {}
    kinds: Counter[str] = Counter()
    for place, nbytes in alive:
        sizes[place] += nbytes
        counts[place] += 1
        kinds[place.kind] += nbytes
        largest[place] = max(largest.get(place, 0), nbytes)
    groups = tuple(
        LiveGroup(
            kind=place.kind, made_by=place.made_by, where=place.where, count=counts[place], size_bytes=size,
            largest_bytes=largest[place],
        )
        for place, size in sizes.most_common(GROUPS)
    )  # fmt: skip
    return groups, {kind: kinds[kind] for kind in KINDS if kinds[kind]}


class _Segments:
    def __init__(self, segments: list[Any], device: int, places: _Places) -> None:
        self.count = self.reserved = self.allocated = self.requested = self.pending = 0
        self.split = self.largest_split = self.cached = 0
        self.alive: list[tuple[Place, int]] = []
        self.empty: list[EmptySegment] = []
        self.n_empty = self.empty_bytes = 0
        self.by_stream: dict[int, tuple[int, int]] = {}  # reserved, free
        self.from_profile = bool(segments) and not any("segment_type" in segment for segment in segments)
        for segment in segments:
            if segment.get("device", 0) == device:
                self._add(segment, places)
        self.empty.sort(key=lambda s: s.used_bytes - s.size_bytes)
        self.empty = self.empty[:SEGMENTS]

    def streams(self) -> tuple[StreamShare, ...]:
        shares = [StreamShare(stream=n, reserved_bytes=r, free_bytes=f) for n, (r, f) in self.by_stream.items()]
        shares.sort(key=lambda share: -share.reserved_bytes)
        return tuple(shares[:SEGMENTS]) if len(shares) > 1 else ()

    def _add(self, segment: dict[str, Any], places: _Places) -> None:
        total, used, free, largest_free = index(segment["total_size"]), 0, 0, 0
        alive: list[tuple[Place, int]] = []
        for block in segment["blocks"]:
            size = index(block["size"])
            if block["state"] == "inactive":
                free, largest_free = free + size, max(largest_free, size)
                continue
            used += size
            if block["state"] == "active_allocated":
                self.requested += _whole(block.get("requested_size"), size)
                alive.append((places.of(block), size))
            else:
                self.pending += size
        if self.from_profile:  # its only segment is all addresses from the lowest to the highest
            total, free = used, 0
        self.count += 1
        self.reserved += total
        stream = _whole(segment.get("stream"), 0)
        reserved_bytes, free_bytes = self.by_stream.get(stream, (0, 0))
        self.by_stream[stream] = (reserved_bytes + total, free_bytes + free)
        self.allocated += sum(size for _, size in alive)
        self.alive += alive
        if not used:
            self.cached += total
            return
        if not free:
            return
        self.split, self.largest_split = self.split + free, max(self.largest_split, largest_free)
        if used < MOSTLY_EMPTY * total and total > 2 << 20:  # small tensors share segments of 2 MiB
            self.n_empty += 1
            self.empty_bytes += total - used
            groups = _groups(alive)[0]
            held_by = groups[0] if groups else None
            self.empty.append(EmptySegment(size_bytes=total, used_bytes=used, blocks=len(alive), held_by=held_by))


def _whole(value: Any, otherwise: int) -> int:
    return value if type(value) is int and value >= 0 else otherwise


class _History:
    """A walk through a history: allocated (as requested) and reserved after each entry, counted from its end."""

    def __init__(self, recording: Recording, trace: list[dict[str, Any]], end: _Segments) -> None:
        self.entries, self.trace = recording.entries, trace
        completed = any(entry.action == "free_completed" for entry in self.entries)
        self.frees = ("free", "free_completed" if completed else "free_requested")
        change = sum(self._change(i) for i in range(len(self.entries)))
        self.before_allocated = max(0, end.requested + end.pending - change)
        self.before_reserved = 0 if end.from_profile else max(0, recording.reserved_before_bytes)

    def _change(self, i: int) -> int:
        entry = self.entries[i]
        return entry.nbytes if entry.action == "alloc" else -entry.nbytes if entry.action in self.frees else 0

    def walk(self) -> tuple[int, int, list[tuple[int, int, int]]]:
        """Return (position of the peak, peak of reserved, [(position, allocated, reserved)] of the failures)."""
        allocated, reserved = self.before_allocated, self.before_reserved
        peak, peak_at, peak_reserved = allocated, -1, reserved
        failures = []
        for i, entry in enumerate(self.entries):
            allocated += self._change(i)
            reserved += _CHANGES.get(entry.action, 0) * entry.nbytes
            if allocated > peak:
                peak, peak_at = allocated, i
            peak_reserved = max(peak_reserved, reserved)
            if entry.action == "oom":
                failures.append((i, max(0, allocated), max(0, reserved)))
        return peak_at, peak_reserved, failures

    def moment(self, position: int, places: _Places) -> Moment:
        alive: dict[int, int] = {}
        allocated, reserved, before = self.before_allocated, self.before_reserved, self.before_allocated
        for i in range(position + 1):
            entry = self.entries[i]
            allocated += self._change(i)
            reserved += _CHANGES.get(entry.action, 0) * entry.nbytes
            if entry.action == "alloc":
                alive[entry.address] = i
            elif entry.action in self.frees and alive.pop(entry.address, None) is None:
                before -= entry.nbytes
        groups, kinds = _groups([(places.of(self.trace[i]), self.entries[i].nbytes) for i in alive.values()])
        return Moment(
            position=position, allocated_bytes=max(0, allocated), reserved_bytes=max(0, reserved),
            before_bytes=max(0, before), groups=groups, by_kind_bytes=kinds,
        )  # fmt: skip


def _fits_expandable(recording: Recording, failure: tuple[int, int, int], asked: int, free: int) -> bool | None:
    """Simulate the same with expandable segments and as much of the card as the program had."""
    position, _, reserved = failure
    if recording.settings.expandable_segments or position > MAX_REPLAYED:
        return None
    until = Recording(recording.entries[:position], recording.settings, frozenset(), reserved)
    found = requests_of(until, more_bytes=asked)
    if found.unknown_frees or until.reserved_before_bytes:
        return None
    return replay(found.lifetimes, Settings(expandable_segments=True), reserved + free).survives


def analyse(snapshot: Any, name: str, device: int | None = None) -> SnapshotAnalysis:
    """Analyse one device, by default the one that holds most. Raises ValueError with a sentence."""
    if isinstance(snapshot, dict) and not isinstance(snapshot.get("device_traces"), list):
        snapshot = {**snapshot, "device_traces": [[]] * _devices(snapshot)}  # a state may have no history
    if isinstance(snapshot, dict) and not isinstance(snapshot.get("segments"), list):
        raise ValueError(f"{name}: has no segments, which every memory snapshot has")
    device = _busiest(snapshot) if device is None else device
    recording = recording_of(snapshot, name, device)
    trace = snapshot["device_traces"][device]
    places = _Places()
    end = _Segments(snapshot["segments"], device, places)
    groups, kinds = _groups(end.alive)
    now = Moment(
        position=len(trace), allocated_bytes=end.allocated, reserved_bytes=end.reserved, groups=groups,
        by_kind_bytes=kinds,
    )  # fmt: skip
    peak = at_failure = peak_reserved = None
    failures: tuple[Failure, ...] = ()
    n_failures = 0
    if trace:
        history = _History(recording, trace, end)
        peak_at, peak_reserved, found = history.walk()
        peak, n_failures = history.moment(peak_at, places), len(found)
        failures = tuple(_failure(recording, trace, one, places) for one in found[-FAILURES:])
        at_failure = history.moment(found[-1][0], places) if found else None
    analysis = SnapshotAnalysis(
        name=name, device=device, devices=len(snapshot["device_traces"]), from_profile=end.from_profile,
        entries=len(trace), segments=end.count,
        allocated_bytes=end.allocated, requested_bytes=end.requested, reserved_bytes=end.reserved,
        pending_bytes=end.pending, split_bytes=end.split, largest_split_bytes=end.largest_split,
        cached_bytes=end.cached, settings=recording.settings.text(),
        has_frames=any(group.made_by for group in (*groups, *(peak.groups if peak else ()))), end=now, peak=peak,
        peak_reserved_bytes=peak_reserved, failures=failures, n_failures=n_failures, at_failure=at_failure,
        empty_segments=tuple(end.empty), n_empty_segments=end.n_empty, empty_segments_bytes=end.empty_bytes,
        streams=end.streams(), advice=(),
    )  # fmt: skip
    return analysis.model_copy(update={"advice": _advice(analysis)})


def _devices(snapshot: dict[str, Any]) -> int:
    segments = snapshot.get("segments")
    numbers = [s.get("device", 0) for s in segments if isinstance(s, dict)] if isinstance(segments, list) else []
    return 1 + max((n for n in numbers if type(n) is int and 0 <= n < 1024), default=0)


def _busiest(snapshot: Any) -> int:
    sizes: Counter[int] = Counter()
    for segment in snapshot.get("segments", []) if isinstance(snapshot, dict) else []:
        if isinstance(segment, dict) and type(segment.get("device", 0)) is int:
            sizes[segment.get("device", 0)] += _whole(segment.get("total_size"), 0)
    traces = snapshot.get("device_traces", []) if isinstance(snapshot, dict) else []
    for i, trace in enumerate(traces if isinstance(traces, list) else []):
        sizes[i] += len(trace) if isinstance(trace, list) else 0
    return max(sizes, key=lambda i: sizes[i]) if sizes else 0


def _failure(recording: Recording, trace: list[Any], found: tuple[int, int, int], places: _Places) -> Failure:
    position, allocated, reserved = found
    asked, free = recording.entries[position].nbytes, _whole(trace[position].get("device_free"), 0)
    place = places.of(trace[position])
    return Failure(
        position=position, asked_bytes=asked, free_bytes=free, allocated_bytes=allocated, reserved_bytes=reserved,
        unused_bytes=max(0, reserved - allocated), kind=place.kind, made_by=place.made_by, where=place.where,
        fits_expandable=_fits_expandable(recording, found, asked, free),
    )  # fmt: skip


def _advice(a: SnapshotAnalysis) -> tuple[Advice, ...]:
    found: list[Advice] = []
    moment = a.at_failure or a.peak or a.end
    total = max(1, moment.allocated_bytes)
    share = {kind: size / total for kind, size in moment.by_kind_bytes.items()}
    if a.failures:
        last = a.failures[-1]
        if last.fits_expandable:
            found.append("expandable")
        elif last.fits_expandable is False:
            found.append("expandable_not_enough")
        elif last.unused_bytes + last.free_bytes >= last.asked_bytes and "expandable" not in a.settings:
            found.append("expandable_untried")
    if share.get("logits", 0) > 0.15:
        found.append("logits")
    if share.get("activations", 0) + share.get("attention", 0) > 0.3:
        found.append("activations")
    if share.get("optimizer", 0) > 0.25:
        found.append("optimizer")
    if share.get("backward", 0) > 0.3:
        found.append("backward")
    if a.empty_segments_bytes > 0.1 * max(1, a.reserved_bytes):
        found.append("empty_segments")
    if not a.entries:
        found.append("no_history")
    if not a.has_frames:
        found.append("no_frames")
    return tuple(found)
