# SPDX-License-Identifier: Apache-2.0
"""Backup workers: each step uses the first N of N + b ranks whose gradients are ready. A policy as
data, which needs no torch: the all-reduce is that of another algorithm.

Chen, Pan, Monga, Bengio and Jozefowicz, "Revisiting Distributed Synchronous SGD", 2016, section 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from commrt.algorithm import Algorithm
from commrt.algorithms.arguments import (
    require_inner,
    require_step_and_ranks,
    require_whole,
    schedule_of,
)
from commrt.algorithms.torus import Torus2D
from commrt.errors import UsageError
from commrt.schedule import Schedule


@dataclass(frozen=True, slots=True)
class BackupWorkers:
    """Average the gradients of the first N of N + `backups` ranks in each step, by `inner`; the
    others catch up.

    A rank announces its gradients when its backward pass has ended. With `early` it announces them
    when its first bucket is ready. Then the exchange overlaps the rest of the backward pass, but a
    rank that becomes slow in that rest delays all others.

    >>> print(BackupWorkers(1, inner=Torus2D()).schedule(0, 3))
    torus 2x1: 3 ranks, 2 chunks
      0  add  0->1 [1:2)  1->0 [0:1)
      1  copy  0->1 [0:1)  1->0 [1:2)
    """

    backups: int = 1
    inner: Algorithm = Torus2D()  # noqa: RUF009  # a frozen value
    early: bool = False
    traits: ClassVar[tuple[str, ...]] = ("backup workers",)
    trained_by: ClassVar[str] = "commrt.backup_workers.backup_replica"

    def __post_init__(self) -> None:
        require_whole("backups", self.backups, 0)
        require_inner(self.inner)
        if not isinstance(self.early, bool):
            raise UsageError(f"early={self.early!r:.80}: give True or False")
        if getattr(self.inner, "traits", ()):
            raise UsageError(
                f"inner={self.inner!r} is no all-reduce: take Torus2D(), Ring() or"
                " HalvingDoubling()"
            )

    def needed(self, ranks: int) -> int:
        """Return N, the number of gradients per step with `ranks` ranks; raises `UsageError` for
        too many backups.

        There must be fewer backups than N. Otherwise all ranks that hold the sum of a step could
        die before a late rank has it. A world of one rank needs no backups.
        """
        if ranks == 1:
            return 1
        if self.backups and self.backups >= ranks - self.backups:
            raise UsageError(
                f"backups={self.backups} of {ranks} ranks leave {max(ranks - self.backups, 0)}"
                " whose gradients count: there must be more of these than backups, so take at most"
                f" {max((ranks - 1) // 2, 0)}"
            )
        return ranks - self.backups

    def needed_among(self, members: int, founders: int) -> int:
        """Return N for `members` ranks of a job that began with `founders`: it rises as ranks come.

        >>> [BackupWorkers(1).needed_among(members, founders=3) for members in (1, 2, 3, 4, 5)]
        [2, 2, 2, 3, 4]
        """
        return max(self.needed(founders), members - min(self.backups, (members - 1) // 2))

    def schedule(self, step: int, ranks: int) -> Schedule:
        """Return the schedule of a step whose quorum is ranks 0 to N - 1 of `ranks`."""
        require_step_and_ranks(step, ranks)
        needed = self.needed(ranks)
        return schedule_of(self.inner, step, needed).over(range(needed), world=ranks)
