# SPDX-License-Identifier: Apache-2.0
"""Batches whose gradients were dropped come again: an iterator for training loops.

On the training thread, between steps; it only reads the replica's reports.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import TypeVar

from commrt.training.replica import Replica

T = TypeVar("T")


def reissued(batches: Iterable[T], replica: Replica) -> Iterator[T]:
    """Yield each of `batches` again and again until its gradient counted; where several make a
    step, all of them.

    For `BackupWorkers`; with other algorithms every batch counts at once. It ends with `batches`.
    It also ends the repetition of a batch when too few ranks train for a step. Keeps the batches of
    one step in memory.
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
