# SPDX-License-Identifier: Apache-2.0
"""One thread that issues all communication of a world, in the order it was submitted."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

from commrt.errors import TransportClosed

__all__ = ["Lane"]

T = TypeVar("T")


class Lane:
    """A worker thread with a memory: after the first failure everything later is refused.

    The ranks of a world run the same tasks in the same order; once one has failed here, the peers are no
    longer in step and running the next one could only exchange the wrong bytes.
    """

    def __init__(self, on_failure: Callable[[BaseException], None], name: str = "commrt") -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._on_failure = on_failure
        self._failure: BaseException | None = None

    def submit(self, task: Callable[[], T]) -> Future[T]:
        """Run `task` after all earlier ones; its error is raised by ``result()``."""
        return self._pool.submit(self._run, task)

    def _run(self, task: Callable[[], T]) -> T:
        if self._failure is not None:
            raise TransportClosed("an earlier transfer failed, so this one was not started") from self._failure
        try:
            with torch.no_grad():
                return task()
        except BaseException as failure:
            self._failure = failure
            self._on_failure(failure)
            raise

    @property
    def failure(self) -> BaseException | None:
        """What broke the lane, or None."""
        return self._failure

    def close(self) -> None:
        """Take no more tasks, and wait for those that were submitted: peers are in the same ones."""
        self._pool.shutdown(wait=True)
