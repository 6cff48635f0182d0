"""TensorBoard: event files in the run's own folder, by its own library; values are float32."""

import contextlib
import importlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foretrain.runs.trackers.tracker import MOST_VALUES, Job, Row, Started, Tracked, Tracker, chosen, damaged

FOLDER = "tensorboard"
_FILE = "events.out.tfevents"
_CONFIG = "config"  # a text, as JSON
_TEXT = "/text_summary"  # TensorBoard's text plugin adds it to a tag
_EVENTS = "tensorboard.backend.event_processing.event_accumulator"


class TensorBoard(Tracker):
    name, package, check, takes_back = "tensorboard", "tensorboard", "`tensorboard --inspect`", True

    def start(self, job: Job) -> Started:
        folder = job.folder / FOLDER
        self.event: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self.summary: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        writer = importlib.import_module("tensorboard.summary.writer.event_file_writer")
        self.writer = writer.EventFileWriter(str(folder))
        self.begins_again = job.resumed is not None
        if not self.begins_again:
            self._write_config(json.dumps(dict(job.config), indent=1))
        return Started(id=FOLDER, look=f"tensorboard --logdir {folder}")

    def _write_config(self, text: str) -> None:
        tensor: Any = importlib.import_module("tensorboard.compat.proto.tensor_pb2")
        types: Any = importlib.import_module("tensorboard.compat.proto.types_pb2")
        plugin = self.summary.SummaryMetadata(plugin_data=self.summary.SummaryMetadata.PluginData(plugin_name="text"))
        held = tensor.TensorProto(dtype=types.DT_STRING, string_val=[text.encode()])
        held.tensor_shape.dim.add(size=1)
        value = self.summary.Summary.Value(tag=_CONFIG + _TEXT, metadata=plugin, tensor=held)
        self.writer.add_event(self.event.Event(step=0, summary=self.summary.Summary(value=[value])))

    def log(self, step: int, values: Mapping[str, float], at_s: float) -> None:
        if self.begins_again:
            self.begins_again = False
            session = self.event.SessionLog(status=self.event.SessionLog.START)
            self.writer.add_event(self.event.Event(wall_time=at_s, step=step, session_log=session))
        scalars = [self.summary.Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        summary = self.summary.Summary(value=scalars)
        self.writer.add_event(self.event.Event(wall_time=at_s, step=step, summary=summary))

    def flush(self) -> None:
        self.writer.flush()

    def finish(self, status: str) -> None:
        self.writer.close()

    @classmethod
    def claims(cls, path: Path, head: bytes) -> bool:  # noqa: ARG003 - a file's name says it
        return path.name.startswith(_FILE) or (path.is_dir() and bool(_folders(path)))

    @classmethod
    def read(cls, path: Path, run: str | None) -> Tracked:
        cls.need_to_read(path)
        logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it logs each resume
        if path.is_dir():
            folders = {str(folder): str(folder.relative_to(path)) for folder in _folders(path)}
            path = Path(chosen(path, folders, run))
        try:
            events = importlib.import_module(_EVENTS).EventAccumulator(
                str(path), size_guidance={"scalars": 0, "tensors": 10}
            )
            events.Reload()
            rows = _rows(events, path)
        except Exception as error:  # its loader raises protobuf's own errors, and its DataLossError
            raise damaged(path, cls.name, error) from None
        return Tracked(cls.name, path.name, rows, _config(events))


def _folders(path: Path) -> list[Path]:
    """Return the folders with event files: this one, or else those down to three levels below it."""
    for level in ("", "*/", "*/*/", "*/*/*/"):
        with contextlib.suppress(FileNotFoundError):  # a folder of /proc goes meanwhile
            if found := {file.parent for file in path.glob(f"{level}{_FILE}*")}:
                return sorted(found)
    return []


def _rows(events: Any, path: Path) -> list[Row]:
    """Return a row for each step and group of tags, such as train/…, by time: the Trainer writes each tag by itself."""
    rows: dict[tuple[int, str], Row] = {}
    count = 0
    for tag in events.Tags()["scalars"]:
        group = tag.partition("/")[0] if "/" in tag else ""
        for event in events.Scalars(tag):
            count += 1
            if count > MOST_VALUES:
                raise damaged(path, TensorBoard.name, f"it has more than {MOST_VALUES:,} values")
            row = rows.setdefault((event.step, group), {"step": event.step, "timestamp": event.wall_time})
            row[tag] = event.value
    return sorted(rows.values(), key=lambda row: (row["timestamp"], row["step"]))


def _config(events: Any) -> dict[str, Any]:
    try:
        text = events.Tensors(_CONFIG + _TEXT)[0].tensor_proto.string_val[0].decode()
        found = json.loads(text)
    except (KeyError, IndexError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


TRACKERS = (TensorBoard,)
