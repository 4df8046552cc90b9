# SPDX-License-Identifier: Apache-2.0
"""What a collective returns: a `Work` of torch.distributed, and errors that its users catch."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from packaging.version import Version
from torch import Tensor

from commrt.errors import CommrtError
from commrt.runtime.work import Work, new_future
from commrt.threads.future import Future
from commrt.torch_import import untraced

Error = TypeVar("Error", bound=CommrtError)
NO_TIMEOUT = timedelta(0)
"""What torch passes where the caller gives none."""
OUTSIDE = -1
"""torch's number of the running backward pass, where there is none."""
KEPT = 0 if Version(torch.__version__) >= Version("2.9") else 32
"""Earlier versions of torch hold only the C++ half of a work, which then waits for ever: the newest are kept alive
until somebody has waited for them."""
_newest: deque[dist.Work] = deque(maxlen=KEPT)


def as_dist_error(error: Error) -> Error:
    """Return `error`, which is a ``torch.distributed.DistBackendError`` too from now on."""
    if not isinstance(error, dist.DistBackendError):
        kind: Any = type(error)
        error.__class__ = _with_base(kind)
    return error


@cache
def _with_base(kind: Any) -> Any:
    names = {"__module__": kind.__module__, "__doc__": kind.__doc__, "__reduce__": _reduced}
    return type(kind.__name__, (kind, dist.DistBackendError), names)


def _reduced(error: CommrtError) -> tuple[Any, ...]:
    """Return how to pickle `error`: its class is made here, so pickle cannot find it by its name."""
    return _restored, (type(error).__base__, error.args, error.__dict__)


def _restored(kind: Any, args: tuple[Any, ...], fields: dict[str, Any]) -> Any:
    error = kind.__new__(kind, *args)
    error.__dict__.update(fields)
    error.args = args
    return as_dist_error(error)


def seconds_of(timeout: timedelta | None) -> float | None:
    """Return a timeout of torch in seconds; None if it stands for the group's own."""
    return None if timeout is None or timeout <= NO_TIMEOUT else timeout.total_seconds()


@untraced
class GroupWork(Work, dist.Work):
    """A collective that runs while its caller does something else; see ``torch.distributed.Work``.

    An error is raised by `wait` and by the future. If nobody asks for it, it is logged.
    """

    def __init__(
        self, future: Future[Any] | None, result: Sequence[Tensor], call: object = "the collective", rank: int = 0
    ) -> None:
        dist.Work.__init__(self)
        Work.__init__(self, result, rank, future, call)
        _newest.append(self)

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:  # type: ignore[override]  # torch's
        """Return True when the result is there; raises the error that ended the collective.

        On a GPU the current stream waits for the result, and the calling thread does not. Raises `DeadlineExceeded`
        after `timeout`; the collective goes on, and you can wait for it again.
        """
        try:
            self._wait(seconds_of(timeout))
        except CommrtError as error:
            as_dist_error(error)
            raise
        finally:
            if _newest and self._task().done():
                with suppress(ValueError):  # later versions of torch keep none
                    _newest.remove(self)
        return True

    def synchronize(self) -> None:
        """Do what `wait` does."""
        self.wait()

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
        """Do as `Work.get_future`. In a backward pass, ``backward()`` raises the error too.

        DDP would make a RuntimeError of it.
        """
        self._is_observed = True
        if torch._C._current_graph_task_id() != OUTSIDE:  # noqa: SLF001
            callback: Any = self.wait
            torch.autograd.Variable._execution_engine.queue_callback(callback)  # noqa: SLF001
        done = new_future(self._result)
        self._task().after_all().add_done_callback(lambda _: done.set_result(None))
        return done.then(self._value)  # what a callback raises is an error for torch's C++ code too

    def _value(self, _: torch.futures.Future[None]) -> list[Tensor]:
        self.wait()
        return self.result()
