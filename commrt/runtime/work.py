# SPDX-License-Identifier: Apache-2.0
"""A transfer that runs while its caller does something else."""

from __future__ import annotations

import logging
from datetime import timedelta
from functools import partial
from math import isnan
from threading import TIMEOUT_MAX
from typing import Any

import torch.futures
from torch import Tensor

from commrt.errors import DeadlineExceeded, Place, UsageError
from commrt.threads.future import Future

__all__ = ["Work"]

_log = logging.getLogger("commrt")


class Work:
    """The handle of a transfer begun with ``async_op=True``; has the methods of torch.distributed's ``Work``.

    Only the thread that began the transfer may use it. Nothing else may touch the tensor until the transfer is
    completed. The transfer ends by the world's deadline, whether anybody waits for it or not. An error is raised by
    `wait` and by the future; if nobody asks for it, it is logged.
    """

    def __init__(self, tensor: Tensor, rank: int, future: Future[Any] | None = None) -> None:
        """Handle the transfer of `future`; None stands for one that is completed."""
        self._tensor, self._rank = tensor, rank
        self._is_observed = future is None
        if future is None:
            future = Future()
            future.set_result(None)
        self._future = future

    def __del__(self) -> None:
        if not self._is_observed:
            self._future.add_done_callback(partial(_log_error, self._rank))

    def wait(self, timeout: float | timedelta | None = None) -> None:
        """Return when the tensor holds the result, or raise the error that ended the transfer.

        On a GPU the current stream waits for the result, and the calling thread does not. Raises `DeadlineExceeded`
        after `timeout` (seconds or a timedelta); the transfer then goes on, and you can wait for it again.
        """
        timeout_s = _seconds(timeout)
        try:
            self._future.result(timeout_s)
        except TimeoutError as late:
            if self._future.done():  # the transfer's own deadline
                raise
            what = f"the transfer is still in flight after {timeout_s:g} s: wait() again, or with a longer timeout"
            raise DeadlineExceeded(what, Place(self._rank)) from late
        finally:
            self._is_observed |= self._future.done()

    def is_completed(self) -> bool:
        """Return True if `wait` would return or raise at once; on a GPU, if the transfer is done. Never waits."""
        return self._future.is_completed()

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Return a future of ``[tensor]``, like torch.distributed; its ``wait()`` and ``value()`` raise an error.

        It is complete when this transfer is, and all that were begun before the call. Callbacks (``then``) run on the
        communication thread, or at once if it is complete. The transfers that they begin run at once, before the next
        one. The world ends in `DeadlineExceeded` if a callback waits for anything else longer than the timeout.
        """
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future(
            devices=[self._tensor.device] if self._tensor.is_cuda else None
        )
        self._future.after_all().add_done_callback(lambda _: self._complete(future))
        self._is_observed = True
        return future

    def _complete(self, future: torch.futures.Future[list[Tensor]]) -> None:
        if error := self._future.exception():
            future.set_exception(error)  # type: ignore[arg-type]  # torch says it takes a value
        else:
            self._future.result()  # lets this thread's stream wait, which the torch future records
            future.set_result([self._tensor])


def _seconds(timeout: float | timedelta | None) -> float | None:
    given = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, int | float) or (isinstance(given, float) and isnan(given)):
        raise UsageError(f"wait({type(timeout).__name__} {timeout!s:.80}): give seconds, a timedelta, or nothing")
    return min(given, TIMEOUT_MAX)


def _log_error(rank: int, future: Future[Any]) -> None:
    if error := future.exception():
        _log.warning("commrt: rank %d: a transfer failed for which nobody waited: %s", rank, error)
