"""PyTorch Lightning: metrics.csv of its CSVLogger, and its progress bar.

The file begins with its columns, such as `epoch,step,train_loss,val_loss`; a row has the figures of a step or of an
evaluation, without times. The bar shows the mean time of the epoch's steps, and counts from one in each epoch: `Epoch
9: 100%|█| 860/860 [00:05<00:00, 162.25it/s, v_num=1, train_loss=1.46]`.
"""

import math
import re

from foretrain.runs.formats.log_format import NUMBER, LineReader, LogFormat, Reading, number, pattern
from foretrain.runs.formats.progress_bar import bars

_TRAIN = (
    "train_loss_step", "train/loss_step", "train_loss", "train/loss", "loss", "loss_step", "training_loss",
    "train_loss_epoch", "train/loss_epoch", "loss_epoch",
)  # fmt: skip
_VAL = (
    "val_loss", "val/loss", "valid_loss", "valid/loss", "eval_loss", "validation_loss", "val_loss_epoch",
    "val/loss_epoch", "valid_loss_epoch",
)  # fmt: skip
_EPOCH = re.compile(r"\bEpoch (\d{1,9})$")
_POSTFIX = pattern(rf"(?<![\w/])([a-z][\w/]{{0,60}})=({NUMBER})")


class _Rows(LineReader):
    def __init__(self, format: LogFormat) -> None:
        super().__init__(format)
        self.columns: dict[str, int] = {}
        self.width = 0

    def read(self, line: str) -> list[Reading]:
        cells = line.strip().lstrip("\ufeff").split(",")
        if "epoch" in cells and "step" in cells:
            names = {name: i for i, name in enumerate(cells)}
            train, val = (next((n for n in some if n in names), None) for some in (_TRAIN, _VAL))
            rate = next((n for n in cells if n.startswith("lr-") or n in ("lr", "learning_rate")), None)
            roles = {"step": "step", "loss": train, "val": val, "lr": rate}
            self.columns = {role: names[name] for role, name in roles.items() if name is not None}
            self.width = len(cells) if train or val else 0
            self.words = () if self.width else self.format.words
            return []
        return self._row(cells) if self.width and len(cells) == self.width else []

    def _row(self, cells: list[str]) -> list[Reading]:
        said = {role: cells[i].strip() for role, i in self.columns.items()}
        if not re.fullmatch(r"\d{1,12}", said["step"], re.ASCII):
            return []
        step, found = int(said["step"]), []
        if said.get("loss"):
            lr = said.get("lr")
            found.append(Reading(0, step, number(said["loss"]), learning_rate=number(lr) if lr else None))
        if said.get("val"):
            found.append(Reading(1, step, evaluated=True, val_loss=number(said["val"])))
        return found


class _Bar(LineReader):
    def __init__(self, format: LogFormat) -> None:
        super().__init__(format)
        self.val = math.nan

    def read(self, line: str) -> list[Reading]:
        found: list[Reading] = []
        for bar in bars(line):
            epoch = _EPOCH.search(bar.label)
            if epoch is None or "v_num=" not in bar.after or not bar.now:
                continue
            values = {name.lower(): number(text) for name, text in _POSTFIX.findall(bar.after)}
            loss = next((values[name] for name in _TRAIN if name in values), None)
            step = int(epoch[1]) * bar.of + bar.now
            found.append(Reading(bar.at, step, loss, bar.step_s))
            val = next((values[name] for name in _VAL if name in values), None)
            # The bar repeats the last one until there is another.
            if val is not None and bar.now == bar.of and val != self.val:
                self.val = val
                found.append(Reading(bar.at, step, evaluated=True, val_loss=val))
        return found


FORMATS = (
    LogFormat(
        name="lightning metrics.csv",
        title="Lightning's metrics.csv",
        words=("epoch",),
        reader=_Rows,
        step_time="none",
        own_evaluations=True,
    ),
    LogFormat(
        name="lightning",
        title="Lightning",
        words=("v_num=",),
        reader=_Bar,
        counts_to_total=True,
        step_time="bar",
        mean_times=True,
        own_evaluations=True,
    ),
)
