"""Advice in a process: a deep model takes many seconds, in which the page would answer nobody else.

A question is answered within WAIT_S: with the advice, else with a job to ask again. The newest question wins.
"""

import secrets
import threading
import time

from foretrain.base.errors import UserError
from foretrain.web import advices, answers, child
from foretrain.web.asking import Made, answered

WAIT_S = 2.0


class Advising:
    """One question for advice, worked on in a process. `body`: as it was posted."""

    def __init__(self, body: bytes) -> None:
        self.id = secrets.token_hex(8)
        self._begun = time.monotonic()
        self._child = child.Child("advice", body.decode("utf-8", "replace"))
        self.stop = self._child.stop

    def state(self) -> Made:
        """The answer, waited for WAIT_S; else 202 and the seconds so far. Raises UserError where there is none."""
        if not self._child.finished(WAIT_S):
            seconds = int(time.monotonic() - self._begun)
            return 202, {"schema": answers.SCHEMA, "job": self.id, "seconds": seconds}
        if self._child.failure:
            raise UserError("page.advice_failed", reason=self._child.failure)
        status, answer = self._child.answer
        return status, answer


class Adviser:
    """The newest question."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._newest: Advising | None = None

    def answer(self, body: bytes) -> Made:
        """Begin to answer a body; one that is no question is refused at once."""
        return answered(body, advices.AskedAdvice, lambda _: self._begun(body).state())

    def _begun(self, body: bytes) -> Advising:
        with self._turn:
            self.stop()
            self._newest = Advising(body)
            return self._newest

    def get(self, id: str) -> Advising | None:
        newest = self._newest
        return newest if newest is not None and newest.id == id else None

    def stop(self) -> None:
        """End what is being worked on, if anything is."""
        if self._newest is not None:
            self._newest.stop()
