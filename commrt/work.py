# SPDX-License-Identifier: Apache-2.0
"""A transfer that goes on while its caller does something else."""

from __future__ import annotations

from datetime import timedelta

from torch import Tensor
from torch.futures import Future

from commrt.errors import CommrtError, DeadlineExceeded, Place, UsageError
from commrt.lane import Result

__all__ = ["Outcome", "Work"]

Outcome = Result[CommrtError | None]
"""Of a transfer; an error there is one after which the world goes on."""


class Work:
    """What ``async_op=True`` returns, with the methods of torch.distributed's. Belongs to the thread that made it.

    Until it is completed nobody else may touch the tensor. It runs to its end whether anybody waits for it or not, by
    the world's deadline; an error is raised by whoever asks, and ends the world.
    """

    def __init__(self, tensor: Tensor, rank: int, answer: Outcome | None = None) -> None:
        self._answer, self._tensor, self._rank = _given() if answer is None else answer, tensor, rank

    def wait(self, timeout: float | timedelta | None = None) -> None:
        """Return when the tensor holds the result; for one on a GPU, the current stream waits in the caller's place.

        Raises what ended the transfer. After `timeout` (seconds, or a timedelta) raises `DeadlineExceeded`; then the
        transfer goes on, and may be waited for again.
        """
        timeout_s = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float | None):
            raise UsageError(f"wait({timeout!r:.80}): give seconds, a timedelta, or nothing")
        try:
            if error := self._answer.result(timeout_s):
                raise error
        except TimeoutError as error:
            if self._answer.given:  # the transfer's own deadline
                raise
            what = f"the transfer is still under way after {timeout_s:g} s: wait() again, or with a longer timeout"
            raise DeadlineExceeded(what, Place(self._rank)) from error

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
        return future

    def _complete(self, future: Future[list[Tensor]]) -> None:
        error = self._answer.error() or self._answer.result()  # on this thread's stream, of which the future takes note
        if error is None:
            future.set_result([self._tensor])
        else:
            future.set_exception(error)  # type: ignore[arg-type]  # torch says it takes a value


def _given() -> Outcome:
    """Of what is over."""
    answer: Outcome = Result()
    answer.give(None)
    return answer
