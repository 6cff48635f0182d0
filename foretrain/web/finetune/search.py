"""What to change, looked for a little at a time: each question plans for a moment and says what was found so far.

So a deep model, of which each change takes a second and more, keeps nobody waiting: neither the form, nor, where the
page has no server, the one thread that answers everything.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator

from foretrain.advice.finetune import FineTuneChange
from foretrain.app.finetune import searched
from foretrain.predict.finetune.plan import FineTunePlan

MOMENT_S = 0.25
_KEPT = 4


class Search:
    """The search of one plan. `found`: the best changes so far; `done`: whether these are all."""

    def __init__(self, plan: FineTunePlan) -> None:
        self.found: tuple[FineTuneChange, ...] = ()
        self.done = False
        self._turn = threading.Lock()
        self._steps: Iterator[tuple[FineTuneChange, ...]] = searched(plan)

    def go_on(self) -> None:
        """Plan one change more, and others while the moment lasts."""
        with self._turn:
            end = time.monotonic() + MOMENT_S
            while not self.done:
                found = next(self._steps, None)
                self.done = found is None
                self.found = self.found if found is None else found
                if time.monotonic() >= end:
                    return


class Searches:
    """The newest searches by what was asked."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._kept: OrderedDict[str, Search] = OrderedDict()

    def of(self, asked: str, plan: Callable[[], FineTunePlan]) -> Search:
        """The search of this question, which may have begun already; else it begins with its plan."""
        with self._turn:
            found = self._kept.pop(asked, None)
        found = found or Search(plan())
        with self._turn:
            self._kept[asked] = found
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
            return found
