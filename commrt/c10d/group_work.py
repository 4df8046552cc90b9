# SPDX-License-Identifier: Apache-2.0
"""The works that collectives of a group return, for torch and its callers.

Any thread may ask one, or wait for it; the thread that runs the collective ends it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from commrt.c10d.call_options import NO_TIMEOUT, seconds_of
from commrt.c10d.dist_errors import as_dist_error
from commrt.errors import CommrtError
from commrt.runtime.untraced import untraced
from commrt.runtime.work import Work, new_future
from commrt.threads.comm_thread import after_all
from commrt.threads.future import Future


@untraced
class GroupWork(Work, dist.Work):
    """A `Work` that is one of ``torch.distributed`` too; any thread may use it, also several.

    Replaces `wait` and `get_future` of its parent, which torch and its callers call, and writes its
    `_is_observed`.
    """

    def __init__(
        self, future: Future[Any] | None, result: Sequence[Tensor], call: object = "the collective"
    ) -> None:
        dist.Work.__init__(self)
        Work.__init__(self, result, 0, future, call)

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:  # type: ignore[override]  # torch's
        """Return True when the result is there, or raise, as `Work.wait`."""
        try:
            self._wait(seconds_of(timeout))
        except CommrtError as error:
            raise as_dist_error(error) from error.__cause__
        return True

    synchronize = wait  # type: ignore[assignment]  # which returns True

    def is_success(self) -> bool:
        """Return True if the collective is done without an error."""
        return self._task().done() and self._task().exception() is None

    def exception(self) -> BaseException | None:
        """Return the error that ended the collective, None while there is none. Never waits."""
        error = self._task().exception() if self._task().done() else None
        return as_dist_error(error) if isinstance(error, CommrtError) else error

    def result(self) -> list[Tensor]:
        """Return the tensors that hold the result; call `wait` before."""
        return list(self._result)

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Do as `Work.get_future`.

        In a backward pass ``backward()`` raises the error too, which DDP would replace.
        """
        self._is_observed = True
        if torch._C._current_graph_task_id() != -1:  # noqa: SLF001  # -1: no backward pass runs
            callback: Any = self.wait
            torch.autograd.Variable._execution_engine.queue_callback(callback)  # noqa: SLF001
        done = new_future(self._result)
        after_all(self._task()).add_done_callback(lambda _: done.set_result(None))
        return done.then(self._value)  # what a callback raises is an error for torch's C++ code too

    def _value(self, _: torch.futures.Future[None]) -> list[Tensor]:
        self.wait()
        return self.result()
