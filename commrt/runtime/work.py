# SPDX-License-Identifier: Apache-2.0
"""A transfer that runs while its caller does something else, as a handle like torch.distributed's.

It waits for a future of the communication thread, and touches nothing of a world.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import timedelta
from math import isnan
from threading import TIMEOUT_MAX
from typing import Any

import torch.futures
from torch import Tensor

from commrt.errors import DeadlineExceeded, Place, UsageError
from commrt.threads.comm_thread import after_all
from commrt.threads.future import Future

_log = logging.getLogger("commrt")


class Work:
    """A transfer begun with ``async_op=True``, with the methods of torch.distributed's ``Work``.

    Only the thread that began the transfer may use it; callbacks run on the thread that ends it.
    Nothing else may touch the tensor until the transfer is completed. The transfer ends by the
    world's deadline, whether anybody waits for it or not. An error is raised by `wait` and by the
    future; if nobody asks for it, it is logged.
    """

    def __init__(
        self,
        result: Sequence[Tensor],
        rank: int,
        future: Future[Any] | None = None,
        what: object = "the transfer",
    ) -> None:
        """Handle the transfer of `future`; None stands for one that is completed."""
        self._result = result
        self._rank = rank
        self._future = future
        self._what = what
        self._is_observed = future is None

    def _task(self) -> Future[Any]:
        """Return the future, and make one that is done for a transfer that had none."""
        if self._future is None:
            self._future = Future()
            self._future.set_result(None)
        return self._future

    def __del__(self) -> None:
        if not self._is_observed:
            rank = self._rank
            what = self._what
            self._task().add_done_callback(
                lambda future: _log_error(rank, what, future.exception())
            )

    def wait(self, timeout: float | timedelta | None = None) -> None:
        """Return when the tensor holds the result, or raise the error that ended the transfer.

        On a GPU the current stream waits for the result, and the calling thread does not. Raises
        `DeadlineExceeded` after `timeout` (seconds or a timedelta); the transfer then goes on, and
        you can wait for it again.
        """
        self._wait(None if timeout is None else _seconds(timeout))

    def _wait(self, timeout_s: float | None) -> None:
        task = self._future or self._task()
        try:
            task.result(timeout_s)
        except TimeoutError as late:
            if task.done():  # the transfer's own deadline
                raise
            what = (
                f"timed out: {self._what} is still in flight after {timeout_s:g} s: wait() again,"
                " or with a longer timeout"
            )
            raise DeadlineExceeded(what, Place(self._rank)) from late
        finally:
            self._is_observed |= task.done()

    def is_completed(self) -> bool:
        """Return True if `wait` would return or raise at once; on a GPU, if the transfer is done.

        Never waits.
        """
        return self._task().is_completed()

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Return a future of ``[tensor]``, as torch does; ``wait()`` and ``value()`` raise errors.

        It is complete when this transfer is, and all that were begun before the call. Callbacks
        (``then``) run on the communication thread, or at once if it is complete. The transfers that
        they begin run at once, before the next one. The world ends in `DeadlineExceeded` if a
        callback waits for anything else longer than the timeout.
        """
        future: torch.futures.Future[list[Tensor]] = new_future(self._result)
        after_all(self._task()).add_done_callback(lambda _: self._complete(future))
        self._is_observed = True
        return future

    def _complete(self, future: torch.futures.Future[list[Tensor]]) -> None:
        if error := self._task().exception():
            future.set_exception(error)  # type: ignore[arg-type]  # torch says it takes a value
        else:
            self._task().result()  # lets this thread's stream wait, which the torch future records
            future.set_result(list(self._result))


def new_future(result: Sequence[Tensor]) -> torch.futures.Future[Any]:
    """Return a future of torch for what comes with `result`."""
    return torch.futures.Future(
        devices=[result[0].device] if result and result[0].is_cuda else None
    )


def _seconds(timeout: float | timedelta) -> float:
    given = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if (
        isinstance(given, bool)
        or not isinstance(given, int | float)
        or (isinstance(given, float) and isnan(given))
    ):
        raise UsageError(
            f"wait({type(timeout).__name__} {timeout!s:.80}): give seconds, a timedelta, or nothing"
        )
    return min(given, TIMEOUT_MAX)


def _log_error(rank: int, what: object, error: BaseException | None) -> None:
    if error is not None:
        _log.warning("commrt: rank %d: nobody waited for %s, which failed: %s", rank, what, error)
