"""Lightning-AI/litgpt: a line for each micro-batch, `Epoch 4 | iter 961 step 961 | loss train: 1.062, val: 1.057 | iter
time: 529.46 ms (step)`, in older versions `iter 77 step 39: loss 10.8259, iter time: 214.40ms (optimizer.step)`."""

import math
import re

from foretrain.runs.formats.log_format import INT, NUMBER, Header, LineReader, LogFormat, Reading, number, pattern

_LINE = pattern(
    rf"(?<![a-z])iter\s+(?P<iter>{INT})\s+(?:\|\s*)?step\s+(?P<step>{INT})\s*(?::\s*loss|\|\s*loss train:)\s*",
    rf"(?P<loss>{NUMBER})(?:,\s*val:\s*(?P<val>{NUMBER}|n/a))?[,\s|]+iter time:\s*(?P<ms>{NUMBER})\s*ms",
    r"(?P<ended>\s*\((?:optimizer\.)?step\))?",
)
_VALIDATION = pattern(rf"(?<![a-z])iter\s+{INT}:\s*val loss\s+(?P<val>{NUMBER})")


class _MicroBatches(LineReader):
    def __init__(self, format: LogFormat) -> None:
        super().__init__(format)
        self.iteration, self.step = -1, 0
        self.sum_s = 0.0
        self.complete = False  # whether every micro-batch of this step was printed
        self.val = math.nan

    def read(self, line: str) -> list[Reading]:
        found = [self._evaluation(m, number(m["val"], grouped_thousands=False)) for m in _VALIDATION.finditer(line)]
        for match in _LINE.finditer(line):
            found += self._line(match)
        return found

    def _line(self, match: re.Match[str]) -> list[Reading]:
        iteration, step = int(match["iter"]), int(match["step"])
        if iteration == self.iteration:  # another process prints it too
            return []
        follows = iteration == self.iteration + 1 or (self.iteration < 0 and iteration == 1)
        self.complete = follows and (self.complete or self.sum_s == 0.0)
        self.sum_s += number(match["ms"]) / 1e3
        self.iteration, self.step = iteration, step
        found: list[Reading] = []
        if match["val"] and match["val"].lower() != "n/a":
            val = number(match["val"], grouped_thousands=False)
            # Three decimals of what was printed before with four, or of an evaluation that this log has lost.
            if math.isfinite(val) and not abs(val - self.val) < 0.00051:
                found.append(self._evaluation(match, val, step - 1))
        if match["ended"]:
            alone = iteration == step  # a step of one micro-batch, whatever is not printed
            time_s = self.sum_s if self.complete else number(match["ms"]) / 1e3 if alone else None
            loss = number(match["loss"], grouped_thousands=False)
            found.append(Reading(match.start(), step, loss, time_s))
            self.sum_s, self.complete = 0.0, False
        return found

    def _evaluation(self, match: re.Match[str], val: float, step: int | None = None) -> Reading:
        self.val = val
        return Reading(match.start(), self.step if step is None else step, evaluated=True, val_loss=val)


FORMATS = (
    LogFormat(
        name="litgpt",
        title="LitGPT",
        words=("iter",),
        reader=_MicroBatches,
        # finetune and pretrain divide torch.cuda.max_memory_allocated() by 1e9
        headers=(Header("memory used:", pattern(rf"\bMemory used:\s*(?P<allocated_gb>{NUMBER})\s*GB")),),
        counts_to_total=True,
        own_evaluations=True,
    ),
)
