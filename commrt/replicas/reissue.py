# SPDX-License-Identifier: Apache-2.0
"""Batches whose gradients came too late are given out again, so that no sample is lost to a slow rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import TypeVar

from commrt.replicas.replica import Replica

__all__ = ["reissued"]

T = TypeVar("T")


def reissued(batches: Iterable[T], replica: Replica) -> Iterator[T]:
    """Each of `batches`, again and again until its gradient counted; where several make a step, all of them again.

    For `BackupWorkers`; with other algorithms every batch counts at once. It ends with `batches`, or when so many ranks
    have finished that no step can be made any more; what was dropped then is not given out again. Costs the memory of
    the batches of one step.
    """
    step: list[T] = []
    for batch in batches:
        waiting = deque([batch])
        while waiting:
            before = replica.last
            step.append(waiting.popleft())
            yield step[-1]
            if (report := replica.last) is not None and report is not before:
                if not (report.counted or report.ended):
                    waiting.extendleft(reversed(step))
                step = []
