# SPDX-License-Identifier: Apache-2.0
"""A transfer that goes on while its caller does something else."""

from __future__ import annotations

import logging
from datetime import timedelta
from functools import partial
from math import isnan
from threading import TIMEOUT_MAX

from torch import Tensor
from torch.futures import Future

from commrt.errors import CommrtError, DeadlineExceeded, Place, UsageError
from commrt.threads.answer import Answer
from commrt.threads.lane import Result

__all__ = ["Outcome", "Work"]

_log = logging.getLogger("commrt")

Outcome = Result[CommrtError | None]
"""Of a transfer; an error there is one after which the world goes on."""


class Work:
    """What ``async_op=True`` returns, with the methods of torch.distributed's. Belongs to the thread that made it.

    Until it is completed nobody else may touch the tensor. It runs to its end whether anybody waits for it or not, by
    the world's deadline; an error is raised by whoever asks, and ends the world. Where nobody asks it is logged.
    """

    def __init__(self, tensor: Tensor, rank: int, answer: Outcome | None = None) -> None:
        self._answer, self._tensor, self._rank = _given() if answer is None else answer, tensor, rank
        self._is_told = answer is None

    def __del__(self) -> None:
        """Nobody can ask any more."""
        if not self._is_told:
            self._answer.when_given(partial(_tell_of, self._answer, self._rank))

    def wait(self, timeout: float | timedelta | None = None) -> None:
        """Return when the tensor holds the result; for one on a GPU, the current stream waits in the caller's place.

        Raises what ended the transfer. After `timeout` (seconds, or a timedelta) raises `DeadlineExceeded`; then the
        transfer goes on, and may be waited for again.
        """
        timeout_s = _seconds(timeout)
        try:
            error = self._answer.result(timeout_s)
        except TimeoutError as late:
            if self._answer.given:  # the transfer's own deadline
                raise
            what = f"the transfer is still under way after {timeout_s:g} s: wait() again, or with a longer timeout"
            raise DeadlineExceeded(what, Place(self._rank)) from late
        finally:
            self._is_told |= self._answer.given
        if error is not None:
            raise error

    def is_completed(self) -> bool:
        """True if `wait` would return, or raise, at once; never waits. On a GPU: if the transfer has been done."""
        return self._answer.is_done

    def get_future(self) -> Future[list[Tensor]]:
        """A future whose value is ``[tensor]``, as torch.distributed's is; ``wait()`` and ``value()`` raise an error.

        Callbacks (``then``) run on the thread that communicates, or here if it is over: they must neither wait for a
        transfer nor start one.
        """
        future: Future[list[Tensor]] = Future(devices=[self._tensor.device] if self._tensor.is_cuda else None)
        self._answer.when_given(lambda: self._complete(future))
        self._is_told = True
        return future

    def _complete(self, future: Future[list[Tensor]]) -> None:
        error = self._answer.error() or self._answer.result()  # on this thread's stream, of which the future takes note
        if error is None:
            future.set_result([self._tensor])
        else:
            future.set_exception(error)  # type: ignore[arg-type]  # torch says it takes a value


def _seconds(timeout: float | timedelta | None) -> float | None:
    given = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, int | float) or (isinstance(given, float) and isnan(given)):
        raise UsageError(f"wait({type(timeout).__name__} {timeout!s:.80}): give seconds, a timedelta, or nothing")
    return min(given, TIMEOUT_MAX)


def _tell_of(outcome: Outcome, rank: int) -> None:
    if error := outcome.error() or Answer.result(outcome):  # without a stream of this thread's that waits
        _log.warning("commrt: rank %d: a transfer failed for which nobody waited: %s", rank, error)


def _given() -> Outcome:
    """Of what is over."""
    answer: Outcome = Result()
    answer.give(None)
    return answer
