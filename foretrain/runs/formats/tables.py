"""Tables of a run's figures: Lightning's metrics.csv, and what transformers, TRL and unsloth show in a notebook.

CSVLogger's file begins with its columns, `epoch,step,train_loss,val_loss`; rows have no times. A notebook shows `Step
Training Loss` and rows below the bar `[60/60 00:53, Epoch 0/1]`.
"""

import re

from foretrain.runs.formats.figures import loss_unit
from foretrain.runs.formats.log_format import INT, Header, LineReader, LogFormat, Reading, number, pattern
from foretrain.runs.formats.progress_bar import LIGHTNING_LOSSES, LIGHTNING_VAL_LOSSES, seconds

_TRAIN = (*LIGHTNING_LOSSES, "training loss")
_VAL = (*LIGHTNING_VAL_LOSSES, "validation loss")
_RATES = ("lr", "learning_rate", "learning rate")
_BAR = re.compile(r"\[\s*(\d{1,9})/(\d{1,9})\s+([\d:]{4,20})(?:\s*<[^,\]]{0,20})?,[^\]]{0,40}\bEpoch", re.ASCII)
_LOSS = re.compile(r"\b(Training|Validation) Loss\b")


def _cells(line: str) -> list[str]:
    """Split at what separates the columns: a tab, a bar, a comma, else blanks."""
    line = line.strip().lstrip("\ufeff")
    for separator in "\t|,":
        if separator in line:
            return [cell.strip() for cell in line.strip("|").split(separator)]
    return [cell.replace("_Loss", " Loss") for cell in _LOSS.sub(r"\1_Loss", line).split()]


class _Rows(LineReader):
    """Reads rows below a line with the names of the columns. `needs`: the column that tells the format."""

    def __init__(self, format: LogFormat, needs: str) -> None:
        super().__init__(format)
        self.needs = needs
        self.columns: dict[str, int] = {}
        self.width = 0
        self.run: dict[str, int] = {}

    def read(self, line: str) -> list[Reading]:
        if (bar := _BAR.search(line)) and int(bar[1]):
            self.run = {"run_steps": int(bar[1]), "total_steps": int(bar[2]), "run_s": seconds(bar[3])}
        cells = _cells(line)
        names = {name.lower(): i for i, name in enumerate(cells)}
        if self.needs in names and "step" in names:
            train, val = (next((name for name in some if name in names), None) for some in (_TRAIN, _VAL))
            rate = next((name for name in names if name.startswith("lr-") or name in _RATES), None)
            roles = {"step": "step", "loss": train, "val": val, "lr": rate}
            self.columns = {role: names[name] for role, name in roles.items() if name is not None}
            self.width = len(cells) if train or val else 0
            self.words = () if self.width else self.format.words
            self.refine(loss_unit(names))
            return []
        return self._row(cells) if self.width and len(cells) == self.width else []

    def _row(self, cells: list[str]) -> list[Reading]:
        texts = {role: cells[i] for role, i in self.columns.items()}
        if not re.fullmatch(r"\d{1,12}", texts["step"], re.ASCII):
            return []
        step, found = int(texts["step"]), []
        if texts.get("loss") not in (None, "", "No log"):
            lr = texts.get("lr")
            found.append(Reading(0, step, number(texts["loss"]), learning_rate=number(lr) if lr else None))
        if texts.get("val"):
            found.append(Reading(1, step, evaluated=True, val_loss=number(texts["val"])))
        return found

    def header(self) -> dict[str, int]:
        return self.run


def _table(name: str, title: str, words: tuple[str, ...], needs: str, *headers: Header) -> LogFormat:
    return LogFormat(
        name=name, title=title, words=words, reader=lambda format: _Rows(format, needs), headers=headers,
        step_time="none", counts_to_total=True, own_evaluations=True,
    )  # fmt: skip


FORMATS = (
    _table("lightning metrics.csv", "Lightning's metrics.csv", ("epoch",), "epoch"),
    _table(
        "notebook", "a table of transformers, TRL or unsloth in a notebook", ("Training Loss", ", Epoch "),
        "training loss",
        Header("total steps", pattern(rf"\bTotal steps = (?P<total_steps>{INT})\b")),
    ),
)  # fmt: skip
